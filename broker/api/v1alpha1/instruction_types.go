package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ReservationInstructionSpec is what the broker tells a consumer: what it may
// use, and where. One object for each reservation and provider.
type ReservationInstructionSpec struct {
	// ReservationName is the ID of the broker's Reservation.
	ReservationName string `json:"reservationName"`
	// SourceNamespace and SourceName are the consumer's own Reservation.
	// +optional
	SourceNamespace string `json:"sourceNamespace,omitempty"`
	// +optional
	SourceName string `json:"sourceName,omitempty"`
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
	// Generation of the broker's allocation, its attempt number.
	Generation int64 `json:"generation"`
}

// ReservationInstructionStatus says how far the consumer is.
type ReservationInstructionStatus struct {
	// Delivered when the agent has seen this generation.
	// +optional
	Delivered bool `json:"delivered"`
	// Carried is what the virtual node carries for it: that of this generation,
	// or, while the node grows or shrinks, of an earlier one.
	// +optional
	Carried *HeldCapacity `json:"carried,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
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

// ProviderInstructionSpec is what the broker tells a provider: what to set
// aside, and for whom.
type ProviderInstructionSpec struct {
	// ReservationName is the ID of the broker's Reservation.
	ReservationName string `json:"reservationName"`
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
	// +optional
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
	// Generation of the broker's hold, its attempt number.
	Generation int64 `json:"generation"`
}

// ProviderInstructionStatus says what the provider has done.
type ProviderInstructionStatus struct {
	// Enforced when the capacity of this generation is set aside.
	// +optional
	Enforced bool `json:"enforced"`
	// Held is what is set aside: that of this generation, or, where this one was
	// refused or is not answered yet, of an earlier one.
	// +optional
	Held *HeldCapacity `json:"held,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
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
