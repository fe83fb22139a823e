package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// OverflowPolicySpec says what may overflow from the namespaces it selects, and
// where. Where several select a namespace, the first by name counts.
type OverflowPolicySpec struct {
	// NamespaceSelector picks namespaces by label; all opted-in ones where empty.
	// +optional
	NamespaceSelector metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	// Placement is copied into each ask.
	// +optional
	Placement *Placement `json:"placement,omitempty"`
	// Budget is copied into each ask.
	// +optional
	Budget *Budget `json:"budget,omitempty"`
	// MaxResources is the most that one namespace may have asked for at a time.
	// +optional
	MaxResources *ResourceQuantities `json:"maxResources,omitempty"`
	// Duration is copied into each ask.
	// +optional
	Duration *metav1.Duration `json:"duration,omitempty"`
}

// OverflowPolicy says what may overflow where.
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
