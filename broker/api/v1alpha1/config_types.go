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

// BrokerConfigSpec tunes the broker. Changes take effect without a restart.
type BrokerConfigSpec struct {
	// Weights of the score.
	// +optional
	Weights *ScoreWeights `json:"weights,omitempty"`
	// StaleAfter is how long after its last advertisement a cluster counts as
	// inactive.
	// +optional
	// +kubebuilder:default="10m"
	StaleAfter *metav1.Duration `json:"staleAfter,omitempty"`
	// FreshFor is how old an advertisement may be for a new placement: three of
	// the agents' beats by default.
	// +optional
	// +kubebuilder:default="90s"
	FreshFor *metav1.Duration `json:"freshFor,omitempty"`
	// MaxDuration caps what reservations ask for. No cap where absent.
	// +optional
	MaxDuration *metav1.Duration `json:"maxDuration,omitempty"`
}

// ScoreWeights are percentages that add up to 100.
// +kubebuilder:validation:XValidation:rule="self.resources + self.cost == 100",message="resources and cost must add up to 100"
type ScoreWeights struct {
	// Resources weighs what is left after the placement.
	// +kubebuilder:default=70
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Resources int32 `json:"resources"`
	// Cost weighs the price.
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Cost int32 `json:"cost"`
}

// BrokerConfig tunes the broker. The one named "default" in the broker's
// namespace counts.
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="Resources",type=integer,JSONPath=`.spec.weights.resources`
// +kubebuilder:printcolumn:name="Cost",type=integer,JSONPath=`.spec.weights.cost`
// +kubebuilder:printcolumn:name="Stale After",type=string,JSONPath=`.spec.staleAfter`
type BrokerConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec BrokerConfigSpec `json:"spec,omitempty"`
}

// BrokerConfigList is a list of BrokerConfig.
// +kubebuilder:object:root=true
type BrokerConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []BrokerConfig `json:"items"`
}

// ClusterRegistrationSpec names a cluster that has joined.
type ClusterRegistrationSpec struct {
	// ClusterID is the common name of its certificates.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	ClusterID string `json:"clusterID"`
}

// RegistrationPhase is where a joining cluster stands.
// +kubebuilder:validation:Enum=Approved
type RegistrationPhase string

// RegistrationApproved may use the broker.
const RegistrationApproved RegistrationPhase = "Approved"

// ClusterRegistrationStatus is what the broker gave it.
type ClusterRegistrationStatus struct {
	// +optional
	Phase RegistrationPhase `json:"phase,omitempty"`
	// KeyFingerprint is the SHA-256 of the cluster's public key (SPKI), in hex.
	// Another key cannot take the same cluster ID.
	// +optional
	KeyFingerprint string `json:"keyFingerprint,omitempty"`
	// CertificateFingerprint is the SHA-256 of the newest certificate, in hex.
	// +optional
	CertificateFingerprint string `json:"certificateFingerprint,omitempty"`
	// NotAfter is when that certificate ends.
	// +optional
	NotAfter *metav1.Time `json:"notAfter,omitempty"`
}

// ClusterRegistration is a cluster's identity at the broker.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=creg
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Not After",type=string,JSONPath=`.status.notAfter`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ClusterRegistration struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ClusterRegistrationSpec   `json:"spec"`
	Status ClusterRegistrationStatus `json:"status,omitempty"`
}

// ClusterRegistrationList is a list of ClusterRegistration.
// +kubebuilder:object:root=true
type ClusterRegistrationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ClusterRegistration `json:"items"`
}
