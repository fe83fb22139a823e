package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClusterRegistrationSpec identifies a cluster, and says what an operator of the hub has
// decided about it. The broker writes clusterID only.
type ClusterRegistrationSpec struct {
	// clusterID is the common name of the cluster's certificates.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	ClusterID string `json:"clusterID"`
	// approval is the operator's decision. Without it, spec.joining of the BrokerConfig decides.
	// Revoked ends the cluster's access within seconds, its Reservations, and those of others in
	// it; its cluster ID remains taken.
	Approval RegistrationApproval `json:"approval,omitempty"`
	// invitation lets one key join as this cluster, without the shared join token.
	Invitation *Invitation `json:"invitation,omitempty"`
}

// RegistrationApproval is an operator's decision about a cluster.
// +kubebuilder:validation:Enum=Approved;Revoked
type RegistrationApproval string

const (
	// ApprovalApproved lets the cluster use the broker.
	ApprovalApproved RegistrationApproval = "Approved"
	// ApprovalRevoked ends its access. No other key can join with its cluster ID.
	ApprovalRevoked RegistrationApproval = "Revoked"
)

// Invitation is a token for one cluster. The first key that joins with it uses it up.
type Invitation struct {
	// tokenHash is the SHA-256 of the token, in hex. The broker does not know the token.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	TokenHash string `json:"tokenHash"`
	// expires ends the token, and deletes a registration that has not joined.
	Expires metav1.Time `json:"expires"`
}

// RegistrationPhase is the phase of a ClusterRegistration.
// +kubebuilder:validation:Enum=Pending;Approved;Revoked
type RegistrationPhase string

const (
	// RegistrationPending means that the cluster has joined, and waits for an operator's approval.
	RegistrationPending RegistrationPhase = "Pending"
	// RegistrationApproved means that the cluster may use the broker.
	RegistrationApproved RegistrationPhase = "Approved"
	// RegistrationRevoked means that an operator has ended the cluster's access.
	RegistrationRevoked RegistrationPhase = "Revoked"
)

// ClusterRegistrationStatus is the identity that the broker issued to a cluster.
// The broker writes it.
type ClusterRegistrationStatus struct {
	// phase of the registration.
	Phase RegistrationPhase `json:"phase,omitempty"`
	// keyFingerprint is the SHA-256 of the cluster's public key (SPKI), in hex. No
	// other key can join with the same cluster ID until the registration is deleted. Empty before
	// the cluster joins, and with certificates of another authority.
	KeyFingerprint string `json:"keyFingerprint,omitempty"`
	// certificateFingerprint is the SHA-256 of the newest certificate, in hex.
	CertificateFingerprint string `json:"certificateFingerprint,omitempty"`
	// notAfter is the expiration time of the newest certificate.
	NotAfter *metav1.Time `json:"notAfter,omitempty"`
}

// ClusterRegistration is the identity of a cluster at the broker, and its admission. Deleting it makes the
// broker forget the cluster: its access is revoked at once, its Reservations end, its
// ClusterAdvertisement is deleted with the ledger of what it holds for others, whose
// Reservations are placed elsewhere, and its cluster ID is free for another key.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=creg,categories=spillway
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
	WithUndecoded   `json:"-"`
}
