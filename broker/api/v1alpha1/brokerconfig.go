package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

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
