package overflow

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

const (
	// soon is when something that was overtaken is tried again.
	soon = 200 * time.Millisecond
	// later is when something that failed, or whose time has not come, is.
	later = 2 * time.Second
	// rarely is when something is that others have to change first.
	rarely = 15 * time.Second
	// answerWithin is how long the answer to an ask is awaited before more is asked
	// for on top of it: pods that come one by one would otherwise have every part
	// of the system start anew with each.
	answerWithin = 3 * time.Second
)

// asker turns pods that found no room into Reservations, tells the pods what
// becomes of them, and wakes the pods when something does. It recomputes what to
// ask for from what it sees, and only ever raises a count: the agent lowers it.
// One goroutine runs it; it takes its work from the inbox.
type asker struct {
	log          klog.Logger
	clock        clock.WithTicker
	inbox        *inbox
	batcher      *demand.Batcher
	book         *book
	keys         *keyring
	pods         corelisters.PodLister
	nodes        corelisters.NodeLister
	namespaces   corelisters.NamespaceLister
	reservations *reservations
	policies     cache.Store
	// synced tells whether Reservations and policies can be judged.
	synced func() bool
	// acting tells whether this replica is the one to ask.
	acting   func() bool
	activate func(map[string]*corev1.Pod)
	recorder events.EventRecorder
	// profile is the name of the scheduler whose pods are asked for, and placed has
	// the UIDs of those that are on their way to a node.
	profile string
	placed  *sync.Map

	// stories of the pods that wait.
	stories map[types.UID]*story
	// raised is when a key was asked for last, for answerWithin.
	raised map[demand.Key]time.Time
	// unresolved pods have an owner that no cache shows yet.
	unresolved map[types.UID]types.NamespacedName
}

// story is what a waiting pod has been told.
type story struct {
	pod types.NamespacedName
	// told is the last thing told, by event reason.
	told map[string]string
}

// run works until ctx ends.
func (a *asker) run(ctx context.Context) {
	a.stories, a.unresolved, a.raised = map[types.UID]*story{}, map[types.UID]types.NamespacedName{}, map[demand.Key]time.Time{}
	for {
		a.step(ctx)
		var timer <-chan time.Time
		if at, ok := a.next(); ok {
			timer = a.clock.After(max(0, at.Sub(a.clock.Now())))
		}
		select {
		case <-ctx.Done():
			return
		case <-a.inbox.wake:
		case <-timer:
		}
	}
}

// next is when there is something to do even if the inbox stays empty.
func (a *asker) next() (time.Time, bool) {
	if !a.acting() {
		return time.Time{}, false
	}
	at, ok := a.batcher.Next()
	if retry := a.clock.Now().Add(later); len(a.unresolved) > 0 && (!ok || retry.Before(at)) {
		return retry, true
	}
	return at, ok
}

// step does what there is to do now.
func (a *asker) step(ctx context.Context) {
	mail := a.inbox.take()
	for uid := range mail.gone {
		a.batcher.Forget(uid)
		delete(a.stories, uid)
		delete(a.unresolved, uid)
	}
	for uid, name := range a.unresolved {
		if _, again := mail.pods[uid]; !again {
			mail.pods[uid] = name
		}
	}
	for uid, name := range mail.pods {
		a.note(uid, name)
	}
	wake := map[string]*corev1.Pod{}
	for uid, name := range mail.welcome {
		if pod := a.waiting(uid, name); pod != nil {
			wake[name.String()] = pod
		}
	}
	for key := range mail.touched {
		a.reservations.forget(key)
		a.hear(key, mail.news[key], wake)
		// The agent may have lowered a count, or a Reservation may be gone, while
		// pods wait.
		a.batcher.Again(key, soon)
	}
	if len(wake) > 0 {
		a.activate(wake)
	}
	if !a.acting() {
		return
	}
	for _, ask := range a.batcher.Due(a.othersCounter()) {
		if retry := a.settle(ctx, ask); retry > 0 {
			a.batcher.Again(ask.Key, retry)
		}
	}
}

// note takes a pod in, or tells it why not.
func (a *asker) note(uid types.UID, name types.NamespacedName) {
	delete(a.unresolved, uid)
	pod := a.waiting(uid, name)
	if pod == nil {
		a.inbox.drop(uid)
		return
	}
	if a.stories[uid] == nil {
		a.stories[uid] = &story{pod: name, told: map[string]string{}}
	}
	if ok, reason := demand.Admissible(pod); !ok {
		if reason != "" {
			a.tell(uid, eventNotPossible, reason, nil, "The pod cannot overflow: %s.", reason)
		}
		return
	}
	known, ok := a.keys.of(pod)
	if !ok {
		a.unresolved[uid] = name
		return
	}
	a.batcher.Note(uid, known.key, known.owner, known.set)
	a.narrate(known.key, uid)
}

// waiting is a pod as the cache shows it, or nil if it waits for no node.
func (a *asker) waiting(uid types.UID, name types.NamespacedName) *corev1.Pod {
	pod, err := a.pods.Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.UID != uid || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		return nil
	}
	return pod
}

// hear tells the waiting pods of a key what is new. If it changes what they may
// use, it adds those to wake that the virtual nodes are open to: the agent opens
// them to as many pods as there are places, and all others would be tried in vain.
// Where there is no room, it adds all: they may push out others at home now, and
// are to say so.
func (a *asker) hear(key demand.Key, again bool, wake map[string]*corev1.Pod) {
	var open []*corev1.Node
	var all bool
	if again {
		open, all = a.granted(key), a.book.refused(key)
	}
	for _, uid := range a.batcher.Waiting(key) {
		a.narrate(key, uid)
		s := a.stories[uid]
		if s == nil || len(open) == 0 && !all {
			continue
		}
		if pod := a.waiting(uid, s.pod); pod != nil && (all || slices.ContainsFunc(open, func(n *corev1.Node) bool { return a.tolerates(pod, n) })) {
			wake[s.pod.String()] = pod
		}
	}
}

// granted lists the virtual nodes on which a key has places.
func (a *asker) granted(key demand.Key) []*corev1.Node {
	g := a.book.grants(key)
	if g == nil {
		return nil
	}
	nodes, err := a.nodes.List(onVirtualNodes)
	if err != nil {
		a.log.Error(err, "Listing virtual nodes failed")
	}
	return slices.DeleteFunc(nodes, func(n *corev1.Node) bool { return g.places[providerOf(n)] == 0 })
}

// tolerates tells whether a pod is let onto a node as far as the node's provider
// goes. All other taints may be gone by the time the pod is tried.
func (a *asker) tolerates(pod *corev1.Pod, node *corev1.Node) bool {
	_, untolerated := corev1helpers.FindMatchingUntoleratedTaint(a.log, node.Spec.Taints, pod.Spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Key == broker.TaintOverflow }, false)
	return !untolerated
}

// othersCounter counts the pods of keys that need a place beside those that were
// turned away, all at once: see others.
func (a *asker) othersCounter() func(demand.Key) int32 {
	var counts map[demand.Key]int32
	return func(key demand.Key) int32 {
		if counts == nil {
			counts = a.others()
		}
		return counts[key]
	}
}

// others counts, by key, the pods that run in other clusters, and those that the
// scheduler has not come to yet: where one of a key was turned away, the rest
// will be, and is better asked for at once. Pods that are ending are left out:
// those that replace them take their places.
func (a *asker) others() map[demand.Key]int32 {
	counts := map[demand.Key]int32{}
	nodes, err := a.nodes.List(onVirtualNodes)
	if err != nil {
		a.log.Error(err, "Listing virtual nodes failed")
	}
	virtual := map[string]bool{}
	for _, n := range nodes {
		virtual[n.Name] = true
	}
	// Of all namespaces: the scheduler's cache of pods has no index by namespace.
	pods, err := a.pods.List(labels.Everything())
	if err != nil {
		a.log.Error(err, "Listing pods failed")
	}
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil || finished(pod) || a.stories[pod.UID] != nil {
			// A pod with a story is noted already, also if it was bound since.
			continue
		}
		if !virtual[pod.Spec.NodeName] && !a.untried(pod) {
			continue
		}
		if known, ok := a.keys.of(pod); ok {
			counts[known.key]++
		}
	}
	return counts
}

// untried tells whether the scheduler has not come to a pod yet that may overflow.
func (a *asker) untried(pod *corev1.Pod) bool {
	if _, placed := a.placed.Load(pod.UID); placed || pod.Spec.NodeName != "" || pod.Spec.SchedulerName != a.profile || !optedIn(a.namespaces, pod.Namespace) {
		return false
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			return false
		}
	}
	ok, _ := demand.Admissible(pod)
	return ok
}

var onVirtualNodes = func() labels.Selector {
	s, err := labels.Parse(broker.LabelProvider)
	if err != nil {
		panic(err)
	}
	return s
}()

// settle sees to it that a Reservation asks for at least what is needed. It
// returns when to try again, or zero.
func (a *asker) settle(ctx context.Context, ask demand.Ask) (retry time.Duration) {
	log := a.log.WithValues("namespace", ask.Key.Namespace, "owner", ask.Owner.Kind+"/"+ask.Owner.Name, "shape", ask.Key.Shape)
	if !a.synced() {
		return later
	}
	name := ask.Key.Name(ask.Owner.Name)
	before := a.reservations.get(ask.Key.Namespace, name)
	if before != nil {
		if key, _ := demand.KeyOfReservation(before); key != ask.Key {
			a.tellAll(ask, eventFailed, name, before, "Reservation %s is in the way: it is not for this pod.", name)
			return 0
		}
		if before.DeletionTimestamp != nil {
			// It would be given back in full; ask anew when it is gone.
			return later
		}
		if podsAsked(before) >= ask.PodSet.Count {
			return 0
		}
		if wait := answerWithin - a.clock.Since(a.raised[ask.Key]); wait > 0 && !answered(before) {
			return wait
		}
	}
	maps.DeleteFunc(a.raised, func(_ demand.Key, at time.Time) bool { return a.clock.Since(at) > answerWithin })
	policy, capped, err := a.withinPolicy(&ask, name)
	if err != nil {
		log.Error(err, "Judging the overflow policy failed")
		a.tellAll(ask, eventFailed, err.Error(), nil, "No room was asked for: %v.", err)
		return later
	}
	if capped != "" {
		a.tellAll(ask, eventCapped, capped, before, "%s", capped)
	}
	if ask.PodSet.Count == 0 || before != nil && podsAsked(before) >= ask.PodSet.Count {
		// What is asked for by others may shrink.
		return rarely
	}
	after, err := a.reservations.apply(ctx, ask, policy, before)
	switch {
	case err == nil:
		a.raised[ask.Key] = a.clock.Now()
		log.Info("Asked for room in other clusters", "reservation", name, "pods", ask.PodSet.Count)
		a.tellAll(ask, eventRequested, name, after, "Asked for room for %d pods of %s %s in other clusters: Reservation %s.",
			ask.PodSet.Count, ask.Owner.Kind, ask.Owner.Name, name)
		if capped != "" {
			return rarely
		}
		return 0
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		return soon
	case apierrors.IsInvalid(err):
		log.Error(err, "The ask is not valid")
		a.tellAll(ask, eventFailed, "invalid", nil, "The pod cannot overflow: %v", err)
		return 0
	case apierrors.IsNotFound(err) || apierrors.IsForbidden(err):
		log.Error(err, "Reservations cannot be written; trying again")
		return rarely
	default:
		log.Error(err, "Asking failed; trying again")
		return later
	}
}

// answered tells whether what a Reservation asks for may be used, or that there
// is no room for it.
func answered(r *broker.Reservation) bool {
	if r.Status.ObservedGeneration < r.Generation {
		return false
	}
	return r.Status.Phase == broker.ReservationFailed ||
		meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionReady) ||
		meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued)
}

// withinPolicy lowers an ask to what the namespace's policy allows. capped says
// so, in a sentence; policy is nil where none selects the namespace.
func (a *asker) withinPolicy(ask *demand.Ask, name string) (policy *broker.OverflowPolicySpec, capped string, err error) {
	namespace, err := a.namespaces.Get(ask.Key.Namespace)
	if err != nil {
		return nil, "", fmt.Errorf("looking up namespace %s: %w", ask.Key.Namespace, err)
	}
	var all []*broker.OverflowPolicy
	for _, obj := range a.policies.List() {
		all = append(all, obj.(*broker.OverflowPolicy))
	}
	chosen, err := policyFor(namespace, all)
	if err != nil || chosen == nil {
		return nil, "", err
	}
	if chosen.Spec.MaxResources == nil {
		return &chosen.Spec, "", nil
	}
	others, err := a.reservations.list(ask.Key.Namespace)
	if err != nil {
		return nil, "", err
	}
	if most, short := affordable(ask.PodSet, *chosen.Spec.MaxResources, askedBy(others, name)); most < ask.PodSet.Count {
		capped = fmt.Sprintf("OverflowPolicy %s allows namespace %s no more %s: room for %d pods may be asked for, %d are needed.",
			chosen.Name, ask.Key.Namespace, short, most, ask.PodSet.Count)
		ask.PodSet.Count = most
	}
	return &chosen.Spec, capped, nil
}
