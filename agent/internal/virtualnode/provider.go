package virtualnode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// reasonOffloadingBackOff is Liqo's word for a pod that its virtual kubelet does
// not take.
const reasonOffloadingBackOff = "OffloadingBackOff"

// turnsMost is how many times Options.RescueAfter a pod may wait on a virtual node
// while the provider starts others.
const turnsMost = 5

// scene is what is seen of one provider.
type scene struct {
	provider string
	grants   []Grant
	// strangers run on the virtual node without a grant, finished have ended
	// there. Pods of DaemonSets are in neither: they come with every node.
	strangers, finished []*corev1.Pod
	// daemons is how many pods of DaemonSets sit there or wait to.
	daemons int32
	// node is nil where there is none.
	node *corev1.Node
}

// active are all pods on the virtual node that have not finished.
func (s *scene) active() []*corev1.Pod {
	pods := slices.Clone(s.strangers)
	for _, g := range s.grants {
		pods = append(pods, g.Bound...)
	}
	return pods
}

// gather reads a scene. Instructions and pods come from the given reader: the
// cache, or the API server where something final depends on it.
func (r *Reconciler) gather(ctx context.Context, provider string, reader client.Reader) (*scene, error) {
	s := &scene{provider: provider}
	var instructions broker.ReservationInstructionList
	if err := reader.List(ctx, &instructions, client.InNamespace(r.InstructionNamespace)); err != nil {
		return nil, fmt.Errorf("listing reservation instructions: %w", err)
	}
	for i := range instructions.Items {
		in := &instructions.Items[i]
		if in.Spec.TargetClusterID != provider {
			continue
		}
		reservation, err := r.reservationOf(ctx, in)
		if err != nil {
			return nil, err
		}
		g := Grant{Instruction: in, Reservation: reservation, Limit: -1}
		if reservation != nil {
			g.Limit = r.limit(reservation, in)
		}
		s.grants = append(s.grants, g)
	}
	slices.SortFunc(s.grants, func(a, b Grant) int { return cmp.Compare(a.Instruction.Name, b.Instruction.Name) })
	nodeName := broker.VirtualNodeName(provider)
	var bound corev1.PodList
	if err := reader.List(ctx, &bound, client.MatchingFields{IndexNode: nodeName}); err != nil {
		return nil, fmt.Errorf("listing pods on %s: %w", nodeName, err)
	}
	for i := range bound.Items {
		pod := &bound.Items[i]
		switch {
		case ofEveryNode(pod):
			s.daemons++
		case inventory.Finished(pod):
			s.finished = append(s.finished, pod)
		default:
			if g := s.grantOf(pod, r.resolve(ctx)); g != nil {
				g.Bound = append(g.Bound, pod)
			} else {
				s.strangers = append(s.strangers, pod)
			}
		}
	}
	var daemons corev1.PodList
	if err := r.client.List(ctx, &daemons, client.MatchingFields{indexDaemon: nodeName}); err != nil {
		return nil, fmt.Errorf("listing pods for %s: %w", nodeName, err)
	}
	s.daemons += int32(len(daemons.Items))
	var node corev1.Node
	if err := r.client.Get(ctx, client.ObjectKey{Name: nodeName}, &node); err == nil {
		s.node = &node
	} else if !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("reading node %s: %w", nodeName, err)
	}
	return s, nil
}

// reservationOf is the Reservation that an instruction is for; nil where that
// one is gone, whoever has its name now.
func (r *Reconciler) reservationOf(ctx context.Context, in *broker.ReservationInstruction) (*broker.Reservation, error) {
	reservation := &broker.Reservation{}
	err := r.client.Get(ctx, client.ObjectKey{Namespace: in.Spec.SourceNamespace, Name: in.Spec.SourceName}, reservation)
	if apierrors.IsNotFound(err) || err == nil && in.Spec.SourceUID != reservation.UID {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading reservation %s/%s: %w", in.Spec.SourceNamespace, in.Spec.SourceName, err)
	}
	return reservation, nil
}

// grantOf finds the grant that a pod uses. The label counts only where the key
// says nothing, since users can write it.
func (s *scene) grantOf(pod *corev1.Pod, resolve demand.Resolve) *Grant {
	if key, _, _, ok := demand.KeyOf(pod, resolve); ok {
		for i := range s.grants {
			if s.grants[i].Reservation == nil {
				continue
			}
			if k, keyed := demand.KeyOfReservation(s.grants[i].Reservation); keyed && k == key {
				return &s.grants[i]
			}
		}
	}
	hold := pod.Labels[broker.LabelHold]
	for i := range s.grants {
		in := s.grants[i].Instruction
		if hold != "" && hold == demand.HoldLabel(in.Spec.ReservationName) && in.Spec.SourceNamespace == pod.Namespace {
			return &s.grants[i]
		}
	}
	return nil
}

// ofEveryNode reports pods that run on each node and ask for none of a grant.
func ofEveryNode(pod *corev1.Pod) bool {
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return true
	}
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner != nil && (owner.Kind == "DaemonSet" || owner.Kind == "Node")
}

// reconcileProvider brings one provider's virtual node in line with its grants.
func (r *Reconciler) reconcileProvider(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	l := r.link(request.Name)
	s, err := r.gather(ctx, request.Name, r.client)
	if err != nil {
		return reconcile.Result{}, err
	}
	rescue, err := r.tend(ctx, l, s)
	if err != nil {
		return reconcile.Result{}, err
	}
	var result reconcile.Result
	if len(s.grants) == 0 {
		result, err = r.idle(ctx, l, s)
	} else {
		result, err = r.serve(ctx, l, s)
	}
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: soonest}, nil
	}
	return sooner(result, rescue), err
}

// sooner is the earlier of two pauses, 0 meaning none.
func sooner(result reconcile.Result, pause time.Duration) reconcile.Result {
	if pause > 0 && (result.RequeueAfter == 0 || pause < result.RequeueAfter) {
		result.RequeueAfter = pause
	}
	return result
}

// serve has the virtual node carry the grants and says how far that is.
func (r *Reconciler) serve(ctx context.Context, l *link, s *scene) (reconcile.Result, error) {
	now := r.Clock.Now()
	l.lastGrant = now
	peer := peering.Peer{ClusterID: s.provider}
	for _, g := range s.grants {
		peer.PeerKey = cmp.Or(g.Instruction.Spec.PeerKey, peer.PeerKey)
		peer.Endpoint = cmp.Or(g.Instruction.Spec.Endpoint, peer.Endpoint)
	}
	l.peer = peer

	peered, node, err := r.drive(ctx, l, s)
	done := err == nil && peered.Done && node.Done
	var news bool
	switch {
	case done:
		news = r.setCarried(l, s.grants, Grant.Places)
		l.waiting, l.told, l.pause = time.Time{}, false, 0
	case s.node == nil:
		// There is no node that a pod could be on its way to.
		news = r.setCarried(l, s.grants, func(Grant) int32 { return 0 })
	}
	if !done && l.waiting.IsZero() {
		l.waiting = now
	}
	overdue := !done && now.Sub(l.waiting) >= r.Deadline

	result := reconcile.Result{RequeueAfter: lookAgain}
	if !done {
		l.pause = min(max(2*l.pause, soonest), latest)
		result.RequeueAfter = l.pause
	}
	var fresh *scene
	for _, g := range s.grants {
		released := false
		if g.Ending() && len(g.Bound) == 0 && !meta.IsStatusConditionTrue(g.Instruction.Status.Conditions, broker.ConditionRequesterReleased) {
			if r.settled(s.provider, g.Instruction.UID, 0) || overdue {
				if fresh == nil {
					var liveErr error
					if fresh, liveErr = r.gather(ctx, s.provider, r.live); liveErr != nil {
						return result, errors.Join(err, liveErr)
					}
				}
				released = !fresh.uses(g.Instruction.UID)
			} else {
				result = sooner(result, r.Settle)
			}
		}
		status := report(g, s, outcome{peered: peered, node: node, err: err, released: released, overdue: overdue, since: l.waiting, now: now})
		if writeErr := r.writeInstruction(ctx, g.Instruction, status); writeErr != nil {
			return result, errors.Join(err, writeErr)
		}
		if news && !g.Ending() {
			wake(r.requests, client.ObjectKeyFromObject(g.Reservation))
		}
	}
	if overdue && peered.Done && node.Reason == peering.ReasonGrantPending && len(s.active()) == 0 {
		// The link stands on this side only: the provider has ended it while it was
		// idle, or has forgotten it. Nothing depends on it, so it is made anew.
		l.tearing = true
	}
	if overdue && !l.told {
		l.told = true
		r.tellOverdue(s, peered, node, now.Sub(l.waiting))
	}
	if err != nil {
		log.FromContext(ctx).Error(err, "Setting up a virtual node", "provider", s.provider, "retryIn", result.RequeueAfter)
	}
	return result, nil
}

// uses reports whether a pod uses an instruction's grant.
func (s *scene) uses(instruction types.UID) bool {
	return slices.ContainsFunc(s.grants, func(g Grant) bool { return g.Instruction.UID == instruction && len(g.Bound) > 0 })
}

// drive takes the driver's next step.
func (r *Reconciler) drive(ctx context.Context, l *link, s *scene) (peered, node peering.Progress, err error) {
	waiting := peering.Waiting("WaitingForPeering", "waiting for the link to "+s.provider)
	if l.tearing {
		// What has begun to go must be gone before it can be made anew.
		gone, err := r.driver.Teardown(ctx, l.peer)
		if err != nil {
			return waiting, waiting, fmt.Errorf("removing the former link to %s: %w", s.provider, err)
		}
		if !gone.Done {
			message := "waiting until the former link is gone: " + gone.Message
			return peering.Waiting("TearingDown", message), peering.Waiting("TearingDown", message), nil
		}
		l.tearing = false
	}
	if s.node == nil && len(s.active()) == 0 && !slices.ContainsFunc(s.grants, func(g Grant) bool { return !g.Ending() }) {
		// Nothing but to let go of what never got as far as a node.
		none := peering.Waiting("Releasing", "the reservation is being released")
		return none, none, nil
	}
	peered, err = r.driver.EnsurePeering(ctx, l.peer)
	if err != nil {
		return waiting, waiting, fmt.Errorf("linking to %s: %w", s.provider, err)
	}
	if !peered.Done {
		return peered, waiting, nil
	}
	node, err = r.driver.EnsureCapacity(ctx, l.peer, NodePlan(s.grants, s.strangers, s.finished, s.daemons))
	if err != nil {
		return peered, peering.Waiting("WaitingForNode", "waiting for the virtual node"), fmt.Errorf("sizing the virtual node of %s: %w", s.provider, err)
	}
	return peered, node, nil
}

// outcome is how far a provider's link and node are.
type outcome struct {
	peered, node      peering.Progress
	err               error
	released, overdue bool
	since, now        time.Time
}

// report computes the status of one instruction.
func report(g Grant, s *scene, o outcome) broker.ReservationInstructionStatus {
	in := g.Instruction
	status := *in.Status.DeepCopy()
	status.Delivered, status.ObservedAttempt, status.ObservedGeneration = true, in.Spec.Attempt, in.Generation
	set := func(kind string, ok bool, reason, message string) {
		c := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: message, ObservedGeneration: in.Generation}
		if ok {
			c.Status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&status.Conditions, c)
	}
	late := func(p peering.Progress) string {
		message := p.Message
		if o.err != nil {
			message = o.err.Error()
		}
		if o.overdue && !p.Done {
			message = fmt.Sprintf("not ready after %s, still trying: %s", o.now.Sub(o.since).Round(time.Second), message)
		}
		return message
	}
	if g.Ending() {
		switch {
		case meta.IsStatusConditionTrue(status.Conditions, broker.ConditionRequesterReleased):
		case o.released:
			set(broker.ConditionRequesterReleased, true, "Released", "no pod of this cluster uses it any more")
		case len(g.Bound) > 0:
			set(broker.ConditionRequesterReleased, false, "PodsStillRun", fmt.Sprintf("%d pods still run in %s: %s", len(g.Bound), s.provider, names(g.Bound)))
		default:
			set(broker.ConditionRequesterReleased, false, "Shrinking", "waiting for the virtual node to give up the capacity: "+late(o.node))
		}
		set(broker.ConditionVirtualNodeReady, false, "Releasing", "the reservation is being released")
		set(broker.ConditionReady, false, "Releasing", "the reservation is being released")
		status.Carried = nil
		return status
	}
	set(broker.ConditionPeered, o.peered.Done, reasonOf(o.peered), late(o.peered))
	was := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionVirtualNodeReady)
	switch {
	case o.err == nil && o.peered.Done && o.node.Done:
		message := fmt.Sprintf("node %s carries %s", broker.VirtualNodeName(s.provider), in.Spec.RequestedResources)
		set(broker.ConditionVirtualNodeReady, true, reasonOf(o.node), message)
		set(broker.ConditionReady, true, "Ready", message)
		status.Carried = &broker.HeldCapacity{Totals: in.Spec.RequestedResources, PodSets: in.Spec.PodSets}
	case was != nil && was.Status == metav1.ConditionTrue && in.Status.ObservedAttempt == in.Spec.Attempt && s.node != nil && nodeReady(s.node):
		// The node is being resized for another grant: this one's part stays.
	default:
		set(broker.ConditionVirtualNodeReady, false, reasonOf(o.node), late(o.node))
		set(broker.ConditionReady, false, reasonOf(o.node), late(firstWaiting(o.peered, o.node)))
		forgotten := o.overdue && o.node.Reason == peering.ReasonGrantPending
		if s.node == nil || !nodeReady(s.node) || forgotten {
			status.Carried = nil
		}
	}
	return status
}

func firstWaiting(a, b peering.Progress) peering.Progress {
	if !a.Done {
		return a
	}
	return b
}

func reasonOf(p peering.Progress) string {
	if p.Done {
		return cmp.Or(p.Reason, "Done")
	}
	return cmp.Or(p.Reason, "Waiting")
}

// names lists a few pods.
func names(pods []*corev1.Pod) string {
	const most = 5
	var out []string
	for _, pod := range pods[:min(len(pods), most)] {
		out = append(out, pod.Namespace+"/"+pod.Name)
	}
	if len(pods) > most {
		out = append(out, "…")
	}
	return strings.Join(out, ", ")
}

func (r *Reconciler) writeInstruction(ctx context.Context, in *broker.ReservationInstruction, status broker.ReservationInstructionStatus) error {
	if equality.Semantic.DeepEqual(in.Status, status) {
		return nil
	}
	changed := in.DeepCopy()
	changed.Status = status
	if err := r.client.Status().Patch(ctx, changed, client.MergeFromWithOptions(in, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("writing the status of reservation instruction %s: %w", in.Name, err)
	}
	return nil
}

// tellOverdue says on each Reservation that its virtual node is late.
func (r *Reconciler) tellOverdue(s *scene, peered, node peering.Progress, waited time.Duration) {
	for _, g := range s.grants {
		if g.Ending() {
			continue
		}
		r.recorder.Eventf(g.Reservation, nil, corev1.EventTypeWarning, "VirtualNodeDelayed", "Peer",
			"the virtual node for %s is not ready after %s, still trying: %s", s.provider, waited.Round(time.Second), firstWaiting(peered, node).Message)
	}
}

// idle parks the virtual node of a provider that no grant is for, and ends the
// link once it has been idle for long.
func (r *Reconciler) idle(ctx context.Context, l *link, s *scene) (reconcile.Result, error) {
	logger := log.FromContext(ctx).WithValues("provider", s.provider)
	r.setCarried(l, nil, nil)
	links, err := r.driver.Observe(ctx)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("looking for a link to %s: %w", s.provider, err)
	}
	i := slices.IndexFunc(links, func(o peering.Observed) bool { return o.ClusterID == s.provider })
	if i < 0 && !l.tearing {
		r.forgetLink(s.provider)
		return reconcile.Result{}, nil
	}
	now := r.Clock.Now()
	if !l.tearing {
		wait := l.lastGrant.Add(r.PeeringIdleTime).Sub(now)
		for _, pod := range s.finished {
			wait = max(wait, finishedAt(pod).Add(r.FinishedPodRetention).Sub(now))
		}
		if len(s.strangers) > 0 {
			wait = max(wait, lookAgain)
		}
		if wait > 0 {
			result := reconcile.Result{RequeueAfter: min(wait, lookAgain)}
			if links[i].Node == nil && s.node == nil {
				return result, nil
			}
			parked, err := r.driver.EnsureCapacity(ctx, l.peer, NodePlan(nil, s.strangers, s.finished, s.daemons))
			if err != nil {
				return reconcile.Result{}, fmt.Errorf("parking the virtual node of %s: %w", s.provider, err)
			}
			if !parked.Done {
				result.RequeueAfter = min(result.RequeueAfter, latest)
			}
			return result, nil
		}
		// A grant or a pod may be there that the cache does not show yet.
		fresh, err := r.gather(ctx, s.provider, r.live)
		if err != nil {
			return reconcile.Result{}, err
		}
		if len(fresh.grants) > 0 || len(fresh.strangers) > 0 {
			return reconcile.Result{RequeueAfter: soonest}, nil
		}
		logger.Info("Ending an idle link", "idleFor", now.Sub(l.lastGrant).Round(time.Second).String())
		l.tearing = true
	}
	gone, err := r.driver.Teardown(ctx, l.peer)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("removing the link to %s: %w", s.provider, err)
	}
	if !gone.Done {
		l.pause = min(max(2*l.pause, soonest), latest)
		logger.V(1).Info("Removing a link", "waitingFor", gone.Message)
		return reconcile.Result{RequeueAfter: l.pause}, nil
	}
	logger.Info("Link ended")
	r.forgetLink(s.provider)
	return reconcile.Result{}, nil
}

// finishedAt is about when a pod ended: the last change of its conditions.
func finishedAt(pod *corev1.Pod) time.Time {
	at := pod.CreationTimestamp.Time
	for _, c := range pod.Status.Conditions {
		if c.LastTransitionTime.After(at) {
			at = c.LastTransitionTime.Time
		}
	}
	return at
}

// tend looks after the pods on a virtual node: they are the first to go when
// their owner shrinks, and those that the provider refused are given back to the
// scheduler. It returns when to look again.
func (r *Reconciler) tend(ctx context.Context, l *link, s *scene) (again time.Duration, err error) {
	still := map[types.UID]bool{}
	soon := func(pause time.Duration) {
		if pause > 0 && (again == 0 || pause < again) {
			again = pause
		}
	}
	// By this cluster's clock: what pods say of their start is the provider's.
	var started int
	for _, pod := range s.active() {
		if pod.Status.StartTime != nil {
			started++
		}
	}
	if l.started != nil && started > *l.started {
		l.lately = r.Clock.Now()
	}
	l.started = &started
	for _, pod := range s.active() {
		if pod.DeletionTimestamp != nil {
			if pause, lost := r.lostIn(s, pod); lost {
				if err := r.giveUp(ctx, pod, s.provider); err != nil {
					return 0, err
				}
			} else {
				soon(pause)
			}
			continue
		}
		since, why := refused(pod)
		if why == "" {
			continue
		}
		if pod.Status.Reason != reasonOffloadingBackOff {
			since = inTurn(since, l.lately, r.RescueAfter)
		}
		if left := since.Add(r.RescueAfter).Sub(r.Clock.Now()); left > 0 {
			soon(left)
			continue
		}
		still[pod.UID] = true
		retry, err := r.rescue(ctx, pod, s.provider, why, l.stuck[pod.UID])
		if err != nil {
			return 0, err
		}
		soon(retry)
	}
	l.stuck = still
	return again, nil
}

// inTurn is since when a pod on a virtual node waits in vain: not while the
// provider starts others, lately the last of them, unless that takes for ever.
func inTurn(since, lately time.Time, rescueAfter time.Duration) time.Time {
	most := since.Add((turnsMost - 1) * rescueAfter)
	switch {
	case lately.Before(since):
		return since
	case lately.Before(most):
		return lately
	default:
		return most
	}
}

// lostIn tells whether a pod that is to end waits for a provider that has been
// out of reach for so long that nobody will confirm its end; if not yet, pause
// is when to look again, 0 where nothing points to it.
//
// A pod of a StatefulSet stays: its successor bears the same name, and the
// provider may only be cut off and run it still.
func (r *Reconciler) lostIn(s *scene, pod *corev1.Pod) (pause time.Duration, lost bool) {
	if owner := metav1.GetControllerOfNoCopy(pod); s.node == nil || owner == nil || owner.Kind == "StatefulSet" {
		return 0, false
	}
	i := slices.IndexFunc(s.node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	if i < 0 || s.node.Status.Conditions[i].Status == corev1.ConditionTrue {
		return 0, false
	}
	now, since := r.Clock.Now(), s.node.Status.Conditions[i].LastTransitionTime.Time
	// The timestamp is that of the end of the grace period.
	grace := time.Duration(ptr.Deref(pod.DeletionGracePeriodSeconds, 0)) * time.Second
	if asked := pod.DeletionTimestamp.Add(-grace); asked.After(since) {
		since = asked
	}
	left := since.Add(r.ProviderLostAfter).Sub(now)
	return left, left <= 0
}

// giveUp removes a pod without waiting for a provider that is lost.
func (r *Reconciler) giveUp(ctx context.Context, pod *corev1.Pod, provider string) error {
	err := r.client.Delete(ctx, pod, client.Preconditions{UID: &pod.UID}, client.GracePeriodSeconds(0))
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("removing pod %s/%s, whose provider %s is lost: %w", pod.Namespace, pod.Name, provider, err)
	}
	r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, "LostWithProvider", "GiveUp",
		"removed without waiting for %s to confirm: it has been out of reach for more than %s", provider, r.ProviderLostAfter)
	log.FromContext(ctx).Info("Gave up a pod whose provider is lost", "pod", client.ObjectKeyFromObject(pod), "provider", provider)
	return nil
}

// refused tells whether and since when a bound pod waits for a provider that
// does not take it: Liqo has said so, or its status shows that nobody has begun
// with it.
func refused(pod *corev1.Pod) (since time.Time, why string) {
	if pod.Status.Phase != corev1.PodPending {
		return time.Time{}, ""
	}
	since = pod.CreationTimestamp.Time
	untouched := pod.Status.StartTime == nil
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			since = c.LastTransitionTime.Time
		} else {
			untouched = false
		}
	}
	switch {
	case pod.Status.Reason == reasonOffloadingBackOff:
		return since, "the virtual kubelet does not take it (" + reasonOffloadingBackOff + ")"
	case untouched:
		return since, "the provider has not started it"
	}
	return time.Time{}, ""
}

// rescue evicts a refused pod if something will replace it.
func (r *Reconciler) rescue(ctx context.Context, pod *corev1.Pod, provider, why string, told bool) (retry time.Duration, err error) {
	if metav1.GetControllerOfNoCopy(pod) == nil {
		if !told {
			r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, "StuckInOverflow", "Rescue",
				"waits on the virtual node for %s: %s; nothing would replace the pod, so delete it and create it anew", provider, why)
		}
		return lookAgain, nil
	}
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	}
	err = r.client.SubResource("eviction").Create(ctx, pod, eviction)
	switch {
	case apierrors.IsTooManyRequests(err):
		// A disruption budget is in the way; it is asked again.
		if !told {
			r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, "StuckInOverflow", "Rescue",
				"waits on the virtual node for %s: %s; a PodDisruptionBudget keeps it from being evicted", provider, why)
		}
		return 2 * latest, nil
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("evicting pod %s/%s from the virtual node of %s: %w", pod.Namespace, pod.Name, provider, err)
	}
	r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, "RescuedFromOverflow", "Rescue",
		"evicted from the virtual node for %s, where it waited in vain: %s", provider, why)
	log.FromContext(ctx).Info("Evicted a pod that a provider refused", "pod", client.ObjectKeyFromObject(pod), "provider", provider, "reason", why)
	return 0, nil
}
