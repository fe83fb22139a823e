package report

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	testclock "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// fakeStore has rows and records, or an error.
type fakeStore struct {
	rows    []history.UsageRow
	records []history.Record
	err     error
	asked   history.UsageQuery
	listed  history.Query
}

func (f *fakeStore) List(_ context.Context, query history.Query) (history.Page, error) {
	f.listed = query
	return history.Page{Records: f.records, Continue: "1.a"}, f.err
}

func (f *fakeStore) Usage(_ context.Context, query history.UsageQuery) ([]history.UsageRow, error) {
	f.asked = query
	return f.rows, f.err
}

var now = time.Date(2026, 3, 31, 12, 0, 0, 0, time.UTC)

func calls(store history.Store) *Calls {
	return &Calls{Store: store, Clock: testclock.NewFakePassiveClock(now)}
}

// call is the response to a call of rome.
func call(of func(http.ResponseWriter, *http.Request, string) error, query, accept string) (*httptest.ResponseRecorder, error) {
	w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)
	r.URL.RawQuery = query
	r.Header.Set("Accept", accept)
	return w, of(w, r, "rome")
}

func row(owner string, currency string) history.UsageRow {
	return history.UsageRow{
		UsageKey: history.UsageKey{Period: "2026-03-01", Requester: "rome", Namespace: "shop", OwnerKind: "Deployment", Owner: owner, Provider: "paris", Currency: currency},
		Sum:      history.Sum{Promised: history.Amount{"cpu": big.NewInt(3_600_000_000), "example.org/x": big.NewInt(7_200_000_000)}, Cost: big.NewRat(1, 3)},
	}
}

// TestPagesReadLess: what was on earlier pages is not read again, but for its last day or month.
func TestPagesReadLess(t *testing.T) {
	for query, want := range map[string]struct{ after, from string }{
		"from=2026-03-01":              {"2026-03-20", "2026-03-20"},
		"from=2026-03-25":              {"2026-03-20", "2026-03-25"},
		"from=2026-02-01&period=month": {"2026-03", "2026-03"},
		"from=2026-03-15&period=month": {"2026-03", "2026-03-15"},
	} {
		store, last := &fakeStore{}, row("web", "EUR").UsageKey
		last.Period = want.after
		if _, err := call(calls(store).Usage, query+"&continue="+continueAfter(last), ""); err != nil || store.asked.From != want.from {
			t.Errorf("%s after %s: reads from %s, want %s (%v)", query, want.after, store.asked.From, want.from, err)
		}
	}
}

// TestPages: the pages of usage have each row once.
func TestPages(t *testing.T) {
	store := &fakeStore{}
	usage := history.Usage{}
	for i := range 7 {
		r := row(fmt.Sprint("web-", i/2), []string{"EUR", "USD"}[i%2])
		expect.NoError(t, usage.Add(history.Daily, r.UsageKey, r.Sum))
	}
	store.rows = usage.Rows()
	var got []string
	query := "limit=2"
	for range 10 {
		w, err := call(calls(store).Usage, query, "")
		expect.NoError(t, err)
		var list protocol.UsageList
		expect.NoError(t, json.Unmarshal(w.Body.Bytes(), &list))
		for _, item := range list.Items {
			got = append(got, item.Owner+item.Currency)
		}
		if list.Continue == "" {
			break
		}
		query = "limit=2&continue=" + url.QueryEscape(list.Continue)
	}
	if want := "web-0EUR web-0USD web-1EUR web-1USD web-2EUR web-2USD web-3EUR"; strings.Join(got, " ") != want {
		t.Errorf("got %v, want %s", got, want)
	}
	if store.asked.From != "2026-03-01" || store.asked.To != "2026-03-31" || store.asked.Requester != "rome" {
		t.Errorf("asked for %+v", store.asked)
	}
}

// TestCSV: a spreadsheet takes no text for a formula, and resources without a column share one.
func TestCSV(t *testing.T) {
	store := &fakeStore{rows: []history.UsageRow{row("=cmd()", "EUR")}, records: []history.Record{{Name: "@x", Ended: now}}}
	for _, c := range []struct{ query, accept string }{{"format=csv", ""}, {"", "text/csv"}, {"", "text/html, text/csv;q=0.9, */*"}} {
		w, err := call(calls(store).Usage, c.query, c.accept)
		expect.NoError(t, err)
		lines, err := csv.NewReader(w.Body).ReadAll()
		expect.NoError(t, err)
		if line := strings.Join(lines[1], "|"); line != "2026-03-01|shop|Deployment|'=cmd()|paris|1||||example.org/x=2||||||0.333333|EUR||" || len(lines[0]) != len(lines[1]) {
			t.Errorf("%+v: %s", c, line)
		}
	}
	w, err := call(calls(store).List, "format=csv", "")
	expect.NoError(t, err)
	if body := w.Body.String(); !strings.Contains(body, "\n'@x,") || w.Header().Get(protocol.HeaderContinue) != "1.a" {
		t.Errorf("history: %s, %v", body, w.Header())
	}
	if w, err := call(calls(store).List, "", "text/html"); err != nil || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("%v, %v", w.Header(), err)
	}
}

// TestRefusals: what is wrong is said, and nothing about the database.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		calls      *Calls
		query      string
		code, want string
	}{
		"no history":        {nil, "", protocol.CodeNotFound, "history.enabled"},
		"no database":       {calls(&fakeStore{err: errors.New("dial tcp: secret")}), "", protocol.CodeUnavailable, "does not answer"},
		"too many":          {calls(&fakeStore{err: history.ErrTooMany}), "", protocol.CodeInvalid, "fewer days"},
		"another cluster":   {calls(&fakeStore{}), "requester=paris", protocol.CodeInvalid, "no parameter"},
		"too many days":     {calls(&fakeStore{}), "from=2020-01-01", protocol.CodeInvalid, "800 days"},
		"backwards":         {calls(&fakeStore{}), "from=2026-03-02&to=2026-03-01", protocol.CodeInvalid, "not be after"},
		"no day":            {calls(&fakeStore{}), "from=yesterday", protocol.CodeInvalid, "must be a day"},
		"an absurd day":     {calls(&fakeStore{}), "to=9999-01-01", protocol.CodeInvalid, "must be a day"},
		"no period":         {calls(&fakeStore{}), "period=year", protocol.CodeInvalid, "day or month"},
		"no page":           {calls(&fakeStore{}), "continue=x", protocol.CodeInvalid, "earlier page"},
		"no query":          {calls(&fakeStore{}), "a=%zz", protocol.CodeInvalid, "no valid query"},
		"set twice":         {calls(&fakeStore{}), "limit=1&limit=2", protocol.CodeInvalid, "more than once"},
		"a large page":      {calls(&fakeStore{}), "limit=1001", protocol.CodeInvalid, "1 to 1000"},
		"no such format":    {calls(&fakeStore{}), "format=xml", protocol.CodeInvalid, "json or csv"},
		"no such namespace": {calls(&fakeStore{}), "namespace=A%00", protocol.CodeInvalid, "name of a namespace"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := call(c.calls.Usage, c.query, "")
			var refusal *protocol.Error
			if !errors.As(err, &refusal) || refusal.Code != c.code || !strings.Contains(refusal.Message, c.want) || strings.Contains(refusal.Message, "secret") {
				t.Errorf("want %s with %q, got %v", c.code, c.want, err)
			}
		})
	}
}

// FuzzParameters: whatever a query has, a call is of its caller, bounded, or refused.
func FuzzParameters(f *testing.F) {
	for _, query := range []string{"", "from=2026-01-01&to=2026-02-01&period=month&namespace=shop&limit=3&format=csv", "since=2026-01-01T00:00:00Z&until=2026-02-01", "continue=" + continueAfter(row("web", "EUR").UsageKey), "limit=-1", "from=0000-01-01"} {
		f.Add(query, "text/csv")
	}
	f.Fuzz(func(t *testing.T, query, accept string) {
		store := &fakeStore{rows: []history.UsageRow{row("web", "EUR")}, records: []history.Record{{Name: "a"}}}
		for _, of := range []func(http.ResponseWriter, *http.Request, string) error{calls(store).Usage, calls(store).List} {
			w, err := call(of, query, accept)
			var refusal *protocol.Error
			if err != nil && (!errors.As(err, &refusal) || refusal.Code != protocol.CodeInvalid || len(refusal.Message) > 1000) {
				t.Errorf("%q: %v", query, err)
			}
			if err == nil && w.Body.Len() == 0 {
				t.Errorf("%q: no body", query)
			}
		}
		if q := store.asked; q.Requester != "" && (q.Requester != "rome" || q.From > q.To || len(q.Namespace) > 63) {
			t.Errorf("%q asks for %+v", query, q)
		}
		if q := store.listed; q.Requester != "" && (q.Requester != "rome" || q.Limit < 1 || q.Limit > history.MaxLimit || len(q.Continue) > maxContinue) {
			t.Errorf("%q lists %+v", query, q)
		}
	})
}
