package overflow

import (
	"fmt"
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// policyFor returns the policy of a namespace: the first by name that selects it,
// or nil. An invalid selector is an error, because the policy may be meant for
// this namespace.
func policyFor(namespace *corev1.Namespace, all []*broker.OverflowPolicy) (*broker.OverflowPolicy, error) {
	var first *broker.OverflowPolicy
	for _, policy := range all {
		selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.NamespaceSelector)
		if err != nil {
			return nil, fmt.Errorf("OverflowPolicy %s: parsing its namespaceSelector: %w", policy.Name, err)
		}
		if selector.Matches(labels.Set(namespace.Labels)) && (first == nil || policy.Name < first.Name) {
			first = policy
		}
	}
	return first, nil
}

// maxPods returns how many pods that request each fit in the limit of a namespace beside
// what it requests already; short is the resource that allows no more.
func maxPods(each corev1.ResourceList, limit broker.ResourceQuantities, others corev1.ResourceList) (n int32, short corev1.ResourceName) {
	n = math.MaxInt32
	for name, each := range each {
		most := limitOf(limit, name)
		if most == nil || each.Sign() <= 0 { // what a gang of several shapes requests further may be nothing
			continue
		}
		left := most.DeepCopy()
		left.Sub(others[name])
		if fit := quotient(left, each); fit < n {
			n, short = fit, name
		}
	}
	return n, short
}

// limitOf returns the limit of a resource, nil if it has none. A limit of zero is
// one too, which ResourceQuantities.List leaves out.
func limitOf(q broker.ResourceQuantities, name corev1.ResourceName) *resource.Quantity {
	switch name {
	case corev1.ResourceCPU:
		return q.CPU
	case corev1.ResourceMemory:
		return q.Memory
	case broker.ResourceGPU:
		return q.GPU
	case corev1.ResourceEphemeralStorage:
		return q.Storage
	}
	if limit, ok := q.Extended[name]; ok {
		return &limit
	}
	return nil
}

// quotient returns how often each fits in left.
func quotient(left, each resource.Quantity) int32 {
	if left.Sign() <= 0 {
		return 0
	}
	// Milli-units, unless they overflow.
	a, b := left.Value(), each.Value()
	if a < math.MaxInt64/1000 {
		a, b = left.MilliValue(), each.MilliValue()
	}
	return int32(min(a/b, math.MaxInt32))
}

// requestedResources sums up what Reservations request, except what claims have.
func requestedResources(all []*broker.Reservation, claims map[string]claim) corev1.ResourceList {
	sum := corev1.ResourceList{}
	for _, r := range all {
		if claims[r.Name].has > 0 {
			continue
		}
		if r.Spec.RequestedResources != nil {
			broker.AddTo(sum, r.Spec.RequestedResources.List())
		}
		for _, set := range r.Spec.PodSets {
			broker.AddTo(sum, broker.Times(set.Requests.List(), set.Count))
		}
	}
	return sum
}
