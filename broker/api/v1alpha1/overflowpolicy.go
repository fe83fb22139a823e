package v1alpha1

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// OverflowPolicySpec limits the overflow of the selected namespaces. If several select one, the first by name applies.
type OverflowPolicySpec struct {
	// namespaceSelector selects namespaces by label. An empty selector selects all namespaces that are opted in.
	// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, e.key.indexOf('/') < 254 && e.key.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && (e.operator in ['In', 'NotIn'] ? has(e.values) && size(e.values) > 0 && e.values.all(v, v.matches('^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$')) : e.operator in ['Exists', 'DoesNotExist'] && (!has(e.values) || size(e.values) == 0)))",message="matchExpressions must have the key of a label, and operator In or NotIn with its values, or Exists or DoesNotExist without, such as {key: team, operator: In, values: [shop]}"
	// +kubebuilder:validation:XValidation:rule="!has(self.matchLabels) || self.matchLabels.all(k, k.indexOf('/') < 254 && k.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && self.matchLabels[k].matches('^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$'))",message="matchLabels must be keys and values of labels, such as {team: shop}"
	NamespaceSelector metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	// placement is copied into each new Reservation.
	Placement *Placement `json:"placement,omitempty"`
	// budget is copied into each new Reservation.
	Budget *Budget `json:"budget,omitempty"`
	// maxResources is the maximum of resources that the Reservations of one namespace
	// request in total. No maximum if unset.
	// +kubebuilder:validation:XValidation:rule="!has(self.cpu) || isQuantity(string(self.cpu)) && quantity(string(self.cpu)).compareTo(quantity('0')) >= 0",message="cpu must be a quantity of 0 or more, such as 500m"
	// +kubebuilder:validation:XValidation:rule="!has(self.memory) || isQuantity(string(self.memory)) && quantity(string(self.memory)).compareTo(quantity('0')) >= 0",message="memory must be a quantity of 0 or more, such as 16Gi"
	// +kubebuilder:validation:XValidation:rule="!has(self.gpu) || isQuantity(string(self.gpu)) && quantity(string(self.gpu)).compareTo(quantity('0')) >= 0",message="gpu must be a quantity of 0 or more, such as 2"
	// +kubebuilder:validation:XValidation:rule="!has(self.storage) || isQuantity(string(self.storage)) && quantity(string(self.storage)).compareTo(quantity('0')) >= 0",message="storage must be a quantity of 0 or more, such as 10Gi"
	// +kubebuilder:validation:XValidation:rule="!has(self.extended) || self.extended.all(k, type(self.extended[k]) == int ? self.extended[k] >= 0 : (self.extended[k] < '-' || self.extended[k] >= '.'))",message="amounts in extended must be quantities of 0 or more, such as 2"
	MaxResources *ResourceQuantities `json:"maxResources,omitempty"`
	// duration is copied into each new Reservation.
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s')",message="duration must be a duration of 1s or more, such as 24h for a day"
	Duration *metav1.Duration `json:"duration,omitempty"`
	// returnHome moves overflowed pods back when this cluster has room for them: by eviction, one at a time, within
	// PodDisruptionBudgets. It applies to pods of ReplicaSets and StatefulSets, and to others with a controller and
	// annotation broker.fluidos.eu/return-home=enabled. Pods stay where they are if unset.
	ReturnHome *ReturnHome `json:"returnHome,omitempty"`
}

// ReturnHome says when overflowed pods move back.
type ReturnHome struct {
	// after is how long this cluster must have had room for a pod before it moves.
	// +kubebuilder:default="5m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="after must be a duration of 1s to 24h, such as 5m"
	After *metav1.Duration `json:"after,omitempty"`
	// minimumStay is how long a pod runs on a virtual node before it moves.
	// +kubebuilder:default="10m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('720h')",message="minimumStay must be a duration of 1s to 720h, such as 10m; a day is 24h"
	MinimumStay *metav1.Duration `json:"minimumStay,omitempty"`
}

// OverflowPolicyStatus says where a policy applies. The scheduler plugin writes it, at most once in 10 s.
type OverflowPolicyStatus struct {
	// namespaces to which the policy applies, at most 20: those whose Reservations request something come first.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=20
	Namespaces []PolicyNamespace `json:"namespaces,omitempty"`
	// namespaceCount is the number of all namespaces to which it applies.
	NamespaceCount int32 `json:"namespaceCount,omitempty"`
	// usage of maxResources by the namespace that is closest to it, such as "cpu 3 of 8 (shop)".
	Usage string `json:"usage,omitempty"`
	// conditions of the policy: Accepted.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedGeneration is the metadata.generation that the status was computed for.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
}

// PolicyNamespace is a namespace to which a policy applies.
type PolicyNamespace struct {
	// name of the namespace.
	Name string `json:"name"`
	// requested is what its Reservations request, which maxResources limits.
	Requested ResourceQuantities `json:"requested,omitempty"`
}

// MaxPolicyNamespaces is the maximum number of namespaces in a policy's status: as in its marker.
const MaxPolicyNamespaces = 20

// OverflowPolicy limits where the pods of the selected namespaces may overflow to,
// how much capacity they may use, and at which price.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=opol,categories=spillway
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Namespaces",type=integer,JSONPath=`.status.namespaceCount`
// +kubebuilder:printcolumn:name="Usage",type=string,JSONPath=`.status.usage`
// +kubebuilder:printcolumn:name="Max CPU",type=string,JSONPath=`.spec.maxResources.cpu`
// +kubebuilder:printcolumn:name="Max Price",type=string,JSONPath=`.spec.budget.maxPricePerHour`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Accepted")].message`
type OverflowPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   OverflowPolicySpec   `json:"spec,omitempty"`
	Status OverflowPolicyStatus `json:"status,omitempty"`
}

// Check reports what no program can use although it can be decoded, in an object from before the CRD refused it: a
// label that no object can have. Package broker/undecoded treats the policy as one that cannot be decoded.
func (p *OverflowPolicy) Check() error {
	if _, err := metav1.LabelSelectorAsSelector(&p.Spec.NamespaceSelector); err != nil {
		return fmt.Errorf("spec.namespaceSelector: %w", err)
	}
	return nil
}

// OverflowPolicyList is a list of OverflowPolicy.
// +kubebuilder:object:root=true
type OverflowPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []OverflowPolicy `json:"items"`
	WithUndecoded   `json:"-"`
}
