package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ReservationInstructionSpec is what the broker tells a consumer: what it may
// use, and where. One object for each reservation and provider.
type ReservationInstructionSpec struct {
	// ReservationName and ReservationUID identify the broker's Reservation.
	ReservationName string `json:"reservationName"`
	// ReservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
	// SourceNamespace, SourceName and SourceUID identify the Reservation in the
	// consumer's own cluster.
	// +optional
	SourceNamespace string `json:"sourceNamespace,omitempty"`
	// +optional
	SourceName string `json:"sourceName,omitempty"`
	// +optional
	SourceUID types.UID `json:"sourceUID,omitempty"`
	// TargetClusterID is the provider.
	TargetClusterID string `json:"targetClusterID"`
	// RequestedCPU and RequestedMemory repeat requestedResources for programs
	// of the system that this one grew out of.
	RequestedCPU    resource.Quantity `json:"requestedCPU"`
	RequestedMemory resource.Quantity `json:"requestedMemory"`
	// RequestedResources may be used, in all.
	RequestedResources ResourceQuantities `json:"requestedResources"`
	// PodSets that the resources are for.
	// +optional
	PodSets []PodSet `json:"podSets,omitempty"`
	// Endpoint of the provider's API server.
	// +optional
	Endpoint string `json:"endpoint,omitempty"`
	// PeerKey is the provider's public key as the broker knows it. It counts
	// only if no other is pinned.
	// +optional
	PeerKey string `json:"peerKey,omitempty"`
	// PricePerHour as "0.25 EUR", if the provider says.
	// +optional
	PricePerHour string `json:"pricePerHour,omitempty"`
	// Message for people.
	// +optional
	Message string `json:"message,omitempty"`
	// +optional
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
	// Attempt of the reservation that this allocation is of. It grows when the
	// resources or pod sets change.
	Attempt int64 `json:"attempt"`
}

// ReservationInstructionStatus says how far the consumer is.
type ReservationInstructionStatus struct {
	// Delivered is true once the agent has observed the instruction.
	// +optional
	Delivered bool `json:"delivered"`
	// Carried is what the virtual node carries for it: that of the current
	// attempt or, while the node grows or shrinks, of an earlier one.
	// +optional
	Carried *HeldCapacity `json:"carried,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// ObservedAttempt is the spec.attempt that the status answers.
	// +optional
	ObservedAttempt int64 `json:"observedAttempt,omitempty"`
	// ObservedGeneration is the metadata.generation that the status was computed for.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// ReservationInstruction tells a consumer what it may use, and where.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=rinst
// +kubebuilder:printcolumn:name="Reservation",type=string,JSONPath=`.spec.sourceName`
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.spec.targetClusterID`
// +kubebuilder:printcolumn:name="CPU",type=string,JSONPath=`.spec.requestedCPU`
// +kubebuilder:printcolumn:name="Memory",type=string,JSONPath=`.spec.requestedMemory`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ReservationInstruction struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ReservationInstructionSpec   `json:"spec"`
	Status ReservationInstructionStatus `json:"status,omitempty"`
}

// ReservationInstructionList is a list of ReservationInstruction.
// +kubebuilder:object:root=true
type ReservationInstructionList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ReservationInstruction `json:"items"`
}
