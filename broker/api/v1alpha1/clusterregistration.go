package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterRegistrationSpec identifies a cluster that has joined the broker. The
// broker writes it.
type ClusterRegistrationSpec struct {
	// clusterID is the common name of the cluster's certificates.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	ClusterID string `json:"clusterID"`
}

// RegistrationPhase is the phase of a ClusterRegistration.
// +kubebuilder:validation:Enum=Approved
type RegistrationPhase string

// RegistrationApproved means that the cluster may use the broker.
const RegistrationApproved RegistrationPhase = "Approved"

// ClusterRegistrationStatus is the identity that the broker issued to a cluster.
// The broker writes it.
type ClusterRegistrationStatus struct {
	// phase of the registration.
	// +optional
	Phase RegistrationPhase `json:"phase,omitempty"`
	// keyFingerprint is the SHA-256 of the cluster's public key (SPKI), in hex. No
	// other key can join with the same cluster ID until the registration is deleted.
	// +optional
	KeyFingerprint string `json:"keyFingerprint,omitempty"`
	// certificateFingerprint is the SHA-256 of the newest certificate, in hex.
	// +optional
	CertificateFingerprint string `json:"certificateFingerprint,omitempty"`
	// notAfter is the expiration time of the newest certificate.
	// +optional
	NotAfter *metav1.Time `json:"notAfter,omitempty"`
}

// ClusterRegistration is the identity of a cluster at the broker. Deleting it makes the
// broker forget the cluster: its access is revoked at once, its Reservations end, its
// ClusterAdvertisement is deleted with the ledger of what it holds for others, whose
// Reservations are placed elsewhere, and its cluster ID is free for another key.
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
	// Undecoded are the items that cannot be decoded.
	Undecoded []Undecoded `json:"-"`
}
