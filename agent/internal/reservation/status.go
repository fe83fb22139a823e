package reservation

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// state is what one reconciliation of a Reservation works with. The status follows
// from it alone.
type state struct {
	// id of the reservation at the broker.
	id    string
	local *broker.Reservation
	// view is the broker's copy, nil if none is known.
	view *protocol.ConsumerView
	// synced is whether the mirror is complete: a nil view then means that the
	// broker has no copy.
	synced       bool
	instructions []broker.ReservationInstruction
	reported     metav1.Condition
	// reportErr is returned after the status that shows it is written.
	reportErr error
	now       time.Time
}

// computeStatus returns the status that the local Reservation should have: the
// broker's, with the conditions of this cluster instead of the broker's.
func computeStatus(s *state) broker.ReservationStatus {
	before := &s.local.Status
	status := broker.ReservationStatus{}
	switch {
	case s.view != nil:
		s.view.Status.DeepCopyInto(&status)
		status.ID = s.view.ID
		status.ObservedGeneration = s.view.SourceGeneration
	case s.synced:
		status.ID = before.ID
		status.Phase = broker.ReservationPending
	default:
		before.DeepCopyInto(&status)
	}
	if s.view == nil && s.reported.Reason == reasonNamespaceUnmappable {
		status.Phase = broker.ReservationFailed
	}
	status.Conditions = slices.DeleteFunc(status.Conditions, func(c metav1.Condition) bool { return slices.Contains(localConditions, c.Type) })
	if s.view != nil {
		for i := range status.Conditions {
			status.Conditions[i].ObservedGeneration = s.view.SourceGeneration
		}
	}

	set := func(condition metav1.Condition) {
		// The former condition carries the time of the last transition.
		if former := meta.FindStatusCondition(before.Conditions, condition.Type); former != nil {
			status.Conditions = append(status.Conditions, *former)
		}
		condition.LastTransitionTime = metav1.NewTime(s.now)
		condition.ObservedGeneration = s.local.Generation
		meta.SetStatusCondition(&status.Conditions, condition)
	}
	set(s.reported)
	for i := range status.Allocations {
		allocation := &status.Allocations[i]
		allocation.VirtualNodeReady = isTrue(find(s.instructions, allocation), broker.ConditionVirtualNodeReady)
		allocation.CarriedPods = 0
		if !allocation.VirtualNodeReady {
			allocation.CarriedPods = carriedPods(s.instructions, allocation)
		}
	}
	if len(status.Allocations) > 0 {
		set(allTrue(&status, s.instructions, broker.ConditionPeered))
		set(allTrue(&status, s.instructions, broker.ConditionVirtualNodeReady))
	}
	set(ready(s.local, &status, s.instructions, s.reported))
	status.Used = used(&s.local.Spec, s.instructions)
	status.Owner, status.Wanted = ownerOf(s.local), capacity.Wanted(&s.local.Spec)
	return status
}

// ownerOf returns whose pods a Reservation is for.
func ownerOf(r *broker.Reservation) string {
	if _, ofPods := demand.KeyOfReservation(r); !ofPods || len(r.OwnerReferences) == 0 {
		return "by hand"
	}
	return controllerOf(r)
}

// controllerOf is the kind and name of the first owner of a Reservation; empty without one.
func controllerOf(r *broker.Reservation) string {
	if len(r.OwnerReferences) == 0 {
		return ""
	}
	return r.OwnerReferences[0].Kind + "/" + r.OwnerReferences[0].Name
}

// find returns the instruction for the current amount of an allocation, nil if
// there is none.
func find(instructions []broker.ReservationInstruction, allocation *broker.Allocation) *broker.ReservationInstruction {
	i := slices.IndexFunc(instructions, func(in broker.ReservationInstruction) bool { return instruction.Matches(&in, allocation) })
	if i < 0 {
		return nil
	}
	return &instructions[i]
}

// isTrue reports whether a condition is true for an instruction's current attempt.
func isTrue(instruction *broker.ReservationInstruction, condition string) bool {
	return instruction != nil && instruction.Status.ObservedAttempt == instruction.Spec.Attempt &&
		meta.IsStatusConditionTrue(instruction.Status.Conditions, condition)
}

// carriedPods returns how many pods of an allocation the virtual node has capacity
// for while it is being resized.
func carriedPods(instructions []broker.ReservationInstruction, allocation *broker.Allocation) int32 {
	for i := range instructions {
		if in := &instructions[i]; in.Spec.TargetClusterID == allocation.Cluster && in.DeletionTimestamp == nil && in.Status.Carried != nil {
			return min(in.Status.Carried.Pods(), podsOf(allocation))
		}
	}
	return 0
}

// podsOf returns the number of pods of an allocation; 0 for a divisible total.
func podsOf(allocation *broker.Allocation) int32 {
	return broker.HeldCapacity{PodSets: allocation.PodSets}.Pods()
}

// acknowledged reports whether the broker's view shows the virtual nodes as they
// are.
func acknowledged(view *protocol.ConsumerView, status *broker.ReservationStatus) bool {
	return slices.EqualFunc(view.Status.Allocations, status.Allocations, func(theirs, ours broker.Allocation) bool {
		return theirs.Cluster == ours.Cluster && theirs.VirtualNodeReady == ours.VirtualNodeReady
	})
}

// acknowledgement is what a status amounts to for the broker.
func acknowledgement(view *protocol.ConsumerView, status *broker.ReservationStatus) protocol.RequesterAck {
	ack := protocol.RequesterAck{ReservationUID: view.UID, Attempt: status.Attempt.Number}
	for _, allocation := range status.Allocations {
		if allocation.VirtualNodeReady {
			ack.Ready = append(ack.Ready, allocation.Cluster)
		}
	}
	return ack
}

// unusable says of the providers that have accepted why no pod can use the allocation there;
// nil if pods can use all of them, or may soon.
func unusable(view *protocol.ConsumerView, instructions []broker.ReservationInstruction) (why map[string]string) {
	for i := range view.Status.Allocations {
		allocation := &view.Status.Allocations[i]
		in := find(instructions, allocation)
		if !allocation.Accepted || !isTrue(in, broker.ConditionUnusable) {
			continue
		}
		if why == nil {
			why = map[string]string{}
		}
		why[allocation.Cluster] = meta.FindStatusCondition(in.Status.Conditions, broker.ConditionUnusable).Message
	}
	return why
}
