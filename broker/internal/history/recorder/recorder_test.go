package recorder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/big"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoevents "k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// memory is a database that can be away.
type memory struct {
	mu      sync.Mutex
	away    error
	records map[types.UID]history.Record
	// slow holds writes up until it is closed, if it is set.
	slow chan struct{}
	// unpruned is the error of Prune, if it is set, and prunes how often it was called.
	unpruned error
	prunes   atomic.Int32
}

func (m *memory) Prepare(context.Context) error { return m.answer(nil) }

func (m *memory) Open(context.Context) ([]history.Record, error) { return nil, m.answer(nil) }

func (m *memory) Prune(context.Context, time.Time, int) (bool, error) {
	m.prunes.Add(1)
	return false, cmp.Or(m.unpruned, m.answer(nil))
}

func (m *memory) Write(ctx context.Context, records []history.Record) error {
	if m.slow != nil {
		select {
		case <-m.slow:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return m.answer(func() {
		for _, r := range records {
			m.records[r.UID] = r
		}
	})
}

func (m *memory) answer(do func()) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.away == nil && do != nil {
		do()
	}
	return m.away
}

func (m *memory) be(away error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.away = away
}

func (m *memory) has(uid types.UID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.records[uid].Ended.IsZero()
}

// nothing is a hub without clusters.
type nothing struct{}

func (nothing) WaitSynced(context.Context) bool                { return true }
func (nothing) Advertisements() []*broker.ClusterAdvertisement { return nil }
func (nothing) Reservation(string) *broker.Reservation         { return nil }

func reservation(uid types.UID) *broker.Reservation {
	return &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "rome-" + string(uid), UID: uid}, Spec: broker.ReservationSpec{RequesterID: "rome"}}
}

// TestDatabaseIsAway: what ends then stays for keepWithin, and its record is written when the database answers again.
func TestDatabaseIsAway(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1_000_000, 0))
	database := &memory{records: map[types.UID]history.Record{}, away: errors.New("away")}
	r := New(Options{Database: database, Objects: nothing{}, Retention: time.Hour, Clock: clock, Events: clientgoevents.NewFakeRecorder(10), Log: logr.Discard()})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Start(ctx) }()
	// It is away before anything was read from it.
	if err := r.Ended(ctx, reservation("early"), clock.Now()); !errors.Is(err, errAway) {
		t.Errorf("away from the beginning: %v", err)
	}
	database.be(nil)
	expect.Eventually(t, "it is written", func() (bool, string) {
		clock.Step(retryAfter)
		err := r.Ended(ctx, reservation("well"), clock.Now())
		return err == nil && database.has("well") && database.has("early"), fmt.Sprint(err)
	})
	database.be(errors.New("away"))
	deleted := clock.Now()
	if err := r.Ended(ctx, reservation("late"), deleted); !errors.Is(err, errAway) {
		t.Errorf("without a database: %v", err)
	}
	clock.Step(keepWithin)
	expect.NoError(t, r.Ended(ctx, reservation("late"), deleted))
	database.be(nil)
	expect.Eventually(t, "the late record is written", func() (bool, string) {
		clock.Step(retryAfter)
		return database.has("late"), ""
	})
	expect.NoError(t, r.Ended(ctx, reservation("again"), clock.Now()))
	cancel()
	expect.NoError(t, <-done)
}

// TestDatabaseIsSlow: an end waits for a slow database for a second, others meanwhile not at all.
func TestDatabaseIsSlow(t *testing.T) {
	database := &memory{records: map[types.UID]history.Record{}, slow: make(chan struct{})}
	r := New(Options{Database: database, Objects: nothing{}, Retention: time.Hour, Clock: clock.RealClock{}, Events: clientgoevents.NewFakeRecorder(10), Log: logr.Discard()})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Start(ctx) }()
	began := time.Now()
	for i := range 20 {
		if err := r.Ended(ctx, reservation(types.UID(fmt.Sprint(i))), time.Now()); !errors.Is(err, errAway) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("20 ends have waited for %s", took)
	}
	close(database.slow)
	expect.Eventually(t, "it is written", func() (bool, string) {
		err := r.Ended(ctx, reservation("19"), time.Now())
		return err == nil && database.has("19"), fmt.Sprint(err)
	})
	cancel()
	expect.NoError(t, <-done)
}

// TestPruneFails: what ends does not wait then, and the next try is an hour later.
func TestPruneFails(t *testing.T) {
	database := &memory{records: map[types.UID]history.Record{}, unpruned: errors.New("too slow")}
	r := New(Options{Database: database, Objects: nothing{}, Retention: time.Hour, Clock: testclock.NewFakeClock(time.Unix(1_000_000, 0)), Events: clientgoevents.NewFakeRecorder(10), Log: logr.Discard()})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Start(ctx) }()
	expect.Eventually(t, "it is pruned", func() (bool, string) { return database.prunes.Load() > 0, "" })
	for _, uid := range []types.UID{"a", "b"} {
		expect.NoError(t, r.Ended(ctx, reservation(uid), r.Clock.Now()))
	}
	cancel()
	expect.NoError(t, <-done)
	if n := database.prunes.Load(); n != 1 {
		t.Errorf("pruned %d times", n)
	}
}

// TestSeriesAreBounded: one cluster has a bounded number of series, which end with it.
func TestSeriesAreBounded(t *testing.T) {
	series := func() int {
		all := make(chan prometheus.Metric, 10_000)
		capacityHours.Collect(all)
		cost.Collect(all)
		return len(all)
	}
	before := series()
	c := counters{namespaces: map[string]map[string]bool{}}
	for i := range 3 * maxNamespaces {
		c.counted(&history.Record{Requester: "hostile", Namespace: fmt.Sprint(i)}, "paris", "EUR", history.Sum{
			Promised: history.Amount{"cpu": big.NewInt(1), "example.org/a": big.NewInt(1), "example.org/b": big.NewInt(1)}, Cost: big.NewRat(1, 2),
		})
	}
	// Of each namespace and of others: cpu, other resources, and the cost.
	if got, want := series()-before, 3*(maxNamespaces+1); got != want {
		t.Errorf("%d series, want %d", got, want)
	}
	c.forget("hostile")
	if got := series(); got != before {
		t.Errorf("%d series are left", got-before)
	}
}
