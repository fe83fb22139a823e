package reservation

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// own are the conditions that this package writes; the others are the broker's.
var own = []string{broker.ConditionReported, broker.ConditionPeered, broker.ConditionVirtualNodeReady, broker.ConditionReady}

// input is everything that a local Reservation's status follows from.
type input struct {
	local *broker.Reservation
	// view is the broker's, nil where it has none or none is known.
	view *protocol.ConsumerView
	// synced is whether a nil view means that the broker has none.
	synced       bool
	instructions []broker.ReservationInstruction
	reported     metav1.Condition
	now          time.Time
}

// compute is the status that a local Reservation should have.
func compute(in input) broker.ReservationStatus {
	before := &in.local.Status
	status := broker.ReservationStatus{}
	switch {
	case in.view != nil:
		in.view.Status.DeepCopyInto(&status)
		status.ID = in.view.ID
		status.ObservedGeneration = in.view.SourceGeneration
	case in.synced:
		status.ID = before.ID
		status.Phase = broker.ReservationPending
	default:
		before.DeepCopyInto(&status)
	}
	status.Conditions = slices.DeleteFunc(status.Conditions, func(c metav1.Condition) bool { return slices.Contains(own, c.Type) })
	if in.view != nil {
		for i := range status.Conditions {
			status.Conditions[i].ObservedGeneration = in.view.SourceGeneration
		}
	}

	set := func(condition metav1.Condition) {
		// The time of the last transition is kept from what stood there before.
		if was := meta.FindStatusCondition(before.Conditions, condition.Type); was != nil {
			status.Conditions = append(status.Conditions, *was)
		}
		condition.LastTransitionTime = metav1.NewTime(in.now)
		condition.ObservedGeneration = in.local.Generation
		meta.SetStatusCondition(&status.Conditions, condition)
	}
	set(in.reported)
	for i := range status.Allocations {
		allocation := &status.Allocations[i]
		allocation.VirtualNodeReady = holds(find(in.instructions, allocation), broker.ConditionVirtualNodeReady)
		allocation.CarriedPods = 0
		if !allocation.VirtualNodeReady {
			allocation.CarriedPods = carried(in.instructions, allocation)
		}
	}
	if len(status.Allocations) > 0 {
		set(across(&status, in.instructions, broker.ConditionPeered))
		set(across(&status, in.instructions, broker.ConditionVirtualNodeReady))
	}
	set(ready(in.local, &status, in.instructions, in.reported))
	return status
}

// find returns the instruction that carries an allocation, nil where none does.
func find(instructions []broker.ReservationInstruction, allocation *broker.Allocation) *broker.ReservationInstruction {
	i := slices.IndexFunc(instructions, func(in broker.ReservationInstruction) bool { return instruction.Carries(&in, allocation) })
	if i < 0 {
		return nil
	}
	return &instructions[i]
}

// carried is for how many pods of an allocation the virtual node carries room
// while it grows from an earlier one.
func carried(instructions []broker.ReservationInstruction, allocation *broker.Allocation) int32 {
	for i := range instructions {
		if in := &instructions[i]; in.Spec.TargetClusterID == allocation.Cluster && in.DeletionTimestamp == nil && in.Status.Carried != nil {
			return min(in.Status.Carried.Pods(), broker.HeldCapacity{PodSets: allocation.PodSets}.Pods())
		}
	}
	return 0
}

// holds reports whether a condition is true for an instruction as it is now.
func holds(instruction *broker.ReservationInstruction, condition string) bool {
	if instruction == nil {
		return false
	}
	c := meta.FindStatusCondition(instruction.Status.Conditions, condition)
	return c != nil && c.Status == metav1.ConditionTrue && instruction.Status.ObservedAttempt == instruction.Spec.Attempt
}

// across sums up one condition of the instructions for all allocations.
func across(status *broker.ReservationStatus, instructions []broker.ReservationInstruction, condition string) metav1.Condition {
	for i := range status.Allocations {
		allocation := &status.Allocations[i]
		instruction := find(instructions, allocation)
		if holds(instruction, condition) {
			continue
		}
		reason, message := "Waiting", progress(allocation, instruction, condition)
		if instruction != nil {
			if c := meta.FindStatusCondition(instruction.Status.Conditions, condition); c != nil && c.Reason != "" && c.Status != metav1.ConditionTrue {
				reason = c.Reason
			}
		}
		return metav1.Condition{Type: condition, Status: metav1.ConditionFalse, Reason: reason, Message: message}
	}
	return metav1.Condition{Type: condition, Status: metav1.ConditionTrue, Reason: condition, Message: "in " + clusters(status)}
}

// progress says what an allocation waits for.
func progress(allocation *broker.Allocation, instruction *broker.ReservationInstruction, condition string) string {
	switch {
	case !allocation.Accepted:
		return allocation.Cluster + ": waiting for the provider to set the capacity aside"
	case instruction == nil:
		return allocation.Cluster + ": waiting for the instruction to use the capacity"
	}
	c := meta.FindStatusCondition(instruction.Status.Conditions, condition)
	if c == nil || c.Message == "" || instruction.Status.ObservedAttempt != instruction.Spec.Attempt {
		return allocation.Cluster + ": waiting for the virtual node to carry the capacity"
	}
	return allocation.Cluster + ": " + c.Message
}

// ready sums everything up for people.
func ready(local *broker.Reservation, status *broker.ReservationStatus, instructions []broker.ReservationInstruction, reported metav1.Condition) metav1.Condition {
	no := func(reason, message string) metav1.Condition {
		return metav1.Condition{Type: broker.ConditionReady, Status: metav1.ConditionFalse, Reason: reason, Message: message}
	}
	if !local.DeletionTimestamp.IsZero() {
		if held := unreleased(instructions); held != nil {
			message := held.Spec.TargetClusterID + ": waiting for its pods to end"
			if c := meta.FindStatusCondition(held.Status.Conditions, broker.ConditionRequesterReleased); c != nil && c.Message != "" {
				message = held.Spec.TargetClusterID + ": " + c.Message
			}
			return no("Releasing", message)
		}
		if reported.Status == metav1.ConditionFalse {
			return no("Releasing", reported.Message)
		}
		return no("Releasing", "waiting for the providers to confirm that their capacity is free")
	}
	if len(status.Allocations) == 0 {
		switch {
		case reported.Status == metav1.ConditionFalse:
			return no("NotReported", "the broker does not have this request: "+reported.Message)
		case status.Phase == broker.ReservationFailed:
			return no("Failed", why(status))
		case status.Phase == broker.ReservationReleased:
			return no("Released", "given back")
		case meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued):
			return no("Queued", why(status))
		}
		return no("Pending", "waiting for the broker to choose a provider")
	}
	for i := range status.Allocations {
		if allocation := &status.Allocations[i]; !allocation.VirtualNodeReady {
			return no("SettingUp", progress(allocation, find(instructions, allocation), broker.ConditionVirtualNodeReady))
		}
	}
	granted, asked := pods(status), int32(0)
	for _, set := range local.Spec.PodSets {
		asked += set.Count
	}
	switch {
	case granted < asked:
		return no("PartlyReady", fmt.Sprintf("%d of %d pods may run in %s. %s", granted, asked, clusters(status), why(status)))
	case asked == 0:
		return metav1.Condition{Type: broker.ConditionReady, Status: metav1.ConditionTrue, Reason: "Ready", Message: "capacity in " + clusters(status) + " may be used"}
	}
	return metav1.Condition{Type: broker.ConditionReady, Status: metav1.ConditionTrue, Reason: "Ready", Message: fmt.Sprintf("%d of %d pods may run in %s", min(granted, asked), asked, clusters(status))}
}

// why gives the reasons for a no, provider by provider: in the broker's words
// where it has any.
func why(status *broker.ReservationStatus) string {
	if c := meta.FindStatusCondition(status.Conditions, broker.ConditionLocked); c != nil && c.Message != "" && status.Phase == broker.ReservationFailed {
		return c.Message
	}
	if c := meta.FindStatusCondition(status.Conditions, broker.ConditionQueued); c != nil && c.Message != "" && c.Status == metav1.ConditionTrue {
		return c.Message
	}
	if status.Decision != nil && len(status.Decision.Rejections) > 0 {
		return "No provider has room for all of it. " + rejections(status.Decision.Rejections)
	}
	return "No provider is known to the broker."
}

func rejections(all []broker.ClusterRejection) string {
	var parts []string
	for _, r := range all {
		parts = append(parts, r.Cluster+": "+cmp.Or(r.Message, r.Reason))
	}
	return strings.Join(parts, "; ")
}

func pods(status *broker.ReservationStatus) (n int32) {
	for _, allocation := range status.Allocations {
		n += podsOf(&allocation)
	}
	return n
}

func podsOf(allocation *broker.Allocation) (n int32) {
	for _, set := range allocation.PodSets {
		n += set.Count
	}
	return n
}

func clusters(status *broker.ReservationStatus) string {
	var names []string
	for _, allocation := range status.Allocations {
		names = append(names, allocation.Cluster)
	}
	return strings.Join(names, ", ")
}

// happened is something that a change of status tells a person.
type happened struct{ kind, reason, note string }

// happenings compares two statuses of a Reservation.
func happenings(before, after *broker.ReservationStatus) []happened {
	var out []happened
	say := func(kind, reason, format string, args ...any) {
		out = append(out, happened{kind, reason, fmt.Sprintf(format, args...)})
	}
	for i := range after.Allocations {
		now := &after.Allocations[i]
		if !now.Accepted {
			continue
		}
		j := slices.IndexFunc(before.Allocations, func(a broker.Allocation) bool { return a.Cluster == now.Cluster && a.Accepted })
		if j >= 0 && (podsOf(now) < podsOf(&before.Allocations[j]) || equality.Semantic.DeepEqual(now.Resources, before.Allocations[j].Resources)) {
			continue
		}
		amount := now.Resources.String()
		if n := podsOf(now); n > 0 {
			amount = fmt.Sprintf("room for %d pods (%s)", n, amount)
		}
		if now.PricePerHour != "" {
			amount += ", " + now.PricePerHour + " per hour"
		}
		say("Normal", "Granted", "%s grants %s", now.Cluster, amount)
	}
	queued := meta.IsStatusConditionTrue(after.Conditions, broker.ConditionQueued)
	if queued && (!meta.IsStatusConditionTrue(before.Conditions, broker.ConditionQueued) || reasons(before) != reasons(after)) {
		say("Warning", "Queued", "%s", why(after))
	}
	if after.Phase == broker.ReservationFailed && before.Phase != broker.ReservationFailed {
		say("Warning", "Failed", "%s", why(after))
	}
	// What cannot be reached is tried again and said in the condition; a refusal
	// is an event.
	if now := meta.FindStatusCondition(after.Conditions, broker.ConditionReported); now != nil && now.Status == metav1.ConditionFalse && now.Reason != reasonUnreachable {
		if was := meta.FindStatusCondition(before.Conditions, broker.ConditionReported); was == nil || was.Reason != now.Reason || was.Message != now.Message {
			say("Warning", "NotReported", "%s", now.Message)
		}
	}
	if now := meta.FindStatusCondition(after.Conditions, broker.ConditionReady); now != nil && now.Status == metav1.ConditionTrue && !meta.IsStatusConditionTrue(before.Conditions, broker.ConditionReady) {
		say("Normal", "Ready", "%s", now.Message)
	}
	return out
}

// reasons is what a decision's rejections have in common while only their
// figures change.
func reasons(status *broker.ReservationStatus) string {
	if status.Decision == nil {
		return ""
	}
	var parts []string
	for _, r := range status.Decision.Rejections {
		parts = append(parts, r.Cluster+"="+r.Reason)
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

// shows reports whether the broker's view has the virtual nodes as they are.
func shows(view *protocol.ConsumerView, status *broker.ReservationStatus) bool {
	return slices.EqualFunc(view.Status.Allocations, status.Allocations, func(theirs, ours broker.Allocation) bool {
		return theirs.Cluster == ours.Cluster && theirs.VirtualNodeReady == ours.VirtualNodeReady
	})
}

// acknowledgement is what the broker is told of a status.
func acknowledgement(view *protocol.ConsumerView, status *broker.ReservationStatus) protocol.RequesterAck {
	ack := protocol.RequesterAck{ReservationUID: view.UID, Attempt: status.Attempt.Number}
	for _, allocation := range status.Allocations {
		if allocation.VirtualNodeReady {
			ack.Ready = append(ack.Ready, allocation.Cluster)
		}
	}
	return ack
}
