package history

import (
	"context"
	"errors"
	"math/big"
	"slices"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Limits of a Query and a UsageQuery.
const (
	// MaxLimit is the maximum number of items on a page.
	MaxLimit = 1000
	// MaxDays is the maximum number of days of a UsageQuery.
	MaxDays = 800
	// MaxRows is the maximum number of rows of all pages of a UsageQuery.
	MaxRows = 20_000
)

// Errors of a Store.
var (
	// ErrContinue means that a query continues from what no page has ended with.
	ErrContinue = errors.New("the value of continue is not that of an earlier page")
	// ErrTooMany means that a query has more rows than MaxRows.
	ErrTooMany = errors.New("the usage has too many rows: ask for fewer days, for months, or for one namespace")
)

// Store answers questions about what has ended. It is safe for concurrent use.
type Store interface {
	// List returns the records that have ended, the latest first.
	List(ctx context.Context, query Query) (Page, error)
	// Usage returns sums of all records, also of those that have not ended: these are some
	// minutes old at most. Rows are sorted by UsageKey.Compare.
	Usage(ctx context.Context, query UsageQuery) ([]UsageRow, error)
}

// Query selects records. Empty fields select all.
type Query struct {
	Requester, Namespace string
	// Since and Until limit when they ended: not before Since, and before Until.
	Since, Until time.Time
	// Limit is the size of a page; MaxLimit if it is 0 or larger.
	Limit int
	// Continue is that of the page before.
	Continue string
}

// Page is a part of the records that a Query selects.
type Page struct {
	Records []Record
	// Continue selects the next page; empty on the last one.
	Continue string
}

// Period is the time that one UsageRow is for.
type Period string

// Periods.
const (
	Daily   Period = "day"
	Monthly Period = "month"
)

// Of is the period of a day: the day, or its month (2006-01).
func (p Period) Of(day string) string {
	if p == Monthly && len(day) > len("2006-01") {
		return day[:len("2006-01")]
	}
	return day
}

// UsageQuery selects sums. Empty fields select all.
type UsageQuery struct {
	Requester, Namespace string
	// From and To are the first and the last day (DateOf). From may be a month (2006-01): its first day.
	From, To string
	Period   Period
}

// UsageKey is what one UsageRow is about: the pods of one owner in a period at one provider, at
// prices in one currency, which is empty for what had no known price.
type UsageKey struct {
	Period, Requester, Namespace, OwnerKind, Owner, Provider, Currency string
}

// Compare orders keys by their fields.
func (k UsageKey) Compare(other UsageKey) int {
	return slices.Compare(k.fields(), other.fields())
}

func (k UsageKey) fields() []string {
	return []string{k.Period, k.Requester, k.Namespace, k.OwnerKind, k.Owner, k.Provider, k.Currency}
}

// UsageRow is a sum of a UsageQuery.
type UsageRow struct {
	UsageKey
	Sum
}

// Usage adds up days to the rows of a query.
type Usage map[UsageKey]Sum

// Add adds the sum of a day, whose date is the key's period.
func (u Usage) Add(period Period, key UsageKey, sum Sum) error {
	key.Period = period.Of(key.Period)
	if _, exists := u[key]; !exists && len(u) >= MaxRows {
		return ErrTooMany
	}
	u[key] = u[key].plus(sum)
	return nil
}

// Rows are the sums in their order.
func (u Usage) Rows() []UsageRow {
	rows := make([]UsageRow, 0, len(u))
	for key, sum := range u {
		rows = append(rows, UsageRow{key, sum})
	}
	slices.SortFunc(rows, func(a, b UsageRow) int { return a.Compare(b.UsageKey) })
	return rows
}

// Saving compares the cost of what was promised with what the same would have cost at reference
// prices; saved is below zero if that is less. It is unknown if one of the prices is, or if their
// currencies differ.
func (s Sum) Saving(currency string, reference *broker.Cost) (cost, saved *big.Rat, known bool) {
	if reference == nil || currency == "" || reference.Currency != currency || s.Cost == nil {
		return nil, nil, false
	}
	if cost, known = s.Promised.Price(reference); !known {
		return nil, nil, false
	}
	return cost, new(big.Rat).Sub(cost, s.Cost), true
}
