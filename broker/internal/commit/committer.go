package commit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/store"
)

const (
	// commitTimeout is how long the caller of a change waits for its outcome, and how
	// long the write of a batch may take.
	commitTimeout = 30 * time.Second
	// maxBatch is the maximum number of changes in one write.
	maxBatch = 256
	// After a write of a ledger with more than pausedHolds, the next one waits for
	// pausePerHold for each of them, or for as long as the write took if that is longer:
	// every write costs the API server and those who watch as much as there are holds, so
	// that the fewer writes the more holds there are.
	pausedHolds  = 16
	pausePerHold = 100 * time.Microsecond
	maxPause     = 2 * time.Second
	// MaxTries is the number of tries of a write if another broker is first.
	MaxTries = 10
)

// ErrOutdated means that a change was computed from a hold that has changed since.
var ErrOutdated = errors.New("the hold has changed since it was read")

// Edit changes a provider's object in place and reports what it has changed. If it
// returns an error, it has changed nothing. It may be called again for a newer version.
type Edit func(ad *broker.ClusterAdvertisement) (Edited, error)

// Edited are the parts of an object that an edit has changed.
type Edited struct{ Spec, Status bool }

// Committer writes the ledgers. The changes to one provider's ledger queue in front of
// it, and all that wait are written together: one compare-and-swap, on the last version
// that this broker knows. It is read live only if another broker was first, or if the
// outcome is that nothing is to be written. Different providers do not wait for each
// other.
type Committer struct {
	Hub   Hub
	Store *store.Store
	clock clock.PassiveClock

	mu     sync.Mutex
	queues map[string]*commitQueue
	// pauses end when the next write of a large ledger may begin, by cluster.
	pauses map[string]<-chan time.Time
}

// commitQueue are the changes to one provider's ledger that wait.
type commitQueue struct {
	waiting []*commit
}

// commit is one change and its outcome.
type commit struct {
	edit Edit
	// done is closed when the outcome is known: the written version, or an error.
	done chan struct{}
	ad   *broker.ClusterAdvertisement
	err  error
}

// New returns a Committer whose Store knows nothing.
func New(hub Hub, clock clock.PassiveClock) *Committer {
	return &Committer{Hub: hub, Store: store.New(clock), clock: clock, queues: map[string]*commitQueue{}, pauses: map[string]<-chan time.Time{}}
}

// Commit makes one change to a provider's object and returns the version that includes
// it, which is read-only. An edit that fails fails only for its own caller. If the
// caller's time is up, the outcome is unknown. The first caller writes for those that
// come while it writes; there is no other goroutine while no other caller waits.
func (c *Committer) Commit(ctx context.Context, cluster string, edit Edit) (*broker.ClusterAdvertisement, error) {
	mine := &commit{edit: edit, done: make(chan struct{})}
	c.mu.Lock()
	queue, busy := c.queues[cluster]
	if !busy {
		queue = &commitQueue{}
		c.queues[cluster] = queue
	}
	queue.waiting = append(queue.waiting, mine)
	c.mu.Unlock()
	if !busy {
		// A caller that gives up must not fail the others.
		if c.writeNext(context.WithoutCancel(ctx), cluster, queue) {
			go func() {
				for c.writeNext(context.WithoutCancel(ctx), cluster, queue) {
				}
			}()
		}
	}
	timeout := time.NewTimer(commitTimeout)
	defer timeout.Stop()
	select {
	case <-mine.done:
		return mine.ad, mine.err
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for the ledger of %s: %w", cluster, ctx.Err())
	case <-timeout.C:
		return nil, fmt.Errorf("the ledger of %s was not written within %s", cluster, commitTimeout)
	}
}

// Waiting reports whether a provider's ledger is being written, and how many changes wait for
// that.
func (c *Committer) Waiting(cluster string) (changes int, writing bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	queue := c.queues[cluster]
	if queue == nil {
		return 0, false
	}
	return len(queue.waiting), true
}

// writeNext writes what waits, and reports whether more waits now. If nothing does, the
// queue is gone.
func (c *Committer) writeNext(ctx context.Context, cluster string, queue *commitQueue) (more bool) {
	c.mu.Lock()
	pause := c.pauses[cluster]
	delete(c.pauses, cluster)
	c.mu.Unlock()
	if pause != nil {
		<-pause
	}
	c.mu.Lock()
	n := min(len(queue.waiting), maxBatch)
	batch := queue.waiting[:n:n]
	queue.waiting = queue.waiting[n:]
	c.mu.Unlock()

	// After a panic, which callers may recover from, the next change finds no queue without
	// a writer.
	var ad *broker.ClusterAdvertisement
	err := errors.New("the write of the ledger did not end")
	ended := false
	start := c.clock.Now()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !ended {
			batch, queue.waiting = append(batch, queue.waiting...), nil
		}
		for _, commit := range batch {
			if commit.ad = ad; err != nil {
				commit.err = err
			}
			close(commit.done)
		}
		if pause := pauseAfter(ad, c.clock.Since(start)); pause > 0 {
			c.pauses[cluster] = time.After(pause)
		}
		if more = len(queue.waiting) > 0; !more {
			delete(c.queues, cluster)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	ad, err = c.write(ctx, cluster, batch)
	ended = true
	commitBatchSize.Observe(float64(len(batch)))
	commitLatency.Observe(c.clock.Since(start).Seconds())
	return more
}

// pauseAfter is how long the next write of a ledger waits after this version, whose write
// took that long.
func pauseAfter(ad *broker.ClusterAdvertisement, took time.Duration) time.Duration {
	if ad == nil || len(ad.Status.Holds) <= pausedHolds {
		return 0
	}
	return min(max(time.Duration(len(ad.Status.Holds))*pausePerHold, took), maxPause)
}

// write applies a batch to a ledger and writes it. Each commit gets the error of its own
// edit; the error is one that all of them have.
func (c *Committer) write(ctx context.Context, cluster string, batch []*commit) (*broker.ClusterAdvertisement, error) {
	known := c.Store.Advertisement(cluster)
	confirmed := known == nil
	for try := 1; ; try++ {
		if confirmed {
			read := &broker.ClusterAdvertisement{}
			if err := c.Hub.Live.Get(ctx, c.Hub.Key(cluster), read); err != nil {
				return nil, fmt.Errorf("reading the ledger of %s: %w", cluster, err)
			}
			c.Store.PutAdvertisement(read)
			known = read
		}
		ad := known.DeepCopy()
		changes := apply(ad, batch)
		if !changes.Spec && !changes.Status {
			if confirmed {
				return known, nil
			}
			// Nothing that the compare-and-swap would confirm.
			confirmed = true
			continue
		}
		err := c.update(ctx, ad, changes)
		if err == nil {
			return ad, nil
		}
		if apierrors.IsNotFound(err) {
			// It was deleted, and the watch may have said so before it was added.
			c.Store.RemoveAdvertisement(known)
		}
		if tooLarge(err) {
			c.Store.MarkUnwritable(known)
			return nil, fmt.Errorf("%w (%w)", store.ErrUnwritable, err)
		}
		if !apierrors.IsConflict(err) || try == MaxTries || ctx.Err() != nil {
			return nil, err
		}
		LockConflicts.Inc()
		confirmed = true
	}
}

// tooLarge reports whether an API server, or its etcd, refused an object because of its
// size. The errors of etcd have no reason of their own.
func tooLarge(err error) bool {
	return apierrors.IsRequestEntityTooLargeError(err) ||
		strings.Contains(err.Error(), "etcdserver: request is too large") ||
		strings.Contains(err.Error(), "trying to send message larger than max")
}

// apply applies the edits of a batch, in its order.
func apply(ad *broker.ClusterAdvertisement, batch []*commit) (changes Edited) {
	for _, commit := range batch {
		var one Edited
		one, commit.err = commit.edit(ad)
		changes.Spec, changes.Status = changes.Spec || one.Spec, changes.Status || one.Status
	}
	// The account depends on the spec.
	changes.Status = changes.Status || changes.Spec
	if changes.Status {
		ledger.Settle(&ad.Spec, &ad.Status)
	}
	return changes
}

// update writes an object and adds it to the store.
func (c *Committer) update(ctx context.Context, ad *broker.ClusterAdvertisement, changes Edited) error {
	if changes.Spec {
		// The answer has the status that is stored.
		status := ad.Status.DeepCopy()
		ad.ManagedFields = Untracked()
		if err := c.Hub.Client.Update(ctx, ad); err != nil {
			return fmt.Errorf("updating the advertisement of %s: %w", ad.Name, err)
		}
		c.Store.PutAdvertisement(ad.DeepCopy())
		ad.Status = *status
	}
	observe(ad)
	if err := c.Hub.Client.Status().Update(ctx, ad); err != nil {
		return fmt.Errorf("writing the ledger of %s: %w", ad.Name, err)
	}
	// Of an advertisement, the API server may still track fields.
	ad.ManagedFields = nil
	c.Store.PutAdvertisement(ad)
	return nil
}

// observe sets the generation that the status was computed for.
func observe(ad *broker.ClusterAdvertisement) {
	ad.Status.ObservedGeneration = ad.Generation
	for i := range ad.Status.Conditions {
		ad.Status.Conditions[i].ObservedGeneration = ad.Generation
	}
}

// Untracked in an update of an object, not of its status, makes the API server drop the
// object's managedFields and track none in later updates. They are half of the content of
// a Reservation, of which every write encodes, decodes and compares them several times.
// It is for objects that only the broker writes.
func Untracked() []metav1.ManagedFieldsEntry { return []metav1.ManagedFieldsEntry{{}} }
