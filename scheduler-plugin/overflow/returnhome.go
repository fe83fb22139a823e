package overflow

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
	"github.com/spillway-dev/spillway/scheduler-plugin/returnhome"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

const (
	// returnAction is the action of the events of moves.
	returnAction = "ReturningHome"
	// movePeriod is how often the replacement of a pod that moves is looked at, and how
	// soon a move is planned again that new pods have delayed.
	movePeriod = time.Second
	// maxUntried is the age up to which a pod that no scheduler has tried delays moves.
	maxUntried = 30 * time.Second
	// evictTimeout limits the request for an eviction.
	evictTimeout = 30 * time.Second
	// unansweredFor is how long an eviction without an answer may still take effect: longer
	// than an API server works on a request.
	unansweredFor = 90 * time.Second
)

// returner moves overflowed pods back to this cluster where an OverflowPolicy says so.
// Package returnhome decides; the returner observes, evicts, and watches for the
// replacement, in a goroutine of its own. Without such a policy it does nothing.
type returner struct {
	log          klog.Logger
	clock        clock.Clock
	client       kubernetes.Interface
	recorder     events.EventRecorder
	planner      *returnhome.Planner
	watched      *watchedPods
	placements   *usage.Placements
	keys         *owners.KeyCache
	pools        *usage.PoolCache
	reservations *request.Reservations
	policies     request.PolicyCache
	nodes        corelisters.NodeLister
	namespaces   corelisters.NamespaceLister
	pods         corelisters.PodLister
	// ready reports whether this replica leads and its caches are complete.
	ready func() bool
	// moved is the pod that was evicted last, and before has the pods of its owner that
	// were there before.
	moved  *corev1.Pod
	before map[types.UID]bool
	// unansweredSince is when the eviction of the pod that moves was requested, while it is
	// not known whether it took place; otherwise zero.
	unansweredSince time.Time
	// reported are the pods of which an event says that their eviction is refused.
	reported map[types.UID]bool
	// nextPlan is when to observe again, while a pod moves.
	nextPlan time.Time
}

// run moves pods until ctx ends.
func (r *returner) run(ctx context.Context) {
	for {
		timer := r.clock.NewTimer(r.step(ctx))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

// step observes, and begins or ends a move. It returns when to call it again.
func (r *returner) step(ctx context.Context) time.Duration {
	if !r.ready() {
		return returnhome.Period(nil)
	}
	r.settle(ctx)
	now, moving := r.clock.Now(), r.planner.Moving() != nil
	if moving && now.Before(r.nextPlan) {
		return movePeriod
	}
	terms := r.terms()
	if len(terms.Decoded) == 0 && !moving {
		return returnhome.Period(nil)
	}
	candidates, pods := r.candidates(terms)
	period := returnhome.Period(candidates)
	next := r.planner.Plan(now, candidates)
	r.nextPlan = now.Add(period)
	if next == nil && !moving {
		return period
	}
	// Pods that no scheduler has tried yet may take the room.
	if next != nil && !r.watched.hasUntried(now.Add(-maxUntried)) {
		r.evict(ctx, *next, pods[next.Pod])
	}
	return min(movePeriod, period)
}

// terms returns the policies if one of them lets pods move, else none.
func (r *returner) terms() request.Policies {
	all := r.policies.List()
	if !slices.ContainsFunc(all.Decoded, func(p *broker.OverflowPolicy) bool { return p.Spec.ReturnHome != nil }) {
		return request.Policies{}
	}
	return all
}

// candidates returns the pods that may move, and the objects by UID.
func (r *returner) candidates(policies request.Policies) ([]returnhome.Candidate, map[types.UID]*corev1.Pod) {
	var all []returnhome.Candidate
	guests := r.watched.guestsNow()
	pods := make(map[types.UID]*corev1.Pod, len(guests))
	byNamespace := map[string]*broker.ReturnHome{}
	room := r.newRoomFinder()
	for _, pod := range guests {
		terms, known := byNamespace[pod.Namespace]
		if !known {
			terms = r.termsOf(pod.Namespace, policies)
			byNamespace[pod.Namespace] = terms
		}
		if terms == nil {
			continue
		}
		if c, ok := r.candidate(pod, terms, room); ok {
			all, pods[pod.UID] = append(all, c), pod
		}
	}
	maps.DeleteFunc(r.reported, func(uid types.UID, _ bool) bool { return pods[uid] == nil })
	return all, pods
}

// termsOf returns the terms of a namespace; nil if its pods do not move.
func (r *returner) termsOf(name string, policies request.Policies) *broker.ReturnHome {
	namespace, err := r.namespaces.Get(name)
	if err != nil {
		return nil
	}
	policy, err := policies.Of(namespace)
	if err != nil || policy == nil {
		return nil
	}
	terms := policy.Spec.ReturnHome
	if terms == nil || terms.After == nil || terms.MinimumStay == nil {
		return nil // the API server defaults both
	}
	return terms
}

// candidate returns a pod as the planner sees it; ok is false if it may not move.
func (r *returner) candidate(pod *corev1.Pod, terms *broker.ReturnHome, room *roomFinder) (c returnhome.Candidate, ok bool) {
	node, err := r.nodes.Get(pod.Spec.NodeName)
	if err != nil || usage.ProviderOf(node) == "" || !mayReturn(pod) || r.pools.Has(pod.Labels[broker.LabelHold]) {
		return c, false
	}
	key, resolved := r.keys.Get(pod)
	_, scheduled := podutil.GetPodCondition(&pod.Status, corev1.PodScheduled)
	if !resolved || key.Key.IsGang() || scheduled == nil {
		return c, false
	}
	return returnhome.Candidate{
		Pod: pod.UID, Namespace: pod.Namespace, Name: pod.Name, Owner: replacerOf(pod, key.Key),
		Since: scheduled.LastTransitionTime.Time, Price: r.price(key.Key, usage.ProviderOf(node)),
		Room:        room.has(pod, key.Key),
		Termination: time.Duration(ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, 0)) * time.Second,
		After:       terms.After.Duration, MinimumStay: terms.MinimumStay.Duration,
	}, true
}

// mayReturn reports whether a pod runs and its owner tolerates that it moves: it has a
// controller that replaces it.
func mayReturn(pod *corev1.Pod) bool {
	controller := metav1.GetControllerOfNoCopy(pod)
	if pod.Status.Phase != corev1.PodRunning || controller == nil {
		return false
	}
	switch pod.Annotations[broker.AnnotationReturnHome] {
	case broker.ReturnHomeEnabled:
		return true
	case "":
		return strings.HasPrefix(controller.APIVersion, "apps/") && (controller.Kind == "ReplicaSet" || controller.Kind == "StatefulSet")
	}
	return false
}

// replacerOf is the UID that a pod and its replacement have in common: that of the root
// owner, or of the controller where pods of several share a key.
func replacerOf(pod *corev1.Pod, key demand.Key) types.UID {
	if key.OwnerUID != demand.SharedOwner {
		return key.OwnerUID
	}
	return metav1.GetControllerOfNoCopy(pod).UID
}

// price returns what the capacity of one pod costs per hour at a provider; 0 if unknown.
func (r *returner) price(key demand.Key, provider string) float64 {
	all, err := r.reservations.ByKey(key)
	if err != nil {
		return 0
	}
	for _, reservation := range all {
		for _, a := range reservation.Status.Allocations {
			amount, _, _ := strings.Cut(a.PricePerHour, " ")
			total, err := strconv.ParseFloat(amount, 64)
			if pods := a.Usable(); a.Cluster == provider && err == nil && pods > 0 {
				return total / float64(pods)
			}
		}
	}
	return 0
}

// evict begins the move of a pod. An eviction without an answer may have taken place: the
// pod counts as moving until it is observed that it was not evicted.
func (r *returner) evict(ctx context.Context, c returnhome.Candidate, pod *corev1.Pod) {
	before := r.podsOf(c.Namespace, c.Owner)
	requestCtx, cancel := context.WithTimeout(ctx, evictTimeout)
	defer cancel()
	request.Writes.WithLabelValues(request.WriteEviction).Inc()
	// Without the client's own retries: they would outlast the time of the request, and
	// make a refusal one without an answer.
	err := r.client.CoreV1().RESTClient().Post().AbsPath("/api/v1").Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("eviction").
		Body(&policyv1.Eviction{
			// The chart's policy for evictions by Spillway goes by the label.
			ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
		}).MaxRetries(0).Do(requestCtx).Error()
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		// It has ended, which its next event shows: until then others get their turn.
		r.planner.Refused(r.clock.Now(), c)
	case refusesRequest(err):
		r.blocked(pod, r.planner.Refused(r.clock.Now(), c), err.Error())
	default:
		r.planner.Start(r.clock.Now(), c)
		r.moved, r.before = pod, before
		if err != nil {
			r.unansweredSince = r.clock.Now()
			r.log.Info("The eviction of an overflowed pod got no answer; observing whether it took place", "pod", klog.KObj(pod), "reason", err.Error())
			return
		}
		r.evicted(c)
	}
}

// refusesRequest reports whether an error is the API server's answer that it did nothing.
func refusesRequest(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code >= 400 && status.Status().Code < 500
}

// evicted reports that the pod that moves was evicted.
func (r *returner) evicted(c returnhome.Candidate) {
	r.log.Info("Evicted an overflowed pod, because this cluster has had room for it", "pod", klog.KObj(r.moved), "node", r.moved.Spec.NodeName, "after", c.After)
	r.record(r.moved, corev1.EventTypeNormal, "ReturningHome", fmt.Sprintf("Evicted pod %s from %s: this cluster has had room for it for %s. The scheduler binds its replacement here.", r.moved.Name, r.moved.Spec.NodeName, c.After))
}

// blocked reports that a pod was not evicted, once for each pod.
func (r *returner) blocked(pod *corev1.Pod, retryAt time.Time, reason string) {
	returnedHome.WithLabelValues(string(returnhome.Blocked)).Inc()
	if r.reported[pod.UID] {
		return
	}
	r.reported[pod.UID] = true
	r.log.Info("The eviction of an overflowed pod was refused; retrying", "pod", klog.KObj(pod), "node", pod.Spec.NodeName, "retryAt", retryAt, "reason", reason)
	r.record(pod, corev1.EventTypeNormal, "ReturnHomeBlocked", fmt.Sprintf("This cluster has room for the pod, and its eviction was refused. It is retried: %s", reason))
}

// answered reports whether it is known that the pod that moves was evicted. If it is known
// that it was not, the move ends.
func (r *returner) answered(ctx context.Context, move *returnhome.Move) bool {
	if r.unansweredSince.IsZero() {
		return true
	}
	stays := func(pod *corev1.Pod, err error) bool {
		return err == nil && pod.UID == r.moved.UID && pod.DeletionTimestamp == nil
	}
	unknown := func(err error) bool { return err != nil && !apierrors.IsNotFound(err) }
	pod, err := r.pods.Pods(r.moved.Namespace).Get(r.moved.Name)
	if stays(pod, err) || unknown(err) {
		if r.clock.Since(r.unansweredSince) < unansweredFor {
			return false
		}
		// The cache may be old.
		ctx, cancel := context.WithTimeout(ctx, evictTimeout)
		defer cancel()
		pod, err = r.client.CoreV1().Pods(r.moved.Namespace).Get(ctx, r.moved.Name, metav1.GetOptions{})
		if unknown(err) {
			return false
		}
	}
	r.unansweredSince = time.Time{}
	if stays(pod, err) {
		r.blocked(r.moved, r.planner.NotEvicted(r.clock.Now()), "the API server did not answer")
		r.moved, r.before = nil, nil
		return false
	}
	r.evicted(move.Candidate)
	return true
}

// podsOf returns the UIDs of the pods that a replacer has.
func (r *returner) podsOf(namespace string, replacer types.UID) map[types.UID]bool {
	uids := map[types.UID]bool{}
	for _, pod := range r.listOf(namespace, replacer) {
		uids[pod.UID] = true
	}
	return uids
}

func (r *returner) listOf(namespace string, replacer types.UID) []*corev1.Pod {
	all, err := r.pods.Pods(namespace).List(labels.Everything())
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(all, func(pod *corev1.Pod) bool {
		if metav1.GetControllerOfNoCopy(pod) == nil {
			return true
		}
		key, ok := r.keys.Get(pod)
		return !ok || replacerOf(pod, key.Key) != replacer
	})
}

// settle ends the move once its replacement is settled: the first pod of the owner that
// was not there before and has a node.
func (r *returner) settle(ctx context.Context) {
	move := r.planner.Moving()
	if move == nil || !r.answered(ctx, move) {
		return
	}
	var first *corev1.Pod
	for _, pod := range r.listOf(move.Namespace, move.Owner) {
		if r.before[pod.UID] || pod.Spec.NodeName == "" || pod.DeletionTimestamp != nil {
			continue
		}
		if first == nil || pod.CreationTimestamp.Before(&first.CreationTimestamp) {
			first = pod
		}
	}
	var found *returnhome.Replacement
	if first != nil {
		found = &returnhome.Replacement{Bound: true, Abroad: r.placements.IsVirtual(first.Spec.NodeName), Ready: podutil.IsPodReady(first) || podutil.IsPodTerminal(first)}
	}
	outcome, retryAt, ended := r.planner.Settle(r.clock.Now(), found)
	if !ended {
		return
	}
	returnedHome.WithLabelValues(string(outcome)).Inc()
	r.log.Info("Settled the replacement of a pod that was evicted to return home", "pod", klog.KObj(r.moved), "outcome", outcome, "retryAt", retryAt)
	if outcome != returnhome.Returned {
		r.record(r.moved, corev1.EventTypeWarning, "ReturnHomeFailed", fmt.Sprintf("Pod %s was evicted to return to this cluster, and %s. No other pod of its owner moves before %s.",
			r.moved.Name, failures[outcome], retryAt.UTC().Format(time.RFC3339)))
	}
	r.moved, r.before = nil, nil
}

// failures of moves, as clauses.
var failures = map[returnhome.Outcome]string{
	returnhome.Overflowed: "its replacement overflowed again",
	returnhome.NotBound:   "no replacement got a node in time",
	returnhome.NotReady:   "its replacement did not become ready in time",
}

// record records an event on a pod and the Reservation that it used.
func (r *returner) record(pod *corev1.Pod, eventType, reason, message string) {
	request.Writes.WithLabelValues(request.WriteEvent).Inc()
	r.recorder.Eventf(pod, nil, eventType, reason, returnAction, "%s", message)
	key, ok := r.keys.Get(pod)
	if !ok {
		return
	}
	all, err := r.reservations.ByKey(key.Key)
	if err != nil {
		return
	}
	for _, reservation := range all {
		if demand.HoldLabel(reservation.Status.ID) != pod.Labels[broker.LabelHold] {
			continue
		}
		var object runtime.Object = &corev1.ObjectReference{APIVersion: broker.GroupVersion.String(), Kind: "Reservation",
			Namespace: reservation.Namespace, Name: reservation.Name, UID: reservation.UID, ResourceVersion: reservation.ResourceVersion}
		request.Writes.WithLabelValues(request.WriteEvent).Inc()
		r.recorder.Eventf(object, pod, eventType, reason, returnAction, "%s", message)
	}
}
