package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ClusterAdvertisementSpec is the capacity that a cluster offers, and its terms. The
// cluster's agent writes it.
type ClusterAdvertisementSpec struct {
	// clusterID is the identity of the cluster: the common name of its certificate.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	ClusterID string `json:"clusterID"`
	// clusterName is a display name. Defaults to the cluster ID.
	// +kubebuilder:validation:MaxLength=253
	ClusterName string `json:"clusterName,omitempty"`
	// endpointURL is the URL at which consumers reach the cluster's API server.
	// +kubebuilder:validation:MaxLength=2048
	EndpointURL string `json:"endpointURL,omitempty"`
	// peerKey is the public key (X25519, base64) that encrypts messages to the cluster.
	// +kubebuilder:validation:MaxLength=128
	PeerKey string `json:"peerKey,omitempty"`
	// lending is whether and to whom the cluster provides capacity. Defaults to all.
	// +optional
	// +kubebuilder:default={enabled: true}
	Lending Lending `json:"lending"`
	// resources is the sum over the cluster's Ready, schedulable, real nodes.
	Resources AdvertisedResources `json:"resources"`
	// nodeClasses describe these nodes, grouped by what a pod can select. Without any, a cluster
	// that says what is available counts as one node.
	// +kubebuilder:validation:MaxItems=64
	NodeClasses []NodeClass `json:"nodeClasses,omitempty"`
	// observedHolds is the usage of each consumer's guests in the cluster. It is not
	// included in resources.allocated.
	// +kubebuilder:validation:MaxItems=1024
	ObservedHolds []ObservedHold `json:"observedHolds,omitempty"`
	// unlistedHolds is the capacity that the cluster holds for Reservations of which the
	// broker has not listed a hold, because the hub lost it. The broker charges it.
	// +kubebuilder:validation:MaxItems=1024
	UnlistedHolds []UnlistedHold `json:"unlistedHolds,omitempty"`
	// unreachable are providers whose API server this cluster could not connect to. They are
	// not chosen for its Reservations.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=63
	// +listType=set
	Unreachable []string `json:"unreachable,omitempty"`
	// latencies are how long this cluster needs to connect to the API servers of the providers that
	// it uses.
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=cluster
	Latencies []ProviderLatency `json:"latencies,omitempty"`
	// cost is the price of the cluster's resources. The price is unknown if unset.
	Cost *Cost `json:"cost,omitempty"`
	// region of the cluster.
	// +kubebuilder:validation:MaxLength=63
	Region string `json:"region,omitempty"`
	// zone of the cluster.
	// +kubebuilder:validation:MaxLength=63
	Zone string `json:"zone,omitempty"`
	// timestamp is the time of the measurement by the agent's clock. For information
	// only: no decision compares it with another clock. In the hub, it is that of the last
	// change: status.active is whether the cluster advertises.
	Timestamp metav1.Time `json:"timestamp"`
	// sequence increases with each measurement of one agent process; 0 if it does not count.
	// +optional
	Sequence int64 `json:"sequence"`
}

// ProviderLatency is how long a consumer needs to connect to a provider's API server.
type ProviderLatency struct {
	// cluster is the cluster ID of the provider.
	// +kubebuilder:validation:MaxLength=63
	Cluster string `json:"cluster"`
	// milliseconds, rounded so that it seldom changes.
	// +kubebuilder:validation:Minimum=0
	Milliseconds int32 `json:"milliseconds"`
}

// Lending is whether, to whom and for which pods a cluster provides capacity.
type Lending struct {
	// enabled is false if the cluster only consumes.
	Enabled bool `json:"enabled"`
	// consumers are the cluster IDs of the consumers that may use the capacity. All
	// consumers may if empty.
	// +kubebuilder:validation:MaxItems=256
	Consumers []string `json:"consumers,omitempty"`
	// podSecurity is the Pod Security Standard that guests must comply with: restricted or
	// baseline. Unset if the cluster does not say.
	// +kubebuilder:validation:Enum=restricted;baseline
	PodSecurity string `json:"podSecurity,omitempty"`
}

// AdvertisedResources is the sum over a cluster's Ready, schedulable, real nodes.
type AdvertisedResources struct {
	// capacity of the nodes.
	Capacity ResourceQuantities `json:"capacity"`
	// allocatable is the capacity available to pods, less the provider's headroom.
	Allocatable ResourceQuantities `json:"allocatable"`
	// allocated is the sum of the requests of the pods bound to the nodes, except
	// guests.
	Allocated ResourceQuantities `json:"allocated"`
	// available is allocatable less allocated and reserved. The broker uses it in place of
	// nodeClasses only; status.available is its own account.
	Available *ResourceQuantities `json:"available,omitempty"`
	// reserved is what the cluster counts as reserved. The broker uses its ledger instead.
	Reserved *ResourceQuantities `json:"reserved,omitempty"`
}

// NodeClass is a group of nodes that are the same to a pod, except for their free
// capacity.
type NodeClass struct {
	// name is unique within the advertisement.
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// labels that all nodes of the class have, without those of a single node, such as
	// kubernetes.io/hostname, and those that have other values in other classes: one virtual
	// node stands for all, so no pod can select by them.
	Labels map[string]string `json:"labels,omitempty"`
	// taints of the nodes.
	Taints []corev1.Taint `json:"taints,omitempty"`
	// arch of the nodes, as in GOARCH.
	Arch string `json:"arch,omitempty"`
	// freeShapes is a histogram of the nodes' free capacity, rounded down, largest
	// first. Capacity used by guests is not free.
	// +kubebuilder:validation:MaxItems=128
	FreeShapes []FreeShape `json:"freeShapes,omitempty"`
	// largestNode is the most of each resource that one of the nodes would have free if no
	// guests ran there. A larger pod never fits.
	LargestNode *ResourceQuantities `json:"largestNode,omitempty"`
	// cost is the price of these nodes, where it is not that of the cluster.
	Cost *Cost `json:"cost,omitempty"`
}

// FreeShape is a number of nodes with at least the same free capacity.
type FreeShape struct {
	// nodes is the number of nodes.
	Nodes int32 `json:"nodes"`
	// free is the free capacity of each node.
	Free ResourceQuantities `json:"free"`
	// pods is the number of additional pods that each node can run.
	Pods int32 `json:"pods"`
}

// ObservedHold is the usage of one consumer's guests at a provider.
type ObservedHold struct {
	// requester is the cluster ID of the consumer, as recorded by the provider's
	// admission.
	Requester string `json:"requester"`
	// used is the sum of the guests' requests.
	Used ResourceQuantities `json:"used"`
	// pods is the number of guests.
	Pods int32 `json:"pods"`
}

// UnlistedHold is capacity that a provider holds for a Reservation that the broker does
// not list.
type UnlistedHold struct {
	// reservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
	// reservationName is the name of the broker's Reservation. A Reservation that the
	// consumer posts again has the same.
	// +kubebuilder:validation:MaxLength=253
	ReservationName string `json:"reservationName"`
	// requester is the cluster ID of the consumer.
	Requester string `json:"requester"`
	// held is the total that the provider holds.
	Held ResourceQuantities `json:"held"`
}

// Cost is the price per hour of a provider's resources.
type Cost struct {
	// cpuCost is the price of one core, a decimal number.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	CPUCost string `json:"cpuCost,omitempty"`
	// memoryCost is the price of one GiB, a decimal number.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	MemoryCost string `json:"memoryCost,omitempty"`
	// gpuCost is the price of one GPU, a decimal number.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	GPUCost string `json:"gpuCost,omitempty"`
	// storageCost is the price of one GiB, a decimal number.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	StorageCost string `json:"storageCost,omitempty"`
	// currency of all prices, an ISO 4217 code such as EUR.
	// +kubebuilder:validation:Pattern=`^[A-Z]{3}$`
	Currency string `json:"currency"`
}

// AdvertisementPhase is the phase of a ClusterAdvertisement.
// +kubebuilder:validation:Enum=Active;Stale
type AdvertisementPhase string

const (
	// AdvertisementActive means that the broker receives the cluster's advertisements.
	AdvertisementActive AdvertisementPhase = "Active"
	// AdvertisementStale means that the broker has received none for longer than the
	// stale threshold.
	AdvertisementStale AdvertisementPhase = "Stale"
)

// ClusterAdvertisementStatus is the broker's ledger for the cluster. The broker
// writes it, by compare-and-swap on the resourceVersion only.
type ClusterAdvertisementStatus struct {
	// active is true while the broker receives the cluster's advertisements.
	Active bool `json:"active"`
	// phase is Active or Stale, the same as active.
	Phase AdvertisementPhase `json:"phase,omitempty"`
	// reserved is the sum of the charges of all holds.
	Reserved ResourceQuantities `json:"reserved,omitempty"`
	// available is resources.allocatable less resources.allocated less reserved, never
	// below zero.
	Available ResourceQuantities `json:"available,omitempty"`
	// holds is the capacity promised to Reservations, one hold for each reservationUID:
	// the authoritative record.
	// +listType=atomic
	Holds []Hold `json:"holds,omitempty"`
	// score is the percentage of the cluster's allocatable resources that is available,
	// from 0 to 100 with two decimals, computed as the resources part of the score of a
	// placement.
	Score string `json:"score,omitempty"`
	// conditions of the cluster: Ready while the broker receives its advertisements.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedGeneration is the metadata.generation that the status was computed for.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// Hold is capacity of one provider that the broker has promised to one Reservation.
type Hold struct {
	// reservationUID is the UID of the broker's Reservation.
	ReservationUID types.UID `json:"reservationUID"`
	// reservationName is the name of the broker's Reservation.
	ReservationName string `json:"reservationName"`
	// requester is the cluster ID of the consumer.
	Requester string `json:"requester"`
	// attempt of the Reservation that last changed the hold. Increased by one when the
	// provider refuses. The provider accepts or refuses this attempt.
	Attempt int64 `json:"attempt"`
	// promised is the capacity that the Reservation may use.
	Promised HeldCapacity `json:"promised"`
	// unconfirmed is the capacity promised before the hold was reduced. It is charged
	// until the provider confirms the reduction. Unset otherwise.
	Unconfirmed *HeldCapacity `json:"unconfirmed,omitempty"`
	// granted is the part of promised that the provider has accepted. A refused
	// increase falls back to it. Unset until the provider first accepts.
	Granted *HeldCapacity `json:"granted,omitempty"`
	// acceptedAttempt is the last attempt that the provider accepted, or 0.
	AcceptedAttempt int64 `json:"acceptedAttempt,omitempty"`
	// withdrawnAttempt is the last attempt of which the provider withdrew a part that it
	// had accepted, or 0. A hold of which all was withdrawn remains until the provider
	// confirms that no guest uses it.
	WithdrawnAttempt int64 `json:"withdrawnAttempt,omitempty"`
	// leaveWithin is how long pods could use what was withdrawn, from when the provider
	// said so.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="leaveWithin must be a duration of 0s or more, such as 10m; a day is 24h"
	LeaveWithin *metav1.Duration `json:"leaveWithin,omitempty"`
	// cost is what the provider charges for the promise: its prices when the capacity was
	// promised. Later prices do not change it. If parts were promised at different prices,
	// it is their mean. Unset if the provider stated no price.
	Cost *Cost `json:"cost,omitempty"`
}

// HeldCapacity is an amount of resources and the pods that it is for.
type HeldCapacity struct {
	// totals is the sum of the pod sets' requests, or a divisible total.
	Totals ResourceQuantities `json:"totals"`
	// podSets are the pods that the capacity is for. Empty for a divisible total.
	PodSets []PodSet `json:"podSets,omitempty"`
}

// Empty reports whether the capacity is zero.
func (c HeldCapacity) Empty() bool { return c.Pods() == 0 && len(c.Totals.List()) == 0 }

// Pods is the number of pods that the capacity is for, 0 for a divisible total.
func (c HeldCapacity) Pods() int32 {
	var n int32
	for _, set := range c.PodSets {
		n += set.Count
	}
	return n
}

// ClusterAdvertisement is the capacity that a cluster offers (spec) and the broker's
// ledger of what is promised of it (status), in the broker's namespace, named as the
// cluster ID. The agent keeps a copy of the spec in its own cluster. Deleting it makes the
// broker forget what the cluster holds: do so only for a cluster that is gone. One that
// still advertises gets a new ledger with its guests.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=cadv,categories=spillway
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.spec.clusterID`
// +kubebuilder:printcolumn:name="Active",type=boolean,JSONPath=`.status.active`
// +kubebuilder:printcolumn:name="Lends",type=boolean,JSONPath=`.spec.lending.enabled`
// +kubebuilder:printcolumn:name="Available CPU",type=string,JSONPath=`.status.available.cpu`
// +kubebuilder:printcolumn:name="Available Memory",type=string,JSONPath=`.status.available.memory`
// +kubebuilder:printcolumn:name="Available GPU",type=string,JSONPath=`.status.available.gpu`
// +kubebuilder:printcolumn:name="Reserved CPU",type=string,JSONPath=`.status.reserved.cpu`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Region",type=string,priority=1,JSONPath=`.spec.region`
// +kubebuilder:printcolumn:name="Zone",type=string,priority=1,JSONPath=`.spec.zone`
// +kubebuilder:printcolumn:name="CPU/H",type=string,priority=1,JSONPath=`.spec.cost.cpuCost`
// +kubebuilder:printcolumn:name="Currency",type=string,priority=1,JSONPath=`.spec.cost.currency`
// +kubebuilder:printcolumn:name="Endpoint",type=string,priority=1,JSONPath=`.spec.endpointURL`
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
	WithUndecoded   `json:"-"`
}
