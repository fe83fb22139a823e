package program

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history/database"
)

// DefaultRetention is how long the history is kept: 13 months.
const DefaultRetention = 400 * 24 * time.Hour

// HistoryOptions say where the history is kept. There is none without a path and a file.
type HistoryOptions struct {
	// Path of the SQLite database, or URLFile, which has the URL of a PostgreSQL database.
	Path, URLFile string
	// Retention is how long what has ended is kept.
	Retention time.Duration
	// ReferencePrices are what the usage is compared with, such as cpu=0.04,memory=0.005,currency=EUR.
	ReferencePrices string
}

// History is an open database, and what the usage is compared with.
type History struct {
	Database  *database.Database
	Retention time.Duration
	Reference *broker.Cost
}

// Open opens the database. It does not connect yet; nil if there is none.
func (o HistoryOptions) Open() (*History, error) {
	reference, err := parsePrices(o.ReferencePrices)
	switch {
	case err != nil:
		return nil, err
	case o.Path != "" && o.URLFile != "":
		return nil, errors.New("--history-path is of SQLite and --history-postgres-url-file of PostgreSQL: set one of them")
	case o.Path == "" && o.URLFile == "":
		return nil, nil
	case o.Retention < 24*time.Hour:
		return nil, fmt.Errorf("--history-retention=%s is too short: set 24h or more", o.Retention)
	}
	h := &History{Retention: o.Retention, Reference: reference}
	if o.Path != "" {
		h.Database, err = database.OpenSQLite(o.Path)
	} else {
		h.Database, err = database.OpenPostgreSQL(o.URLFile)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the history: %w", err)
	}
	return h, nil
}

var (
	decimalPrice = regexp.MustCompile(`^[0-9]{1,12}([.][0-9]{1,12})?$`)
	currencyCode = regexp.MustCompile(`^[A-Z]{3}$`)
)

// parsePrices parses reference prices of one hour; nil for none.
func parsePrices(text string) (*broker.Cost, error) {
	if text == "" {
		return nil, nil
	}
	prices := &broker.Cost{}
	fields := map[string]*string{"cpu": &prices.CPUCost, "memory": &prices.MemoryCost, "gpu": &prices.GPUCost, "storage": &prices.StorageCost, "currency": &prices.Currency}
	for part := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(part, "=")
		valid := decimalPrice
		if name == "currency" {
			valid = currencyCode
		}
		if fields[name] == nil || !valid.MatchString(value) {
			return nil, fmt.Errorf("--history-reference-prices: %q is none of cpu, memory, gpu and storage with a decimal number, or currency with an ISO 4217 code", part)
		}
		*fields[name] = value
	}
	if prices.Currency == "" {
		return nil, errors.New("--history-reference-prices has no currency: add one, such as currency=EUR")
	}
	return prices, nil
}
