package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	reasonReleasing  = "Releasing"
	messageReleasing = "the Reservation is being released"
)

// writeStatuses writes the status of every instruction that has changed.
func (r *Reconciler) writeStatuses(ctx context.Context, s *Snapshot, p progress, unused map[types.UID]bool) error {
	for _, g := range s.Grants {
		in := g.Instruction
		status := instructionStatus(g, s, p.of(g), unused[in.UID])
		r.setWithinGrant(&status, g, s.Provider)
		if equality.Semantic.DeepEqual(in.Status, status) {
			continue
		}
		changed := in.DeepCopy()
		changed.Status = status
		err := r.client.Status().Patch(ctx, changed, client.MergeFromWithOptions(in, client.MergeFromWithOptimisticLock{}))
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("writing the status of ReservationInstruction %s: %w", in.Name, err)
		}
	}
	return nil
}

// instructionStatus computes the status of one instruction; unused is whether no
// pod can use its grant any more.
func instructionStatus(g Grant, s *Snapshot, p progress, unused bool) broker.ReservationInstructionStatus {
	in := g.Instruction
	status := *in.Status.DeepCopy()
	status.Delivered, status.ObservedAttempt, status.ObservedGeneration = true, in.Spec.Attempt, in.Generation
	set := func(kind string, ok bool, reason, message string) {
		c := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: message, ObservedGeneration: in.Generation}
		if ok {
			c.Status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&status.Conditions, c)
	}
	if status.Used = nil; g.ByHand() {
		status.Used = g.Use()
	}
	if g.Releasing() {
		if !meta.IsStatusConditionTrue(status.Conditions, broker.ConditionRequesterReleased) {
			reason, message := releaseProgress(g, s.Provider, p, unused)
			set(broker.ConditionRequesterReleased, unused, reason, message)
		}
		set(broker.ConditionVirtualNodeReady, false, reasonReleasing, messageReleasing)
		set(broker.ConditionReady, false, reasonReleasing, messageReleasing)
		status.Carried, status.UnmappedNamespaces = nil, nil
		meta.RemoveStatusCondition(&status.Conditions, broker.ConditionUnusable)
		return status
	}
	// It may be released once more.
	meta.RemoveStatusCondition(&status.Conditions, broker.ConditionRequesterReleased)
	set(broker.ConditionPeered, p.peered.Done, reasonOf(p.peered), p.message(p.peered))
	if p.ready() || p.noPod || in.Status.ObservedAttempt != in.Spec.Attempt {
		meta.RemoveStatusCondition(&status.Conditions, broker.ConditionUnusable)
	}
	if p.ready() || p.noPod {
		status.UnmappedNamespaces = nil
		if in.Spec.FromHub() {
			status.UnmappedNamespaces = slices.DeleteFunc(slices.Clone(g.namespaces(s.OptedIn)), func(name string) bool {
				_, unmapped := p.node.Namespaces[name]
				return !unmapped
			})
		}
	}
	switch {
	case p.ready():
		message := fmt.Sprintf("node %s provides %s", broker.VirtualNodeName(s.Provider), in.Spec.RequestedResources)
		set(broker.ConditionVirtualNodeReady, true, reasonOf(p.node), message)
		set(broker.ConditionReady, true, "Ready", message)
		status.Carried = &broker.HeldCapacity{Totals: in.Spec.RequestedResources, PodSets: in.Spec.PodSets}
	case p.noPod && (g.Bound.Count == 0 || !meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionVirtualNodeReady)):
		set(broker.ConditionVirtualNodeReady, false, reasonOf(p.node), p.message(p.node))
		set(broker.ConditionReady, false, reasonOf(p.node), p.message(p.node))
		if p.final && g.Bound.Count == 0 && (unused || unusable(in)) {
			set(broker.ConditionUnusable, true, reasonOf(p.node), p.node.Message)
		}
		status.Carried = nil
	case nodeReady(s.Node) && in.Status.ObservedAttempt == in.Spec.Attempt && meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionVirtualNodeReady):
		// The node is being resized for another grant and still provides this one; or no other
		// pod can use it, beside those that do.
	default:
		set(broker.ConditionVirtualNodeReady, false, reasonOf(p.node), p.message(p.node))
		set(broker.ConditionReady, false, reasonOf(p.node), p.message(p.blocking()))
		if !nodeReady(s.Node) || p.overdue && p.node.Reason == peering.ReasonGrantPending {
			status.Carried = nil
		}
	}
	return status
}

// releaseProgress is the reason and message of condition RequesterReleased.
func releaseProgress(g Grant, provider string, p progress, released bool) (reason, message string) {
	switch {
	case released:
		return "Released", "no pod of this cluster uses the capacity"
	case g.Bound.Count > 0:
		return "PodsRunning", fmt.Sprintf("pods still running in %s: %d (%s)", provider, g.Bound.Count, podNames(g.Bound.names()))
	default:
		return "Shrinking", "waiting for the virtual node to shrink: " + p.message(p.node)
	}
}

// message describes a step, with the error and the time waited.
func (p progress) message(step peering.Progress) string {
	message := step.Message
	if p.err != nil {
		message = p.err.Error()
	}
	if p.overdue && !step.Done {
		message = fmt.Sprintf("not ready after %s, retrying: %s", p.waited.Round(time.Second), message)
	}
	return message
}

func reasonOf(step peering.Progress) string {
	if step.Done {
		return cmp.Or(step.Reason, "Done")
	}
	return cmp.Or(step.Reason, "Waiting")
}

// podNames lists the first few names of pods.
func podNames(names []string) string {
	const limit = 5
	out := slices.Clone(names[:min(len(names), limit)])
	if len(names) > limit {
		out = append(out, "…")
	}
	return strings.Join(out, ", ")
}
