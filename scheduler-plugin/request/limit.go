package request

import (
	"fmt"
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// policyOf returns the policy of a namespace, nil if none selects it.
func (c *Controller) policyOf(name string) (*broker.OverflowPolicy, error) {
	namespace, err := c.Namespaces.Get(name)
	if err != nil {
		return nil, fmt.Errorf("getting namespace %s: %w", name, err)
	}
	return c.Policies.List().Of(namespace)
}

// allowed returns how many units of a request the policy of its namespace allows, or nil, beside
// what other Reservations request; short is the resource that allows no more. What its own, of a
// name, requests already stays, also after the limit was lowered.
func (c *Controller) allowed(policy *broker.OverflowPolicy, request demand.Request, name string, current *broker.Reservation) (units int32, short corev1.ResourceName, err error) {
	each, wanted := request.Unit()
	if policy == nil || policy.Spec.MaxResources == nil || current != nil && coversPods(current, request) {
		return wanted, "", nil
	}
	all, err := c.Reservations.list(request.Key.Namespace)
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
