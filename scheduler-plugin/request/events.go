package request

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientevents "k8s.io/client-go/tools/events"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// eventAction is the action of all events.
const eventAction = "Overflowing"

const (
	// ReasonGranted is the reason of the event that every overflowed pod gets once: from the
	// controller while it is pending, or with its binding.
	ReasonGranted = "OverflowGranted"
	// reasonRequested is the reason of the event that one of the pods of each request gets at
	// once, and the others if they still wait at a look after requestedAfter.
	reasonRequested = "OverflowRequested"
	reasonCapped    = "OverflowCapped"
	reasonQueued    = "OverflowQueued"
	reasonFailed    = "OverflowFailed"
)

// requestedAfter is how long pods wait for a grant before they get an event of the request:
// most of a crowd have the grant by then, and one write less.
const requestedAfter = 10 * time.Second

// Event is an event on a pending pod.
type Event struct {
	eventType, reason string
	// key distinguishes events of one reason: a pod gets one with the key of its last one after
	// waiting.RepeatAfter. Figures that change often are left out of it.
	key     string
	message string
	// reservation that the event refers to, or nil.
	reservation *broker.Reservation
	// clusters with the capacity that is granted.
	clusters []string
}

// notPossible: the pod cannot overflow.
func notPossible(reason string) Event {
	return Event{corev1.EventTypeWarning, "OverflowNotPossible", reason, fmt.Sprintf("The pod cannot overflow: %s. It waits for a node of this cluster.", reason), nil, nil}
}

// notSteered: another scheduler schedules the pod.
func notSteered() Event {
	return Event{corev1.EventTypeWarning, "OverflowNotPossible", "scheduler", "The pod cannot overflow: its scheduler is " + corev1.DefaultSchedulerName +
		", because it was created before its namespace opted in, or while no " + broker.SchedulerName + " was available. Delete it, so that its controller creates another one.", nil, nil}
}

// delayed: an autoscaler may add a node first.
func delayed(askAfter time.Duration) Event {
	return Event{corev1.EventTypeNormal, "OverflowDelayed", "delayed", fmt.Sprintf("The pod fits no node of this cluster. If none is added within %s, capacity is requested in other clusters.", askAfter), nil, nil}
}

// incomplete: a gang requires more pods than can be scheduled.
func incomplete(members []*corev1.Pod, required int32) Event {
	var gang demand.Gang
	for _, pod := range members {
		gang, _ = demand.GangOf(pod)
	}
	return Event{corev1.EventTypeNormal, "OverflowIncomplete", "incomplete", fmt.Sprintf("%s requires %d pods, of which %d exist and have no scheduling gates. Capacity is requested in other clusters once there are enough.",
		gang, required, len(members)), nil, nil}
}

// outdated: a gang's Reservation was made for pods of other shapes.
func outdated(r *broker.Reservation, request demand.Request) Event {
	return Event{corev1.EventTypeNormal, "OverflowOutdated", r.Name, fmt.Sprintf("Reservation %s requests capacity for %d pods of %s %s that had other requests, node selectors, node affinities or tolerations. "+
		"The agent deletes it when none of them has been left for some time (30 s by default). Then capacity is requested for the pods as they are now.",
		r.Name, usage.RequestedPods(r), request.Owner.Kind, request.Owner.Name), r, nil}
}

// tooManyShapes: a gang, whose pods have n shapes, does not fit into one Reservation, which
// may request others for pods that have been replaced: current is that Reservation, or nil.
func tooManyShapes(request demand.Request, n int, current *broker.Reservation) Event {
	message := fmt.Sprintf("Failed to request capacity for %s %s: its pods have %d shapes (requests, node selectors, node affinities and tolerations), ", request.Owner.Kind, request.Owner.Name, n)
	former := len(request.PodSets) - n
	if n > maxShapes || former == 0 {
		message += fmt.Sprintf("and a Reservation has at most %d. Give more of its pods the same, or divide the group.", maxShapes)
	} else {
		message += fmt.Sprintf("and Reservation %s still requests %d of former pods; a Reservation has at most %d. "+
			"Delete the pods of the group that run in other clusters, or wait for their end: then capacity is requested for the pods as they are now.", current.Name, former, maxShapes)
	}
	return failed(fmt.Sprint(n, " shapes, ", former, " others"), message, current)
}

// requested: the Reservation was created, or its count raised.
func requested(owner metav1.OwnerReference, r *broker.Reservation) Event {
	return Event{corev1.EventTypeNormal, reasonRequested, r.Name, fmt.Sprintf("Requested capacity for %d pods of %s %s in other clusters (Reservation %s).",
		usage.RequestedPods(r), owner.Kind, owner.Name, r.Name), r, nil}
}

// capped: the namespace's OverflowPolicy allows only part of the request.
func capped(policy string, request demand.Request, allowed int32, short corev1.ResourceName, r *broker.Reservation) Event {
	message := fmt.Sprintf("OverflowPolicy %s limits %s of namespace %s: capacity is requested for %d of %d pods. The others wait until the policy or other Reservations of the namespace allow more.",
		policy, short, request.Key.Namespace, allowed, request.Pods())
	return Event{corev1.EventTypeWarning, reasonCapped, fmt.Sprint(policy, " ", short, " ", allowed), message, r, nil}
}

// queued: no cluster has enough capacity.
func queued(r *broker.Reservation, message string) Event {
	key, rejections := rejections(r)
	if rejections != "" {
		message = rejections
	}
	return Event{corev1.EventTypeWarning, reasonQueued, key, fmt.Sprintf("Reservation %s for %d pods is queued until capacity becomes available: %s", r.Name, usage.RequestedPods(r), message), r, nil}
}

// Granted: capacity can be used.
func Granted(r *broker.Reservation, slots map[string]int32) Event {
	prices := map[string]string{}
	for _, allocation := range r.Status.Allocations {
		if allocation.PricePerHour != "" {
			prices[allocation.Cluster] = " at " + allocation.PricePerHour + " per hour"
		}
	}
	var clusters, pods []string
	for _, cluster := range slices.Sorted(maps.Keys(slots)) {
		clusters = append(clusters, cluster)
		pods = append(pods, fmt.Sprintf("%d in %s%s", slots[cluster], cluster, prices[cluster]))
	}
	return Event{corev1.EventTypeNormal, ReasonGranted, strings.Join(clusters, ","), fmt.Sprintf("Granted capacity for pods of this owner: %s (Reservation %s).",
		strings.Join(pods, ", "), r.Name), r, clusters}
}

// Pooled: the pod uses capacity that was reserved in advance.
func Pooled(p *usage.Pool) Event {
	price := ""
	if p.Price != "" {
		price = " at " + p.Price + " per hour"
	}
	return Event{corev1.EventTypeNormal, ReasonGranted, p.Provider, fmt.Sprintf("The pod uses capacity in %s that was reserved in advance%s (Reservation %s).", p.Provider, price, p.Reservation), nil, []string{p.Provider}}
}

// failed: the capacity cannot be requested, or never be granted.
func failed(key, message string, r *broker.Reservation) Event {
	return Event{corev1.EventTypeWarning, reasonFailed, key, message, r, nil}
}

// maxAnswer is how much of the API server's answer is repeated in an event, in bytes.
const maxAnswer = 700

// Kinds of answers to a write of a Reservation that was not accepted.
const (
	// refusedWrite: the API server does not accept the Reservation as it is, there, now.
	refusedWrite = "refused"
	// failedWrite: the API server cannot process the request.
	failedWrite = "failed"
)

// notWritten: the API server has not accepted the Reservation several times. Its answers of one
// kind are one event: they may have other figures each time.
func notWritten(kind string, err error) Event {
	return failed(kind, fmt.Sprintf("Failed to request capacity: %s. It is requested again every %.0f s.",
		strings.TrimSuffix(events.TruncateTo(err.Error(), maxAnswer), "."), blockedRetryAfter.Seconds()), nil)
}

// deleting: a Reservation is being deleted while pods use it.
func deleting(r *broker.Reservation, users int32) Event {
	return failed("deleting "+r.Name, fmt.Sprintf("Reservation %s is being deleted, and %d pods in other clusters still use it. Capacity is requested again when they have ended: "+
		"delete them if that is to be soon.", r.Name, users), r)
}

// statusEvents returns the events for a Reservation's status.
func statusEvents(r *broker.Reservation) []Event {
	var all []Event
	if slots := usage.StateOf(r, "").Slots; len(slots) > 0 {
		all = append(all, Granted(r, slots))
	}
	if c := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionQueued); c != nil && c.Status == "True" {
		all = append(all, queued(r, c.Message))
	}
	if r.Status.Phase == broker.ReservationFailed {
		reason := "no cluster can grant it as specified"
		if ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady); ready != nil && ready.Message != "" {
			reason = ready.Message
		}
		all = append(all, failed(reason, fmt.Sprintf("Reservation %s failed: %s", r.Name, reason), r))
	}
	return all
}

// rejections lists the clusters that were rejected: with reasons as an event key,
// with messages for people.
func rejections(r *broker.Reservation) (key, text string) {
	if r.Status.Decision == nil || len(r.Status.Decision.Rejections) == 0 {
		return "", ""
	}
	var reasons, messages []string
	for _, rejection := range r.Status.Decision.Rejections {
		reasons = append(reasons, rejection.Cluster+"="+rejection.Reason)
		messages = append(messages, rejection.Cluster+": "+strings.TrimSuffix(rejection.Message, "."))
	}
	others := r.Status.Decision.Unlisted()
	var closed string
	for _, c := range r.Status.Decision.RejectionCounts {
		if c.Reason == capacity.ReasonConsumerNotAdmitted {
			others -= int(c.Count)
			closed = strings.TrimSuffix(capacity.NotAdmitted(c.Count, r.Spec.RequesterID), ".")
		}
	}
	if others > 0 {
		messages = append(messages, fmt.Sprintf("%d other clusters were rejected", others))
	}
	if closed != "" {
		messages = append(messages, closed)
	}
	return strings.Join(reasons, ","), strings.Join(messages, "; ") + "."
}

// Send writes an event on a pod. Events that differ in their messages only are aggregated,
// and the first message stays: what they are related to differs too.
func (e Event) Send(recorder clientevents.EventRecorder, pod *corev1.Pod) {
	related := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	if r := e.reservation; r != nil {
		related = &corev1.ObjectReference{APIVersion: broker.GroupVersion.String(), Kind: "Reservation",
			Namespace: r.Namespace, Name: r.Name, UID: r.UID, ResourceVersion: r.ResourceVersion}
	}
	related.FieldPath = e.key
	Writes.WithLabelValues(WriteEvent).Inc()
	recorder.Eventf(pod, related, e.eventType, e.reason, eventAction, "%s", events.Truncate(e.message))
}
