package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"

	corev1 "k8s.io/api/core/v1"

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
		free capacity.Vector
	}
	byAmount := map[string]*rounded{}
	for _, n := range nodes {
		if n.freePods == 0 {
			continue
		}
		free := capacity.Floor(n.free)
		for name, amount := range free {
			free[name] = roundDown(amount/unit(name), precision) * unit(name)
		}
		shape := broker.FreeShape{Nodes: 1, Free: broker.FromList(free.List()), Pods: int32(roundDown(int64(n.freePods), precision))}
		key := fmt.Sprintf("%s, pods %d", shape.Free, shape.Pods)
		if same := byAmount[key]; same != nil {
			same.Nodes++
		} else {
			byAmount[key] = &rounded{shape, free}
		}
	}
	sorted := slices.SortedFunc(maps.Values(byAmount), func(a, b *rounded) int {
		return cmp.Or(capacity.Compare(b.free, a.free), cmp.Compare(b.Pods, a.Pods))
	})
	var shapes []broker.FreeShape
	for _, r := range sorted {
		shapes = append(shapes, r.FreeShape)
	}
	return shapes
}

// unit is what amounts of a resource are rounded down to, in thousandths: whole
// milli-cores, MiB or devices.
func unit(name corev1.ResourceName) int64 {
	switch name {
	case corev1.ResourceCPU:
		return 1
	case corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		return 1000 << 20
	default:
		return 1000
	}
}

// roundDown keeps the highest bits of a number that is not negative.
func roundDown(value int64, precision int) int64 {
	if excess := bits.Len64(uint64(value)) - precision; excess > 0 {
		return value >> excess << excess
	}
	return value
}
