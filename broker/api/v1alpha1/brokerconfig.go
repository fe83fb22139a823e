package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BrokerConfigSpec is the desired configuration of the broker. Users write it.
// Changes take effect without a restart.
type BrokerConfigSpec struct {
	// weights of the scoring rules. Defaults to 70 for resources and 30 for cost.
	// +optional
	Weights *ScoreWeights `json:"weights,omitempty"`
	// quotas limit what one cluster uses of the broker.
	// +optional
	Quotas *Quotas `json:"quotas,omitempty"`
	// staleAfter is the time since a cluster's last advertisement after which the
	// cluster is inactive.
	// +optional
	// +kubebuilder:default="10m"
	StaleAfter *metav1.Duration `json:"staleAfter,omitempty"`
	// freshFor is the maximum age of an advertisement on which new pods are placed.
	// The default is three advertisement intervals of the agents.
	// +optional
	// +kubebuilder:default="90s"
	FreshFor *metav1.Duration `json:"freshFor,omitempty"`
	// maxDuration is the maximum duration of a Reservation. A Reservation that
	// requests more, or states none, gets this one. No maximum if unset.
	// +optional
	MaxDuration *metav1.Duration `json:"maxDuration,omitempty"`
}

// ScoreWeights are the weights of the scoring rules in percent.
// +kubebuilder:validation:XValidation:rule="self.resources + self.cost == 100",message="resources and cost must add up to 100"
type ScoreWeights struct {
	// resources is the weight of the share of resources that remains available after
	// the placement.
	// +kubebuilder:default=70
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Resources int32 `json:"resources"`
	// cost is the weight of the price.
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Cost int32 `json:"cost"`
}

// BrokerConfig configures the broker. Only the object named "default" in the
// broker's namespace is used; without it the defaults apply.
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
