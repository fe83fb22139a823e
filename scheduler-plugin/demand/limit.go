package demand

import (
	"maps"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// MaxPods returns how many pods that request each fit in the limit of a namespace beside
// what it requests already; short is the resource that allows no more.
func MaxPods(each corev1.ResourceList, limit broker.ResourceQuantities, others corev1.ResourceList) (n int32, short corev1.ResourceName) {
	n = math.MaxInt32
	for name, each := range each {
		most := LimitOf(limit, name)
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

// LimitOf returns the limit of a resource, nil if it has none. A limit of zero is
// one too, which ResourceQuantities.List leaves out.
func LimitOf(q broker.ResourceQuantities, name corev1.ResourceName) *resource.Quantity {
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

// Limits are the resources that have a limit.
func Limits(q broker.ResourceQuantities) []corev1.ResourceName {
	names := slices.Sorted(maps.Keys(q.Extended))
	for _, name := range []corev1.ResourceName{corev1.ResourceEphemeralStorage, broker.ResourceGPU, corev1.ResourceMemory, corev1.ResourceCPU} {
		if LimitOf(q, name) != nil {
			names = slices.Insert(names, 0, name)
		}
	}
	return names
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

// AddRequested adds what a Reservation requests to a sum.
func AddRequested(sum corev1.ResourceList, spec *broker.ReservationSpec) {
	if spec.RequestedResources != nil {
		broker.AddTo(sum, spec.RequestedResources.List())
	}
	for _, set := range spec.PodSets {
		broker.AddTo(sum, broker.Times(set.Requests.List(), set.Count))
	}
}
