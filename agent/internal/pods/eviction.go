package pods

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// maxStartTimeouts is how many times Options.StartTimeout a pod may wait on a
	// virtual node while the provider starts others.
	maxStartTimeouts = 5
	// budgetRetry is the delay after a PodDisruptionBudget has blocked an eviction.
	budgetRetry = 10 * time.Second
	// missingRetry is the delay after a ConfigMap or Secret that a pod refers to was not
	// found.
	missingRetry = 10 * time.Second
	// carryInterval is how often what a pod refers to is looked at again.
	carryInterval = time.Minute
)

// blockedByBudget is what happens next to a pod that cannot be evicted yet.
const blockedByBudget = "A PodDisruptionBudget blocks its eviction, which is retried."

// providerState is what is remembered of the pods on one virtual node. Only the
// worker that reconciles the provider uses it.
type providerState struct {
	// started is the number of started pods at the last reconcile, -1 before the
	// first; lastStart is when it rose last, by this cluster's clock.
	started   int
	lastStart time.Time
	// reported are the pods of which an event says that they are not started, stuck those
	// of which one says why they have not left in time.
	reported, stuck sets.Set[types.UID]
	// carried is when the driver has last done what the guest of a pod needs.
	carried map[types.UID]time.Time
	// daemons are the backoffs of DaemonSets whose pods waited for the node.
	daemons map[types.UID]daemonBackoff
}

// state returns what is remembered of a provider, and removes it once the provider
// has neither node nor pods.
func (r *Reconciler) state(provider string, gone bool) *providerState {
	r.mu.Lock()
	defer r.mu.Unlock()
	state := r.providers[provider]
	if state == nil {
		state = &providerState{
			started: -1, reported: sets.New[types.UID](), stuck: sets.New[types.UID](),
			carried: map[types.UID]time.Time{}, daemons: map[types.UID]daemonBackoff{},
		}
		r.providers[provider] = state
	}
	if gone {
		delete(r.providers, provider)
	}
	return state
}

// observe records how many of the pods have started, and drops reports of others.
func (s *providerState) observe(pods []*corev1.Pod, now time.Time) {
	started, present := 0, sets.New[types.UID]()
	for _, pod := range pods {
		present.Insert(pod.UID)
		if pod.Status.StartTime != nil {
			started++
		}
	}
	if s.started >= 0 && started > s.started {
		s.lastStart = now
	}
	s.started, s.reported, s.stuck = started, s.reported.Intersection(present), s.stuck.Intersection(present)
	maps.DeleteFunc(s.carried, func(uid types.UID, _ time.Time) bool { return !present.Has(uid) })
}

// reconcileProvider evicts pods that the provider does not start or whose capacity it has
// withdrawn, force-deletes those whose termination an unreachable provider cannot confirm, and
// deletes those of DaemonSets that wait for the virtual node.
func (r *Reconciler) reconcileProvider(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	provider := request.Name
	node, err := session.Node(ctx, r.client, provider)
	if err != nil || node != nil && !virtualnode.IsVirtual(node, provider) {
		return reconcile.Result{}, err
	}
	if err := r.nodes.Pods.WaitSynced(ctx); err != nil {
		return reconcile.Result{}, err
	}
	pods := r.nodes.Pods.PodsOn(broker.VirtualNodeName(provider))
	state := r.state(provider, node == nil && len(pods) == 0)
	state.observe(pods, r.nodes.Clock.Now())
	daemons := r.nodes.Pods.WaitingDaemons(broker.VirtualNodeName(provider))
	if len(pods)+len(daemons) == 0 {
		return reconcile.Result{}, nil
	}
	requeueAfter, err := r.moveLeaving(ctx, provider, state)
	errs := []error{err}
	if node != nil {
		after, err := r.deleteDaemons(ctx, daemons, provider, state)
		errs, requeueAfter = append(errs, err), min(requeueAfter, after)
	}
	for _, pod := range pods {
		var after time.Duration
		if pod.DeletionTimestamp != nil {
			after, err = r.forceDeleteLost(ctx, node, pod, provider)
		} else {
			var carry time.Duration
			carry, err = r.carry(ctx, pod, state)
			errs, requeueAfter = append(errs, err), min(requeueAfter, carry)
			after, err = r.evictNotStarted(ctx, pod, provider, state)
		}
		errs, requeueAfter = append(errs, err), min(requeueAfter, after)
	}
	if err := errors.Join(errs...); err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: requeueAfter}, nil
}

// startDeadline is when a pod that has not been started is to be evicted, and the
// cause for the event; ok is false for a pod that is not to be. refusal is the
// reason why the virtual node rejects the pod, if it does. Otherwise the timeout
// begins again with each start of another pod, up to maxStartTimeouts in all.
func startDeadline(pod *corev1.Pod, refusal string, lastStart time.Time, timeout time.Duration) (deadline time.Time, cause string, ok bool) {
	if pod.Status.Phase != corev1.PodPending {
		return time.Time{}, "", false
	}
	since := pod.CreationTimestamp.Time
	untouched := pod.Status.StartTime == nil
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			since = c.LastTransitionTime.Time
		} else if c.Type != broker.PodMustLeave {
			untouched = false
		}
	}
	switch {
	case refusal != "":
		return since.Add(timeout), "the virtual node rejects it (" + refusal + ")", true
	case !untouched:
		return time.Time{}, "", false
	}
	deadline = since.Add(timeout)
	if lastStart.After(since) {
		deadline = lastStart.Add(timeout)
	}
	if last := since.Add(maxStartTimeouts * timeout); deadline.After(last) {
		deadline = last
	}
	return deadline, "the provider has not started it", true
}

// carry makes the driver do what a pod's guest needs, and returns when to requeue the pod.
// It is repeated while the pod runs: what the pod refers to may be created again.
func (r *Reconciler) carry(ctx context.Context, pod *corev1.Pod, state *providerState) (requeueAfter time.Duration, err error) {
	now := r.nodes.Clock.Now()
	if last, carried := state.carried[pod.UID]; carried && now.Sub(last) < carryInterval {
		return virtualnode.ResyncPeriod, nil
	}
	progress, err := r.driver.Carry(ctx, pod)
	if err != nil {
		return 0, fmt.Errorf("preparing the guest of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	if !progress.Done && pod.Status.Phase == corev1.PodPending {
		if progress.Reason == peering.ReasonSourceMissing {
			return missingRetry, nil
		}
		log.FromContext(ctx).V(1).Info("A pod's guest has to wait", "pod", client.ObjectKeyFromObject(pod), "cause", progress.Message)
		return retryDelay, nil
	}
	state.carried[pod.UID] = now
	return virtualnode.ResyncPeriod, nil
}

// evictNotStarted evicts a pod that the provider has not started in time, and
// returns when to requeue it.
func (r *Reconciler) evictNotStarted(ctx context.Context, pod *corev1.Pod, provider string, state *providerState) (requeueAfter time.Duration, err error) {
	deadline, cause, ok := startDeadline(pod, r.driver.RefusedReason(pod), state.lastStart, r.StartTimeout)
	if !ok {
		state.reported.Delete(pod.UID)
		return virtualnode.ResyncPeriod, nil
	}
	if left := deadline.Sub(r.nodes.Clock.Now()); left > 0 {
		return left, nil
	}
	_, requeueAfter, err = r.evictOrReport(ctx, pod, provider, cause, state.reported, "PodNotStarted", "Pod is waiting on the virtual node")
	return requeueAfter, err
}

// evictOrReport evicts a pod. If it must not, an event with a reason and what is wrong says
// what to do, once as long as the pod is in reported. It returns when to requeue the pod.
func (r *Reconciler) evictOrReport(ctx context.Context, pod *corev1.Pod, provider, cause string, reported sets.Set[types.UID], reason, wrong string) (evicted bool, requeueAfter time.Duration, err error) {
	report := func(next string) {
		if !reported.Has(pod.UID) {
			reported.Insert(pod.UID)
			r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, reason, "Evict", "%s for provider %s: %s. %s", wrong, provider, cause, next)
		}
	}
	if metav1.GetControllerOfNoCopy(pod) == nil {
		report("No controller would replace it: delete the pod and create it again.")
		return false, virtualnode.ResyncPeriod, nil
	}
	blocked, err := r.evict(ctx, pod, provider, cause)
	if blocked {
		report(blockedByBudget)
		return false, budgetRetry, nil
	}
	return err == nil, virtualnode.ResyncPeriod, err
}

// evict evicts a pod, unless it is gone; blocked reports whether a PodDisruptionBudget does
// not allow it.
func (r *Reconciler) evict(ctx context.Context, pod *corev1.Pod, provider, cause string) (blocked bool, err error) {
	// The chart's policy for the agent's evictions goes by the label.
	labels := map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, Labels: labels},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	}
	err = r.client.SubResource("eviction").Create(ctx, named(pod), eviction)
	switch {
	case apierrors.IsTooManyRequests(err):
		return true, nil
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("evicting pod %s/%s from the virtual node of %s: %w", pod.Namespace, pod.Name, provider, err)
	}
	r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, "EvictedFromVirtualNode", "Evict",
		"Evicted from the virtual node for provider %s: %s. The scheduler places its replacement.", provider, cause)
	log.FromContext(ctx).Info("Evicted a pod from a virtual node", "pod", client.ObjectKeyFromObject(pod), "provider", provider, "cause", cause)
	return false, nil
}

// forceDeleteAt is when a deleted pod is to be removed without confirmation, since
// its provider has been unreachable for lostAfter; ok is false if it is not to be.
//
// Pods of StatefulSets stay: the provider may only be cut off and still run them,
// and their successors have the same names. So do pods without a controller.
func forceDeleteAt(node *corev1.Node, pod *corev1.Pod, lostAfter time.Duration) (at time.Time, ok bool) {
	if owner := metav1.GetControllerOfNoCopy(pod); owner == nil || owner.Kind == "StatefulSet" {
		return time.Time{}, false
	}
	ready := virtualnode.ReadyCondition(node)
	if ready == nil || ready.Status == corev1.ConditionTrue {
		return time.Time{}, false
	}
	// The deletion timestamp is the end of the grace period.
	grace := time.Duration(ptr.Deref(pod.DeletionGracePeriodSeconds, 0)) * time.Second
	since := pod.DeletionTimestamp.Add(-grace)
	if unreachable := ready.LastTransitionTime.Time; unreachable.After(since) {
		since = unreachable
	}
	return since.Add(lostAfter), true
}

// forceDeleteLost force-deletes a pod whose provider is lost, and returns when to
// requeue it.
func (r *Reconciler) forceDeleteLost(ctx context.Context, node *corev1.Node, pod *corev1.Pod, provider string) (requeueAfter time.Duration, err error) {
	at, ok := forceDeleteAt(node, pod, r.ProviderLostAfter)
	if !ok {
		return virtualnode.ResyncPeriod, nil
	}
	if left := at.Sub(r.nodes.Clock.Now()); left > 0 {
		return left, nil
	}
	err = r.client.Delete(ctx, named(pod), client.Preconditions{UID: &pod.UID}, client.GracePeriodSeconds(0))
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return virtualnode.ResyncPeriod, nil
	}
	if err != nil {
		return 0, fmt.Errorf("force-deleting pod %s/%s of unreachable provider %s: %w", pod.Namespace, pod.Name, provider, err)
	}
	r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, "ForceDeleted", "Delete",
		"Force-deleted the pod because provider %s has been unreachable for more than %s. The guest may still be running there.", provider, r.ProviderLostAfter)
	log.FromContext(ctx).Info("Force-deleted a pod of an unreachable provider", "pod", client.ObjectKeyFromObject(pod), "provider", provider)
	return virtualnode.ResyncPeriod, nil
}

// named is a pod for a call that a client may write to: the cache shares the pod itself.
func named(pod *corev1.Pod) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}}
}
