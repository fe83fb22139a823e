package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ClusterAdvertisementSpec is what a cluster says of itself. Its agent owns it.
type ClusterAdvertisementSpec struct {
	// ClusterID is the cluster's identity: the common name of its certificate.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	ClusterID string `json:"clusterID"`
	// ClusterName is for people; the cluster ID where it is empty.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ClusterName string `json:"clusterName,omitempty"`
	// EndpointURL is where consumers reach this cluster's API server.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	EndpointURL string `json:"endpointURL,omitempty"`
	// PeerKey is the public key (X25519, base64) that messages to this cluster
	// are sealed with.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	PeerKey string `json:"peerKey,omitempty"`
	// Lending says on which terms the cluster lends.
	Lending Lending `json:"lending"`
	// Resources sums up the nodes that may be lent.
	Resources AdvertisedResources `json:"resources"`
	// NodeClasses describes those nodes by class: what one pod can ask for.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	NodeClasses []NodeClass `json:"nodeClasses,omitempty"`
	// ObservedHolds is what guests use here now, by consumer. Not part of
	// resources.allocated.
	// +optional
	// +kubebuilder:validation:MaxItems=1024
	ObservedHolds []ObservedHold `json:"observedHolds,omitempty"`
	// Cost is the price of lending. Unknown where absent.
	// +optional
	Cost *Cost `json:"cost,omitempty"`
	// Region and Zone say where the cluster stands.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Region string `json:"region,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Zone string `json:"zone,omitempty"`
	// Timestamp is the agent's clock when it measured: for people only.
	Timestamp metav1.Time `json:"timestamp"`
	// Sequence grows with every measurement of one agent process.
	Sequence int64 `json:"sequence"`
}

// Lending is a lender's terms.
type Lending struct {
	// Enabled is false for a cluster that only consumes.
	Enabled bool `json:"enabled"`
	// Consumers may borrow; everybody where empty.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	Consumers []string `json:"consumers,omitempty"`
}

// AdvertisedResources sums up a cluster's Ready, uncordoned, real nodes.
type AdvertisedResources struct {
	// Capacity is what the nodes have.
	Capacity ResourceQuantities `json:"capacity"`
	// Allocatable is what they offer to pods, less the lender's headroom.
	Allocatable ResourceQuantities `json:"allocatable"`
	// Allocated is what the pods bound to them request, guests not counted.
	Allocated ResourceQuantities `json:"allocated"`
}

// NodeClass is a group of nodes that a pod cannot tell apart but by their room.
type NodeClass struct {
	// Name is unique within the advertisement.
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// Labels that all nodes of the class share (hostname and other names of one
	// node are left out).
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// Taints of the class's nodes.
	// +optional
	Taints []corev1.Taint `json:"taints,omitempty"`
	// Arch as in GOARCH.
	// +optional
	Arch string `json:"arch,omitempty"`
	// FreeShapes is the room on the class's nodes, guests counted as taken: a
	// bounded histogram, rounded down, largest first.
	// +optional
	// +kubebuilder:validation:MaxItems=128
	FreeShapes []FreeShape `json:"freeShapes,omitempty"`
}

// FreeShape is a number of nodes that each have at least this much room.
type FreeShape struct {
	// Nodes is how many.
	Nodes int32 `json:"nodes"`
	// Free is the room of each.
	Free ResourceQuantities `json:"free"`
	// Pods is how many more pods each may run.
	Pods int32 `json:"pods"`
}

// ObservedHold is what one consumer's guests use at the provider now.
type ObservedHold struct {
	// Requester is the consumer, as the provider's own admission recorded it.
	Requester string `json:"requester"`
	// Used is the sum of the guests' requests.
	Used ResourceQuantities `json:"used"`
	// Pods is how many guests there are.
	Pods int32 `json:"pods"`
}

// Cost is a price for each hour, in decimal numbers of one currency.
type Cost struct {
	// CPUCost for one core.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	CPUCost string `json:"cpuCost,omitempty"`
	// MemoryCost for one GiB.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	MemoryCost string `json:"memoryCost,omitempty"`
	// GPUCost for one device.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	GPUCost string `json:"gpuCost,omitempty"`
	// StorageCost for one GiB.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	StorageCost string `json:"storageCost,omitempty"`
	// Currency is an ISO 4217 code.
	// +kubebuilder:validation:Pattern=`^[A-Z]{3}$`
	Currency string `json:"currency"`
}

// AdvertisementPhase says whether an advertisement is fresh.
// +kubebuilder:validation:Enum=Active;Stale
type AdvertisementPhase string

const (
	// AdvertisementActive is one that was received lately.
	AdvertisementActive AdvertisementPhase = "Active"
	// AdvertisementStale is one that was not.
	AdvertisementStale AdvertisementPhase = "Stale"
)

// ClusterAdvertisementStatus is the broker's side: the ledger. The broker owns
// it and changes it by compare-and-swap only.
type ClusterAdvertisementStatus struct {
	// Active is whether the cluster has advertised lately.
	Active bool `json:"active"`
	// Phase says the same in a word.
	// +optional
	Phase AdvertisementPhase `json:"phase,omitempty"`
	// Reserved is the sum of the charges of all holds.
	// +optional
	Reserved ResourceQuantities `json:"reserved,omitempty"`
	// Available is allocatable less allocated less reserved, never below zero.
	// +optional
	Available ResourceQuantities `json:"available,omitempty"`
	// Holds is the authoritative record of what is promised here.
	// +optional
	// +listType=map
	// +listMapKey=reservationUID
	Holds []Hold `json:"holds,omitempty"`
	// Score is the share of the cluster's resources that is still available, as
	// the resources part of a placement's score: from 0 to 100, with two decimals.
	// +optional
	Score string `json:"score,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// Hold is capacity of one provider promised to one reservation.
type Hold struct {
	// ReservationUID is the UID of the broker's Reservation; ReservationName its
	// name.
	ReservationUID  types.UID `json:"reservationUID"`
	ReservationName string    `json:"reservationName"`
	// Requester is the consumer.
	Requester string `json:"requester"`
	// Attempt of the reservation that made, grew or shrank this hold last; one
	// more when a growth was refused. The provider answers to this number.
	Attempt int64 `json:"attempt"`
	// Promised is what the reservation may use.
	Promised HeldCapacity `json:"promised"`
	// Unconfirmed is what was promised before the hold shrank. It is charged
	// until the provider confirms the smaller hold; absent otherwise.
	// +optional
	Unconfirmed *HeldCapacity `json:"unconfirmed,omitempty"`
	// Granted is the part of Promised that the provider has set aside: what the
	// requester may use. A refused growth falls back to it. Absent until the
	// provider has first accepted.
	// +optional
	Granted *HeldCapacity `json:"granted,omitempty"`
	// AcceptedAttempt is the last attempt that the provider accepted; 0 for none.
	// +optional
	AcceptedAttempt int64 `json:"acceptedAttempt,omitempty"`
}

// HeldCapacity is an amount and the pods it is for.
type HeldCapacity struct {
	// Totals is the sum; the whole of a divisible total.
	Totals ResourceQuantities `json:"totals"`
	// PodSets is what is held shape by shape; absent for a divisible total.
	// +optional
	PodSets []PodSet `json:"podSets,omitempty"`
}

// Empty reports whether nothing is held.
func (c HeldCapacity) Empty() bool { return c.Pods() == 0 && len(c.Totals.List()) == 0 }

// Pods is how many pods the capacity is for; 0 for a divisible total.
func (c HeldCapacity) Pods() int32 {
	var n int32
	for _, set := range c.PodSets {
		n += set.Count
	}
	return n
}

// ClusterAdvertisement is what a cluster has to offer, and the ledger of what
// is promised there.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=cadv
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.spec.clusterID`
// +kubebuilder:printcolumn:name="Active",type=boolean,JSONPath=`.status.active`
// +kubebuilder:printcolumn:name="Lends",type=boolean,JSONPath=`.spec.lending.enabled`
// +kubebuilder:printcolumn:name="Available CPU",type=string,JSONPath=`.status.available.cpu`
// +kubebuilder:printcolumn:name="Available Memory",type=string,JSONPath=`.status.available.memory`
// +kubebuilder:printcolumn:name="Available GPU",type=string,JSONPath=`.status.available.gpu`
// +kubebuilder:printcolumn:name="Reserved CPU",type=string,JSONPath=`.status.reserved.cpu`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ClusterAdvertisement struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ClusterAdvertisementSpec   `json:"spec"`
	Status ClusterAdvertisementStatus `json:"status,omitempty"`
}

// ClusterAdvertisementList is a list of ClusterAdvertisement.
// +kubebuilder:object:root=true
type ClusterAdvertisementList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ClusterAdvertisement `json:"items"`
}
