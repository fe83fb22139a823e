package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// freeShapes is a histogram of what nodes have free, in at most limit entries,
// the largest first. Amounts are rounded down to ever fewer significant bits
// until the entries fit; if they do not fit even so, the smallest are left out.
// So it never promises more than there is.
func freeShapes(nodes []node, limit int) []broker.FreeShape {
	var shapes []broker.FreeShape
	for _, precision := range []int{64, 8, 6, 5, 4, 3, 2, 1} {
		shapes = roundedShapes(nodes, precision)
		if len(shapes) <= limit {
			break
		}
	}
	return shapes[:min(len(shapes), limit)]
}

func roundedShapes(nodes []node, precision int) []broker.FreeShape {
	type rounded struct {
		broker.FreeShape
		key  string
		free capacity.Vector
	}
	byKey := map[string]*rounded{}
	for _, n := range nodes {
		if n.freePods == 0 {
			continue
		}
		free := corev1.ResourceList{}
		pods := int32(roundDown(int64(n.freePods), precision))
		var key strings.Builder
		for _, name := range slices.Sorted(maps.Keys(n.free)) {
			amount := roundQuantity(name, n.free[name], precision)
			free[name] = amount
			fmt.Fprintf(&key, "%s=%s,", name, amount.String())
		}
		fmt.Fprintf(&key, "pods=%d", pods)
		if same := byKey[key.String()]; same != nil {
			same.Nodes++
		} else {
			byKey[key.String()] = &rounded{broker.FreeShape{Nodes: 1, Free: broker.FromList(free), Pods: pods}, key.String(), capacity.Floor(free)}
		}
	}
	sorted := slices.SortedFunc(maps.Values(byKey), func(a, b *rounded) int {
		return cmp.Or(capacity.Compare(b.free, a.free), cmp.Compare(b.Pods, a.Pods), cmp.Compare(a.key, b.key))
	})
	var shapes []broker.FreeShape
	for _, r := range sorted {
		shapes = append(shapes, r.FreeShape)
	}
	return shapes
}

// roundQuantity rounds down: CPU to whole milli-cores, bytes to whole MiB, and
// everything to the given number of significant bits.
func roundQuantity(name corev1.ResourceName, amount resource.Quantity, precision int) resource.Quantity {
	switch name {
	case corev1.ResourceCPU:
		milli := amount.MilliValue()
		if exact := resource.NewMilliQuantity(milli, resource.DecimalSI); exact.Cmp(amount) > 0 {
			milli--
		}
		return *resource.NewMilliQuantity(roundDown(milli, precision), resource.DecimalSI)
	case corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		const mebi = 1 << 20
		return *resource.NewQuantity(roundDown(floor(amount)/mebi, precision)*mebi, resource.BinarySI)
	default:
		return *resource.NewQuantity(roundDown(floor(amount), precision), amount.Format)
	}
}

// floor is the largest integer not above amount; Value rounds up.
func floor(amount resource.Quantity) int64 {
	value := amount.Value()
	if resource.NewQuantity(value, amount.Format).Cmp(amount) > 0 {
		value--
	}
	return value
}

// roundDown keeps the highest bits of a number that is not negative.
func roundDown(value int64, precision int) int64 {
	if excess := bits.Len64(uint64(value)) - precision; excess > 0 {
		return value >> excess << excess
	}
	return value
}
