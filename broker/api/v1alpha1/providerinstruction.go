package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ProviderInstructionSpec is a hold in the broker's ledger that this cluster is to
// provide. The provider's agent writes it from the broker's ledger.
type ProviderInstructionSpec struct {
	// reservationName is the name of the broker's Reservation.
	ReservationName string `json:"reservationName"`
	// reservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
	// requesterClusterID is the cluster ID of the consumer.
	RequesterClusterID string `json:"requesterClusterID"`
	// requesterPeerKey is the consumer's public key as the broker knows it. It is
	// ignored if another key of the consumer is pinned.
	RequesterPeerKey string `json:"requesterPeerKey,omitempty"`
	// requestedCPU repeats requestedResources.cpu for older clients.
	RequestedCPU resource.Quantity `json:"requestedCPU"`
	// requestedMemory repeats requestedResources.memory for older clients.
	RequestedMemory resource.Quantity `json:"requestedMemory"`
	// requestedResources is the total to hold for the consumer.
	RequestedResources ResourceQuantities `json:"requestedResources"`
	// podSets are the pods that the total is for. Empty for a divisible total.
	PodSets []PodSet `json:"podSets,omitempty"`
	// releasing is true if the provider is to release the hold.
	Releasing bool `json:"releasing,omitempty"`
	// attempt of the hold. The provider accepts or refuses this attempt.
	Attempt int64 `json:"attempt"`
	// answerWithin is how long the broker waits for the answer to the attempt, as it said when
	// this cluster first saw the attempt. Unset if an older broker did not say it.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="answerWithin must be a duration of 0s or more, such as 30s; a day is 24h"
	AnswerWithin *metav1.Duration `json:"answerWithin,omitempty"`
}

// ProviderInstructionStatus is the observed state of the hold at the provider. The provider's agent writes it.
type ProviderInstructionStatus struct {
	// enforced is true if the provider holds the capacity of observedAttempt.
	// +optional
	Enforced bool `json:"enforced"`
	// held is the capacity that the provider holds: that of the current attempt or, if
	// this attempt is refused or undecided, of an earlier one.
	Held *HeldCapacity `json:"held,omitempty"`
	// accepted is what the provider held before, while it decides on a larger hold. Unset otherwise.
	Accepted *HeldCapacity `json:"accepted,omitempty"`
	// leaveBy is when the guests must have left that use what this cluster last withdrew of an accepted hold. Unset
	// if it has not withdrawn anything, or has accepted a larger hold since.
	LeaveBy *metav1.Time `json:"leaveBy,omitempty"`
	// conditions of the instruction: Enforced and Proven.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedAttempt is the spec.attempt that the status was computed for.
	ObservedAttempt int64 `json:"observedAttempt,omitempty"`
	// observedGeneration is the metadata.generation that the status was computed for.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// ProviderInstruction instructs a provider to hold capacity for a consumer. There is
// one for each hold in the provider's cluster.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=pinst,categories=spillway
// +kubebuilder:printcolumn:name="Requester",type=string,JSONPath=`.spec.requesterClusterID`
// +kubebuilder:printcolumn:name="CPU",type=string,JSONPath=`.spec.requestedCPU`
// +kubebuilder:printcolumn:name="Memory",type=string,JSONPath=`.spec.requestedMemory`
// +kubebuilder:printcolumn:name="Held CPU",type=string,JSONPath=`.status.held.totals.cpu`
// +kubebuilder:printcolumn:name="Enforced",type=boolean,JSONPath=`.status.enforced`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Enforced")].reason`
// +kubebuilder:printcolumn:name="Leave By",type=string,JSONPath=`.status.leaveBy`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Enforced")].message`
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
	WithUndecoded   `json:"-"`
}
