package report

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/text"
)

// Formats.
const (
	formatJSON = "json"
	formatCSV  = "csv"
)

const (
	// defaultLimit is the size of a page, defaultDays how many days usage is of, with today.
	defaultLimit, defaultDays = 500, 31
	// maxContinue is the maximum size of parameter continue.
	maxContinue = 2048
	// separator is between the fields of parameter continue. No field has it.
	separator = "\x1f"
)

// parameters reads the parameters of a request, once each.
type parameters struct {
	values url.Values
	err    error
}

func read(r *http.Request, known ...string) *parameters {
	p := &parameters{}
	p.values, p.err = url.ParseQuery(r.URL.RawQuery)
	if p.err != nil {
		p.err = refuse(protocol.CodeInvalid, "the parameters are no valid query")
		return p
	}
	for name, values := range p.values {
		if !slices.Contains(known, name) {
			p.refuse("there is no parameter %q: the parameters are %s", text.TruncateTo(name, 64), strings.Join(known, ", "))
		} else if len(values) > 1 {
			p.refuse("parameter %s is set more than once", name)
		}
	}
	return p
}

func (p *parameters) refuse(format string, args ...any) {
	if p.err == nil {
		p.err = refuse(protocol.CodeInvalid, format, args...)
	}
}

func (p *parameters) namespace() string {
	name := p.values.Get("namespace")
	if name != "" && len(validation.IsDNS1123Label(name)) > 0 {
		p.refuse("namespace must be the name of a namespace")
	}
	return name
}

func (p *parameters) limit() int {
	value := p.values.Get("limit")
	if value == "" {
		return defaultLimit
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > history.MaxLimit {
		p.refuse("limit must be a number from 1 to %d", history.MaxLimit)
	}
	return n
}

func (p *parameters) continued() string {
	value := p.values.Get("continue")
	if len(value) > maxContinue {
		p.refuse("%v", history.ErrContinue)
	}
	return value
}

// format is that of the response: parameter format, or what header Accept wants.
func (p *parameters) format(r *http.Request) string {
	switch format := p.values.Get("format"); format {
	case formatJSON, formatCSV:
		return format
	case "":
	default:
		p.refuse("format must be json or csv")
	}
	for _, accepted := range strings.Split(r.Header.Get("Accept"), ",") {
		switch kind, _, _ := strings.Cut(strings.TrimSpace(accepted), ";"); kind {
		case "text/csv":
			return formatCSV
		case "application/json", "*/*":
			return formatJSON
		}
	}
	return formatJSON
}

// at is a time: a day (UTC), or a time as in RFC 3339.
func (p *parameters) at(name string) (at time.Time) {
	value := p.values.Get(name)
	if value == "" {
		return at
	}
	at, err := time.Parse(time.DateOnly, value)
	if err != nil {
		at, err = time.Parse(time.RFC3339, value)
	}
	if err != nil || at.Year() < 1970 || at.Year() > 9998 {
		p.refuse("%s must be a day such as 2026-01-31, or a time such as 2026-01-31T15:04:05Z", name)
	}
	return at
}

// parseHistory is what a call for history selects.
func parseHistory(r *http.Request, caller string) (query history.Query, format string, err error) {
	p := read(r, "namespace", "since", "until", "limit", "continue", "format")
	query = history.Query{
		Requester: caller, Namespace: p.namespace(), Since: p.at("since"), Until: p.at("until"),
		Limit: p.limit(), Continue: p.continued(),
	}
	format = p.format(r)
	return query, format, p.err
}

// usagePage is which rows of usage are returned.
type usagePage struct {
	limit int
	after *history.UsageKey
}

// parseUsage is what a call for usage selects.
func parseUsage(r *http.Request, caller string, now time.Time) (query history.UsageQuery, page usagePage, format string, err error) {
	p := read(r, "namespace", "from", "to", "period", "limit", "continue", "format")
	from, to := p.at("from"), p.at("to")
	if to.IsZero() {
		to = now
	}
	if from.IsZero() {
		from = to.AddDate(0, 0, 1-defaultDays)
	}
	if from.After(to) || to.Sub(from) > history.MaxDays*24*time.Hour {
		p.refuse("from must not be after to, and %d days before it at most", history.MaxDays)
	}
	query = history.UsageQuery{
		Requester: caller, Namespace: p.namespace(), From: history.DateOf(from), To: history.DateOf(to), Period: history.Daily,
	}
	switch period := history.Period(p.values.Get("period")); period {
	case "", history.Daily:
	case history.Monthly:
		query.Period = period
	default:
		p.refuse("period must be day or month")
	}
	page.limit = p.limit()
	if token := p.continued(); token != "" {
		if page.after = parseContinue(token, caller); page.after == nil {
			p.refuse("%v", history.ErrContinue)
		} else {
			// Earlier ones were on earlier pages.
			query.From = max(query.From, page.after.Period)
		}
	}
	format = p.format(r)
	return query, page, format, p.err
}

// parseContinue is the key of the last row of the page before; nil if it is none.
func parseContinue(token, caller string) *history.UsageKey {
	content, err := base64.RawURLEncoding.DecodeString(token)
	fields := strings.Split(string(content), separator)
	if err != nil || len(fields) != 6 {
		return nil
	}
	return &history.UsageKey{Period: fields[0], Requester: caller, Namespace: fields[1], OwnerKind: fields[2], Owner: fields[3], Provider: fields[4], Currency: fields[5]}
}

func continueAfter(k history.UsageKey) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strings.Join([]string{k.Period, k.Namespace, k.OwnerKind, k.Owner, k.Provider, k.Currency}, separator)))
}

// of is a page of the rows, which are sorted, and the parameter of the next one.
func (p usagePage) of(rows []history.UsageRow) (some []history.UsageRow, next string) {
	at := 0
	if p.after != nil {
		found := false
		if at, found = slices.BinarySearchFunc(rows, *p.after, func(r history.UsageRow, key history.UsageKey) int { return r.Compare(key) }); found {
			at++
		}
	}
	some = rows[at:]
	if len(some) > p.limit {
		some = some[:p.limit]
		next = continueAfter(some[p.limit-1].UsageKey)
	}
	return some, next
}
