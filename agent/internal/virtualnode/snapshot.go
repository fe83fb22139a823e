package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	nodeutil "k8s.io/component-helpers/node/util"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/agent/internal/podindex"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Snapshot is the observed state of one provider's virtual node.
type Snapshot struct {
	Provider string
	// Grants by the name of their instruction.
	Grants []Grant
	// Ungranted pods run on the virtual node without a grant, Finished ones have
	// ended there. Neither includes pods of DaemonSets.
	Ungranted, Finished Pods
	// DaemonPods is the number of DaemonSets' pods that are on the node or wait for
	// it.
	DaemonPods int32
	// OptedIn are the opted-in namespaces, sorted; only if there is a grant for a
	// Reservation of the hub.
	OptedIn []string
	// Node is nil if there is none.
	Node *corev1.Node
}

// inUse reports whether pods on the virtual node have not finished.
func (s *Snapshot) inUse() bool {
	return s.Ungranted.Count > 0 || slices.ContainsFunc(s.Grants, func(g Grant) bool { return g.Bound.Count > 0 })
}

// boundPods is the number of pods that use an instruction's grant.
func (s *Snapshot) boundPods(instruction types.UID) int32 {
	i := slices.IndexFunc(s.Grants, func(g Grant) bool { return g.Instruction.UID == instruction })
	if i < 0 {
		return 0
	}
	return s.Grants[i].Bound.Count
}

// holdsOf returns the grants as what pods may use.
func holdsOf(grants []Grant) *charge.Index[demand.Key] {
	holds := make([]charge.Hold[demand.Key], len(grants))
	for i, g := range grants {
		holds[i] = charge.Hold[demand.Key]{Namespace: g.Instruction.Spec.SourceNamespace, Label: charge.Label(g.Instruction.Spec.ReservationName), ByHand: g.ByHand()}
		if g.Reservation == nil {
			continue
		}
		if key, keyed := demand.KeyOfReservation(g.Reservation); keyed {
			holds[i].Key = key
		}
	}
	return charge.NewIndex(holds)
}

// gather reads a Snapshot. Instructions and bound pods come from the given
// reader: the cache, or the API server if something irreversible depends on them.
func (r *Reconciler) gather(ctx context.Context, reader client.Reader, provider string) (*Snapshot, error) {
	grants, err := r.grants(ctx, reader, provider)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Provider: provider, Grants: grants}
	if slices.ContainsFunc(grants, func(g Grant) bool { return g.Instruction.Spec.FromHub() }) {
		if s.OptedIn, err = r.optedIn(ctx); err != nil {
			return nil, err
		}
	}
	nodeName := broker.VirtualNodeName(provider)
	index := r.Pods
	if reader != r.client {
		if index, err = readIndex(ctx, reader, nodeName); err != nil {
			return nil, err
		}
		s.DaemonPods = int32(len(r.Pods.WaitingDaemons(nodeName)))
	}
	if err := index.WaitSynced(ctx); err != nil {
		return nil, err
	}
	s.Count(index, r.ResolveOwners(ctx))
	s.Node, err = session.Node(ctx, r.client, provider)
	return s, err
}

// Count adds the pods on the virtual node to the grants that they use.
func (s *Snapshot) Count(index *podindex.Index, resolve demand.Resolve) {
	holds := holdsOf(s.Grants)
	for _, group := range index.OnNode(broker.VirtualNodeName(s.Provider)) {
		pods := Pods{Count: group.Count, Requests: group.Requests, Namespaces: []string{group.Namespace}, list: []func() []*corev1.Pod{func() []*corev1.Pod { return index.Members(group.Key) }}}
		switch group.Use {
		case podindex.Daemon:
			s.DaemonPods += pods.Count
		case podindex.Ended:
			s.Finished.add(pods)
		case podindex.Runs:
			if i, ok := charge.Of(group.Pod(resolve), holds); ok {
				s.Grants[i].Bound.add(pods)
			} else {
				s.Ungranted.add(pods)
			}
		}
	}
}

// readIndex returns an Index of the pods that are on a node now.
func readIndex(ctx context.Context, reader client.Reader, nodeName string) (*podindex.Index, error) {
	var bound corev1.PodList
	if err := reader.List(ctx, &bound, client.MatchingFields{indexNode: nodeName}); err != nil {
		return nil, fmt.Errorf("listing pods on node %s: %w", nodeName, err)
	}
	index := podindex.New("")
	for i := range bound.Items {
		index.Set(&bound.Items[i])
	}
	return index, nil
}

// optedIn lists the opted-in namespaces, sorted.
func (r *Reconciler) optedIn(ctx context.Context) (names []string, err error) {
	var all corev1.NamespaceList
	if err := r.client.List(ctx, &all, client.MatchingLabels{broker.LabelOverflow: broker.OverflowEnabled}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing opted-in namespaces: %w", err)
	}
	for i := range all.Items {
		if all.Items[i].DeletionTimestamp == nil {
			names = append(names, all.Items[i].Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// grants reads a provider's instructions and the Reservations that they are for.
func (r *Reconciler) grants(ctx context.Context, reader client.Reader, provider string) ([]Grant, error) {
	instructions, err := r.instructions(ctx, reader, func(spec broker.ReservationInstructionSpec) bool { return spec.TargetClusterID == provider })
	var grants []Grant
	for i := range instructions {
		g := Grant{Instruction: &instructions[i], Limit: -1}
		if g.Reservation, err = r.reservationOf(ctx, g.Instruction); err != nil {
			return nil, err
		}
		if g.Reservation != nil {
			g.Limit = podLimit(&g.Reservation.Spec, g.Instruction, r.releaseOf(g.Reservation))
		}
		grants = append(grants, g)
	}
	return grants, err
}

// podLimit is the number of pods to keep capacity for under an instruction;
// negative for no limit. A release in progress, nil if there is none, limits every
// instruction, so that no node grows before the release has taken account of it.
// Otherwise the Reservation's retained pods limit the attempts that were in force
// when the count was lowered, not later ones, and none once the count is raised.
func podLimit(spec *broker.ReservationSpec, in *broker.ReservationInstruction, release []broker.RetainedPods) int32 {
	isProvider := func(at broker.RetainedPods) bool { return at.Cluster == in.Spec.TargetClusterID }
	if release != nil {
		if i := slices.IndexFunc(release, isProvider); i >= 0 {
			return release[i].Count
		}
		return 0
	}
	i := slices.IndexFunc(spec.Retained, isProvider)
	if i < 0 || in.Spec.Attempt > spec.Retained[i].Attempt || PodsOf(spec.PodSets) > spec.RetainedCount() {
		return -1
	}
	return spec.Retained[i].Count
}

// reservationOf is the Reservation that an instruction is for; nil once that one
// is gone, even if another has its name. It must not be changed.
func (r *Reconciler) reservationOf(ctx context.Context, in *broker.ReservationInstruction) (*broker.Reservation, error) {
	if in.Spec.FromHub() {
		return nil, nil
	}
	reservation := &broker.Reservation{}
	err := r.client.Get(ctx, client.ObjectKey{Namespace: in.Spec.SourceNamespace, Name: in.Spec.SourceName}, reservation, client.UnsafeDisableDeepCopy)
	if apierrors.IsNotFound(err) || err == nil && in.Spec.SourceUID != reservation.UID {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading Reservation %s/%s: %w", in.Spec.SourceNamespace, in.Spec.SourceName, err)
	}
	return reservation, nil
}

// Instructions lists the ReservationInstructions for a Reservation, by name. They must not be
// changed.
func (r *Reconciler) Instructions(ctx context.Context, reservation *broker.Reservation) ([]broker.ReservationInstruction, error) {
	return r.instructions(ctx, r.client, func(spec broker.ReservationInstructionSpec) bool { return spec.SourceUID == reservation.UID })
}

func (r *Reconciler) instructions(ctx context.Context, reader client.Reader, match func(broker.ReservationInstructionSpec) bool) ([]broker.ReservationInstruction, error) {
	var all broker.ReservationInstructionList
	if err := reader.List(ctx, &all, client.InNamespace(r.InstructionNamespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing ReservationInstructions: %w", err)
	}
	matching := slices.DeleteFunc(all.Items, func(in broker.ReservationInstruction) bool { return !match(in.Spec) })
	slices.SortFunc(matching, func(a, b broker.ReservationInstruction) int { return cmp.Compare(a.Name, b.Name) })
	return matching, nil
}

// indexNode is the field selector of pods by the node they are bound to.
const indexNode = "spec.nodeName"

// IsVirtual reports whether a node is the virtual node of a provider, and not one of this
// cluster that has its name.
func IsVirtual(node *corev1.Node, provider string) bool {
	return node.Name == broker.VirtualNodeName(provider) && node.Labels[broker.LabelProvider] == provider
}

// boundTo returns the provider whose virtual node has a name; empty for a node of this
// cluster. A node that does not exist counts as virtual if it is named as one.
func boundTo(ctx context.Context, reader client.Reader, nodeName string) (provider string, err error) {
	if provider = podindex.ProviderOf(nodeName); provider == "" {
		return "", nil
	}
	node, err := session.Node(ctx, reader, provider)
	if err != nil || node != nil && !IsVirtual(node, provider) {
		return "", err
	}
	return provider, nil
}

// ReadyCondition is the condition Ready of a node; nil if it has none, or if there is
// no node.
func ReadyCondition(node *corev1.Node) *corev1.NodeCondition {
	if node == nil {
		return nil
	}
	_, ready := nodeutil.GetNodeCondition(&node.Status, corev1.NodeReady)
	return ready
}

func nodeReady(node *corev1.Node) bool {
	ready := ReadyCondition(node)
	return ready != nil && ready.Status == corev1.ConditionTrue
}

// ResolveOwners looks up the controllers of owners: those that demand.Resolvable names in the
// cache, each once, and others with Options.Owners.
func (r *Reconciler) ResolveOwners(ctx context.Context) demand.Resolve {
	owners := map[types.UID]*metav1.PartialObjectMetadata{}
	return func(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		kind, ok := demand.Resolvable(ref)
		if !ok && r.Owners == nil {
			return nil, true
		} else if !ok {
			return r.Owners(namespace, ref)
		}
		owner, known := owners[ref.UID]
		if !known {
			owner = &metav1.PartialObjectMetadata{}
			owner.SetGroupVersionKind(kind)
			if err := r.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: ref.Name}, owner, client.UnsafeDisableDeepCopy); err != nil || owner.UID != ref.UID {
				owner = nil
			}
			owners[ref.UID] = owner
		}
		if owner == nil {
			return nil, false
		}
		return metav1.GetControllerOf(owner), true
	}
}
