package demand

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Policies are all policies of a cluster.
type Policies struct {
	Decoded   []*broker.OverflowPolicy
	Undecoded []broker.Undecoded
}

// Of returns the policy of a namespace: the first by name that selects it, or nil. If that one
// cannot be decoded, it is an error: the namespace must not be without the limits that it is to have.
func (p Policies) Of(namespace *corev1.Namespace) (*broker.OverflowPolicy, error) {
	var first *broker.OverflowPolicy
	unknown := map[string]bool{}
	for _, u := range p.Undecoded {
		unknown[u.Name] = true // what it was before has been changed
	}
	for _, policy := range p.Decoded {
		if !unknown[policy.Name] && Selects(policy.Spec.NamespaceSelector, namespace) && (first == nil || policy.Name < first.Name) {
			first = policy
		}
	}
	for _, u := range p.Undecoded {
		if (first == nil || u.Name < first.Name) && undecodedSelects(u, namespace) {
			return nil, fmt.Errorf("OverflowPolicy %s, which applies to namespace %s, cannot be decoded: %s: correct it", u.Name, namespace.Name, u.Message)
		}
	}
	return first, nil
}

// Selects reports whether a selector selects a namespace. One that cannot be parsed selects none:
// it does not say which it is meant for, and the others must not wait for its correction.
func Selects(selector metav1.LabelSelector, namespace *corev1.Namespace) bool {
	parsed, err := metav1.LabelSelectorAsSelector(&selector)
	return err == nil && parsed.Matches(labels.Set(namespace.Labels))
}

// undecodedSelects does so of a policy of which at most the selector can be decoded.
func undecodedSelects(policy broker.Undecoded, namespace *corev1.Namespace) bool {
	var only struct {
		Spec struct {
			NamespaceSelector metav1.LabelSelector `json:"namespaceSelector"`
		} `json:"spec"`
	}
	return json.Unmarshal(policy.Raw, &only) == nil && Selects(only.Spec.NamespaceSelector, namespace)
}
