package overflow

import (
	"encoding/json"
	"fmt"
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// policyCache has the OverflowPolicies.
type policyCache struct {
	decoded cache.Store
	objects *undecoded.Objects
}

// list returns the policies as they are now.
func (c policyCache) list() policies {
	p := policies{undecoded: c.objects.Of("OverflowPolicy")}
	for _, obj := range c.decoded.List() {
		p.decoded = append(p.decoded, obj.(*broker.OverflowPolicy))
	}
	return p
}

// policies are all policies of a cluster.
type policies struct {
	decoded   []*broker.OverflowPolicy
	undecoded []broker.Undecoded
}

// of returns the policy of a namespace: the first by name that selects it, or nil. If that one
// cannot be decoded, it is an error: the namespace must not be without the limits that it is to have.
func (p policies) of(namespace *corev1.Namespace) (*broker.OverflowPolicy, error) {
	var first *broker.OverflowPolicy
	unknown := map[string]bool{}
	for _, u := range p.undecoded {
		unknown[u.Name] = true // what it was before has been changed
	}
	for _, policy := range p.decoded {
		if !unknown[policy.Name] && selects(policy.Spec.NamespaceSelector, namespace) && (first == nil || policy.Name < first.Name) {
			first = policy
		}
	}
	for _, u := range p.undecoded {
		if (first == nil || u.Name < first.Name) && undecodedSelects(u, namespace) {
			return nil, fmt.Errorf("OverflowPolicy %s, which applies to namespace %s, cannot be decoded: %s: correct it", u.Name, namespace.Name, u.Message)
		}
	}
	return first, nil
}

// selects reports whether a selector selects a namespace. One that cannot be parsed selects none:
// it does not say which it is meant for, and the others must not wait for its correction.
func selects(selector metav1.LabelSelector, namespace *corev1.Namespace) bool {
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
	return json.Unmarshal(policy.Raw, &only) == nil && selects(only.Spec.NamespaceSelector, namespace)
}

// allowed returns how many units of a request the policy of its namespace allows, or nil, beside
// what other Reservations request; short is the resource that allows no more. What its own, of a
// name, requests already stays, also after the limit was lowered.
func (c *demandController) allowed(policy *broker.OverflowPolicy, request demand.Request, name string, current *broker.Reservation) (units int32, short corev1.ResourceName, err error) {
	each, wanted := request.Unit()
	if policy == nil || policy.Spec.MaxResources == nil || current != nil && coversPods(current, request) {
		return wanted, "", nil
	}
	all, err := c.reservations.list(request.Key.Namespace)
	if err != nil {
		return 0, "", err
	}
	units, short = maxPods(each, *policy.Spec.MaxResources, requestedResources(all, name))
	if current != nil && len(request.PodSets) == 1 {
		units = max(units, usage.RequestedPods(current))
	}
	return min(units, wanted), short, nil
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

// requestedResources sums up what Reservations request, except one of a name.
func requestedResources(all []*broker.Reservation, except string) corev1.ResourceList {
	sum := corev1.ResourceList{}
	for _, r := range all {
		if r.Name == except {
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
