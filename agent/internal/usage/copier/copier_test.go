package copier_test

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/spillway-dev/spillway/agent/internal/usage"
	"github.com/spillway-dev/spillway/agent/internal/usage/copier"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// brokerOf has pages of so many items, or an error.
type brokerOf struct {
	pages int
	err   chan error
	// noMonths is the error of months, if it is set, and owner a prefix of the owners.
	noMonths error
	owner    string
}

func (b *brokerOf) Usage(_ context.Context, query url.Values) (list protocol.UsageList, err error) {
	select {
	case err := <-b.err:
		return list, err
	default:
	}
	if query.Get("period") == "month" && b.noMonths != nil {
		return list, b.noMonths
	}
	at, _ := strconv.Atoi(query.Get("continue"))
	for i := range 600 {
		list.Items = append(list.Items, protocol.UsageItem{Period: query.Get("from"), Owner: b.owner + fmt.Sprint(at*600+i)})
	}
	if at+1 < b.pages {
		list.Continue = strconv.Itoa(at + 1)
	}
	return list, nil
}

// TestCopier: the newest items are copied, again after a failure, and nothing without a history.
func TestCopier(t *testing.T) {
	clock := testclock.NewFakeClock(time.Date(2026, 3, 31, 12, 0, 0, 0, time.UTC))
	from := &brokerOf{pages: 3, err: make(chan error, 1)}
	c := fake.NewClientBuilder().Build()
	copies := &copier.Copier{Broker: from, Client: c, Namespace: "spillway-system", Clock: clock, Log: logr.Discard()}
	ctx, cancel := context.WithCancel(t.Context())
	from.err <- &protocol.Error{Code: protocol.CodeNotFound}
	done := make(chan error)
	go func() { done <- copies.Start(ctx) }()
	read := func() (usage.Copy, error) {
		var copied corev1.ConfigMap
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: "spillway-system", Name: usage.Name}, &copied); err != nil {
			return usage.Copy{}, err
		}
		return usage.Decode(copied.Data[usage.Key])
	}
	next := func(after time.Duration) {
		t.Helper()
		expect.Eventually(t, "the next copy waits", func() (bool, string) { return clock.HasWaiters(), "" })
		clock.Step(after)
	}
	next(9 * time.Minute)
	if _, err := read(); !apierrors.IsNotFound(err) {
		t.Errorf("a copy without a history: %v", err)
	}
	clock.Step(time.Minute)
	expect.Eventually(t, "the usage is copied", func() (bool, string) {
		got, err := read()
		return err == nil && got.Truncated && len(got.Days) == usage.MaxItems && got.Days[usage.MaxItems-1].Owner == "1799" &&
			got.Days[0].Period == "2026-03-01" && got.Months[0].Period == "2025-03-01", fmt.Sprint(err, len(got.Days))
	})
	first, err := read()
	expect.NoError(t, err)
	from.err <- fmt.Errorf("the broker is away")
	next(10 * time.Minute)
	expect.Eventually(t, "the failure was seen", func() (bool, string) { return len(from.err) == 0, "" })
	next(time.Minute)
	expect.Eventually(t, "the usage is copied again", func() (bool, string) {
		again, err := read()
		return err == nil && again.AsOf.Equal(first.AsOf.Add(11*time.Minute)), fmt.Sprint(err, again.AsOf)
	})
	cancel()
	expect.NoError(t, <-done)
}

// TestCopyInParts: days are copied without the months, and of large items the newest that a ConfigMap holds.
func TestCopyInParts(t *testing.T) {
	for name, from := range map[string]*brokerOf{
		"no months": {pages: 1, noMonths: fmt.Errorf("the broker is away")},
		"large":     {pages: 2, owner: strings.Repeat("x", 2000)},
	} {
		t.Run(name, func(t *testing.T) {
			c := fake.NewClientBuilder().Build()
			copies := &copier.Copier{Broker: from, Client: c, Namespace: "spillway-system", Clock: testclock.NewFakeClock(time.Date(2026, 3, 31, 12, 0, 0, 0, time.UTC)), Log: logr.Discard()}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- copies.Start(ctx) }()
			var copied corev1.ConfigMap
			expect.Eventually(t, "the usage is copied", func() (bool, string) {
				err := c.Get(t.Context(), client.ObjectKey{Namespace: "spillway-system", Name: usage.Name}, &copied)
				return err == nil, fmt.Sprint(err)
			})
			cancel()
			expect.NoError(t, <-done)
			got, err := usage.Decode(copied.Data[usage.Key])
			expect.NoError(t, err)
			last := from.owner + fmt.Sprint(from.pages*600-1)
			if n := len(got.Days); n < 100 || got.Days[n-1].Owner != last || !got.Truncated || len(copied.Data[usage.Key]) > 900<<10 {
				t.Errorf("%d days, %d bytes", n, len(copied.Data[usage.Key]))
			}
		})
	}
}
