package v1alpha1

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PodSet is a number of pods of one shape.
type PodSet struct {
	// name is unique within the Reservation.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// count is the number of pods.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100000
	Count int32 `json:"count"`
	// requests of each pod, with init containers and overhead, as the scheduler computes them.
	Requests ResourceQuantities `json:"requests"`
	// nodeSelector of the pods.
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// nodeAffinity is the required node affinity of the pods.
	NodeAffinity *corev1.NodeSelector `json:"nodeAffinity,omitempty"`
	// tolerations of the pods.
	// +kubebuilder:validation:MaxItems=64
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`
	// podSecurity is the strictest Pod Security Standard that the pods comply with: restricted or baseline. No
	// provider is chosen that requires a stricter one. If unset, that is not checked before the pods are bound.
	// +kubebuilder:validation:Enum=restricted;baseline
	PodSecurity string `json:"podSecurity,omitempty"`
}

// Pod Security Standards of guests.
const (
	PodSecurityRestricted = "restricted"
	PodSecurityBaseline   = "baseline"
)

// ReservationSpec is the requested capacity: either a divisible total or pod sets. Users or the scheduler plugin
// write it; the consumer's agent sets requesterID, reduces counts and sets retained. Once created, only amounts,
// minAvailable, priority, deadline and podSelector can change, and namespaces in the hub; pod sets can be added.
// The API server refuses another shape of a pod set (requests, nodeSelector, nodeAffinity, tolerations and
// podSecurity); the broker refuses every other change of a consumer's Reservation.
// +kubebuilder:validation:XValidation:rule="has(self.requestedResources) != has(self.podSets)",message="set exactly one of requestedResources (a divisible total) and podSets"
// +kubebuilder:validation:XValidation:rule="!has(self.targetClusterID) || !has(self.requesterID) || self.targetClusterID != self.requesterID",message="targetClusterID must not be the requester itself: set another cluster ID, or remove targetClusterID to let the broker choose"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.requesterID) || has(self.requesterID) && self.requesterID == oldSelf.requesterID",message="requesterID is immutable: create another Reservation for another consumer"
// +kubebuilder:validation:XValidation:rule="!has(self.minAvailable) || self.minAvailable == 0 || has(self.podSets)",message="minAvailable is the number of pods: set podSets, or remove minAvailable"
// +kubebuilder:validation:XValidation:rule="!has(self.placement) || !has(self.placement.spread) || has(self.podSets)",message="placement.spread divides pods: set podSets, or remove placement.spread"
// +kubebuilder:validation:XValidation:rule="!has(self.placement) || !has(self.placement.transferPrice) || has(self.podSets)",message="placement.transferPrice is that of a pod: set podSets, or remove dataRegions and transferPrice"
type ReservationSpec struct {
	// requesterID is the cluster ID of the consumer. Required in the hub. In the consumer's cluster, the agent sets it.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	RequesterID string `json:"requesterID,omitempty"`
	// targetClusterID is the only cluster that may be chosen as provider. All other
	// requirements still apply. The broker chooses if empty.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	TargetClusterID string `json:"targetClusterID,omitempty"`
	// requestedResources is a divisible total: it may be spread over nodes. Pods of any
	// size use it, at most 110 at each provider, unless they select nodes.
	// +kubebuilder:validation:XValidation:rule="!has(self.cpu) || isQuantity(string(self.cpu)) && quantity(string(self.cpu)).compareTo(quantity('0')) >= 0",message="cpu must be a quantity of 0 or more, such as 500m"
	// +kubebuilder:validation:XValidation:rule="!has(self.memory) || isQuantity(string(self.memory)) && quantity(string(self.memory)).compareTo(quantity('0')) >= 0",message="memory must be a quantity of 0 or more, such as 16Gi"
	// +kubebuilder:validation:XValidation:rule="!has(self.gpu) || isQuantity(string(self.gpu)) && quantity(string(self.gpu)).compareTo(quantity('0')) >= 0",message="gpu must be a quantity of 0 or more, such as 2"
	// +kubebuilder:validation:XValidation:rule="!has(self.storage) || isQuantity(string(self.storage)) && quantity(string(self.storage)).compareTo(quantity('0')) >= 0",message="storage must be a quantity of 0 or more, such as 10Gi"
	// +kubebuilder:validation:XValidation:rule="!has(self.extended) || self.extended.all(k, type(self.extended[k]) == int ? self.extended[k] >= 0 : (self.extended[k] < '-' || self.extended[k] >= '.'))",message="amounts in extended must be quantities of 0 or more, such as 2"
	RequestedResources *ResourceQuantities `json:"requestedResources,omitempty"`
	// podSets are the requested pods. Each pod needs its requests on a single node.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.cpu) || isQuantity(string(s.requests.cpu)) && quantity(string(s.requests.cpu)).compareTo(quantity('0')) >= 0)",message="requests.cpu must be a quantity of 0 or more, such as 500m"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.memory) || isQuantity(string(s.requests.memory)) && quantity(string(s.requests.memory)).compareTo(quantity('0')) >= 0)",message="requests.memory must be a quantity of 0 or more, such as 16Gi"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.gpu) || isQuantity(string(s.requests.gpu)) && quantity(string(s.requests.gpu)).compareTo(quantity('0')) >= 0)",message="requests.gpu must be a quantity of 0 or more, such as 2"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.storage) || isQuantity(string(s.requests.storage)) && quantity(string(s.requests.storage)).compareTo(quantity('0')) >= 0)",message="requests.storage must be a quantity of 0 or more, such as 10Gi"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.extended) || s.requests.extended.all(k, type(s.requests.extended[k]) == int ? s.requests.extended[k] >= 0 : (s.requests.extended[k] < '-' || s.requests.extended[k] >= '.')))",message="amounts in requests.extended must be quantities of 0 or more, such as 2"
	// +kubebuilder:validation:items:XValidation:rule="self.requests == oldSelf.requests && has(self.nodeSelector) == has(oldSelf.nodeSelector) && (!has(self.nodeSelector) || self.nodeSelector == oldSelf.nodeSelector) && has(self.nodeAffinity) == has(oldSelf.nodeAffinity) && (!has(self.nodeAffinity) || self.nodeAffinity == oldSelf.nodeAffinity) && has(self.tolerations) == has(oldSelf.tolerations) && (!has(self.tolerations) || self.tolerations == oldSelf.tolerations) && has(self.podSecurity) == has(oldSelf.podSecurity) && (!has(self.podSecurity) || self.podSecurity == oldSelf.podSecurity)",message="the shape of a pod set (requests, nodeSelector, nodeAffinity, tolerations, podSecurity) is immutable: change its count, or create another Reservation for another shape"
	PodSets []PodSet `json:"podSets,omitempty"`
	// podSelector limits the pods that may use a Reservation made by hand to those with these labels. All pods of
	// its namespaces if unset. Reservations of the scheduler plugin serve the pods of one owner, and ignore it.
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.key.indexOf('/') < 254 && e.key.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && (e.operator in ['In', 'NotIn'] ? has(e.values) && size(e.values) > 0 && e.values.all(v, v.matches('^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$')) : e.operator in ['Exists', 'DoesNotExist'] && (!has(e.values) || size(e.values) == 0)))",message="matchExpressions must have the key of a label, and operator In or NotIn with its values, or Exists or DoesNotExist without, such as {key: team, operator: In, values: [shop]}"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchLabels) || self.matchLabels.all(k, k.indexOf('/') < 254 && k.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && self.matchLabels[k].matches('^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$'))",message="matchLabels must be keys and values of labels, such as {team: shop}"
	PodSelector *metav1.LabelSelector `json:"podSelector,omitempty"`
	// namespaces of the consumer whose pods may use a Reservation that was created in the
	// hub, as far as they are opted in; all that are if empty. A Reservation that was
	// created in the consumer serves its own namespace only.
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:items:MaxLength=63
	Namespaces []string `json:"namespaces,omitempty"`
	// minAvailable is the number of pods below which the capacity is of no use: the broker holds capacity for at
	// least as many pods, or for none, and no pod may use it before the providers have accepted as many. It counts
	// the pods of all pod sets, and is limited to their number. Not for a divisible total.
	// +kubebuilder:validation:Minimum=0
	MinAvailable int32 `json:"minAvailable,omitempty"`
	// priority in the queue: Reservations of a higher priority are placed first, those of the same priority by age:
	// since their creation, or since what they request last grew after they were placed. It never takes capacity
	// that another one holds. One that is higher than quotas.maxPriority of the BrokerConfig (1000) counts as that.
	// +kubebuilder:validation:Minimum=-1000000000
	// +kubebuilder:validation:Maximum=1000000000
	Priority int32 `json:"priority,omitempty"`
	// deadline is how long the Reservation may be queued. After that, the broker does not
	// look for the missing capacity any more; what is held stays held. The broker measures
	// it by its own clock: it starts again when another replica becomes the leader, and
	// when the spec changes. If unset, the Reservation is queued until it is deleted.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="deadline must be a duration of 1s or more, such as 10m; a day is 24h"
	Deadline *metav1.Duration `json:"deadline,omitempty"`
	// duration of the lease, limited by the BrokerConfig's maxDuration; its defaultDuration if unset. The lease
	// starts with the first hold, and again while pods use the capacity, and when another replica of the broker
	// becomes the leader. When it ends, the capacity is released: set or not, also when its consumer has neither
	// advertised nor renewed it for the BrokerConfig's defaultLease.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="duration must be a duration of 1s or more, such as 24h for a day"
	Duration *metav1.Duration `json:"duration,omitempty"`
	// retained is the number of pods that the Reservation keeps at each provider after its counts were reduced;
	// other capacity is released first. The consumer's agent sets it together with the reduced counts. It is
	// ignored while the pod sets request more pods than it retains.
	// +listType=map
	// +listMapKey=cluster
	// +kubebuilder:validation:MaxItems=64
	Retained []RetainedPods `json:"retained,omitempty"`
	// placement limits the providers by location, and orders them.
	Placement *Placement `json:"placement,omitempty"`
	// budget limits the price.
	Budget *Budget `json:"budget,omitempty"`
}

// RetainedPods is the number of pods that a Reservation keeps at one provider.
type RetainedPods struct {
	// cluster is the cluster ID of the provider.
	Cluster string `json:"cluster"`
	// count is the number of pods to keep there.
	// +kubebuilder:validation:Minimum=0
	Count int32 `json:"count"`
	// attempt of this provider's ReservationInstruction at the time of the reduction.
	// An instruction of a later attempt is used in full.
	Attempt int64 `json:"attempt,omitempty"`
}

// MaxRetained is the maximum number of providers in spec.retained: as in its marker.
const MaxRetained = 64

// RetainedCount is the number of pods that the Reservation keeps at all providers.
func (s *ReservationSpec) RetainedCount() int32 {
	var n int32
	for _, retained := range s.Retained {
		n += retained.Count
	}
	return n
}

// Placement limits the providers by location, and orders them.
// +kubebuilder:validation:XValidation:rule="has(self.dataRegions) == has(self.transferPrice)",message="set both dataRegions and transferPrice, or neither"
type Placement struct {
	// regions that the provider may be in. Any region if empty.
	// +kubebuilder:validation:MaxItems=64
	Regions []string `json:"regions,omitempty"`
	// zones that the provider may be in. Any zone if empty.
	// +kubebuilder:validation:MaxItems=64
	Zones []string `json:"zones,omitempty"`
	// excludeClusters are the cluster IDs of providers that must not be chosen.
	// +kubebuilder:validation:MaxItems=64
	ExcludeClusters []string `json:"excludeClusters,omitempty"`
	// preferredProviders are groups of providers, the most preferred first. Of the providers where the request
	// fits, one of an earlier group is chosen, whatever the scores are; those of no group come last.
	// +kubebuilder:validation:MaxItems=8
	PreferredProviders []ProviderGroup `json:"preferredProviders,omitempty"`
	// spread divides the pods among clusters, zones or regions, so that not all fail with one.
	Spread *Spread `json:"spread,omitempty"`
	// dataRegions are where the pods' data is. To a provider outside of them, or that states no region,
	// transferPrice is added.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	DataRegions []string `json:"dataRegions,omitempty"`
	// transferPrice is what it costs to bring its data to a pod outside of dataRegions.
	TransferPrice *TransferPrice `json:"transferPrice,omitempty"`
}

// TransferPrice is added to the price of a provider, for its score and the budget. Providers do not
// charge it: it is in no price of a status.
type TransferPrice struct {
	// pricePerHour of one pod, a decimal number.
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]+([.][0-9]+)?$')",message="pricePerHour must be a decimal number without currency, such as 0.02"
	PricePerHour string `json:"pricePerHour"`
	// currency of the price, an ISO 4217 code such as EUR.
	// +kubebuilder:validation:Pattern=`^[A-Z]{3}$`
	Currency string `json:"currency"`
}

// What a Spread may be over.
const (
	SpreadOverCluster = "cluster"
	SpreadOverZone    = "zone"
	SpreadOverRegion  = "region"
)

// Spread divides pods among domains, as evenly as they have room.
type Spread struct {
	// over are the domains: each cluster, or each zone or region that clusters state.
	// +kubebuilder:validation:Enum=cluster;zone;region
	Over string `json:"over"`
	// maxSkew is by how many pods of the Reservation any two domains may differ where pods are
	// added. Pods that would exceed it wait. Only domains with a provider that may be chosen count.
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	MaxSkew int32 `json:"maxSkew,omitempty"`
}

// ProviderGroup has the providers for which all that is set is true.
// +kubebuilder:validation:MinProperties=1
type ProviderGroup struct {
	// clusters are their cluster IDs.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Clusters []string `json:"clusters,omitempty"`
	// regions that they are in.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Regions []string `json:"regions,omitempty"`
	// zones that they are in.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Zones []string `json:"zones,omitempty"`
}

// Budget limits the price. A provider whose price is unknown or in another currency is not chosen.
type Budget struct {
	// maxPricePerHour is the maximum price per hour of the entire Reservation, a decimal number.
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]+([.][0-9]+)?$')",message="maxPricePerHour must be a decimal number without currency, such as 0.25"
	MaxPricePerHour string `json:"maxPricePerHour"`
	// currency of the price, an ISO 4217 code such as EUR.
	// +kubebuilder:validation:Pattern=`^[A-Z]{3}$`
	Currency string `json:"currency"`
}

// ReservationPhase is the phase of a Reservation.
// +kubebuilder:validation:Enum=Pending;Reserved;Active;Failed;Released
type ReservationPhase string

const (
	// ReservationPending means that no provider holds capacity yet.
	ReservationPending ReservationPhase = "Pending"
	// ReservationReserved means that providers hold capacity that cannot be used yet.
	ReservationReserved ReservationPhase = "Reserved"
	// ReservationActive means that a virtual node provides capacity, or has done so.
	ReservationActive ReservationPhase = "Active"
	// ReservationFailed means that the spec cannot be satisfied by any provider, that none had
	// the capacity before the deadline, or that pods of the namespace can run at no provider.
	ReservationFailed ReservationPhase = "Failed"
	// ReservationReleased means that the Reservation has ended.
	// Condition ProviderReleased is True once the providers have confirmed.
	ReservationReleased ReservationPhase = "Released"
)

// Attempt is one placement. It is written before the holds that it commits.
type Attempt struct {
	// number increases by one with each attempt.
	Number int64 `json:"number"`
	// clusters are the cluster IDs of the providers whose holds the attempt changes.
	Clusters []string `json:"clusters,omitempty"`
}

// Allocation is the capacity that one provider holds for a Reservation.
type Allocation struct {
	// cluster is the cluster ID of the provider.
	Cluster string `json:"cluster"`
	// resources is the total that the provider holds.
	Resources ResourceQuantities `json:"resources"`
	// podSets are the pods that the total is for. Empty for a divisible total.
	PodSets []PodSet `json:"podSets,omitempty"`
	// nodeLabels are the labels of the provider's nodes by which the pods select nodes.
	NodeLabels map[string]string `json:"nodeLabels,omitempty"`
	// podSecurity is the Pod Security Standard that guests must comply with there. Empty if
	// the provider does not say.
	PodSecurity string `json:"podSecurity,omitempty"`
	// pricePerHour of the allocation, such as "0.25 EUR". Empty if the provider states no price.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)? [A-Z]{3}$`
	PricePerHour string `json:"pricePerHour,omitempty"`
	// endpoint is the URL of the provider's API server.
	Endpoint string `json:"endpoint,omitempty"`
	// accepted is true once the provider has accepted the hold. The broker sets it.
	Accepted bool `json:"accepted,omitempty"`
	// virtualNodeReady is true once the virtual node provides the allocation; only then
	// may pods use it. The consumer's agent reports it.
	VirtualNodeReady bool `json:"virtualNodeReady,omitempty"`
	// carriedPods is the number of pods for which the virtual node provides capacity
	// while it grows. The consumer's agent sets it in the consumer's cluster only.
	CarriedPods int32 `json:"carriedPods,omitempty"`
}

// Usable is the number of pods that may use the allocation now, in the consumer's
// copy of the Reservation; 0 for a divisible total.
func (a *Allocation) Usable() int32 {
	if !a.Accepted {
		// The provider may already have released what the node provides from an earlier grant.
		return 0
	}
	pods := HeldCapacity{PodSets: a.PodSets}.Pods()
	if a.VirtualNodeReady {
		return pods
	}
	return min(a.CarriedPods, pods)
}

// Withdrawal says that a provider has lowered what it had accepted. Pods beyond what remains must leave.
type Withdrawal struct {
	// cluster is the cluster ID of the provider.
	Cluster string `json:"cluster"`
	// attempt of which a part was withdrawn. A later withdrawal has a later attempt.
	Attempt int64 `json:"attempt"`
	// leaveWithin is how long pods may use what was withdrawn, from when this is
	// received: it is a duration because clocks differ.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="leaveWithin must be a duration of 0s or more, such as 10m; a day is 24h"
	LeaveWithin metav1.Duration `json:"leaveWithin"`
}

// Use is what pods use of the capacity of a Reservation.
type Use struct {
	// count is the number of pods.
	Count int32 `json:"count"`
	// resources that the pods request.
	Resources ResourceQuantities `json:"resources,omitempty"`
	// pods are the first of them as namespace/name, at most 20.
	// +kubebuilder:validation:MaxItems=20
	Pods []string `json:"pods,omitempty"`
	// summary of the above for the print column, such as "2 pods, cpu 1500m of 4".
	Summary string `json:"summary,omitempty"`
}

// MaxUsePods is the maximum number of pods that a Use lists: as in its marker.
const MaxUsePods = 20

// Decision explains the last placement, for the most relevant clusters. The broker reports all clusters on request.
type Decision struct {
	// scores of the best of the clusters that were compared, at most 20.
	Scores []ClusterScore `json:"scores,omitempty"`
	// rejections of the clusters that were not chosen: of the 20 that came closest.
	Rejections []ClusterRejection `json:"rejections,omitempty"`
	// rejectionCounts is the number of all other clusters that were not chosen, by reason.
	// +listType=map
	// +listMapKey=reason
	RejectionCounts []RejectionCount `json:"rejectionCounts,omitempty"`
}

// Unlisted is the number of clusters that were not chosen besides those in rejections.
func (d *Decision) Unlisted() int {
	var n int
	for _, c := range d.RejectionCounts {
		n += int(c.Count)
	}
	return n
}

// ClusterScore is the score of one cluster.
type ClusterScore struct {
	// cluster is the cluster ID.
	Cluster string `json:"cluster"`
	// score from 0 to 100, with two decimals.
	Score string `json:"score"`
	// detail is what each rule gives it, and why; of the first five only.
	Detail string `json:"detail,omitempty"`
}

// ClusterRejection explains why a cluster was not chosen.
type ClusterRejection struct {
	// cluster is the cluster ID.
	Cluster string `json:"cluster"`
	// reason is a CamelCase word.
	Reason string `json:"reason"`
	// message explains the reason, with figures.
	Message string `json:"message"`
}

// RejectionCount is the number of clusters that were rejected for one reason.
type RejectionCount struct {
	// reason is a CamelCase word.
	Reason string `json:"reason"`
	// count of clusters.
	Count int32 `json:"count"`
}

// ReservationStatus is the outcome of a Reservation. The broker writes it. In the consumer's cluster the agent
// copies it and adds id, used, what the virtual nodes provide of the allocations, and the conditions Reported,
// Peered, VirtualNodeReady and Ready.
type ReservationStatus struct {
	// phase of the Reservation.
	Phase ReservationPhase `json:"phase,omitempty"`
	// id is the name of the broker's Reservation. Set in the consumer's cluster only.
	ID string `json:"id,omitempty"`
	// attempt is the last placement.
	Attempt Attempt `json:"attempt,omitempty"`
	// allocations by provider.
	// +listType=map
	// +listMapKey=cluster
	Allocations []Allocation `json:"allocations,omitempty"`
	// withdrawals are the last of each provider that holds capacity, or of which pods have yet to leave.
	// +listType=map
	// +listMapKey=cluster
	Withdrawals []Withdrawal `json:"withdrawals,omitempty"`
	// decision explains the last placement. In the hub it names any cluster; its consumer sees the names of those
	// only that lend to it, and the others counted as ConsumerNotAdmitted.
	Decision *Decision `json:"decision,omitempty"`
	// queuePosition is the position in the queue of all Reservations that wait for capacity: 1 is the first. 0 if
	// this one does not wait. The broker updates it from time to time only.
	QueuePosition int32 `json:"queuePosition,omitempty"`
	// queueTime is the time by which the Reservation is ordered in the queue if the request
	// has grown after it was placed: just after that of every other one that there was when this
	// one queued again. If unset, the Reservation is ordered by its creation.
	QueueTime *metav1.MicroTime `json:"queueTime,omitempty"`
	// requested is the total that the Reservation requests. Once it has allocations, it queues
	// again when it requests more of any resource.
	Requested *ResourceQuantities `json:"requested,omitempty"`
	// reservedAt is the time of the first of the current holds. Unset without holds.
	ReservedAt *metav1.Time `json:"reservedAt,omitempty"`
	// expiresAt is about when the lease ends unless it is renewed. It is for information: the broker decides by
	// durations, and updates this field only when it is wrong by more than a quarter of the lease.
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
	// leaseDuration is the length of the lease: spec.duration within the BrokerConfig's
	// maxDuration. The consumer's agent renews the lease in each third of it while pods use
	// the capacity. Unset if the Reservation lasts as long as its consumer advertises.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="leaseDuration must be a duration of 0s or more, such as 1h; a day is 24h"
	LeaseDuration *metav1.Duration `json:"leaseDuration,omitempty"`
	// targetClusterEndpoint repeats the endpoint of the first allocation. Its cluster ID is
	// in allocations: spec.targetClusterID is only ever the author's.
	TargetClusterEndpoint string `json:"targetClusterEndpoint,omitempty"`
	// used is the part of the capacity that pods use. Only of Reservations made by hand.
	Used *Use `json:"used,omitempty"`
	// summary of the allocations, such as "3 of 5 pods in paris".
	Summary string `json:"summary,omitempty"`
	// owner of what the capacity is for: in the consumer the owner of the pods, such as "Deployment/web", or "by
	// hand"; in the hub the Reservation there, such as "rome/shop/web-5f0c".
	Owner string `json:"owner,omitempty"`
	// wanted is what the Reservation requests, such as "5 pods".
	Wanted string `json:"wanted,omitempty"`
	// granted is what the providers have accepted of it, such as "3 pods".
	Granted string `json:"granted,omitempty"`
	// where are the providers that have accepted, such as "paris, berlin".
	Where string `json:"where,omitempty"`
	// pricePerHour of what the providers have accepted, such as "0.25 EUR", or "0.25 EUR + unknown" if
	// some of them state no price. Unset if none does.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)? [A-Z]{3}( \+ ([0-9]+(\.[0-9]+)? [A-Z]{3}|unknown))*$`
	PricePerHour string `json:"pricePerHour,omitempty"`
	// conditions of the Reservation. All are positive, that is, True is the desired
	// state, except Queued. A queued Reservation has Ready=False.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedGeneration is the metadata.generation that the status was computed for.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// Reservation requests capacity in other clusters. Conditions are positive except
// Queued; Ready is True when all requested capacity can be used. One that is being deleted
// grants nothing, whatever its status says: see EffectiveStatus.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=resv,categories=spillway
// +kubebuilder:printcolumn:name="Owner",type=string,JSONPath=`.status.owner`
// +kubebuilder:printcolumn:name="Wanted",type=string,JSONPath=`.status.wanted`
// +kubebuilder:printcolumn:name="Granted",type=string,JSONPath=`.status.granted`
// +kubebuilder:printcolumn:name="Where",type=string,JSONPath=`.status.where`
// +kubebuilder:printcolumn:name="Price/H",type=string,JSONPath=`.status.pricePerHour`
// +kubebuilder:printcolumn:name="Queue",type=integer,JSONPath=`.status.queuePosition`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Phase",type=string,priority=1,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Used",type=string,priority=1,JSONPath=`.status.used.summary`
// +kubebuilder:printcolumn:name="Priority",type=integer,priority=1,JSONPath=`.spec.priority`
// +kubebuilder:printcolumn:name="Expires",type=string,priority=1,JSONPath=`.status.expiresAt`
// +kubebuilder:printcolumn:name="Requester",type=string,priority=1,JSONPath=`.spec.requesterID`
// +kubebuilder:printcolumn:name="ID",type=string,priority=1,JSONPath=`.status.id`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
type Reservation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ReservationSpec   `json:"spec"`
	Status ReservationStatus `json:"status,omitempty"`
}

// FirstAsked are the clusters of the first attempt while only AnnotationFirstAttempt has it,
// and the status does not.
func (r *Reservation) FirstAsked() []string {
	clusters := r.Annotations[AnnotationFirstAttempt]
	if clusters == "" || r.Status.Attempt.Number != 0 {
		return nil
	}
	return strings.Split(clusters, ",")
}

// EffectiveStatus is the status as it counts. A Reservation grants nothing and is Released
// from the moment on in which it is deleted; the broker writes that only if someone waits
// for the release. It may share its content with the Reservation.
func (r *Reservation) EffectiveStatus() ReservationStatus {
	status := r.Status
	if r.DeletionTimestamp.IsZero() {
		return status
	}
	status.Phase, status.Summary = ReservationReleased, SummaryReleased
	status.Granted, status.Where, status.PricePerHour = NothingGranted, "", ""
	status.Allocations, status.TargetClusterEndpoint, status.QueuePosition = nil, "", 0
	status.Conditions = slices.Clone(status.Conditions)
	for _, kind := range []string{ConditionLocked, ConditionQueued, ConditionProviderAccepted, ConditionVirtualNodeReady, ConditionReady} {
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: kind, Status: metav1.ConditionFalse, Reason: ReasonReleased, Message: MessageReleased,
			ObservedGeneration: r.Generation, LastTransitionTime: *r.DeletionTimestamp,
		})
	}
	return status
}

// What the status of a Reservation says that has been deleted. One that has not may have NothingGranted, too.
const (
	SummaryReleased = "released"
	NothingGranted  = "none"
	MessageReleased = "The Reservation has been released."
)

// ReservationList is a list of Reservation.
// +kubebuilder:object:root=true
type ReservationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Reservation `json:"items"`
	WithUndecoded   `json:"-"`
}
