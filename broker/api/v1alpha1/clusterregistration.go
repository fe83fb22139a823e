package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

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
