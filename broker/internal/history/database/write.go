package database

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/big"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/broker/internal/history"
)

// putRecord writes a record unless the one that is there has ended, or was counted later.
const putRecord = `INSERT INTO spillway_reservations (uid, requester, namespace, ended, counted, record)
	VALUES (?, ?, ?, ?, ?, ?)
	ON CONFLICT (uid) DO UPDATE SET ended = excluded.ended, counted = excluded.counted, record = excluded.record
	WHERE spillway_reservations.ended = 0 AND spillway_reservations.counted <= excluded.counted`

// putDay writes the sum of a day, likewise.
const putDay = `INSERT INTO spillway_usage (uid, provider, day, currency, requester, namespace, owner_kind, owner, counted, promised, used, cost)
	VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
	ON CONFLICT (uid, provider, day, currency) DO UPDATE SET counted = excluded.counted, promised = excluded.promised, used = excluded.used, cost = excluded.cost
	WHERE spillway_usage.counted <= excluded.counted`

// Write writes records, all or none.
func (d *Database) Write(ctx context.Context, records []history.Record) error {
	err := d.in(ctx, func(tx *sql.Tx) error {
		record, err := tx.PrepareContext(ctx, d.places(putRecord))
		if err != nil {
			return err
		}
		defer record.Close()
		day, err := tx.PrepareContext(ctx, d.places(putDay))
		if err != nil {
			return err
		}
		defer day.Close()
		for i := range records {
			if err := put(ctx, record, day, &records[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing the history: %w", err)
	}
	return nil
}

func put(ctx context.Context, record, day *sql.Stmt, r *history.Record) error {
	counted := r.Until.UnixMilli()
	content, err := encode(r)
	if err != nil {
		return err
	}
	done, err := record.ExecContext(ctx, string(r.UID), storable(r.Requester), storable(r.Namespace), millis(r.Ended), counted, content)
	if err != nil {
		return err
	}
	if changed, err := done.RowsAffected(); err != nil || changed == 0 {
		return err // a later one is there, with its days
	}
	for _, of := range r.Days {
		promised, err := encode(of.Promised)
		if err != nil {
			return err
		}
		used, err := encode(of.Used)
		if err != nil {
			return err
		}
		cost := new(big.Rat)
		if of.Cost != nil {
			cost = of.Cost
		}
		if _, err := day.ExecContext(ctx, string(r.UID), of.Provider, of.Day, of.Currency, storable(r.Requester), storable(r.Namespace),
			storable(r.OwnerKind), storable(r.Owner), counted, promised, used, cost.RatString()); err != nil {
			return err
		}
	}
	return nil
}

// encode returns a value as JSON that both databases store.
func encode(value any) (string, error) {
	content, err := json.Marshal(value)
	return strings.ReplaceAll(string(content), `\u0000`, `\ufffd`), err
}

// storable is a text without what PostgreSQL does not store.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "�"), "\x00", "�")
}

// millis are milliseconds since 1970, 0 for a zero time.
func millis(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return at.UnixMilli()
}

// Prune deletes what ended before a time, days before it, and of each requester what is beyond the
// last so many records, with their days: who makes very many deletes only its own.
func (d *Database) Prune(ctx context.Context, before time.Time, most int) error {
	err := d.in(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, d.places(`DELETE FROM spillway_usage WHERE day < ?`), history.DateOf(before)); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, d.places(`DELETE FROM spillway_reservations WHERE ended > 0 AND ended < ?`), before.UnixMilli()); err != nil {
			return err
		}
		crowded, err := d.texts(ctx, tx, `SELECT requester FROM spillway_reservations WHERE ended > 0 GROUP BY requester HAVING COUNT(*) > ?`, most)
		if err != nil {
			return err
		}
		for _, requester := range crowded {
			var last int64
			row := tx.QueryRowContext(ctx, d.places(`SELECT ended FROM spillway_reservations WHERE requester = ? AND ended > 0 ORDER BY ended DESC LIMIT 1 OFFSET ?`), requester, most)
			if err := row.Scan(&last); err != nil {
				return err
			}
			const old = ` FROM spillway_reservations WHERE requester = ? AND ended > 0 AND ended <= ?`
			for _, statement := range []string{`DELETE FROM spillway_usage WHERE uid IN (SELECT uid` + old + `)`, `DELETE` + old} {
				if _, err := tx.ExecContext(ctx, d.places(statement), requester, last); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("deleting old history: %w", err)
	}
	return nil
}

// texts are the values of a query of one column.
func (d *Database) texts(ctx context.Context, tx *sql.Tx, query string, arguments ...any) (all []string, err error) {
	rows, err := tx.QueryContext(ctx, d.places(query), arguments...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			return nil, err
		}
		all = append(all, text)
	}
	return all, rows.Err()
}
