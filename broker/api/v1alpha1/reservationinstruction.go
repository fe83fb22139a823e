package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ReservationInstructionSpec is a grant of one provider that the consumer is to use.
// The consumer's agent writes it from the broker's Reservation.
type ReservationInstructionSpec struct {
	// reservationName is the name of the broker's Reservation.
	ReservationName string `json:"reservationName"`
	// reservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
	// sourceNamespace is the namespace of the Reservation in the consumer's cluster.
	SourceNamespace string `json:"sourceNamespace,omitempty"`
	// sourceName is the name of the Reservation in the consumer's cluster.
	SourceName string `json:"sourceName,omitempty"`
	// sourceUID is the UID of the Reservation in the consumer's cluster.
	SourceUID types.UID `json:"sourceUID,omitempty"`
	// podSelector is that of the Reservation: it limits the pods that may use the grant.
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.key.indexOf('/') < 254 && e.key.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && (e.operator in ['In', 'NotIn'] ? has(e.values) && size(e.values) > 0 && e.values.all(v, v.matches('^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$')) : e.operator in ['Exists', 'DoesNotExist'] && (!has(e.values) || size(e.values) == 0)))",message="matchExpressions must have the key of a label, and operator In or NotIn with its values, or Exists or DoesNotExist without, such as {key: team, operator: In, values: [shop]}"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchLabels) || self.matchLabels.all(k, k.indexOf('/') < 254 && k.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && self.matchLabels[k].matches('^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$'))",message="matchLabels must be keys and values of labels, such as {team: shop}"
	PodSelector *metav1.LabelSelector `json:"podSelector,omitempty"`
	// namespaces are those of a Reservation that was created in the hub.
	Namespaces []string `json:"namespaces,omitempty"`
	// releasing is true once a Reservation of the hub has ended: no new pod may use the
	// grant, those that do may run on.
	Releasing bool `json:"releasing,omitempty"`
	// suspended is true while the provider has not accepted what the broker has placed there again, after an
	// earlier grant: no new pod may use the grant, those that do may run on.
	Suspended bool `json:"suspended,omitempty"`
	// targetClusterID is the cluster ID of the provider.
	TargetClusterID string `json:"targetClusterID"`
	// requestedCPU repeats requestedResources.cpu for older clients.
	RequestedCPU resource.Quantity `json:"requestedCPU"`
	// requestedMemory repeats requestedResources.memory for older clients.
	RequestedMemory resource.Quantity `json:"requestedMemory"`
	// requestedResources is the total that the consumer may use.
	RequestedResources ResourceQuantities `json:"requestedResources"`
	// podSets are the pods that the total is for. Empty for a divisible total.
	PodSets []PodSet `json:"podSets,omitempty"`
	// nodeLabels are the labels of the provider's nodes by which the pods select nodes. The virtual node gets them.
	NodeLabels map[string]string `json:"nodeLabels,omitempty"`
	// podSecurity is the Pod Security Standard that guests must comply with at the provider:
	// no other pod uses a grant that was reserved by hand.
	PodSecurity string `json:"podSecurity,omitempty"`
	// endpoint is the URL of the provider's API server.
	Endpoint string `json:"endpoint,omitempty"`
	// peerKey is the provider's public key as the broker knows it. It is ignored if
	// another key of the provider is pinned.
	PeerKey string `json:"peerKey,omitempty"`
	// pricePerHour of the grant, such as "0.25 EUR". Empty if the provider states no price.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)? [A-Z]{3}$`
	PricePerHour string `json:"pricePerHour,omitempty"`
	// message is the status.summary of the broker's Reservation.
	Message string `json:"message,omitempty"`
	// expiresAt is the time at which the Reservation expires. Unset if it does not.
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
	// withdrawal is set once the provider has lowered the grant after it had accepted
	// more. If nothing remains of the grant, requestedResources is zero.
	Withdrawal *GrantWithdrawal `json:"withdrawal,omitempty"`
	// attempt of the grant. It increases when the resources or pod sets change.
	Attempt int64 `json:"attempt"`
}

// GrantWithdrawal is by when pods beyond the grant must leave the virtual node.
type GrantWithdrawal struct {
	// attempt identifies the withdrawal: that of the broker's Reservation.
	Attempt int64 `json:"attempt"`
	// leaveBy is when they must have left, by this cluster's clock.
	LeaveBy metav1.Time `json:"leaveBy"`
}

// FromHub reports whether the Reservation was created in the hub: the consumer has none.
func (s *ReservationInstructionSpec) FromHub() bool { return s.SourceName == "" }

// ReservationInstructionStatus is the observed state of the grant at the consumer. The consumer's agent writes it.
type ReservationInstructionStatus struct {
	// delivered is true once the agent has processed the instruction.
	// +optional
	Delivered bool `json:"delivered"`
	// carried is the part of the virtual node's capacity that is for this grant: that
	// of the current attempt or, while the node is resized, of an earlier one.
	Carried *HeldCapacity `json:"carried,omitempty"`
	// used is the part of the grant that pods use. Only for Reservations made by hand.
	Used *Use `json:"used,omitempty"`
	// unmappedNamespaces are those of the grant's namespaces whose pods cannot use the
	// virtual node. Only for Reservations of the hub: others serve one namespace.
	UnmappedNamespaces []string `json:"unmappedNamespaces,omitempty"`
	// leftAttempt is the spec.withdrawal.attempt of the last withdrawal after which all
	// pods beyond the grant have left.
	LeftAttempt int64 `json:"leftAttempt,omitempty"`
	// conditions of the instruction: Peered, VirtualNodeReady, WithinGrant,
	// RequesterReleased, Unusable and their summary Ready.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedAttempt is the spec.attempt that the status was computed for.
	ObservedAttempt int64 `json:"observedAttempt,omitempty"`
	// observedGeneration is the metadata.generation that the status was computed for.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// ReservationInstruction instructs a consumer to use the capacity that one provider grants to one Reservation.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=rinst,categories=spillway
// +kubebuilder:printcolumn:name="Reservation",type=string,JSONPath=`.spec.sourceName`
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.spec.targetClusterID`
// +kubebuilder:printcolumn:name="CPU",type=string,JSONPath=`.spec.requestedCPU`
// +kubebuilder:printcolumn:name="Memory",type=string,JSONPath=`.spec.requestedMemory`
// +kubebuilder:printcolumn:name="Price/H",type=string,JSONPath=`.spec.pricePerHour`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
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
	WithUndecoded   `json:"-"`
}
