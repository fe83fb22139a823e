package request

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/condition"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// recordStatus records the status of a key's Reservations on pending pods.
func (c *Controller) recordStatus(key demand.Key, pods ...types.UID) {
	if len(pods) == 0 || !c.Active() {
		return
	}
	all, err := c.Reservations.ByKey(key)
	if err != nil {
		c.Log.Error(err, "Failed to read the status of Reservations")
		return
	}
	for _, r := range all {
		for _, e := range statusEvents(r) {
			for _, uid := range pods {
				c.record(uid, e)
			}
		}
	}
}

// recordAll records what was decided on a request: in events of its pending pods, and for their
// conditions.
func (c *Controller) recordAll(request demand.Request, e Event) {
	c.decisions.set(request.Key, &e)
	for _, uid := range request.Pending {
		c.record(uid, e)
	}
}

// record records an event on a pending pod, unless it has just had one of that reason or this
// repeats that, and reports whether it has. What is granted to a pod that has a place is
// recorded with its binding, and what was requested for it before is of no interest.
func (c *Controller) record(uid types.UID, e Event) (recorded bool) {
	if !c.Active() {
		return false
	}
	name, ok := c.Pending.Name(uid)
	if !ok {
		return false
	}
	// An event that counts as recorded is: the pod may be bound at any time.
	pod := c.getPending(uid, name)
	var placed func(types.UID) bool
	if e.reason == ReasonGranted || e.reason == reasonRequested {
		placed = c.Placements.Has
	}
	if pod == nil || !c.Pending.Announce(uid, waiting.Event{Reason: e.reason, Key: e.key, Clusters: e.clusters}, c.Clock.Now(), placed) {
		return false
	}
	e.Send(c.Recorder, pod)
	return true
}

// recordRequested records on one pod of a request that its Reservation requests more than before.
// The others get the event from look if they still wait.
func (c *Controller) recordRequested(request demand.Request, r *broker.Reservation) {
	e := requested(request.Owner, r)
	for _, uid := range request.Pending {
		if c.record(uid, e) {
			return
		}
	}
}

// look records on the pods that have waited for requestedAfter what is requested for them, and
// what has become of that, unless they have an event of it. It settles the conditions of those that do
// not wait any more.
func (c *Controller) look() {
	pods, err := c.Pods.List(labels.Everything())
	if err != nil {
		c.Log.Error(err, "Failed to list pods")
	}
	c.settleAll(pods)
	c.conditions.Forget()
	if c.Steers {
		c.recordUnsteered(pods)
	}
	needed := c.validator(new([]*corev1.Pod))
	waiting, owners := map[demand.Key][]types.UID{}, map[demand.Key]metav1.OwnerReference{}
	for uid, name := range c.Pending.Waiting(c.Clock.Now().Add(-requestedAfter - c.AskAfter)) {
		if pod := c.getPending(uid, name); pod != nil {
			if of, resolved := c.Keys.Get(pod); resolved && needed(uid, of.Key.OfReservation()) {
				key := of.Key.OfReservation()
				waiting[key], owners[key] = append(waiting[key], uid), of.Owner
			}
		}
	}
	for key, pods := range waiting {
		if r := c.Reservations.get(key, key.Name(owners[key].Name)); r != nil && c.waitsForGrant(key, r) {
			e := requested(owners[key], r)
			for _, uid := range pods {
				c.record(uid, e)
			}
		}
		c.recordStatus(key, pods...)
	}
}

// waitsForGrant reports whether the pods of a key wait until providers grant more of a Reservation,
// and for nothing else, such as that it is accepted.
func (c *Controller) waitsForGrant(key demand.Key, r *broker.Reservation) bool {
	of, _ := demand.KeyOfReservation(r)
	most, unasked := c.Grants.UnaskedBut(key)
	return of == key && r.DeletionTimestamp == nil && r.Status.Phase != broker.ReservationFailed && !(unasked && most == 0) &&
		usage.StateOf(r, "").Most < usage.RequestedPods(r)
}

// recordUnsteered records on the pods that wait for another scheduler why they stay home, each
// waiting.RepeatAfter. Nothing may report them: their scheduler changes them no more.
func (c *Controller) recordUnsteered(pods []*corev1.Pod) {
	recorded := map[types.UID]time.Time{}
	for _, pod := range pods {
		if !unsteered(pod) {
			continue
		}
		if c.getPending(pod.UID, waiting.NameOf(pod)) != nil && OptedIn(c.Namespaces, pod.Namespace) {
			e := notSteered()
			c.conditions.Set(pod, condition.Waits(false, e.reason, e.message))
		}
		if at, known := c.unsteered[pod.UID]; known && c.Clock.Since(at) < waiting.RepeatAfter {
			recorded[pod.UID] = at
		} else if c.getPending(pod.UID, waiting.NameOf(pod)) != nil && OptedIn(c.Namespaces, pod.Namespace) {
			recorded[pod.UID] = c.Clock.Now()
			notSteered().Send(c.Recorder, pod)
		}
	}
	c.unsteered = recorded
}

// unsteered reports whether a pod waits for the cluster's own scheduler that Spillway's would
// schedule if it was created now, and if its namespace has opted in.
func unsteered(pod *corev1.Pod) bool {
	return pod.Spec.SchedulerName == corev1.DefaultSchedulerName && waiting.Unschedulable(pod) && demand.Steerable(pod)
}
