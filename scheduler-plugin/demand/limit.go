package demand

import (
	"maps"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// MaxPods returns how many pods that request each fit in the limit of a namespace beside
// what it requests already; short is the resource that allows no more.
func MaxPods(each corev1.ResourceList, limit broker.ResourceQuantities, others corev1.ResourceList) (n int32, short corev1.ResourceName) {
	n = math.MaxInt32
	limits, need := limit.Limits(), capacity.Ceil(each)
	left := capacity.Floor(limits)
	left.Add(capacity.Ceil(others), -1)
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		// What a gang of several shapes requests further may be nothing.
		if fit := (capacity.Vector{name: need[name]}).FitsIn(left); fit < int64(n) {
			n, short = int32(fit), name
		}
	}
	return n, short
}
