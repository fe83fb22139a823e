package request

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/condition"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// wait is what a pod waits for.
type wait struct {
	// decided is what the last decision on its request says, or nil if there is nothing to say.
	decided *Event
	// placed is how many of its pods have a place in other clusters.
	placed int32
	// owner of the request, and its Reservations.
	owner        metav1.OwnerReference
	reservations []*broker.Reservation
}

// event returns what the pods of a request wait for; nil if that is not known yet. Of several things
// it is the one that is in the way: a pod for which nothing is requested has no use for what others
// are granted.
func (w wait) event(now time.Time) *Event {
	for _, r := range w.reservations {
		events := statusEvents(r)
		if len(events) == 0 {
			continue
		}
		switch last := events[len(events)-1]; last.reason {
		case reasonQueued:
			last.message = queuedMessage(r, now)
			return &last
		case reasonFailed:
			return &last
		}
	}
	if w.decided != nil {
		return w.decided
	}
	for _, r := range w.reservations {
		if r.DeletionTimestamp != nil {
			continue
		}
		state := usage.StateOf(r, "")
		switch {
		case state.Most > w.placed:
			granted := Granted(r, state.Slots)
			return &granted
		case state.Most >= usage.RequestedPods(r): // more is about to be requested
			return nil
		}
		e := requested(w.owner, r)
		if ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady); ready != nil && ready.Status == metav1.ConditionFalse {
			e.message += " " + ready.Message
		}
		return &e
	}
	return nil
}

// queuedMessage says what a Reservation that is queued waits for: the cluster that came closest and what to
// do, and the position. The position is that of a time: the message is not written again for another one.
func queuedMessage(r *broker.Reservation, now time.Time) string {
	message := "No other cluster has room for the pod now."
	if r.Status.Decision == nil || len(r.Status.Decision.Rejections) == 0 {
		if c := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionQueued); c != nil && c.Message != "" {
			message += " " + c.Message
		}
	} else {
		best := capacity.Closest(r.Status.Decision.Rejections)
		message += fmt.Sprintf(" %s: %s", best.Cluster, best.Message)
		if more := len(r.Status.Decision.Rejections) - 1 + r.Status.Decision.Unlisted(); more > 0 {
			message += fmt.Sprintf(" %d more were not chosen.", more)
		}
		if fix := capacity.Fix(best.Reason); fix != "" {
			message += " " + fix
		}
	}
	if r.Status.QueuePosition > 0 {
		message += fmt.Sprintf(" Its Reservation %s was number %d in the queue at %s.", r.Name, r.Status.QueuePosition, now.UTC().Format("15:04 UTC"))
	}
	return message
}

// conditionPeriod is how often the conditions of pods are compared with what the pods wait for.
const conditionPeriod = 5 * time.Second

// explain writes the conditions of the pods that have waited for requestedAfter, where they say
// something else. Most of a crowd are granted before: they need none.
func (c *Controller) explain() {
	now := c.Clock.Now()
	events := map[demand.Key]*Event{}
	for uid, name := range c.Pending.Waiting(now.Add(-requestedAfter)) {
		pod := c.getPending(uid, name)
		if pod == nil || c.Placements.Has(uid) { // it is being bound
			continue
		}
		e, known := c.waitsFor(pod, events, now)
		switch {
		case !known:
		case e == nil:
			c.conditions.Remove(pod)
		default:
			c.conditions.Set(pod, condition.Waits(e.reason == ReasonGranted, e.reason, e.message))
		}
	}
}

// waitsFor returns what a pending pod waits for: nil if it is not to overflow. events has that of
// requests. known is false if that is not clear yet: the pod then keeps the condition that it has.
func (c *Controller) waitsFor(pod *corev1.Pod, events map[demand.Key]*Event, now time.Time) (e *Event, known bool) {
	if !OptedIn(c.Namespaces, pod.Namespace) {
		return nil, true
	}
	if ok, reason := c.Gangs.Admissible(pod); !ok {
		if reason == "" {
			return nil, true
		}
		own := notPossible(reason)
		return &own, true
	}
	if c.Gate.Since(pod.UID).Add(c.AskAfter).After(now) {
		own := delayed(c.AskAfter)
		return &own, true
	}
	of, resolved := c.Keys.Get(pod)
	switch {
	case !c.Synced():
		return nil, false
	case !resolved: // for so long that its owner may be gone: nothing is requested
		return nil, true
	}
	key := of.Key.OfReservation()
	e, known = events[key]
	if !known {
		reservations, err := c.Reservations.ByKey(key)
		if err != nil {
			c.Log.Error(err, "Failed to read what a pod waits for", "pod", klog.KObj(pod))
			return nil, false
		}
		placed := c.Placements.LivingOf(of.Key)
		if key.IsGang() && len(reservations) > 0 {
			placed = 0
			for _, each := range demand.PodKeys(reservations[0]) {
				placed += c.Placements.LivingOf(each)
			}
		}
		e = wait{decided: c.decisions.of(key), placed: placed, owner: of.Owner, reservations: reservations}.event(now)
		events[key] = e
	}
	return e, e != nil
}

// settle corrects the condition of a pod that does not wait any more, if it has one. One that is still
// pending waits for something else, such as pods that are preempted.
func (c *Controller) settle(pod *corev1.Pod) {
	if !c.Active() || !c.conditions.Unfinished(pod) || pod.DeletionTimestamp != nil {
		return
	}
	if pod.Spec.NodeName == "" {
		c.conditions.Remove(pod)
		return
	}
	provider := ""
	if node, err := c.Waker.Nodes.Get(pod.Spec.NodeName); err == nil {
		provider = usage.ProviderOf(node)
	} else if strings.HasPrefix(pod.Spec.NodeName, broker.VirtualNodePrefix) {
		return // it says so once the node is there
	}
	c.conditions.Set(pod, condition.Bound(pod.Spec.NodeName, provider))
}

// settleAll does so for the pods of this scheduler that were bound, or whose namespaces opted out, while
// no replica was active, for those that wait for what describes their gang and have not been tried since
// then, and for those of another scheduler.
func (c *Controller) settleAll(pods []*corev1.Pod) {
	for _, pod := range pods {
		own, others := pod.Spec.SchedulerName == c.Profile, c.Steers && pod.Spec.SchedulerName == corev1.DefaultSchedulerName
		held := !c.Pending.Has(pod.UID) && c.Gangs.Holds(pod.UID)
		if condition.Unfinished(pod) && (own || others) && (pod.Spec.NodeName != "" || !OptedIn(c.Namespaces, pod.Namespace) || held || others && !unsteered(pod)) {
			c.settle(pod)
		}
	}
}

// decisions has what the last decision on each request says. Safe for concurrent use.
type decisions struct {
	mu     sync.Mutex
	events map[demand.Key]Event
}

func (d *decisions) of(key demand.Key) *Event {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, some := d.events[key]; some {
		return &e
	}
	return nil
}

// set records what a decision says: nil if nothing.
func (d *decisions) set(key demand.Key, e *Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e == nil {
		delete(d.events, key)
	} else {
		d.events[key] = *e
	}
}

// keep forgets the others.
func (d *decisions) keep(keep func(demand.Key) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.events, func(key demand.Key, _ Event) bool { return !keep(key) })
}
