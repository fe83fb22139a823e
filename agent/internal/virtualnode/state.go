package virtualnode

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// peeringState is what is remembered of the peering with one provider. Only the
// worker that reconciles the provider uses it.
type peeringState struct {
	peer peering.Peer
	// lastGrant is when a grant was observed last.
	lastGrant time.Time
	// terminating is set from the first call of Teardown until it is done.
	terminating bool
	// notReadySince is zero while peering and virtual node are ready; reported is
	// set once an event says that they are late.
	notReadySince time.Time
	reported      bool
	retryAfter    time.Duration
}

// backOff returns the delay before the driver's step is tried again.
func (s *peeringState) backOff() time.Duration {
	s.retryAfter = min(max(2*s.retryAfter, minRetry), maxRetry)
	return s.retryAfter
}

// observe records since when the virtual node is not ready, and returns the progress
// with the time waited.
func (s *peeringState) observe(p progress, now time.Time, timeout time.Duration) progress {
	if p.ready() {
		s.notReadySince, s.reported, s.retryAfter = time.Time{}, false, 0
		return p
	}
	if s.notReadySince.IsZero() {
		s.notReadySince = now
	}
	p.waited = now.Sub(s.notReadySince)
	p.overdue = p.waited >= timeout
	return p
}

// carriedPods is the number of pods that a virtual node carries capacity for on
// behalf of one instruction, and since when.
type carriedPods struct {
	pods  int32
	since time.Time
}

// state returns what is remembered of a provider. The idle time of a peering that
// is found without a grant starts then.
func (r *Reconciler) state(provider string) *peeringState {
	r.mu.Lock()
	defer r.mu.Unlock()
	state := r.peerings[provider]
	if state == nil {
		state = &peeringState{peer: peering.Peer{ClusterID: provider}, lastGrant: r.Clock.Now()}
		r.peerings[provider] = state
	}
	return state
}

func (r *Reconciler) deleteState(provider string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.peerings, provider)
	delete(r.carried, provider)
}

// setCarried records the number of pods that a virtual node carries capacity for
// by instruction, and reports whether one of them is new or has changed.
func (r *Reconciler) setCarried(provider string, pods map[types.UID]int32) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before, after := r.carried[provider], map[types.UID]carriedPods{}
	for instruction, n := range pods {
		after[instruction] = carriedPods{pods: n, since: r.Clock.Now()}
		if was, ok := before[instruction]; ok && was.pods == n {
			after[instruction] = was
		} else {
			changed = true
		}
	}
	r.carried[provider] = after
	return changed
}

// Shrunk reports whether the virtual node has carried capacity for at most so many
// pods of an instruction for long enough that no pod is being bound to more.
func (r *Reconciler) Shrunk(in *broker.ReservationInstruction, pods int32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.carried[in.Spec.TargetClusterID][in.UID]
	return ok && c.pods <= pods && !r.Clock.Now().Before(c.since.Add(r.ShrinkDelay))
}

// BoundPods is the number of pods that use an instruction's grant, by a read from
// the API server.
func (r *Reconciler) BoundPods(ctx context.Context, in *broker.ReservationInstruction) (int32, error) {
	s, err := r.gather(ctx, r.live, in.Spec.TargetClusterID)
	if err != nil {
		return 0, err
	}
	return s.boundPods(in.UID), nil
}

// SetRelease limits a Reservation to the retained pods while a release is in
// progress, and enqueues the providers; nil ends that.
func (r *Reconciler) SetRelease(reservation types.UID, retained []broker.RetainedPods) {
	r.mu.Lock()
	before := r.releases[reservation]
	if retained == nil {
		delete(r.releases, reservation)
	} else {
		r.releases[reservation] = retained
	}
	r.mu.Unlock()
	if equality.Semantic.DeepEqual(before, retained) {
		return
	}
	for _, at := range slices.Concat(before, retained) {
		r.Enqueue(at.Cluster)
	}
}

// releaseOf is the release in progress of a Reservation, nil if there is none.
func (r *Reconciler) releaseOf(reservation types.UID) []broker.RetainedPods {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.releases[reservation]
}

// CapacityChanges sends the namespace and name of a Reservation when the capacity
// that a virtual node carries for it has changed.
func (r *Reconciler) CapacityChanges() <-chan event.GenericEvent { return r.reservations }

// Enqueue enqueues a provider without blocking. If the queue is full, the provider
// is reconciled within the resync period.
func (r *Reconciler) Enqueue(provider string) {
	enqueue(r.providers, types.NamespacedName{Name: provider})
}

func (r *Reconciler) enqueueReservation(reservation *broker.Reservation) {
	enqueue(r.reservations, client.ObjectKeyFromObject(reservation))
}
