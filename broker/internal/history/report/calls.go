package report

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// summing bounds how many calls add up usage at the same time, each with up to history.MaxRows in memory.
var summing = make(chan struct{}, 2)

// Calls answers from a store. Its methods work on nil, which has no history.
type Calls struct {
	Store history.Store
	// Reference are the prices that usage is compared with; nil for none.
	Reference *broker.Cost
	Clock     clock.PassiveClock
}

// List answers GET on protocol.PathHistory.
func (c *Calls) List(w http.ResponseWriter, r *http.Request, caller string) error {
	if c == nil {
		return noHistory()
	}
	query, format, err := parseHistory(r, caller)
	if err != nil {
		return err
	}
	page, err := c.Store.List(r.Context(), query)
	if err != nil {
		return refusal(err)
	}
	list := protocol.HistoryList{Items: make([]protocol.HistoryItem, len(page.Records)), Continue: page.Continue}
	for i := range page.Records {
		list.Items[i] = itemOf(&page.Records[i])
	}
	return answer(w, format, list, list.Continue, func(rows *csv.Writer) error { return writeHistory(rows, list.Items) })
}

// Usage answers GET on protocol.PathUsage.
func (c *Calls) Usage(w http.ResponseWriter, r *http.Request, caller string) error {
	if c == nil {
		return noHistory()
	}
	query, page, format, err := parseUsage(r, caller, c.Clock.Now())
	if err != nil {
		return err
	}
	all, err := c.sum(r.Context(), query)
	if err != nil {
		return refusal(err)
	}
	rows, next := page.of(all)
	list := protocol.UsageList{Items: make([]protocol.UsageItem, len(rows)), Continue: next}
	for i := range rows {
		list.Items[i] = usageOf(&rows[i], c.Reference)
	}
	return answer(w, format, list, list.Continue, func(rows *csv.Writer) error { return writeUsage(rows, list.Items) })
}

// sum adds up usage when it is its turn.
func (c *Calls) sum(ctx context.Context, query history.UsageQuery) ([]history.UsageRow, error) {
	select {
	case summing <- struct{}{}:
		defer func() { <-summing }()
		return c.Store.Usage(ctx, query)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func noHistory() error {
	return refuse(protocol.CodeNotFound, "this broker keeps no history: its operator sets value history.enabled of its chart")
}

func refuse(code, format string, args ...any) error {
	return &protocol.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// refusal is the error of the store as it is sent to the caller: nothing about the database.
func refusal(err error) error {
	switch {
	case errors.Is(err, history.ErrContinue), errors.Is(err, history.ErrTooMany):
		return refuse(protocol.CodeInvalid, "%v", err)
	case errors.Is(err, context.Canceled):
		return err
	}
	return fmt.Errorf("%w: %w", refuse(protocol.CodeUnavailable, "the database of the history does not answer: retry"), err)
}

// answer writes a list as JSON, or as CSV.
func answer(w http.ResponseWriter, format string, list any, next string, rows func(*csv.Writer) error) error {
	var body bytes.Buffer
	kind := "application/json"
	if format == formatCSV {
		kind = "text/csv; charset=utf-8"
		out := csv.NewWriter(&body)
		if err := rows(out); err != nil {
			return err
		}
		if out.Flush(); out.Error() != nil {
			return out.Error()
		}
		if next != "" {
			w.Header().Set(protocol.HeaderContinue, next)
		}
	} else if err := json.NewEncoder(&body).Encode(list); err != nil {
		return fmt.Errorf("encoding the response: %w", err)
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusOK)
	// If this fails, the caller is gone.
	_, _ = w.Write(body.Bytes())
	return nil
}
