package database

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/broker/internal/history"
)

// putRecord writes a record unless the one that is there has ended, or was counted later. An end is
// kept also if the clock of who ends it is behind.
const putRecord = `INSERT INTO spillway_reservations (uid, requester, namespace, ended, counted, record)
	VALUES (?, ?, ?, ?, ?, ?)
	ON CONFLICT (uid) DO UPDATE SET ended = excluded.ended, counted = excluded.counted, record = excluded.record
	WHERE spillway_reservations.ended = 0 AND (spillway_reservations.counted <= excluded.counted OR excluded.ended > 0)`

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

// pruneRows is about how many rows one Prune deletes: other writes wait for it.
const pruneRows = 1000

// Prune deletes some of what ended before a time, of days before it, and of each requester of what is
// beyond the last so many records, with their days: who makes very many deletes only its own. It
// reports whether there may be more.
func (d *Database) Prune(ctx context.Context, before time.Time, most int) (more bool, err error) {
	err = d.in(ctx, func(tx *sql.Tx) error {
		for _, old := range []struct {
			rows string
			than any
		}{
			{`DELETE FROM spillway_usage WHERE (uid, provider, day, currency) IN (SELECT uid, provider, day, currency FROM spillway_usage WHERE day < ? LIMIT ?)`, history.DateOf(before)},
			{`DELETE FROM spillway_reservations WHERE uid IN (SELECT uid FROM spillway_reservations WHERE ended > 0 AND ended < ? LIMIT ?)`, before.UnixMilli()},
		} {
			done, err := tx.ExecContext(ctx, d.places(old.rows), old.than, pruneRows)
			if err != nil {
				return err
			}
			if n, err := done.RowsAffected(); err != nil || n >= pruneRows {
				more = true
				return err
			}
		}
		more, err = d.pruneCrowded(ctx, tx, most)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("deleting old history: %w", err)
	}
	return more, nil
}

// pruneCrowded deletes the oldest records of one requester with too many, if there is one.
func (d *Database) pruneCrowded(ctx context.Context, tx *sql.Tx, most int) (found bool, err error) {
	var requester string
	var has int
	row := tx.QueryRowContext(ctx, d.places(`SELECT requester, COUNT(*) FROM spillway_reservations WHERE ended > 0 GROUP BY requester HAVING COUNT(*) > ? LIMIT 1`), most)
	switch err := row.Scan(&requester, &has); {
	case errors.Is(err, sql.ErrNoRows):
		return false, nil
	case err != nil:
		return false, err
	}
	const oldest = ` WHERE uid IN (SELECT uid FROM spillway_reservations WHERE requester = ? AND ended > 0 ORDER BY ended, uid LIMIT ?)`
	for _, table := range []string{"spillway_usage", "spillway_reservations"} {
		if _, err := tx.ExecContext(ctx, d.places(`DELETE FROM `+table+oldest), requester, min(has-most, pruneRows)); err != nil {
			return false, err
		}
	}
	return true, nil
}
