package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Snapshot is the observed state of one provider's virtual node.
type Snapshot struct {
	Provider string
	// Grants by the name of their instruction.
	Grants []Grant
	// Ungranted pods run on the virtual node without a grant, Finished ones have
	// ended there. Neither includes pods of DaemonSets.
	Ungranted, Finished []*corev1.Pod
	// DaemonPods is the number of DaemonSets' pods that are on the node or wait for
	// it.
	DaemonPods int32
	// Node is nil if there is none.
	Node *corev1.Node
}

// active are all pods on the virtual node that have not finished.
func (s *Snapshot) active() []*corev1.Pod {
	pods := slices.Clone(s.Ungranted)
	for _, g := range s.Grants {
		pods = append(pods, g.Bound...)
	}
	return pods
}

// boundPods is the number of pods that use an instruction's grant.
func (s *Snapshot) boundPods(instruction types.UID) int32 {
	for _, g := range s.Grants {
		if g.Instruction.UID == instruction {
			return int32(len(g.Bound))
		}
	}
	return 0
}

// grantOf finds the grant that a pod uses. The hold label counts only for a pod
// whose key matches no grant, since users can write it.
func (s *Snapshot) grantOf(pod *corev1.Pod, resolve demand.Resolve) *Grant {
	if key, _, _, ok := demand.KeyOf(pod, resolve); ok {
		for i := range s.Grants {
			if s.Grants[i].Reservation == nil {
				continue
			}
			if k, keyed := demand.KeyOfReservation(s.Grants[i].Reservation); keyed && k == key {
				return &s.Grants[i]
			}
		}
	}
	hold := pod.Labels[broker.LabelHold]
	for i := range s.Grants {
		in := s.Grants[i].Instruction
		if hold != "" && hold == demand.HoldLabel(in.Spec.ReservationName) && in.Spec.SourceNamespace == pod.Namespace {
			return &s.Grants[i]
		}
	}
	return nil
}

// gather reads a Snapshot. Instructions and bound pods come from the given
// reader: the cache, or the API server if something irreversible depends on them.
func (r *Reconciler) gather(ctx context.Context, reader client.Reader, provider string) (*Snapshot, error) {
	grants, err := r.grants(ctx, reader, provider)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Provider: provider, Grants: grants}
	nodeName := broker.VirtualNodeName(provider)
	var bound corev1.PodList
	if err := reader.List(ctx, &bound, client.MatchingFields{IndexNode: nodeName}); err != nil {
		return nil, fmt.Errorf("listing pods on node %s: %w", nodeName, err)
	}
	resolve := ResolveOwners(ctx, r.client)
	for i := range bound.Items {
		pod := &bound.Items[i]
		switch {
		case RunsOnEveryNode(pod):
			s.DaemonPods++
		case inventory.Finished(pod):
			s.Finished = append(s.Finished, pod)
		default:
			if g := s.grantOf(pod, resolve); g != nil {
				g.Bound = append(g.Bound, pod)
			} else {
				s.Ungranted = append(s.Ungranted, pod)
			}
		}
	}
	var pending corev1.PodList
	if err := r.client.List(ctx, &pending, client.MatchingFields{indexDaemonNode: nodeName}); err != nil {
		return nil, fmt.Errorf("listing DaemonSet pods for node %s: %w", nodeName, err)
	}
	s.DaemonPods += int32(len(pending.Items))
	s.Node, err = ReadNode(ctx, r.client, provider)
	return s, err
}

// grants reads a provider's instructions and the Reservations that they are for.
func (r *Reconciler) grants(ctx context.Context, reader client.Reader, provider string) ([]Grant, error) {
	var instructions broker.ReservationInstructionList
	if err := reader.List(ctx, &instructions, client.InNamespace(r.InstructionNamespace)); err != nil {
		return nil, fmt.Errorf("listing ReservationInstructions: %w", err)
	}
	var grants []Grant
	for i := range instructions.Items {
		in := &instructions.Items[i]
		if in.Spec.TargetClusterID != provider {
			continue
		}
		reservation, err := r.reservationOf(ctx, in)
		if err != nil {
			return nil, err
		}
		g := Grant{Instruction: in, Reservation: reservation, Limit: -1}
		if reservation != nil {
			g.Limit = podLimit(&reservation.Spec, in, r.releaseOf(reservation.UID))
		}
		grants = append(grants, g)
	}
	slices.SortFunc(grants, func(a, b Grant) int { return cmp.Compare(a.Instruction.Name, b.Instruction.Name) })
	return grants, nil
}

// podLimit is the number of pods to keep capacity for under an instruction;
// negative for no limit. A release in progress decides it, or else the
// Reservation's retained pods: they limit the attempts that were in force when the
// count was lowered, not later ones, and none once the count is raised again.
func podLimit(spec *broker.ReservationSpec, in *broker.ReservationInstruction, release []broker.RetainedPods) int32 {
	retained := release
	if release == nil {
		if (broker.HeldCapacity{PodSets: spec.PodSets}).Pods() > spec.RetainedCount() {
			return -1
		}
		retained = spec.Retained
	}
	for _, at := range retained {
		if at.Cluster == in.Spec.TargetClusterID && in.Spec.Attempt <= at.Attempt {
			return at.Count
		}
	}
	return -1
}

// reservationOf is the Reservation that an instruction is for; nil once that one
// is gone, even if another has its name.
func (r *Reconciler) reservationOf(ctx context.Context, in *broker.ReservationInstruction) (*broker.Reservation, error) {
	reservation := &broker.Reservation{}
	err := r.client.Get(ctx, client.ObjectKey{Namespace: in.Spec.SourceNamespace, Name: in.Spec.SourceName}, reservation)
	if apierrors.IsNotFound(err) || err == nil && in.Spec.SourceUID != reservation.UID {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading Reservation %s/%s: %w", in.Spec.SourceNamespace, in.Spec.SourceName, err)
	}
	return reservation, nil
}

// Instructions lists the ReservationInstructions for a Reservation, by provider.
func (r *Reconciler) Instructions(ctx context.Context, reservation *broker.Reservation) ([]broker.ReservationInstruction, error) {
	var all broker.ReservationInstructionList
	if err := r.client.List(ctx, &all, client.InNamespace(r.InstructionNamespace)); err != nil {
		return nil, fmt.Errorf("listing ReservationInstructions: %w", err)
	}
	own := slices.DeleteFunc(all.Items, func(in broker.ReservationInstruction) bool { return in.Spec.SourceUID != reservation.UID })
	slices.SortFunc(own, func(a, b broker.ReservationInstruction) int {
		return cmp.Compare(a.Spec.TargetClusterID, b.Spec.TargetClusterID)
	})
	return own, nil
}
