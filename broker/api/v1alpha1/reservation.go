package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PodSet is a number of pods of one shape.
type PodSet struct {
	// Name is unique within its Reservation.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// Count of pods.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100000
	Count int32 `json:"count"`
	// Requests of each pod, init containers and overhead counted as the
	// scheduler counts them.
	Requests ResourceQuantities `json:"requests"`
	// NodeSelector that the pods carry.
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// NodeAffinity that the pods require.
	// +optional
	NodeAffinity *corev1.NodeSelector `json:"nodeAffinity,omitempty"`
	// Tolerations that the pods carry.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`
}

// ReservationSpec asks for capacity: either a divisible total or pods.
// +kubebuilder:validation:XValidation:rule="has(self.requestedResources) != has(self.podSets)",message="set either requestedResources (a divisible total) or podSets, not both"
// +kubebuilder:validation:XValidation:rule="!has(self.targetClusterID) || !has(self.requesterID) || self.targetClusterID != self.requesterID",message="targetClusterID must not be the requester itself"
// +kubebuilder:validation:XValidation:rule="!has(self.podSets) || !has(oldSelf.podSets) || self.podSets.all(n, oldSelf.podSets.all(o, o.name != n.name || (o.requests == n.requests)))",message="a pod set's requests cannot change; counts may, and a new shape needs a new Reservation"
type ReservationSpec struct {
	// RequesterID is the consumer. In the consumer's own cluster it may be left
	// out: the agent fills it from its certificate.
	// +optional
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	RequesterID string `json:"requesterID,omitempty"`
	// TargetClusterID pins the provider; every other check still applies.
	// +optional
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:MaxLength=40
	TargetClusterID string `json:"targetClusterID,omitempty"`
	// RequestedResources is a divisible total: it may be spread over nodes.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.cpu) || quantity(string(self.cpu)).compareTo(quantity('0')) >= 0",message="cpu must not be negative"
	// +kubebuilder:validation:XValidation:rule="!has(self.memory) || quantity(string(self.memory)).compareTo(quantity('0')) >= 0",message="memory must not be negative"
	// +kubebuilder:validation:XValidation:rule="!has(self.gpu) || quantity(string(self.gpu)).compareTo(quantity('0')) >= 0",message="gpu must not be negative"
	// +kubebuilder:validation:XValidation:rule="!has(self.storage) || quantity(string(self.storage)).compareTo(quantity('0')) >= 0",message="storage must not be negative"
	RequestedResources *ResourceQuantities `json:"requestedResources,omitempty"`
	// PodSets are pods, each of which needs its whole place on one node.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.cpu) || quantity(string(s.requests.cpu)).compareTo(quantity('0')) >= 0)",message="cpu must not be negative"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.memory) || quantity(string(s.requests.memory)).compareTo(quantity('0')) >= 0)",message="memory must not be negative"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.gpu) || quantity(string(s.requests.gpu)).compareTo(quantity('0')) >= 0)",message="gpu must not be negative"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !has(s.requests.storage) || quantity(string(s.requests.storage)).compareTo(quantity('0')) >= 0)",message="storage must not be negative"
	PodSets []PodSet `json:"podSets,omitempty"`
	// Duration after which an unused or forgotten reservation is released. Kept
	// for as long as it is needed where absent.
	// +optional
	Duration *metav1.Duration `json:"duration,omitempty"`
	// Retained lists, when a count is lowered, where the pods run that it leaves:
	// capacity is given back elsewhere first. The consumer's agent sets it together
	// with the lower count. It has no effect once the pod sets ask for more pods
	// than it retains.
	// +optional
	// +listType=map
	// +listMapKey=cluster
	// +kubebuilder:validation:MaxItems=64
	Retained []RetainedPods `json:"retained,omitempty"`
	// Placement limits where the pods may go.
	// +optional
	Placement *Placement `json:"placement,omitempty"`
	// Budget limits what they may cost.
	// +optional
	Budget *Budget `json:"budget,omitempty"`
}

// RetainedPods is the number of pods that a Reservation keeps at one provider.
type RetainedPods struct {
	// Cluster is the provider.
	Cluster string `json:"cluster"`
	// Count of pods to keep there.
	// +kubebuilder:validation:Minimum=0
	Count int32 `json:"count"`
	// Attempt of the ReservationInstruction that was in force for this provider.
	// A later one is in force in full.
	// +optional
	Attempt int64 `json:"attempt,omitempty"`
}

// RetainedCount is the number of pods that the Reservation keeps at all providers.
func (s *ReservationSpec) RetainedCount() int32 {
	var n int32
	for _, at := range s.Retained {
		n += at.Count
	}
	return n
}

// Placement limits the providers.
type Placement struct {
	// Regions the provider must be in one of, if any are given.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Regions []string `json:"regions,omitempty"`
	// Zones the provider must be in one of, if any are given.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	Zones []string `json:"zones,omitempty"`
	// ExcludeClusters never to use.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	ExcludeClusters []string `json:"excludeClusters,omitempty"`
}

// Budget is a ceiling on price. A provider whose cost is unknown, or in another
// currency, does not fit a budget.
type Budget struct {
	// MaxPricePerHour of the whole reservation, a decimal number.
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	// +kubebuilder:validation:MaxLength=32
	MaxPricePerHour string `json:"maxPricePerHour"`
	// Currency is an ISO 4217 code.
	// +kubebuilder:validation:Pattern=`^[A-Z]{3}$`
	Currency string `json:"currency"`
}

// ReservationPhase is where a reservation stands.
// +kubebuilder:validation:Enum=Pending;Reserved;Active;Failed;Released
type ReservationPhase string

const (
	// ReservationPending waits for capacity.
	ReservationPending ReservationPhase = "Pending"
	// ReservationReserved has holds; they are being set up.
	ReservationReserved ReservationPhase = "Reserved"
	// ReservationActive can be used.
	ReservationActive ReservationPhase = "Active"
	// ReservationFailed can never be met as it is written.
	ReservationFailed ReservationPhase = "Failed"
	// ReservationReleased is over; its holds are being freed or are.
	ReservationReleased ReservationPhase = "Released"
)

// Attempt is a placement being committed: written before the holds it names.
type Attempt struct {
	// Number grows by one with each attempt.
	Number int64 `json:"number"`
	// Clusters on which this attempt places holds.
	// +optional
	Clusters []string `json:"clusters,omitempty"`
}

// Allocation is what one provider holds for a reservation.
type Allocation struct {
	// Cluster is the provider.
	Cluster string `json:"cluster"`
	// Resources held there, in all.
	Resources ResourceQuantities `json:"resources"`
	// PodSets held there; absent for a divisible total.
	// +optional
	PodSets []PodSet `json:"podSets,omitempty"`
	// PricePerHour as "0.25 EUR", if the provider says.
	// +optional
	PricePerHour string `json:"pricePerHour,omitempty"`
	// Endpoint of the provider's API server.
	// +optional
	Endpoint string `json:"endpoint,omitempty"`
	// Accepted is set when the provider's agent has set the capacity aside.
	// +optional
	Accepted bool `json:"accepted,omitempty"`
	// VirtualNodeReady is set in the consumer's copy once the virtual node has
	// grown to carry this allocation: only then may pods use it.
	// +optional
	VirtualNodeReady bool `json:"virtualNodeReady,omitempty"`
	// CarriedPods is set in the consumer's copy while the virtual node grows: for
	// how many of the pods it carries room already.
	// +optional
	CarriedPods int32 `json:"carriedPods,omitempty"`
}

// Usable is how many pods may use the allocation now, in the consumer's copy; 0
// for a divisible total.
func (a *Allocation) Usable() int32 {
	if !a.Accepted {
		// What the node carries from an earlier grant, the provider may have back.
		return 0
	}
	pods := HeldCapacity{PodSets: a.PodSets}.Pods()
	if a.VirtualNodeReady {
		return pods
	}
	return min(a.CarriedPods, pods)
}

// Decision explains a placement.
type Decision struct {
	// Scores of the clusters that fit, from 0 to 100.
	// +optional
	Scores []ClusterScore `json:"scores,omitempty"`
	// Rejections of those that were not chosen, with the reason.
	// +optional
	Rejections []ClusterRejection `json:"rejections,omitempty"`
}

// ClusterScore is one cluster's score.
type ClusterScore struct {
	Cluster string `json:"cluster"`
	// Score from 0 to 100, with two decimals.
	Score string `json:"score"`
}

// ClusterRejection says why a cluster was not chosen.
type ClusterRejection struct {
	Cluster string `json:"cluster"`
	// Reason is one CamelCase word.
	Reason string `json:"reason"`
	// Message is a sentence with the figures.
	Message string `json:"message"`
}

// ReservationStatus is what became of a request. The broker owns it; in the
// consumer's cluster the agent keeps a copy.
type ReservationStatus struct {
	// +optional
	Phase ReservationPhase `json:"phase,omitempty"`
	// ID of the broker's copy, in the consumer's cluster.
	// +optional
	ID string `json:"id,omitempty"`
	// +optional
	Attempt Attempt `json:"attempt,omitempty"`
	// Allocations in force, by cluster.
	// +optional
	// +listType=map
	// +listMapKey=cluster
	Allocations []Allocation `json:"allocations,omitempty"`
	// +optional
	Decision *Decision `json:"decision,omitempty"`
	// Refused lists providers that have turned an attempt down lately.
	// +optional
	Refused []Refusal `json:"refused,omitempty"`
	// +optional
	ReservedAt *metav1.Time `json:"reservedAt,omitempty"`
	// +optional
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
	// Summary for the print columns, as "3 of 5 pods in paris".
	// +optional
	Summary string `json:"summary,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// Refusal is a provider's no to one attempt.
type Refusal struct {
	Cluster string `json:"cluster"`
	// Sequence of the provider's advertisement when it refused: it is asked
	// again after a newer one.
	Sequence int64  `json:"sequence"`
	Message  string `json:"message"`
}

// Reservation asks for capacity in another cluster and says what became of it.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=resv
// +kubebuilder:printcolumn:name="Requester",type=string,JSONPath=`.spec.requesterID`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Granted",type=string,JSONPath=`.status.summary`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Reservation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ReservationSpec   `json:"spec"`
	Status ReservationStatus `json:"status,omitempty"`
}

// ReservationList is a list of Reservation.
// +kubebuilder:object:root=true
type ReservationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Reservation `json:"items"`
}
