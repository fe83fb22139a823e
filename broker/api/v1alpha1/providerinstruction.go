package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ProviderInstructionSpec is what the broker tells a provider: what to set
// aside, and for whom.
type ProviderInstructionSpec struct {
	// ReservationName and ReservationUID identify the broker's Reservation.
	ReservationName string `json:"reservationName"`
	// ReservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
	// RequesterClusterID is the consumer.
	RequesterClusterID string `json:"requesterClusterID"`
	// RequesterPeerKey is the consumer's public key as the broker knows it. It
	// counts only if no other is pinned.
	// +optional
	RequesterPeerKey string `json:"requesterPeerKey,omitempty"`
	// RequestedCPU and RequestedMemory repeat requestedResources for programs
	// of the system that this one grew out of.
	RequestedCPU    resource.Quantity `json:"requestedCPU"`
	RequestedMemory resource.Quantity `json:"requestedMemory"`
	// RequestedResources to set aside, in all.
	RequestedResources ResourceQuantities `json:"requestedResources"`
	// PodSets that the resources are for.
	// +optional
	PodSets []PodSet `json:"podSets,omitempty"`
	// Releasing asks the provider to end the hold and report it gone.
	// +optional
	Releasing bool `json:"releasing,omitempty"`
	// Attempt of the hold that the provider answers to.
	Attempt int64 `json:"attempt"`
}

// ProviderInstructionStatus says what the provider has done.
type ProviderInstructionStatus struct {
	// Enforced is true when the capacity of the current attempt is set aside.
	// +optional
	Enforced bool `json:"enforced"`
	// Held is what is set aside: the capacity of the current attempt or, where that
	// was refused or is not decided yet, of an earlier one.
	// +optional
	Held *HeldCapacity `json:"held,omitempty"`
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

// ProviderInstruction tells a provider what to set aside, and for whom.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=pinst
// +kubebuilder:printcolumn:name="Requester",type=string,JSONPath=`.spec.requesterClusterID`
// +kubebuilder:printcolumn:name="CPU",type=string,JSONPath=`.spec.requestedCPU`
// +kubebuilder:printcolumn:name="Memory",type=string,JSONPath=`.spec.requestedMemory`
// +kubebuilder:printcolumn:name="Enforced",type=boolean,JSONPath=`.status.enforced`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Enforced")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ProviderInstruction struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ProviderInstructionSpec   `json:"spec"`
	Status ProviderInstructionStatus `json:"status,omitempty"`
}

// ProviderInstructionList is a list of ProviderInstruction.
// +kubebuilder:object:root=true
type ProviderInstructionList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ProviderInstruction `json:"items"`
}
