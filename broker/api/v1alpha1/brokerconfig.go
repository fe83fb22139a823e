package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BrokerConfigSpec is the desired configuration of the broker. Users write it.
// Changes take effect without a restart.
type BrokerConfigSpec struct {
	// weights of the scoring rules: 70 for resources and 30 for cost if unset.
	Weights *ScoreWeights `json:"weights,omitempty"`
	// exchangeRates are those by which prices in several currencies are compared, with each other
	// and with budgets. Where one of two currencies has none, they are not.
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=currency
	ExchangeRates []ExchangeRate `json:"exchangeRates,omitempty"`
	// quotas limit what one cluster uses of the broker.
	Quotas *Quotas `json:"quotas,omitempty"`
	// joining decides which clusters may use the broker.
	Joining *Joining `json:"joining,omitempty"`
	// staleAfter is the time since a cluster's last advertisement after which the cluster is inactive.
	// +kubebuilder:default="10m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="staleAfter must be a duration of 1s or more, such as 10m; a day is 24h"
	StaleAfter *metav1.Duration `json:"staleAfter,omitempty"`
	// freshFor is the maximum age of an advertisement on which new pods are placed.
	// The default is three advertisement intervals of the agents.
	// +kubebuilder:default="90s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="freshFor must be a duration of 1s or more, such as 90s; a day is 24h"
	FreshFor *metav1.Duration `json:"freshFor,omitempty"`
	// maxDuration is the maximum lease of a Reservation. A Reservation whose duration is longer,
	// or unset, gets this one. No maximum if unset.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="maxDuration must be a duration of 1s or more, such as 24h for a day"
	MaxDuration *metav1.Duration `json:"maxDuration,omitempty"`
	// defaultDuration is the lease of a Reservation without spec.duration, at most maxDuration;
	// maxDuration if unset. It ends when no pod has used the capacity for so long, whereas
	// defaultLease ends when the consumer has been silent for so long.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="defaultDuration must be a duration of 1s or more, such as 1h; a day is 24h"
	DefaultDuration *metav1.Duration `json:"defaultDuration,omitempty"`
	// defaultLease is how long a Reservation outlives the last sign of life of its consumer:
	// an advertisement or a renewal. Its own duration, or maxDuration, may end it earlier.
	// +kubebuilder:default="1h"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="defaultLease must be a duration of 1s or more, such as 1h; a day is 24h"
	DefaultLease *metav1.Duration `json:"defaultLease,omitempty"`
	// proofDeadline is how long a provider may take to accept or refuse an attempt, and
	// again for each 250 pods of it, at most ten times. After that, the Reservation is placed elsewhere, and the
	// provider gets no other requests for the time of retryAfter unless it answers.
	// +kubebuilder:default="30s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="proofDeadline must be a duration of 1s or more, such as 30s; a day is 24h"
	ProofDeadline *metav1.Duration `json:"proofDeadline,omitempty"`
	// retryAfter is the time after which a provider that has refused a shape, or has not
	// answered, is asked again. Each further refusal doubles it, up to 16 times.
	// +kubebuilder:default="30s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="retryAfter must be a duration of 1s or more, such as 30s; a day is 24h"
	RetryAfter *metav1.Duration `json:"retryAfter,omitempty"`
	// queueing decides whether a Reservation may pass those before it in the queue.
	// Conservative: only if the capacity that the first one waits for stays free. None: the queue
	// only orders who is tried first, and a large request may wait indefinitely.
	// +kubebuilder:default=Conservative
	Queueing Queueing `json:"queueing,omitempty"`
	// keepFreeFor is how long capacity may stay free for a Reservation in the queue, from when
	// it began to wait or its spec last changed. After that, others may use it. Without it, or
	// with 0s, it is free for as long as the Reservation waits.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s')",message="keepFreeFor must be a duration of 0s or more, such as 30m; a day is 24h"
	KeepFreeFor *metav1.Duration `json:"keepFreeFor,omitempty"`
}

// Joining decides which clusters may use the broker. It concerns those that join, and renew their
// certificates; spec.approval of a ClusterRegistration ends the access of one that has joined.
type Joining struct {
	// admission of a cluster about which no operator has decided.
	// +kubebuilder:default=Automatic
	Admission Admission `json:"admission,omitempty"`
	// allowed are the IDs of the clusters that may join. Empty means all.
	// +listType=set
	// +kubebuilder:validation:MaxItems=10000
	// +kubebuilder:validation:items:MaxLength=40
	Allowed []string `json:"allowed,omitempty"`
}

// Admission of clusters that join.
// +kubebuilder:validation:Enum=Automatic;Approval;Invitation
type Admission string

const (
	// AdmissionAutomatic approves each cluster that has the shared join token.
	AdmissionAutomatic Admission = "Automatic"
	// AdmissionApproval lets a cluster that has the shared join token wait for spec.approval.
	AdmissionApproval Admission = "Approval"
	// AdmissionInvitation refuses the shared join token: a cluster needs an invitation.
	AdmissionInvitation Admission = "Invitation"
)

// Queueing is how the queue protects large requests from small ones.
// +kubebuilder:validation:Enum=Conservative;None
type Queueing string

const (
	// QueueingConservative keeps free what the first Reservation in the queue waits for.
	QueueingConservative Queueing = "Conservative"
	// QueueingNone lets every Reservation take what is available.
	QueueingNone Queueing = "None"
)

// ScoreWeights are the weights of the scoring rules in percent.
// +kubebuilder:validation:XValidation:rule="self.resources + self.cost + self.reliability + self.latency == 100",message="resources, cost, reliability and latency must add up to 100"
type ScoreWeights struct {
	// resources is the weight of the share of resources that remains available after the placement.
	// +kubebuilder:default=70
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Resources int32 `json:"resources"`
	// cost is the weight of the price.
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Cost int32 `json:"cost"`
	// reliability is the weight of the share of its promises that the provider has kept of late:
	// what it refuses, withdraws or does not answer is not kept.
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Reliability int32 `json:"reliability,omitempty"`
	// latency is the weight of the time to connect to the API server of the provider, from the consumer.
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Latency int32 `json:"latency,omitempty"`
}

// ExchangeRate is what a currency is worth.
type ExchangeRate struct {
	// currency is an ISO 4217 code such as EUR.
	// +kubebuilder:validation:Pattern=`^[A-Z]{3}$`
	Currency string `json:"currency"`
	// rate is the worth of one unit, a decimal number, in a unit that is the same for all rates.
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]+([.][0-9]+)?$') && !self.matches('^[0.]+$')",message="rate must be a decimal number above 0, such as 0.92"
	Rate string `json:"rate"`
	// date of the rate, such as 2026-11-28. Where prices are compared by it, they are shown with it.
	// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}$`
	Date string `json:"date"`
}

// BrokerConfigStatus says whether the broker uses a BrokerConfig. The broker writes it.
type BrokerConfigStatus struct {
	// conditions of the BrokerConfig: Accepted.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedGeneration is the metadata.generation that the status was computed for.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// BrokerConfig configures the broker. Only the object named "default" in the
// broker's namespace is used; without it the defaults apply. In another namespace it has no status.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'default'",message="a BrokerConfig must be named default: the broker uses no other"
// +kubebuilder:resource:shortName=bcfg,categories=spillway
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Resources",type=integer,JSONPath=`.spec.weights.resources`
// +kubebuilder:printcolumn:name="Cost",type=integer,JSONPath=`.spec.weights.cost`
// +kubebuilder:printcolumn:name="Stale After",type=string,JSONPath=`.spec.staleAfter`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Accepted")].message`
type BrokerConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   BrokerConfigSpec   `json:"spec,omitempty"`
	Status BrokerConfigStatus `json:"status,omitempty"`
}

// BrokerConfigList is a list of BrokerConfig.
// +kubebuilder:object:root=true
type BrokerConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []BrokerConfig `json:"items"`
	WithUndecoded   `json:"-"`
}
