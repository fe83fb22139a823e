package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// OverflowPolicySpec limits the overflow of the selected namespaces. Users write
// it. If several policies select a namespace, the first by name applies.
type OverflowPolicySpec struct {
	// namespaceSelector selects namespaces by label. An empty selector selects all
	// namespaces that are opted in.
	// +optional
	NamespaceSelector metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	// placement is copied into each new Reservation.
	// +optional
	Placement *Placement `json:"placement,omitempty"`
	// budget is copied into each new Reservation.
	// +optional
	Budget *Budget `json:"budget,omitempty"`
	// maxResources is the maximum of resources that the Reservations of one namespace
	// request in total. No maximum if unset.
	// +optional
	MaxResources *ResourceQuantities `json:"maxResources,omitempty"`
	// duration is copied into each new Reservation.
	// +optional
	Duration *metav1.Duration `json:"duration,omitempty"`
	// returnHome moves overflowed pods back when this cluster has room for them: by eviction,
	// one at a time, within PodDisruptionBudgets. It applies to pods of ReplicaSets and
	// StatefulSets, and to others with a controller and annotation
	// broker.fluidos.eu/return-home=enabled. Pods stay where they are if unset.
	// +optional
	ReturnHome *ReturnHome `json:"returnHome,omitempty"`
}

// ReturnHome says when overflowed pods move back.
type ReturnHome struct {
	// after is how long this cluster must have had room for a pod before it moves.
	// +optional
	// +kubebuilder:default="5m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="after must be 1s to 24h"
	After *metav1.Duration `json:"after,omitempty"`
	// minimumStay is how long a pod runs on a virtual node before it moves.
	// +optional
	// +kubebuilder:default="10m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('720h')",message="minimumStay must be 1s to 720h"
	MinimumStay *metav1.Duration `json:"minimumStay,omitempty"`
}

// OverflowPolicy limits where the pods of the selected namespaces may overflow to,
// how much capacity they may use, and at which price.
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=opol
// +kubebuilder:printcolumn:name="Max CPU",type=string,JSONPath=`.spec.maxResources.cpu`
// +kubebuilder:printcolumn:name="Max Price",type=string,JSONPath=`.spec.budget.maxPricePerHour`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type OverflowPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec OverflowPolicySpec `json:"spec,omitempty"`
}

// OverflowPolicyList is a list of OverflowPolicy.
// +kubebuilder:object:root=true
type OverflowPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []OverflowPolicy `json:"items"`
}
