package recorder

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoevents "k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
)

const (
	// lookEvery is how often ledgers that have changed are looked at, sweepEvery how often all are.
	lookEvery, sweepEvery = time.Second, 5 * time.Minute
	// pruneEvery is how often what is too old is deleted.
	pruneEvery = time.Hour
	// writeTimeout is how long one use of the database may take, batch how many records it writes,
	// and retryAfter how long it is left alone after a failure.
	writeTimeout = 10 * time.Second
	batch        = 500
	retryAfter   = 5 * time.Second
	// keepWithin is how long the end of a Reservation waits for the database, from its deletion.
	keepWithin = 30 * time.Second
	// waitWithin is how long one try to end a Reservation waits for a write.
	waitWithin = time.Second
	// maxRecords is how many records of one requester are kept.
	maxRecords = 200_000
)

// Reasons of events.
const (
	eventNotKept = "HistoryNotWritten"
	actionKeep   = "WriteHistory"
)

// errAway means that the database has not answered.
var errAway = errors.New("the database of the history does not answer")

// Database keeps records. All methods may be repeated.
type Database interface {
	Prepare(ctx context.Context) error
	// Open returns the records that have not ended.
	Open(ctx context.Context) ([]history.Record, error)
	Write(ctx context.Context, records []history.Record) error
	// Prune deletes some of what is too old, and reports whether there may be more.
	Prune(ctx context.Context, before time.Time, most int) (more bool, err error)
}

// Objects are what the broker knows: store.Store.
type Objects interface {
	WaitSynced(ctx context.Context) bool
	Advertisements() []*broker.ClusterAdvertisement
	Reservation(name string) *broker.Reservation
}

// Options of a Recorder. All fields are required.
type Options struct {
	Database Database
	Objects  Objects
	// Retention is how long records are kept.
	Retention time.Duration
	Clock     clock.WithTicker
	Events    clientgoevents.EventRecorder
	Log       logr.Logger
}

// Recorder is a manager.Runnable that needs leader election.
type Recorder struct {
	Options
	// write has a value when something is to be written at once.
	write chan struct{}

	mu sync.Mutex
	// meter counts also before the database was read, which loaded says.
	meter  *history.Meter
	loaded bool
	// seen are the ledgers as they were looked at, swept when all were, pruned when old records
	// were deleted.
	seen          map[string]*broker.ClusterAdvertisement
	swept, pruned time.Time
	// away is why the last use of the database failed, and tried when that was.
	away  error
	tried time.Time
	// wrote is closed after each write, successful or not. slow is whether an end has waited for
	// it for too long: the next ends do not wait.
	wrote chan struct{}
	slow  bool
	lost  int
	count counters
}

// New returns a Recorder that Start runs.
func New(o Options) *Recorder {
	r := &Recorder{
		Options: o, write: make(chan struct{}, 1), seen: map[string]*broker.ClusterAdvertisement{}, wrote: make(chan struct{}),
		count: counters{namespaces: map[string]map[string]bool{}}, meter: history.NewMeter(),
	}
	r.meter.Counted = r.count.counted
	return r
}

// Start records until the context ends, and writes what is left then.
func (r *Recorder) Start(ctx context.Context) error {
	if !r.Objects.WaitSynced(ctx) {
		return nil
	}
	ticker := r.Clock.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		r.look()
		if r.load(ctx) {
			r.flush(ctx)
			r.prune(ctx)
		}
		r.done()
		select {
		case <-ctx.Done():
			r.look()
			r.flush(context.WithoutCancel(ctx))
			r.done()
			return nil
		case <-ticker.C():
		case <-r.write:
		}
	}
}

// use uses the database, unless it has failed lately.
func (r *Recorder) use(ctx context.Context, do func(context.Context) error) bool {
	if r.away != nil && r.Clock.Since(r.tried) < retryAfter {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err := do(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil:
		failures.Inc()
		r.tried = r.Clock.Now()
		if r.away == nil {
			r.Log.Error(err, "The database of the history does not answer; records wait for it in memory")
		}
	case r.away != nil:
		r.Log.Info("The database of the history answers again")
	}
	r.away = err
	return err == nil
}

// load reads what has not ended, once.
func (r *Recorder) load(ctx context.Context) bool {
	if r.loaded {
		return true
	}
	var open []history.Record
	if !r.use(ctx, func(ctx context.Context) (err error) {
		if err = r.Database.Prepare(ctx); err == nil {
			open, err = r.Database.Open(ctx)
		}
		return err
	}) {
		return false
	}
	r.mu.Lock()
	r.meter.Resume(open)
	r.loaded, r.swept = true, time.Time{}
	r.mu.Unlock()
	r.look()
	r.Log.Info("The history goes on", "open", len(open))
	return true
}

// prune deletes what is too old, once an hour, in parts between which records are written. Records do
// not wait if it fails.
func (r *Recorder) prune(ctx context.Context) {
	now := r.Clock.Now()
	if now.Sub(r.pruned) < pruneEvery || r.away != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	more, err := r.Database.Prune(ctx, now.Add(-r.Retention), maxRecords)
	if err != nil {
		failures.Inc()
		r.Log.Error(err, "Failed to delete old history; the next try is later", "after", pruneEvery)
	}
	if err != nil || !more {
		r.pruned = now
	}
}

// now is the time without the monotonic clock, which differs from what is stored after a correction.
func (r *Recorder) now() time.Time { return r.Clock.Now().Round(0) }

// find is the Reservation with that UID.
func (r *Recorder) find(name string, uid types.UID) *broker.Reservation {
	if known := r.Objects.Reservation(name); known != nil && known.UID == uid {
		return known
	}
	return nil
}

// look counts at the ledgers that have changed since the last time, and every sweepEvery at all.
func (r *Recorder) look() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	known := map[string]*broker.ClusterAdvertisement{}
	for _, ad := range r.Objects.Advertisements() {
		if known[ad.Name] = ad; r.seen[ad.Name] != ad {
			r.meter.Observe(ad, r.find, now)
		}
	}
	for cluster := range r.seen {
		if known[cluster] == nil {
			r.count.forget(cluster)
		}
	}
	r.seen = known
	if now.Sub(r.swept) >= sweepEvery {
		r.meter.Sweep(r.find, func(provider string) bool { return known[provider] != nil }, now)
		r.swept = now
	}
	if r.meter.Lost > r.lost {
		lostTotal.Add(float64(r.meter.Lost - r.lost))
		r.lost = r.meter.Lost
	}
	unwritten.Set(float64(r.meter.Waiting()))
}

// flush writes what the database does not have.
func (r *Recorder) flush(ctx context.Context) {
	if !r.loaded {
		return // what is there of the same records must not be lost
	}
	r.mu.Lock()
	all := r.meter.Take()
	r.mu.Unlock()
	for some := range slices.Chunk(all, batch) {
		records := make([]history.Record, len(some))
		for i := range some {
			records[i] = some[i].Record
		}
		if !r.use(ctx, func(ctx context.Context) error { return r.Database.Write(ctx, records) }) {
			break
		}
		r.mu.Lock()
		r.meter.Written(some)
		unwritten.Set(float64(r.meter.Waiting()))
		r.mu.Unlock()
		r.done()
	}
}

// done wakes those who wait for a write.
func (r *Recorder) done() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.wrote)
	r.wrote, r.slow = make(chan struct{}), false
}

// Ended has the record of a Reservation written that is about to disappear, and that was seen deleted
// at that time. An error means that it is not written yet, and that the Reservation must stay. After
// keepWithin, it returns none: the record waits in memory, and is lost if this process ends before
// the database answers.
func (r *Recorder) Ended(ctx context.Context, reservation *broker.Reservation, deleted time.Time) error {
	if written, err := r.end(ctx, reservation); written || err != nil {
		return err
	}
	if deleted.IsZero() || r.Clock.Since(deleted) < keepWithin {
		return errAway
	}
	late.Inc()
	r.Log.Error(errAway, "A Reservation disappears before its record is written", "reservation", reservation.Name, "requester", reservation.Spec.RequesterID)
	r.Events.Eventf(reservation, nil, corev1.EventTypeWarning, eventNotKept, actionKeep,
		"The database of the history has not answered for %s: the record of this Reservation waits in the broker's memory. See --history-path and --history-postgres-url-file.", keepWithin)
	return nil
}

// end ends a record, and waits until it is written, a write has failed, or waitWithin has passed: those
// who place Reservations call it.
func (r *Recorder) end(ctx context.Context, reservation *broker.Reservation) (written bool, err error) {
	patience, cancel := context.WithTimeout(ctx, waitWithin)
	defer cancel()
	ended := false
	for {
		r.mu.Lock()
		if !ended {
			r.meter.End(reservation, r.now())
			ended = true
		}
		if r.meter.IsWritten(reservation.UID) {
			r.mu.Unlock()
			return true, nil
		}
		wrote, hopeless := r.wrote, r.away != nil || r.slow
		r.mu.Unlock()
		if hopeless {
			return false, nil
		}
		select {
		case r.write <- struct{}{}:
		default:
		}
		select {
		case <-wrote:
		case <-patience.Done():
			if ctx.Err() != nil {
				return false, fmt.Errorf("waiting for the history: %w", ctx.Err())
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.slow = true
			return false, nil
		}
	}
}
