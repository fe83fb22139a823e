package reservation

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// localConditions are the conditions that this package writes; the others are the
// broker's.
var localConditions = []string{broker.ConditionReported, broker.ConditionPeered, broker.ConditionVirtualNodeReady, broker.ConditionReady}

// Reasons of the conditions. Condition Reported may also have a protocol code, and
// Peered and VirtualNodeReady those of the instruction.
const (
	reasonReported          = "Reported"
	reasonBrokerUnreachable = "BrokerUnreachable"
	reasonWrongRequester    = "WrongRequester"
	reasonNamespaceOfBroker = "NamespaceOfBroker"
	// reasonNamespaceUnmappable is why the Reservation fails in this cluster.
	reasonNamespaceUnmappable = "NamespaceUnmappable"

	reasonWaiting      = "Waiting"
	reasonPending      = "Pending"
	reasonQueued       = "Queued"
	reasonFailed       = "Failed"
	reasonNotReported  = "NotReported"
	reasonSettingUp    = "SettingUp"
	reasonPartialReady = "PartiallyReady"
	reasonReady        = "Ready"
	reasonReleasing    = "Releasing"
	reasonReleased     = "Released"
)

var reported = metav1.Condition{Type: broker.ConditionReported, Status: metav1.ConditionTrue, Reason: reasonReported, Message: "The broker has a copy of this Reservation."}

func notReported(reason, message string) metav1.Condition {
	return metav1.Condition{Type: broker.ConditionReported, Status: metav1.ConditionFalse, Reason: reason, Message: message}
}

// allTrue returns a condition that is true if it is for the instructions of all
// allocations, and otherwise says what the first other one waits for.
func allTrue(status *broker.ReservationStatus, instructions []broker.ReservationInstruction, condition string) metav1.Condition {
	for i := range status.Allocations {
		allocation := &status.Allocations[i]
		instruction := find(instructions, allocation)
		if isTrue(instruction, condition) {
			continue
		}
		reason := reasonWaiting
		if instruction != nil {
			if c := meta.FindStatusCondition(instruction.Status.Conditions, condition); c != nil && c.Reason != "" && c.Status != metav1.ConditionTrue {
				reason = c.Reason
			}
		}
		return metav1.Condition{Type: condition, Status: metav1.ConditionFalse, Reason: reason, Message: progress(allocation, instruction, condition)}
	}
	return metav1.Condition{Type: condition, Status: metav1.ConditionTrue, Reason: condition, Message: trueMessage(condition, status)}
}

// trueMessage returns the message of a condition that is true for all allocations.
func trueMessage(condition string, status *broker.ReservationStatus) string {
	if condition == broker.ConditionPeered {
		return fmt.Sprintf("Peered with %s.", clusters(status))
	}
	return fmt.Sprintf("The virtual nodes for %s are ready.", clusters(status))
}

// progress says what an allocation waits for.
func progress(allocation *broker.Allocation, instruction *broker.ReservationInstruction, condition string) string {
	switch {
	case !allocation.Accepted:
		return allocation.Cluster + ": waiting for the provider to accept the hold"
	case instruction == nil:
		return allocation.Cluster + ": waiting for the ReservationInstruction"
	}
	c := meta.FindStatusCondition(instruction.Status.Conditions, condition)
	if c == nil || c.Message == "" || instruction.Status.ObservedAttempt != instruction.Spec.Attempt {
		return allocation.Cluster + ": waiting for the virtual node to be resized"
	}
	return allocation.Cluster + ": " + c.Message
}

// ready returns the condition that sums up all others.
func ready(local *broker.Reservation, status *broker.ReservationStatus, instructions []broker.ReservationInstruction, reported metav1.Condition) metav1.Condition {
	condition := func(conditionStatus metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: broker.ConditionReady, Status: conditionStatus, Reason: reason, Message: message}
	}
	notReady := func(reason, message string) metav1.Condition {
		return condition(metav1.ConditionFalse, reason, message)
	}
	switch {
	case !local.DeletionTimestamp.IsZero():
		return notReady(reasonReleasing, releasing(instructions, reported))
	case len(status.Allocations) > 0:
	case reported.Reason == reasonNamespaceUnmappable:
		return notReady(reported.Reason, reported.Message)
	case reported.Status == metav1.ConditionFalse:
		return notReady(reasonNotReported, "The broker has no copy of this Reservation: "+reported.Message)
	case status.Phase == broker.ReservationFailed:
		return notReady(reasonFailed, insufficiency(status))
	case status.Phase == broker.ReservationReleased:
		if ended := meta.FindStatusCondition(status.Conditions, broker.ConditionLocked); ended != nil && ended.Status == metav1.ConditionFalse {
			return notReady(ended.Reason, ended.Message)
		}
		return notReady(reasonReleased, "The Reservation has been released.")
	case meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued):
		return notReady(reasonQueued, insufficiency(status))
	default:
		return notReady(reasonPending, "Waiting for the broker to choose a provider.")
	}
	var granted, requested int32
	for i := range status.Allocations {
		allocation := &status.Allocations[i]
		if !allocation.VirtualNodeReady {
			return notReady(reasonSettingUp, progress(allocation, find(instructions, allocation), broker.ConditionVirtualNodeReady))
		}
		granted += podsOf(allocation)
	}
	for _, set := range local.Spec.PodSets {
		requested += set.Count
	}
	switch {
	case granted < requested:
		return notReady(reasonPartialReady, fmt.Sprintf("%d of %d pods can run in %s. %s", granted, requested, clusters(status), insufficiency(status)))
	case requested == 0:
		return condition(metav1.ConditionTrue, reasonReady, fmt.Sprintf("The capacity in %s can be used.", clusters(status)))
	}
	return condition(metav1.ConditionTrue, reasonReady, fmt.Sprintf("%d of %d pods can run in %s.", requested, requested, clusters(status)))
}

// releasing says what a Reservation that is being deleted waits for.
func releasing(instructions []broker.ReservationInstruction, reported metav1.Condition) string {
	if in := unreleased(instructions); in != nil {
		if c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionRequesterReleased); c != nil && c.Message != "" {
			return in.Spec.TargetClusterID + ": " + c.Message
		}
		return in.Spec.TargetClusterID + ": waiting for pods on the virtual node to terminate"
	}
	if reported.Status == metav1.ConditionFalse {
		return reported.Message
	}
	return "Waiting for the broker to release the capacity."
}

// insufficiency says why not all requested capacity is granted, in the words of the
// broker, which knows the providers.
func insufficiency(status *broker.ReservationStatus) string {
	kind := broker.ConditionQueued
	if status.Phase == broker.ReservationFailed {
		kind = broker.ConditionLocked
	}
	if c := meta.FindStatusCondition(status.Conditions, kind); c != nil && c.Message != "" {
		return c.Message
	}
	return "Waiting for the broker to choose a provider."
}

func clusters(status *broker.ReservationStatus) string {
	var names []string
	for _, allocation := range status.Allocations {
		names = append(names, allocation.Cluster)
	}
	return strings.Join(names, ", ")
}
