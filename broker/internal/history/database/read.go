package database

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"

	"github.com/spillway-dev/spillway/broker/internal/history"
)

var _ history.Store = &Database{}

// Open returns the records that have not ended.
func (d *Database) Open(ctx context.Context) ([]history.Record, error) {
	records, err := d.records(ctx, `SELECT record FROM spillway_reservations WHERE ended = 0`)
	if err != nil {
		return nil, fmt.Errorf("reading what has not ended: %w", err)
	}
	return records, nil
}

// List implements history.Store.
func (d *Database) List(ctx context.Context, query history.Query) (history.Page, error) {
	limit := query.Limit
	if limit <= 0 || limit > history.MaxLimit {
		limit = history.MaxLimit
	}
	until := int64(math.MaxInt64)
	if !query.Until.IsZero() {
		until = query.Until.UnixMilli()
	}
	ended, uid, err := position(query.Continue)
	if err != nil {
		return history.Page{}, err
	}
	where := &conditions{}
	where.and("ended > 0 AND ended >= ? AND ended < ?", millis(query.Since), until)
	where.and("(ended < ? OR ended = ? AND uid < ?)", ended, ended, uid)
	where.equal("requester", query.Requester)
	where.equal("namespace", query.Namespace)
	records, err := d.records(ctx, `SELECT record FROM spillway_reservations`+where.text+` ORDER BY ended DESC, uid DESC LIMIT `+strconv.Itoa(limit+1), where.arguments...)
	if err != nil {
		return history.Page{}, fmt.Errorf("reading the history: %w", err)
	}
	page := history.Page{Records: records}
	if len(records) > limit {
		page.Records = records[:limit]
		last := page.Records[limit-1]
		page.Continue = fmt.Sprintf("%d.%s", last.Ended.UnixMilli(), last.UID)
	}
	return page, nil
}

// position is where a page begins: after that record.
func position(continued string) (ended int64, uid string, err error) {
	if continued == "" {
		return math.MaxInt64, "", nil
	}
	at, uid, found := strings.Cut(continued, ".")
	ended, err = strconv.ParseInt(at, 10, 64)
	if err != nil || !found || uid == "" || len(uid) > 64 || uid != storable(uid) {
		return 0, "", history.ErrContinue
	}
	return ended, uid, nil
}

// conditions are those of a query, with their arguments.
type conditions struct {
	text      string
	arguments []any
}

func (c *conditions) and(condition string, arguments ...any) {
	if c.text == "" {
		c.text = " WHERE " + condition
	} else {
		c.text += " AND " + condition
	}
	c.arguments = append(c.arguments, arguments...)
}

// equal is a condition on a column if there is a value for it.
func (c *conditions) equal(column, value string) {
	if value != "" {
		c.and(column+" = ?", storable(value))
	}
}

// records are those of a query for their content.
func (d *Database) records(ctx context.Context, query string, arguments ...any) (all []history.Record, err error) {
	rows, err := d.db.QueryContext(ctx, d.places(query), arguments...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var content []byte
		if err := rows.Scan(&content); err != nil {
			return nil, err
		}
		var record history.Record
		if err := json.Unmarshal(content, &record); err != nil {
			return nil, fmt.Errorf("decoding a record: %w", err)
		}
		all = append(all, record)
	}
	return all, rows.Err()
}

// Usage implements history.Store. It adds up row by row: no database sums numbers of any size
// without rounding.
func (d *Database) Usage(ctx context.Context, query history.UsageQuery) ([]history.UsageRow, error) {
	where := &conditions{}
	where.and("day >= ? AND day <= ?", storable(query.From), storable(query.To))
	where.equal("requester", query.Requester)
	where.equal("namespace", query.Namespace)
	rows, err := d.db.QueryContext(ctx, d.places(`SELECT day, requester, namespace, owner_kind, owner, provider, currency, promised, used, cost FROM spillway_usage`+where.text), where.arguments...)
	if err != nil {
		return nil, fmt.Errorf("reading the usage: %w", err)
	}
	defer rows.Close()
	usage := history.Usage{}
	for rows.Next() {
		var key history.UsageKey
		var promised, used []byte
		var cost string
		if err := rows.Scan(&key.Period, &key.Requester, &key.Namespace, &key.OwnerKind, &key.Owner, &key.Provider, &key.Currency, &promised, &used, &cost); err != nil {
			return nil, fmt.Errorf("reading the usage: %w", err)
		}
		sum, err := decodeSum(promised, used, cost)
		if err == nil {
			err = usage.Add(query.Period, key, sum)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("reading the usage: %w", err)
	}
	return usage.Rows(), nil
}

func decodeSum(promised, used []byte, cost string) (sum history.Sum, err error) {
	if err = json.Unmarshal(promised, &sum.Promised); err == nil {
		err = json.Unmarshal(used, &sum.Used)
	}
	ok := false
	if sum.Cost, ok = new(big.Rat).SetString(cost); !ok && err == nil {
		err = fmt.Errorf("the cost %q is no number", cost)
	}
	if err != nil {
		return sum, fmt.Errorf("decoding a sum: %w", err)
	}
	return sum, nil
}
