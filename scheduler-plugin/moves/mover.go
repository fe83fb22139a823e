package moves

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
	"github.com/spillway-dev/spillway/broker/charge"
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

// Config is what a Mover reads and writes with.
type Config struct {
	Log          klog.Logger
	Clock        clock.Clock
	Client       kubernetes.Interface
	Recorder     events.EventRecorder
	Watched      *WatchedPods
	Placements   *usage.Placements
	Keys         *owners.KeyCache
	Pools        *usage.PoolCache
	Reservations *request.Reservations
	Policies     request.PolicyCache
	Nodes        corelisters.NodeLister
	Namespaces   corelisters.NamespaceLister
	Pods         corelisters.PodLister
	// Ready reports whether this replica leads and its caches are complete.
	Ready func() bool
}

// Mover moves overflowed pods back to this cluster where an OverflowPolicy says so.
// Package returnhome decides; the Mover observes, evicts, and watches for the
// replacement, in a goroutine of its own. Without such a policy it does nothing.
type Mover struct {
	Config

	planner *returnhome.Planner
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

// New returns a Mover that remembers no moves.
func New(config Config) *Mover {
	return &Mover{Config: config, planner: returnhome.New(), reported: map[types.UID]bool{}}
}

// Run moves pods until ctx ends.
func (m *Mover) Run(ctx context.Context) {
	for {
		timer := m.Clock.NewTimer(m.step(ctx))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

// step observes, and begins or ends a move. It returns when to call it again.
func (m *Mover) step(ctx context.Context) time.Duration {
	if !m.Ready() {
		return returnhome.Period(nil)
	}
	m.settle(ctx)
	now, moving := m.Clock.Now(), m.planner.Moving() != nil
	if moving && now.Before(m.nextPlan) {
		return movePeriod
	}
	terms := m.terms()
	if len(terms.Decoded) == 0 && !moving {
		return returnhome.Period(nil)
	}
	candidates, pods := m.candidates(terms)
	period := returnhome.Period(candidates)
	next := m.planner.Plan(now, candidates)
	m.nextPlan = now.Add(period)
	if next == nil && !moving {
		return period
	}
	// Pods that no scheduler has tried yet may take the room.
	if next != nil && !m.Watched.hasUntried(now.Add(-maxUntried)) {
		m.evict(ctx, *next, pods[next.Pod])
	}
	return min(movePeriod, period)
}

// terms returns the policies if one of them lets pods move, else none.
func (m *Mover) terms() demand.Policies {
	all := m.Policies.List()
	if !slices.ContainsFunc(all.Decoded, func(p *broker.OverflowPolicy) bool { return p.Spec.ReturnHome != nil }) {
		return demand.Policies{}
	}
	return all
}

// candidates returns the pods that may move, and the objects by UID.
func (m *Mover) candidates(policies demand.Policies) ([]returnhome.Candidate, map[types.UID]*corev1.Pod) {
	var all []returnhome.Candidate
	guests := m.Watched.guestsNow()
	pods := make(map[types.UID]*corev1.Pod, len(guests))
	byNamespace := map[string]*broker.ReturnHome{}
	room := m.newRoomFinder()
	for _, pod := range guests {
		terms, known := byNamespace[pod.Namespace]
		if !known {
			terms = m.termsOf(pod.Namespace, policies)
			byNamespace[pod.Namespace] = terms
		}
		if terms == nil {
			continue
		}
		if c, ok := m.candidate(pod, terms, room); ok {
			all, pods[pod.UID] = append(all, c), pod
		}
	}
	maps.DeleteFunc(m.reported, func(uid types.UID, _ bool) bool { return pods[uid] == nil })
	return all, pods
}

// termsOf returns the terms of a namespace; nil if its pods do not move.
func (m *Mover) termsOf(name string, policies demand.Policies) *broker.ReturnHome {
	namespace, err := m.Namespaces.Get(name)
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
func (m *Mover) candidate(pod *corev1.Pod, terms *broker.ReturnHome, room *roomFinder) (c returnhome.Candidate, ok bool) {
	node, err := m.Nodes.Get(pod.Spec.NodeName)
	if err != nil || usage.ProviderOf(node) == "" || !mayReturn(pod) || m.Pools.Has(pod.Labels[broker.LabelHold]) {
		return c, false
	}
	key, resolved := m.Keys.Get(pod)
	_, scheduled := podutil.GetPodCondition(&pod.Status, corev1.PodScheduled)
	if !resolved || key.Key.IsGang() || scheduled == nil {
		return c, false
	}
	return returnhome.Candidate{
		Pod: pod.UID, Namespace: pod.Namespace, Name: pod.Name, Owner: replacerOf(pod, key.Key),
		Since: scheduled.LastTransitionTime.Time, Price: m.price(key.Key, usage.ProviderOf(node)),
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
func (m *Mover) price(key demand.Key, provider string) float64 {
	all, err := m.Reservations.ByKey(key)
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
func (m *Mover) evict(ctx context.Context, c returnhome.Candidate, pod *corev1.Pod) {
	before := m.podsOf(c.Namespace, c.Owner)
	requestCtx, cancel := context.WithTimeout(ctx, evictTimeout)
	defer cancel()
	request.Writes.WithLabelValues(request.WriteEviction).Inc()
	// Without the client's own retries: they would outlast the time of the request, and
	// make a refusal one without an answer.
	err := m.Client.CoreV1().RESTClient().Post().AbsPath("/api/v1").Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("eviction").
		Body(&policyv1.Eviction{
			// The chart's policy for evictions by Spillway goes by the label.
			ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
		}).MaxRetries(0).Do(requestCtx).Error()
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		// It has ended, which its next event shows: until then others get their turn.
		m.planner.Refused(m.Clock.Now(), c)
	case refusesRequest(err):
		m.blocked(pod, m.planner.Refused(m.Clock.Now(), c), err.Error())
	default:
		m.planner.Start(m.Clock.Now(), c)
		m.moved, m.before = pod, before
		if err != nil {
			m.unansweredSince = m.Clock.Now()
			m.Log.Info("The eviction of an overflowed pod got no answer; observing whether it took place", "pod", klog.KObj(pod), "reason", err.Error())
			return
		}
		m.evicted(c)
	}
}

// refusesRequest reports whether an error is the API server's answer that it did nothing.
func refusesRequest(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code >= 400 && status.Status().Code < 500
}

// evicted reports that the pod that moves was evicted.
func (m *Mover) evicted(c returnhome.Candidate) {
	m.Log.Info("Evicted an overflowed pod, because this cluster has had room for it", "pod", klog.KObj(m.moved), "node", m.moved.Spec.NodeName, "after", c.After)
	m.record(m.moved, corev1.EventTypeNormal, "ReturningHome", fmt.Sprintf("Evicted pod %s from %s: this cluster has had room for it for %s. The scheduler binds its replacement here.", m.moved.Name, m.moved.Spec.NodeName, c.After))
}

// blocked reports that a pod was not evicted, once for each pod.
func (m *Mover) blocked(pod *corev1.Pod, retryAt time.Time, reason string) {
	returnedHome.WithLabelValues(string(returnhome.Blocked)).Inc()
	if m.reported[pod.UID] {
		return
	}
	m.reported[pod.UID] = true
	m.Log.Info("The eviction of an overflowed pod was refused; retrying", "pod", klog.KObj(pod), "node", pod.Spec.NodeName, "retryAt", retryAt, "reason", reason)
	m.record(pod, corev1.EventTypeNormal, "ReturnHomeBlocked", fmt.Sprintf("This cluster has room for the pod, and its eviction was refused. It is retried: %s", reason))
}

// answered reports whether it is known that the pod that moves was evicted. If it is known
// that it was not, the move ends.
func (m *Mover) answered(ctx context.Context, move *returnhome.Move) bool {
	if m.unansweredSince.IsZero() {
		return true
	}
	stays := func(pod *corev1.Pod, err error) bool {
		return err == nil && pod.UID == m.moved.UID && pod.DeletionTimestamp == nil
	}
	unknown := func(err error) bool { return err != nil && !apierrors.IsNotFound(err) }
	pod, err := m.Pods.Pods(m.moved.Namespace).Get(m.moved.Name)
	if stays(pod, err) || unknown(err) {
		if m.Clock.Since(m.unansweredSince) < unansweredFor {
			return false
		}
		// The cache may be old.
		ctx, cancel := context.WithTimeout(ctx, evictTimeout)
		defer cancel()
		pod, err = m.Client.CoreV1().Pods(m.moved.Namespace).Get(ctx, m.moved.Name, metav1.GetOptions{})
		if unknown(err) {
			return false
		}
	}
	m.unansweredSince = time.Time{}
	if stays(pod, err) {
		m.blocked(m.moved, m.planner.NotEvicted(m.Clock.Now()), "the API server did not answer")
		m.moved, m.before = nil, nil
		return false
	}
	m.evicted(move.Candidate)
	return true
}

// podsOf returns the UIDs of the pods that a replacer has.
func (m *Mover) podsOf(namespace string, replacer types.UID) map[types.UID]bool {
	uids := map[types.UID]bool{}
	for _, pod := range m.listOf(namespace, replacer) {
		uids[pod.UID] = true
	}
	return uids
}

func (m *Mover) listOf(namespace string, replacer types.UID) []*corev1.Pod {
	all, err := m.Pods.Pods(namespace).List(labels.Everything())
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(all, func(pod *corev1.Pod) bool {
		if metav1.GetControllerOfNoCopy(pod) == nil {
			return true
		}
		key, ok := m.Keys.Get(pod)
		return !ok || replacerOf(pod, key.Key) != replacer
	})
}

// settle ends the move once its replacement is settled: the first pod of the owner that
// was not there before and has a node.
func (m *Mover) settle(ctx context.Context) {
	move := m.planner.Moving()
	if move == nil || !m.answered(ctx, move) {
		return
	}
	var first *corev1.Pod
	for _, pod := range m.listOf(move.Namespace, move.Owner) {
		if m.before[pod.UID] || pod.Spec.NodeName == "" || pod.DeletionTimestamp != nil {
			continue
		}
		if first == nil || pod.CreationTimestamp.Before(&first.CreationTimestamp) {
			first = pod
		}
	}
	var found *returnhome.Replacement
	if first != nil {
		found = &returnhome.Replacement{Bound: true, Abroad: m.Placements.IsVirtual(first.Spec.NodeName), Ready: podutil.IsPodReady(first) || podutil.IsPodTerminal(first)}
	}
	outcome, retryAt, ended := m.planner.Settle(m.Clock.Now(), found)
	if !ended {
		return
	}
	returnedHome.WithLabelValues(string(outcome)).Inc()
	m.Log.Info("Settled the replacement of a pod that was evicted to return home", "pod", klog.KObj(m.moved), "outcome", outcome, "retryAt", retryAt)
	if outcome != returnhome.Returned {
		m.record(m.moved, corev1.EventTypeWarning, "ReturnHomeFailed", fmt.Sprintf("Pod %s was evicted to return to this cluster, and %s. No other pod of its owner moves before %s.",
			m.moved.Name, failures[outcome], retryAt.UTC().Format(time.RFC3339)))
	}
	m.moved, m.before = nil, nil
}

// failures of moves, as clauses.
var failures = map[returnhome.Outcome]string{
	returnhome.Overflowed: "its replacement overflowed again",
	returnhome.NotBound:   "no replacement got a node in time",
	returnhome.NotReady:   "its replacement did not become ready in time",
}

// record records an event on a pod and the Reservation that it used.
func (m *Mover) record(pod *corev1.Pod, eventType, reason, message string) {
	request.Writes.WithLabelValues(request.WriteEvent).Inc()
	m.Recorder.Eventf(pod, nil, eventType, reason, returnAction, "%s", message)
	key, ok := m.Keys.Get(pod)
	if !ok {
		return
	}
	all, err := m.Reservations.ByKey(key.Key)
	if err != nil {
		return
	}
	for _, reservation := range all {
		if charge.Label(reservation.Status.ID) != pod.Labels[broker.LabelHold] {
			continue
		}
		var object runtime.Object = &corev1.ObjectReference{APIVersion: broker.GroupVersion.String(), Kind: "Reservation",
			Namespace: reservation.Namespace, Name: reservation.Name, UID: reservation.UID, ResourceVersion: reservation.ResourceVersion}
		request.Writes.WithLabelValues(request.WriteEvent).Inc()
		m.Recorder.Eventf(object, pod, eventType, reason, returnAction, "%s", message)
	}
}
