package plan

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/text"
)

// Reasons of the conditions of a Reservation. Ready has the reason of the condition
// that it waits for.
const (
	reasonReady                 = "Ready"
	reasonHoldCreated           = "HoldCreated"
	reasonPartiallyHeld         = "PartiallyHeld"
	reasonNoHold                = "NoHold"
	reasonPlaced                = "Placed"
	ReasonInsufficientCapacity  = "InsufficientCapacity"
	ReasonQuotaReached          = "QuotaReached"
	reasonWaitingForRelease     = "WaitingForRelease"
	reasonAccepted              = "Accepted"
	ReasonDeadlineExceeded      = "DeadlineExceeded"
	reasonWaitingForProvider    = "WaitingForProvider"
	reasonVirtualNodeReady      = "VirtualNodeReady"
	reasonWaitingForVirtualNode = "WaitingForVirtualNode"
	reasonNothingRequested      = "NothingRequested"
	reasonUnknownTarget         = "UnknownTarget"
	reasonTooLarge              = "TooLarge"
	reasonInvalidSpec           = "InvalidSpec"
	ReasonExpired               = "Expired"
	ReasonConsumerSilent        = "ConsumerSilent"
	reasonConfirmed             = "Confirmed"
)

const (
	// maxMessage is the maximum size of a condition's message in bytes. The API server
	// rejects a status with more than 32 KiB in one.
	maxMessage = 8 << 10
	// maxNamed is the maximum number of providers that a message names.
	maxNamed = 20
)

// conditions are those of an object, to be set for its generation.
type conditions struct {
	list       *[]metav1.Condition
	generation int64
	now        time.Time
}

func (c conditions) set(kind string, status bool, reason, message string) {
	condition := metav1.Condition{
		Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: text.TruncateTo(message, maxMessage),
		ObservedGeneration: c.generation, LastTransitionTime: metav1.Time{Time: c.now},
	}
	if status {
		condition.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(c.list, condition)
}

// setConditions sets the conditions of a Reservation, whose other fields are set.
func setConditions(in Input, p Plan, status *broker.ReservationStatus) {
	c := conditions{&status.Conditions, in.Reservation.Generation, in.Now}
	if in.Requested().Empty() {
		c.setEnded(in, status)
		return
	}
	meta.RemoveStatusCondition(c.list, broker.ConditionProviderReleased)
	var parts []string
	for _, h := range in.Holds() {
		if !h.Promised.Empty() {
			parts = append(parts, fmt.Sprintf("%s in %s", capacity.Amount(h.Promised), h.Cluster))
		}
	}
	placed := strings.Join(parts, " and ")
	c.setPlaced(in, p, status, placed)
	c.setProviderAccepted(in, placed)
	c.setVirtualNodeReady(in, status)
	c.setReady(in, p, status)
}

// setEnded sets the conditions of a Reservation that requests nothing any more.
func (c conditions) setEnded(in Input, status *broker.ReservationStatus) {
	reason, message := in.endedReason()
	for _, kind := range []string{broker.ConditionLocked, broker.ConditionQueued, broker.ConditionProviderAccepted, broker.ConditionVirtualNodeReady, broker.ConditionReady} {
		c.set(kind, false, reason, message)
	}
	var releasing []string
	for _, h := range in.Holds() {
		if h.Unconfirmed != nil {
			releasing = append(releasing, h.Cluster)
		}
	}
	if len(releasing) > 0 {
		message := fmt.Sprintf("Waiting for %s to confirm the release.", strings.Join(releasing, ", "))
		if used := status.Used; used != nil && used.Count > 0 {
			message += fmt.Sprintf(" Pods of %s that still run there: %d.", in.Reservation.Spec.RequesterID, used.Count)
		}
		c.set(broker.ConditionProviderReleased, false, reasonWaitingForProvider, message)
	} else if in.ended() {
		c.set(broker.ConditionProviderReleased, true, reasonConfirmed, "No provider holds capacity for the Reservation.")
	}
}

// endedReason explains why the Reservation requests nothing any more. Why a lease ended
// is known only when it ends: then the status says so.
func (in Input) endedReason() (reason, message string) {
	r := in.Reservation
	before := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady)
	invalid := invalidReason(&r.Spec)
	_, ending, _ := in.leaseEnd()
	switch {
	case in.Deleted():
		return broker.ReasonReleased, broker.MessageReleased
	case r.Status.Phase == broker.ReservationReleased && before != nil:
		return before.Reason, before.Message
	case in.leaseEnded() && ending == ReasonExpired:
		return ReasonExpired, fmt.Sprintf("The lease of %s has ended without a renewal. Create another Reservation for more time.", in.Settings.Duration(r.Spec.Duration))
	case in.leaseEnded():
		return ReasonConsumerSilent, fmt.Sprintf("The broker has not heard from %s for %s. Check that its agent runs and can reach the broker.", r.Spec.RequesterID, in.Settings.DefaultLease)
	case in.ended():
		return broker.ReasonReleased, broker.MessageReleased
	case invalid != "":
		return reasonInvalidSpec, invalid
	}
	return reasonNothingRequested, "The Reservation requests no capacity."
}

// setPlaced sets Locked and Queued.
func (c conditions) setPlaced(in Input, p Plan, status *broker.ReservationStatus, placed string) {
	if p.Missing.Empty() {
		c.set(broker.ConditionLocked, true, reasonHoldCreated, fmt.Sprintf("The ledger holds %s.", placed))
		c.set(broker.ConditionQueued, false, reasonPlaced, "All requested capacity has been placed.")
		return
	}
	if p.Impossible.Reason != "" {
		c.set(broker.ConditionLocked, false, p.Impossible.Reason, p.Impossible.message)
		c.set(broker.ConditionQueued, false, p.Impossible.Reason, p.Impossible.message)
		return
	}
	waiting := capacity.Amount(p.Missing) + " are waiting"
	if len(p.Missing.PodSets) == 0 || p.Missing.Pods() == 1 {
		waiting = capacity.Amount(p.Missing) + " is waiting"
	}
	if placed == "" {
		c.set(broker.ConditionLocked, false, reasonNoHold, "No provider holds capacity yet.")
	} else {
		c.set(broker.ConditionLocked, false, reasonPartiallyHeld, fmt.Sprintf("The ledger holds %s; %s for capacity.", placed, waiting))
	}
	if p.gaveUp {
		c.set(broker.ConditionQueued, false, ReasonDeadlineExceeded, fmt.Sprintf("%s not placed within the deadline of %s. Create another Reservation for the rest.",
			strings.TrimSuffix(waiting, " waiting"), in.Reservation.Spec.Deadline.Duration))
	} else if p.blockedBy != "" {
		c.set(broker.ConditionQueued, true, reasonWaitingForRelease, fmt.Sprintf("%s: %s must first release an earlier Reservation of the same name.", waiting, p.blockedBy))
	} else if !p.overQuota.Empty() && p.Decision == nil {
		c.set(broker.ConditionQueued, true, ReasonQuotaReached, fmt.Sprintf("%s: %s", waiting, in.quotaMessage()))
	} else {
		message := fmt.Sprintf("%s for capacity. %s%s", waiting, rejectionsMessage(in.Reservation.Spec.RequesterID, status.Decision), in.queueMessage())
		if !p.overQuota.Empty() {
			message += fmt.Sprintf(" Its quota has no room for %s. %s", capacity.Amount(p.overQuota), in.quotaMessage())
		}
		c.set(broker.ConditionQueued, true, ReasonInsufficientCapacity, message)
	}
}

// queueMessage says who must be placed first, and whether the priority is too high.
func (in Input) queueMessage() string {
	var message string
	if in.First != nil {
		message = fmt.Sprintf(" It is number %d in the queue: what the first one waits for stays free.", in.Position)
	}
	if priority := in.Reservation.Spec.Priority; priority > in.Settings.MaxPriority {
		message += fmt.Sprintf(" Its priority %d counts as %d, the maximum (quotas.maxPriority of the BrokerConfig).", priority, in.Settings.MaxPriority)
	}
	return message
}

// rejectionsMessage lists the providers and why each of them was not chosen. It is for the
// consumer to see.
func rejectionsMessage(requester string, decision *broker.Decision) string {
	var reasons []string
	var more, closed int32
	if seen := decide.ForConsumer(decision); seen != nil {
		for _, rejection := range seen.Rejections {
			if len(reasons) == maxNamed {
				more++
				continue
			}
			reasons = append(reasons, fmt.Sprintf("%s: %s", rejection.Cluster, rejection.Message))
		}
		for _, unlisted := range seen.RejectionCounts {
			if unlisted.Reason == capacity.ReasonConsumerNotAdmitted {
				closed += unlisted.Count
			} else {
				more += unlisted.Count
			}
		}
	}
	if more > 0 {
		reasons = append(reasons, fmt.Sprintf("And %d more, see status.decision.", more))
	}
	if closed > 0 {
		reasons = append(reasons, capacity.NotAdmitted(closed, requester))
	}
	if len(reasons) == 0 {
		return fmt.Sprintf("No cluster except %s has sent an advertisement. Check that the agents of the providers are running.", requester)
	}
	return strings.Join(reasons, " ")
}

func (c conditions) setProviderAccepted(in Input, placed string) {
	var pending []string
	for _, h := range in.Holds() {
		if waiting := ledger.Pending(h.Hold); !waiting.Empty() {
			pending = append(pending, fmt.Sprintf("%s to accept %s", h.Cluster, capacity.Amount(waiting)))
		}
	}
	switch {
	case len(pending) > 0:
		c.set(broker.ConditionProviderAccepted, false, reasonWaitingForProvider, fmt.Sprintf("Waiting for %s.", strings.Join(pending, " and ")))
	case placed != "":
		c.set(broker.ConditionProviderAccepted, true, reasonAccepted, fmt.Sprintf("The providers have accepted %s.", placed))
	default:
		c.set(broker.ConditionProviderAccepted, false, reasonNoHold, "No provider holds capacity yet.")
	}
}

func (c conditions) setVirtualNodeReady(in Input, status *broker.ReservationStatus) {
	var waiting []string
	for _, a := range status.Allocations {
		if !a.VirtualNodeReady {
			waiting = append(waiting, a.Cluster)
		}
	}
	switch {
	case len(status.Allocations) == 0:
		c.set(broker.ConditionVirtualNodeReady, false, reasonNoHold, "No provider holds capacity yet.")
	case len(waiting) > 0:
		c.set(broker.ConditionVirtualNodeReady, false, reasonWaitingForVirtualNode, fmt.Sprintf("Waiting for %s to report that its virtual node for %s is ready.", in.Reservation.Spec.RequesterID, strings.Join(waiting, ", ")))
	default:
		c.set(broker.ConditionVirtualNodeReady, true, reasonVirtualNodeReady, fmt.Sprintf("The virtual nodes provide %s.", status.Summary))
	}
}

// setReady summarizes the other conditions: the first that is not as desired is the
// reason for which the Reservation is not ready.
func (c conditions) setReady(in Input, p Plan, status *broker.ReservationStatus) {
	if p.gaveUp || p.Impossible.Reason != "" {
		queued := meta.FindStatusCondition(*c.list, broker.ConditionQueued)
		c.set(broker.ConditionReady, false, queued.Reason, queued.Message)
		return
	}
	for _, kind := range []string{broker.ConditionQueued, broker.ConditionProviderAccepted, broker.ConditionVirtualNodeReady} {
		condition := meta.FindStatusCondition(*c.list, kind)
		if bad := kind == broker.ConditionQueued; (condition.Status == metav1.ConditionTrue) == bad {
			c.set(broker.ConditionReady, false, condition.Reason, condition.Message)
			return
		}
	}
	c.set(broker.ConditionReady, true, reasonReady, fmt.Sprintf("All requested capacity can be used: %s.", status.Summary))
}
