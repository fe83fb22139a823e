package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Reconcile brings one provider's peering and virtual node in line with its
// grants.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	state := r.state(request.Name)
	s, err := r.gather(ctx, r.client, request.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	r.recordUse(s)
	var requeueAfter time.Duration
	peer, asked := peering.Peer{}, false
	if len(s.Grants) == 0 {
		if peer, asked = r.Asked(s.Provider); asked {
			state.lastGrant = r.Clock.Now() // it is not idle
		}
	}
	switch {
	case len(s.Grants) > 0:
		requeueAfter, err = r.reconcileGrants(ctx, state, s)
	case asked && s.Node == nil && !state.terminating:
		requeueAfter = r.reconcileAsked(ctx, state, peer)
	default:
		requeueAfter, err = r.reconcileIdle(ctx, state, s)
	}
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: minRetry}, nil
	}
	return reconcile.Result{RequeueAfter: requeueAfter}, err
}

// reconcileGrants makes the virtual node provide the grants and reports the progress.
func (r *Reconciler) reconcileGrants(ctx context.Context, state *peeringState, s *Snapshot) (requeueAfter time.Duration, err error) {
	now := r.Clock.Now()
	state.lastGrant, state.peer = now, peering.Peer{ClusterID: s.Provider}
	for _, g := range s.Grants {
		state.peer.PeerKey = cmp.Or(g.Instruction.Spec.PeerKey, state.peer.PeerKey)
		state.peer.Endpoint = cmp.Or(g.Instruction.Spec.Endpoint, state.peer.Endpoint)
	}
	if s.Node != nil {
		// Before the driver is called, since the node may grow at once.
		r.recordCarried(s, progress{})
	}
	p := state.observe(r.ensure(ctx, state, s), s, now, r.ReadyTimeout)
	r.recordCarried(s, p)
	requeueAfter = ResyncPeriod
	if !p.ready() || p.pending() {
		requeueAfter = state.backoff.Step()
	}
	if p.err != nil {
		log.FromContext(ctx).Error(p.err, "Failed to set up the virtual node", "provider", s.Provider, "retryAfter", requeueAfter)
	}
	unused, retryAfter, err := r.findUnused(ctx, s, p)
	if err != nil {
		return 0, err
	}
	if err := r.writeStatuses(ctx, s, p, unused); err != nil {
		return 0, err
	}
	if p.overdue && p.peered.Done && p.node.Reason == peering.ReasonGrantPending && !s.inUse() {
		// The provider has ended or lost the peering: it is removed here too, and
		// established again.
		state.terminating = true
	}
	r.reportLate(s, p)
	return min(requeueAfter, retryAfter), nil
}

// reportLate records an event for each grant that is late, once while it is.
func (r *Reconciler) reportLate(s *Snapshot, p progress) {
	var reported []*lateness
	for _, g := range s.Grants {
		own := p.of(g)
		if !own.overdue || own.lateness.reported || g.Releasing() {
			continue
		}
		reported = append(reported, own.lateness)
		var about runtime.Object = g.Instruction
		if g.Reservation != nil {
			about = g.Reservation
		}
		what := "Virtual node for provider %s is not ready after %s, retrying: %s"
		if own.noPod {
			what = "No pod of the Reservation can use the virtual node for provider %s after %s, retrying: %s"
		}
		r.recorder.Eventf(about, nil, corev1.EventTypeWarning, "VirtualNodeNotReady", "Peer", what, s.Provider, own.waited.Round(time.Second), own.blocking().Message)
	}
	for _, late := range reported {
		late.reported = true
	}
}

// progress is the state of a provider's peering and virtual node.
type progress struct {
	peered, node peering.Progress
	// err of the driver's step that was tried last.
	err error
	// waited is for how long they have not been ready, overdue whether that is
	// longer than Options.ReadyTimeout. lateness says so; nil if they are ready.
	waited   time.Duration
	overdue  bool
	lateness *lateness
	// unmapped is the progress of each grant that the node provides and no pod can use
	// there, by the UID of its instruction. Of such a progress, noPod is set, and final if
	// another provider is to be asked.
	unmapped     map[types.UID]progress
	noPod, final bool
}

func (p progress) ready() bool { return p.err == nil && p.peered.Done && p.node.Done }

// pending reports whether waiting may let the pods of further namespaces use the node.
func (p progress) pending() bool {
	for _, why := range p.node.Namespaces {
		if !why.Final {
			return true
		}
	}
	return false
}

// of is the progress as it concerns one grant.
func (p progress) of(g Grant) progress {
	if own, unmapped := p.unmapped[g.Instruction.UID]; unmapped {
		return own
	}
	return p
}

// blocking is the first step that is not done.
func (p progress) blocking() peering.Progress {
	if !p.peered.Done {
		return p.peered
	}
	return p.node
}

// ensure takes the driver's next step. The driver is not called while the same plan is in
// effect and neither the node nor anything else that it watches has changed.
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
	if s.Node == nil && !s.inUse() && !slices.ContainsFunc(s.Grants, func(g Grant) bool { return !g.Releasing() }) {
		// All grants are being released and none ever had a node.
		releasing := peering.Waiting(reasonReleasing, messageReleasing)
		return progress{peered: releasing, node: releasing}
	}
	plan := NodePlan(s)
	if changed := r.takeChanged(s.Provider); !changed && state.inEffect.is(state.peer, plan, s.Node) {
		return state.inEffect.progress
	}
	state.inEffect = nil
	peered, err := r.driver.EnsurePeering(ctx, state.peer)
	if err != nil {
		return progress{peered: unpeered, node: unpeered, err: fmt.Errorf("peering with %s: %w", s.Provider, err)}
	}
	if !peered.Done {
		return progress{peered: peered, node: unpeered}
	}
	node, err := r.driver.EnsureCapacity(ctx, state.peer, plan)
	if err != nil {
		return progress{peered: peered, node: peering.Waiting("WaitingForNode", "waiting for the virtual node"), err: fmt.Errorf("sizing the virtual node of %s: %w", s.Provider, err)}
	}
	p := progress{peered: peered, node: node}
	if p.ready() && len(node.Namespaces) == 0 {
		state.inEffect = &inEffect{state.peer, plan, s.Node, p}
	}
	return p
}

// findUnused returns the instructions whose grant no pod can use any more: those that are being
// released and whose part of the node has shrunk, or is overdue to, and those that no pod can use
// there, once the scheduler has seen it; and the API server shows no pod. retryAfter is when to
// check again.
func (r *Reconciler) findUnused(ctx context.Context, s *Snapshot, p progress) (unused map[types.UID]bool, retryAfter time.Duration, err error) {
	retryAfter = ResyncPeriod
	var candidates []types.UID
	for _, g := range s.Grants {
		in, own := g.Instruction, p.of(g)
		done := meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionRequesterReleased)
		certain := p.overdue || r.carriesAtMost(in, 0)
		if !g.Releasing() {
			done, certain = !own.final || unusable(in), own.waited >= r.ShrinkDelay
		}
		switch {
		case g.Bound.Count > 0 || done:
		case certain:
			candidates = append(candidates, in.UID)
		default:
			retryAfter = r.ShrinkDelay
		}
	}
	if len(candidates) == 0 {
		return nil, retryAfter, nil
	}
	live, err := r.gather(ctx, r.live, s.Provider)
	if err != nil {
		return nil, 0, err
	}
	unused = map[types.UID]bool{}
	for _, uid := range candidates {
		unused[uid] = live.boundPods(uid) == 0
	}
	return unused, retryAfter, nil
}

// unusable reports whether an instruction's status says that no pod can use its present grant.
func unusable(in *broker.ReservationInstruction) bool {
	return in.Status.ObservedAttempt == in.Spec.Attempt && meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionUnusable)
}

// reconcileAsked peers with a provider while it decides whether it grants what it has been
// asked for. If it refuses, the peering is one without a grant.
func (r *Reconciler) reconcileAsked(ctx context.Context, state *peeringState, peer peering.Peer) (requeueAfter time.Duration) {
	state.peer, state.inEffect = peer, nil
	peered, err := r.driver.EnsurePeering(ctx, peer)
	if err != nil {
		requeueAfter = state.backoff.Step()
		log.FromContext(ctx).Error(err, "Failed to peer with a provider that has been asked for capacity", "provider", peer.ClusterID, "retryAfter", requeueAfter)
		return requeueAfter
	}
	state.backoff = stepBackoff
	if !peered.Done {
		return askedRetry
	}
	return ResyncPeriod
}

// reconcileIdle parks the virtual node of a provider without grants, and removes
// the peering once it has been idle for long enough.
func (r *Reconciler) reconcileIdle(ctx context.Context, state *peeringState, s *Snapshot) (requeueAfter time.Duration, err error) {
	r.recordCarried(s, progress{})
	state.inEffect = nil
	peerings, err := r.driver.Observe(ctx)
	if err != nil {
		return 0, fmt.Errorf("listing peerings: %w", err)
	}
	if !slices.Contains(peerings, s.Provider) && !state.terminating {
		r.deleteState(s.Provider)
		return 0, nil
	}
	if !state.terminating {
		now := r.Clock.Now()
		if keep := keepPeering(s, state.lastGrant, now, r.PeeringIdleTime, r.FinishedPodRetention); keep > 0 {
			if s.Node == nil {
				return keep, nil
			}
			parked, err := r.driver.EnsureCapacity(ctx, state.peer, NodePlan(s))
			if err != nil {
				return 0, fmt.Errorf("parking the virtual node of %s: %w", s.Provider, err)
			}
			if !parked.Done {
				keep = min(keep, maxRetry)
			}
			return keep, nil
		}
		// The cache may not show the latest grant or pod yet.
		live, err := r.gather(ctx, r.live, s.Provider)
		if err != nil {
			return 0, err
		}
		if len(live.Grants) > 0 || live.Ungranted.Count > 0 || unschedulable(live) {
			return minRetry, nil
		}
		log.FromContext(ctx).Info("Removing an idle peering", "provider", s.Provider, "idleFor", now.Sub(state.lastGrant).Round(time.Second).String())
		state.terminating = true
	}
	return r.teardown(ctx, state, s.Provider)
}

// keepPeering returns how long to keep a peering without grants until the next check,
// at most the resync period; 0 if it is to be removed now.
func keepPeering(s *Snapshot, lastGrant, now time.Time, idleTime, retention time.Duration) time.Duration {
	keep := lastGrant.Add(idleTime).Sub(now)
	for _, pod := range s.Finished.all() {
		keep = max(keep, finishedAt(pod).Add(retention).Sub(now))
	}
	// The next node of the provider would not have an administrator's cordon.
	if s.Ungranted.Count > 0 || unschedulable(s) {
		keep = ResyncPeriod
	}
	return min(max(keep, 0), ResyncPeriod)
}

func unschedulable(s *Snapshot) bool { return s.Node != nil && s.Node.Spec.Unschedulable }

// finishedAt is about when a pod ended: the last transition of its conditions.
func finishedAt(pod *corev1.Pod) time.Time {
	at := pod.CreationTimestamp.Time
	for _, c := range pod.Status.Conditions {
		if c.LastTransitionTime.After(at) {
			at = c.LastTransitionTime.Time
		}
	}
	return at
}

// teardown takes the next step of removing a peering.
func (r *Reconciler) teardown(ctx context.Context, state *peeringState, provider string) (requeueAfter time.Duration, err error) {
	logger := log.FromContext(ctx).WithValues("provider", provider)
	gone, err := r.driver.Teardown(ctx, state.peer)
	if err != nil {
		return 0, fmt.Errorf("removing the peering with %s: %w", provider, err)
	}
	if !gone.Done {
		logger.V(1).Info("Waiting for the peering to be removed", "reason", gone.Message)
		return state.backoff.Step(), nil
	}
	logger.Info("Removed the peering")
	r.deleteState(provider)
	return 0, nil
}
