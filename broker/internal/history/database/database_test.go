package database_test

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/history/database"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestSQLite(t *testing.T) {
	contract(t, func(t *testing.T) func() *database.Database {
		path := filepath.Join(t.TempDir(), "a folder?", "history.db")
		expect.NoError(t, os.Mkdir(filepath.Dir(path), 0o700))
		return func() *database.Database {
			d, err := database.OpenSQLite(path)
			expect.NoError(t, err)
			return d
		}
	})
}

// began is when the records of the tests begin.
var began = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// record is one of so many core-hours on a day, for half as many EUR.
func record(uid, requester, namespace string, ended time.Time, hours int64) history.Record {
	until := ended
	if until.IsZero() {
		until = began
	}
	sum := history.Sum{Promised: history.Amount{"cpu": big.NewInt(hours * 3_600_000_000)}, Cost: big.NewRat(hours, 2)}
	return history.Record{
		UID: types.UID(uid), Name: requester + "-" + uid, Requester: requester, Namespace: namespace, OwnerKind: "Deployment", Owner: "web", Asked: began, Ended: ended, Until: until,
		Shares: map[string]history.Share{"paris": {Why: "paris scored 91.20", Most: capacity.Vector{"cpu": 1000}, PricePerHour: big.NewRat(1, 3), Currency: "EUR", Total: sum,
			Rate: history.Rate{Promised: capacity.Vector{"cpu": 1000}, PricePerHour: big.NewRat(1, 3), Currency: "EUR"}}},
		Days: []history.Day{{Provider: "paris", Day: history.DateOf(until), Currency: "EUR", Sum: sum}},
	}
}

// numbers compares them by value.
var numbers = cmp.Options{
	cmp.Comparer(func(a, b *big.Int) bool { return a == b || a != nil && b != nil && a.Cmp(b) == 0 }),
	cmp.Comparer(func(a, b *big.Rat) bool { return a == b || a != nil && b != nil && a.Cmp(b) == 0 }),
}

// names are the names of the records of all pages.
func names(t *testing.T, d *database.Database, query history.Query) (all []string) {
	t.Helper()
	for pages := 0; ; pages++ {
		page, err := d.List(t.Context(), query)
		expect.NoError(t, err)
		for _, r := range page.Records {
			all = append(all, r.Name)
		}
		if query.Continue = page.Continue; page.Continue == "" {
			return all
		}
		if len(page.Records) != query.Limit || pages > 100 {
			t.Fatalf("page %d has %d records, and goes on", pages, len(page.Records))
		}
	}
}

// rows are usage as text.
func rows(t *testing.T, d *database.Database, query history.UsageQuery) (all []string) {
	t.Helper()
	usage, err := d.Usage(t.Context(), query)
	expect.NoError(t, err)
	for _, r := range usage {
		all = append(all, fmt.Sprintf("%s %s/%s %s %s %s", r.Period, r.Requester, r.Namespace, r.Owner, history.Decimal(r.Promised.Hours("cpu")), history.Decimal(r.Cost)+r.Currency))
	}
	return all
}

// prepared opens a database with its tables, and again by again.
func prepared(t *testing.T, opening func(*testing.T) func() *database.Database) (d *database.Database, again func() *database.Database) {
	t.Helper()
	open := opening(t)
	again = func() *database.Database {
		d := open()
		t.Cleanup(func() { expect.NoError(t, d.Close()) })
		for range 2 {
			expect.NoError(t, d.Prepare(t.Context()))
		}
		return d
	}
	return again(), again
}

func same(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got, numbers); diff != "" {
		t.Errorf("%s: -want +got\n%s", what, diff)
	}
}

// prune deletes all that is too old, and returns in how many parts.
func prune(t *testing.T, d *database.Database, before time.Time, most int) (parts int) {
	t.Helper()
	for more := true; more; parts++ {
		var err error
		more, err = d.Prune(t.Context(), before, most)
		expect.NoError(t, err)
	}
	return parts
}

// contract is what every database does. opening returns a function that opens an empty one, and again
// what is in it.
func contract(t *testing.T, opening func(t *testing.T) (open func() *database.Database)) {
	start := func(t *testing.T) (d *database.Database, again func() *database.Database) {
		t.Helper()
		return prepared(t, opening)
	}
	t.Run("a restart keeps everything", func(t *testing.T) {
		d, again := start(t)
		open, ended := record("open", "rome", "shop", time.Time{}, 2), record("ended", "rome", "shop", began.Add(time.Hour), 4)
		expect.NoError(t, d.Write(t.Context(), []history.Record{open, ended}))
		for _, d := range []*database.Database{d, again()} {
			got, err := d.Open(t.Context())
			expect.NoError(t, err)
			same(t, "open", []history.Record{open}, got)
			page, err := d.List(t.Context(), history.Query{})
			expect.NoError(t, err)
			same(t, "list", []history.Record{ended}, page.Records)
			same(t, "usage", []string{"2026-03 rome/shop web 6 3EUR"}, rows(t, d, history.UsageQuery{From: "2026-03-01", To: "2026-03-31", Period: history.Monthly}))
		}
	})

	t.Run("writes are repeated, and late ones change nothing", func(t *testing.T) {
		d, _ := start(t)
		first := record("a", "rome", "shop", time.Time{}, 2)
		later := record("a", "rome", "shop", began.Add(time.Hour), 4)
		after := record("a", "rome", "shop", began.Add(2*time.Hour), 0)
		for _, r := range []history.Record{first, first, later, later, first, after} {
			expect.NoError(t, d.Write(t.Context(), []history.Record{r}))
		}
		page, err := d.List(t.Context(), history.Query{})
		expect.NoError(t, err)
		same(t, "list", []history.Record{later}, page.Records)
		same(t, "usage", []string{"2026-03-01 rome/shop web 4 2EUR"}, rows(t, d, history.UsageQuery{From: "2026-03-01", To: "2026-03-01", Period: history.Daily}))
	})

	t.Run("an end is kept though its clock is behind", func(t *testing.T) {
		d, _ := start(t)
		expect.NoError(t, d.Write(t.Context(), []history.Record{record("a", "rome", "shop", time.Time{}, 2)}))
		expect.NoError(t, d.Write(t.Context(), []history.Record{record("a", "rome", "shop", began.Add(-time.Second), 2)}))
		same(t, "list", []string{"rome-a"}, names(t, d, history.Query{}))
	})

	t.Run("lists are filtered and paged", func(t *testing.T) {
		d, _ := start(t)
		var all []history.Record
		for i := range 7 { // some end at the same time
			all = append(all, record(fmt.Sprint(i), "rome", "shop", began.Add(time.Duration(i/3)*time.Hour), 1))
		}
		all = append(all, record("other", "berlin", "shop", began, 1), record("blog", "rome", "blog", began, 1))
		expect.NoError(t, d.Write(t.Context(), all))
		of := history.Query{Requester: "rome", Namespace: "shop", Limit: 2}
		same(t, "rome/shop", []string{"rome-6", "rome-5", "rome-4", "rome-3", "rome-2", "rome-1", "rome-0"}, names(t, d, of))
		same(t, "berlin", []string{"berlin-other"}, names(t, d, history.Query{Requester: "berlin", Limit: 2}))
		same(t, "another cluster", []string(nil), names(t, d, history.Query{Requester: "oslo", Limit: 2}))
		of.Since, of.Until = began.Add(time.Hour), began.Add(2*time.Hour)
		same(t, "an hour", []string{"rome-5", "rome-4", "rome-3"}, names(t, d, of))
		for _, token := range []string{"x", "1", "1.", ".a", "1.\x00", "1." + strings.Repeat("a", 65), "9999999999999999999999.a"} {
			if _, err := d.List(t.Context(), history.Query{Continue: token}); !errors.Is(err, history.ErrContinue) {
				t.Errorf("continue %q: %v", token, err)
			}
		}
	})

	t.Run("usage is grouped and filtered", func(t *testing.T) {
		d, _ := start(t)
		expect.NoError(t, d.Write(t.Context(), []history.Record{
			record("1", "rome", "shop", began, 1), record("2", "rome", "shop", began.Add(24*time.Hour), 2),
			record("3", "rome", "blog", began, 4), record("4", "berlin", "shop", began, 8), record("5", "rome", "shop", began.AddDate(0, 1, 0), 16),
		}))
		of := history.UsageQuery{Requester: "rome", From: "2026-03-01", To: "2026-03-31", Period: history.Daily}
		same(t, "days", []string{"2026-03-01 rome/blog web 4 2EUR", "2026-03-01 rome/shop web 1 0.5EUR", "2026-03-02 rome/shop web 2 1EUR"}, rows(t, d, of))
		of.Period, of.Namespace, of.To = history.Monthly, "shop", "2026-04-30"
		same(t, "months", []string{"2026-03 rome/shop web 3 1.5EUR", "2026-04 rome/shop web 16 8EUR"}, rows(t, d, of))
		same(t, "another cluster", []string(nil), rows(t, d, history.UsageQuery{Requester: "oslo", From: "2026-03-01", To: "2026-03-31"}))
	})

	retention(t, start)

	t.Run("what clusters wrote", func(t *testing.T) {
		d, _ := start(t)
		r := record("a", "rome", "'; DROP TABLE spillway_reservations; --\x00\xff", began, 1)
		r.Owner, r.Requested = "\x00", strings.Repeat("é\x00", 100)
		big := new(big.Int).Lsh(big.NewInt(1), 200)
		r.Days[0].Promised = history.Amount{"cpu": big}
		expect.NoError(t, d.Write(t.Context(), []history.Record{r}))
		same(t, "list", []string{"rome-a"}, names(t, d, history.Query{}))
		usage, err := d.Usage(t.Context(), history.UsageQuery{From: "2026-03-01", To: "2026-03-01"})
		expect.NoError(t, err)
		same(t, "a large sum", big, usage[0].Promised["cpu"])
	})

	t.Run("a write is all or nothing, and ends with its context", func(t *testing.T) {
		d, _ := start(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := d.Write(ctx, []history.Record{record("a", "rome", "shop", began, 1)}); err == nil {
			t.Error("no error")
		}
		same(t, "list", []string(nil), names(t, d, history.Query{}))
	})
}

// retention is what a database deletes.
func retention(t *testing.T, start func(*testing.T) (*database.Database, func() *database.Database)) {
	t.Helper()
	t.Run("retention", func(t *testing.T) {
		d, _ := start(t)
		all := []history.Record{record("old", "rome", "shop", began.Add(-48*time.Hour), 1), record("new", "rome", "shop", began, 1), record("open", "rome", "shop", time.Time{}, 1)}
		for i := range 5 {
			all = append(all, record(fmt.Sprint(i), "berlin", "shop", began.Add(time.Duration(i)*time.Minute), 1))
		}
		expect.NoError(t, d.Write(t.Context(), all))
		prune(t, d, began.Add(-24*time.Hour), 3)
		same(t, "rome", []string{"rome-new"}, names(t, d, history.Query{Requester: "rome"}))
		same(t, "berlin", []string{"berlin-4", "berlin-3", "berlin-2"}, names(t, d, history.Query{Requester: "berlin"}))
		same(t, "usage", []string{"2026 berlin/shop web 3 1.5EUR", "2026 rome/shop web 2 1EUR"}, years(rows(t, d, history.UsageQuery{From: "2026-01-01", To: "2026-12-31", Period: history.Monthly})))
		open, err := d.Open(t.Context())
		expect.NoError(t, err)
		same(t, "open", 1, len(open))
	})

	t.Run("little is deleted at a time", func(t *testing.T) {
		d, _ := start(t)
		var all []history.Record
		for i := range 1500 {
			all = append(all, record(fmt.Sprintf("old%d", i), "rome", "shop", began.Add(-48*time.Hour), 1), record(fmt.Sprintf("many%d", i), "berlin", "shop", began, 1))
		}
		expect.NoError(t, d.Write(t.Context(), all))
		if parts := prune(t, d, began.Add(-24*time.Hour), 10); parts != 5 {
			t.Errorf("deleted in %d parts", parts)
		}
		same(t, "rome", 0, len(names(t, d, history.Query{Requester: "rome", Limit: 100})))
		same(t, "berlin", 10, len(names(t, d, history.Query{Requester: "berlin", Limit: 100})))
	})
}

// years shortens the periods of rows to years.
func years(rows []string) []string {
	for i, row := range rows {
		rows[i] = row[:4] + row[strings.Index(row, " "):]
	}
	slices.Sort(rows)
	return rows
}

// TestURLFile: no error shows a part of the URL.
func TestURLFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "url")
	for _, content := range []string{"", "secret", "mysql://user:secret@host/db", "postgres://user:secret@host:secret/db", "postgres://user:secret@host/db?connect_timeout=secret"} {
		expect.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		if _, err := database.OpenPostgreSQL(file); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", content, err)
		}
	}
	if _, err := database.OpenPostgreSQL(file + "x"); err == nil {
		t.Error("a file that does not exist is accepted")
	}
}
