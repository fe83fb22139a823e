package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Reconcile brings one provider's peering and virtual node in line with its
// grants.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	state := r.state(request.Name)
	s, err := r.gather(ctx, r.client, request.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	var requeueAfter time.Duration
	if len(s.Grants) > 0 {
		requeueAfter, err = r.reconcileGrants(ctx, state, s)
	} else {
		requeueAfter, err = r.reconcileIdle(ctx, state, s)
	}
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: minRetry}, nil
	}
	return reconcile.Result{RequeueAfter: requeueAfter}, err
}

// reconcileGrants has the virtual node carry the grants and reports how far that
// is.
func (r *Reconciler) reconcileGrants(ctx context.Context, state *peeringState, s *Snapshot) (requeueAfter time.Duration, err error) {
	now := r.Clock.Now()
	state.lastGrant, state.peer = now, peerOf(s)
	p := state.observe(r.ensure(ctx, state, s), now, r.ReadyTimeout)
	requeueAfter = resyncPeriod
	if !p.ready() {
		requeueAfter = state.backOff()
	}
	if p.err != nil {
		log.FromContext(ctx).Error(p.err, "Failed to set up the virtual node", "provider", s.Provider, "retryAfter", requeueAfter)
	}
	r.recordCarried(s, p)
	released, retryAfter, err := r.findReleased(ctx, s, p.overdue)
	if err != nil {
		return 0, err
	}
	if err := r.writeStatuses(ctx, s, p, released); err != nil {
		return 0, err
	}
	if p.overdue && peeringForgotten(s, p) {
		state.terminating = true
	}
	if p.overdue && !state.reported {
		state.reported = true
		r.reportNotReady(s, p)
	}
	return earlier(requeueAfter, retryAfter), nil
}

// earlier is the shorter of two delays, of which 0 means none.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// peerOf is the provider as its instructions describe it.
func peerOf(s *Snapshot) peering.Peer {
	peer := peering.Peer{ClusterID: s.Provider}
	for _, g := range s.Grants {
		peer.PeerKey = cmp.Or(g.Instruction.Spec.PeerKey, peer.PeerKey)
		peer.Endpoint = cmp.Or(g.Instruction.Spec.Endpoint, peer.Endpoint)
	}
	return peer
}

// progress is how far a provider's peering and virtual node are.
type progress struct {
	peered, node peering.Progress
	// err of the driver's step that was tried last.
	err error
	// waited is for how long they have not been ready, overdue whether that is
	// longer than Options.ReadyTimeout.
	waited  time.Duration
	overdue bool
}

func (p progress) ready() bool { return p.err == nil && p.peered.Done && p.node.Done }

// blocking is the first step that is not done.
func (p progress) blocking() peering.Progress {
	if !p.peered.Done {
		return p.peered
	}
	return p.node
}

// ensure takes the driver's next step.
func (r *Reconciler) ensure(ctx context.Context, state *peeringState, s *Snapshot) progress {
	unpeered := peering.Waiting("WaitingForPeering", "waiting for the peering with "+s.Provider)
	if state.terminating {
		gone, err := r.driver.Teardown(ctx, state.peer)
		if err != nil {
			return progress{peered: unpeered, node: unpeered, err: fmt.Errorf("removing the previous peering with %s: %w", s.Provider, err)}
		}
		if !gone.Done {
			waiting := peering.Waiting("TearingDown", "waiting for the previous peering to be removed: "+gone.Message)
			return progress{peered: waiting, node: waiting}
		}
		state.terminating = false
	}
	if s.Node == nil && len(s.active()) == 0 && !slices.ContainsFunc(s.Grants, func(g Grant) bool { return !g.Releasing() }) {
		// All grants are being released and none ever had a node.
		releasing := peering.Waiting(reasonReleasing, messageReleasing)
		return progress{peered: releasing, node: releasing}
	}
	peered, err := r.driver.EnsurePeering(ctx, state.peer)
	if err != nil {
		return progress{peered: unpeered, node: unpeered, err: fmt.Errorf("peering with %s: %w", s.Provider, err)}
	}
	if !peered.Done {
		return progress{peered: peered, node: unpeered}
	}
	node, err := r.driver.EnsureCapacity(ctx, state.peer, NodePlan(s))
	if err != nil {
		return progress{peered: peered, node: peering.Waiting("WaitingForNode", "waiting for the virtual node"), err: fmt.Errorf("sizing the virtual node of %s: %w", s.Provider, err)}
	}
	return progress{peered: peered, node: node}
}

// recordCarried records what the virtual node carries, and enqueues the
// Reservations if that has changed. While the node is being resized, what was
// recorded before stays.
func (r *Reconciler) recordCarried(s *Snapshot, p progress) {
	if !p.ready() && s.Node != nil {
		return
	}
	carried := map[types.UID]int32{}
	for _, g := range s.Grants {
		carried[g.Instruction.UID] = 0
		if p.ready() {
			carried[g.Instruction.UID] = g.Pods()
		}
	}
	if !r.setCarried(s.Provider, carried) {
		return
	}
	for _, g := range s.Grants {
		if !g.Releasing() {
			r.enqueueReservation(g.Reservation)
		}
	}
}

// findReleased returns the instructions whose grant no pod can use any more: the
// node has shrunk, or is overdue to, and the API server shows no pod. retryAfter
// is when a node that is shrinking is to be looked at again.
func (r *Reconciler) findReleased(ctx context.Context, s *Snapshot, overdue bool) (released map[types.UID]bool, retryAfter time.Duration, err error) {
	var unused []types.UID
	for _, g := range s.Grants {
		switch in := g.Instruction; {
		case !g.Releasing() || len(g.Bound) > 0 || meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionRequesterReleased):
		case overdue || r.Shrunk(in, 0):
			unused = append(unused, in.UID)
		default:
			retryAfter = r.ShrinkDelay
		}
	}
	if len(unused) == 0 {
		return nil, retryAfter, nil
	}
	live, err := r.gather(ctx, r.live, s.Provider)
	if err != nil {
		return nil, 0, err
	}
	released = map[types.UID]bool{}
	for _, uid := range unused {
		released[uid] = live.boundPods(uid) == 0
	}
	return released, retryAfter, nil
}

// peeringForgotten reports whether the peering exists on this side only, because
// the provider has ended it or lost it: nothing depends on it, so that it can be
// removed and made again.
func peeringForgotten(s *Snapshot, p progress) bool {
	return p.peered.Done && p.node.Reason == peering.ReasonGrantPending && len(s.active()) == 0
}
