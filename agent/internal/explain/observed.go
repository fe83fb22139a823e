package explain

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Kinds of objects that are read, as Unreadable names them.
const (
	Namespaces   = "namespaces"
	Policies     = "overflowpolicies.broker.fluidos.eu"
	Reservations = "reservations.broker.fluidos.eu"
	Instructions = "reservationinstructions.broker.fluidos.eu"
	Nodes        = "nodes"
	Events       = "events"
	Owners       = "controllers of the pod"
	PodGroups    = "PodGroups"
)

// Observed is what the caller can see of a pod, or of a Reservation.
type Observed struct {
	// Asked is what the question is about.
	Asked Object
	// System is the namespace of Spillway, spillway-system if it is empty.
	System string
	// Pod that is explained, or nil. It may be the template of a workload without pods: then it has no UID.
	Pod *corev1.Pod
	// Siblings are the pods of the workload that the question is about, with Pod.
	Siblings []corev1.Pod
	// Owner is the root owner of the pod, nil if unknown. ReservationName is the name of the
	// Reservation that serves pods of this owner and shape, empty if unknown.
	Owner           *metav1.OwnerReference
	ReservationName string
	Gang            *Gang

	Namespace *corev1.Namespace
	Policies  []broker.OverflowPolicy
	// Reservations of the namespace.
	Reservations []broker.Reservation
	Instructions []broker.ReservationInstruction
	// Nodes are the virtual ones.
	Nodes []corev1.Node
	// Events of the pod, the last of each reason.
	Events []Event

	Unreadable []Unreadable
}

// Event is an event of the pod.
type Event struct{ Reason, Message string }

// Gang is the group that a pod belongs to.
type Gang struct {
	// Group describes it, as "PodGroup train".
	Group string
	// Min is how many pods it needs, 0 if that is unknown. Members exist, and Ungated of them have no
	// scheduling gate.
	Min, Members, Ungated int32
	// Missing is whether no object describes the gang.
	Missing bool
}

func (o *Observed) unreadable(what string) bool {
	return slices.ContainsFunc(o.Unreadable, func(u Unreadable) bool { return u.What == what })
}

// permission is what is missing to read a kind of object.
func (o *Observed) permission(what string) string {
	for _, u := range o.Unreadable {
		if u.What == what && u.Permission != "" {
			return "not known: you may not " + u.Permission
		}
		if u.What == what {
			return "not known: " + u.Reason
		}
	}
	return "not known"
}

// event returns the message of the pod's last event of a reason, or of its condition, which has the reasons
// of events while it waits.
func (o *Observed) event(reason string) (message string, ok bool) {
	for _, e := range o.Events {
		if e.Reason == reason {
			return e.Message, true
		}
	}
	if c := o.waits(); c != nil && c.Reason == reason {
		return c.Message, true
	}
	return "", false
}

// waits is the condition of the pod that says what it waits for, nil if it has none.
func (o *Observed) waits() *corev1.PodCondition {
	if o.Pod != nil {
		for i := range o.Pod.Status.Conditions {
			if c := &o.Pod.Status.Conditions[i]; c.Type == broker.PodOverflow {
				return c
			}
		}
	}
	return nil
}

// reservation returns the Reservation that is asked about, that the pod uses, or that is to serve it.
func (o *Observed) reservation() *broker.Reservation {
	hold := ""
	if o.Pod != nil {
		hold = o.Pod.Labels[broker.LabelHold]
	}
	for i := range o.Reservations {
		r := &o.Reservations[i]
		switch {
		case o.Pod == nil && r.Name == o.Asked.Name,
			hold != "" && r.Status.ID != "" && charge.Label(r.Status.ID) == hold,
			o.Pod != nil && hold == "" && o.ReservationName != "" && r.Name == o.ReservationName:
			return r
		}
	}
	return nil
}

// instruction returns that of a provider for a Reservation of the broker, nil if there is none.
func (o *Observed) instruction(id, provider string) *broker.ReservationInstruction {
	for i := range o.Instructions {
		if in := &o.Instructions[i]; in.Spec.ReservationName == id && in.Spec.TargetClusterID == provider {
			return in
		}
	}
	return nil
}

// virtualNode returns the virtual node of a provider, nil if there is none.
func (o *Observed) virtualNode(provider string) *corev1.Node {
	for i := range o.Nodes {
		if o.Nodes[i].Labels[broker.LabelProvider] == provider {
			return &o.Nodes[i]
		}
	}
	return nil
}

// providerOf returns the provider that a pod is bound to, empty if it is not on a virtual node.
func (o *Observed) providerOf(pod *corev1.Pod) string {
	for i := range o.Nodes {
		if o.Nodes[i].Name == pod.Spec.NodeName {
			return o.Nodes[i].Labels[broker.LabelProvider]
		}
	}
	// Without permission to read nodes, or if the node is gone.
	if provider, ok := strings.CutPrefix(pod.Spec.NodeName, broker.VirtualNodePrefix); ok && pod.Labels[broker.LabelHold] != "" {
		return provider
	}
	return ""
}

// Policy returns the OverflowPolicy of the namespace, nil if there is none.
func (o *Observed) Policy() *broker.OverflowPolicy {
	if o.Namespace == nil {
		return nil
	}
	var policies demand.Policies
	for i := range o.Policies {
		policies.Decoded = append(policies.Decoded, &o.Policies[i])
	}
	policy, _ := policies.Of(o.Namespace) // all can be decoded
	return policy
}

// Requested sums up what the Reservations of the namespace request.
func (o *Observed) Requested() corev1.ResourceList {
	sum := corev1.ResourceList{}
	for i := range o.Reservations {
		broker.AddTo(sum, capacity.Requested(&o.Reservations[i].Spec).Totals.List())
	}
	return sum
}
