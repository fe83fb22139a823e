package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite" // driver sqlite
)

// maxConnections is how many queries run at the same time.
const maxConnections = 4

// connectTimeout is how long a connection to PostgreSQL may take, unless its URL says another time.
const connectTimeout = 5 * time.Second

// Database is a history.Store, and keeps what it answers from.
type Database struct {
	db *sql.DB
	// places writes the parameters of a statement, each a ?, as the driver wants them.
	places func(statement string) string
}

// OpenSQLite opens a file, which Prepare creates if it does not exist.
func OpenSQLite(path string) (*Database, error) {
	settings := url.Values{
		// A commit is on the disk when it returns.
		"_pragma": {"journal_mode(WAL)", "synchronous(FULL)", "busy_timeout(5000)"},
		"_txlock": {"immediate"},
	}
	source := url.URL{Scheme: "file", OmitHost: true, Path: path, RawQuery: settings.Encode()}
	db, err := sql.Open("sqlite", source.String())
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	db.SetMaxOpenConns(maxConnections)
	return &Database{db: db, places: strings.Clone}, nil
}

// numbered are the parameters of a statement as PostgreSQL wants them: $1 for the first.
func numbered(statement string) string {
	var out strings.Builder
	parts := strings.Split(statement, "?")
	out.WriteString(parts[0])
	for i, part := range parts[1:] {
		fmt.Fprintf(&out, "$%d%s", i+1, part)
	}
	return out.String()
}

// OpenPostgreSQL opens the database whose URL a file has. Each connection reads the file again, so
// that another password needs no restart.
func OpenPostgreSQL(file string) (*Database, error) {
	config, err := readURL(file)
	if err != nil {
		return nil, err
	}
	db := stdlib.OpenDB(*config, stdlib.OptionBeforeConnect(func(_ context.Context, connection *pgx.ConnConfig) error {
		now, err := readURL(file)
		if err == nil {
			*connection = *now
		}
		return err
	}))
	db.SetMaxOpenConns(maxConnections)
	db.SetConnMaxIdleTime(time.Minute)
	return &Database{db: db, places: numbered}, nil
}

// readURL reads the URL of a database. No error has a part of it: it has a password.
func readURL(file string) (*pgx.ConnConfig, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the URL of the database: %w", err)
	}
	text := strings.TrimSpace(string(content))
	if !strings.HasPrefix(text, "postgres://") && !strings.HasPrefix(text, "postgresql://") {
		return nil, fmt.Errorf("%s has no URL of a PostgreSQL database, such as postgres://user:password@host:5432/database", file)
	}
	config, err := pgx.ParseConfig(text)
	if err != nil {
		return nil, fmt.Errorf("%s has an invalid URL of a PostgreSQL database", file)
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = connectTimeout
	}
	return config, nil
}

// schema is that of both databases. Times are milliseconds since 1970, 0 for none; days are text.
var schema = []string{
	`CREATE TABLE IF NOT EXISTS spillway_reservations (
		uid TEXT PRIMARY KEY,
		requester TEXT NOT NULL,
		namespace TEXT NOT NULL,
		ended BIGINT NOT NULL,
		counted BIGINT NOT NULL,
		record TEXT NOT NULL)`,
	`CREATE INDEX IF NOT EXISTS spillway_reservations_ended ON spillway_reservations (ended, uid)`,
	`CREATE INDEX IF NOT EXISTS spillway_reservations_requester ON spillway_reservations (requester, ended, uid)`,
	`CREATE TABLE IF NOT EXISTS spillway_usage (
		uid TEXT NOT NULL,
		provider TEXT NOT NULL,
		day TEXT NOT NULL,
		currency TEXT NOT NULL,
		requester TEXT NOT NULL,
		namespace TEXT NOT NULL,
		owner_kind TEXT NOT NULL,
		owner TEXT NOT NULL,
		counted BIGINT NOT NULL,
		promised TEXT NOT NULL,
		used TEXT NOT NULL,
		cost TEXT NOT NULL,
		PRIMARY KEY (uid, provider, day, currency))`,
	`CREATE INDEX IF NOT EXISTS spillway_usage_requester ON spillway_usage (requester, day)`,
	`CREATE INDEX IF NOT EXISTS spillway_usage_day ON spillway_usage (day)`,
}

// Prepare connects, and creates the tables unless they exist.
func (d *Database) Prepare(ctx context.Context) error {
	for _, statement := range schema {
		if _, err := d.db.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("creating the tables of the history: %w", err)
		}
	}
	return nil
}

// Close closes all connections.
func (d *Database) Close() error { return d.db.Close() }

// in runs a function in a transaction, which is undone if it fails.
func (d *Database) in(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := d.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}
