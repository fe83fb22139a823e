package inventory

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// freeShapes is a histogram of what nodes have free, in at most limit entries,
// the largest first. Amounts are rounded down to ever fewer significant bits
// until the entries fit; if they do not fit even so, the smallest are left out.
// So it never promises more than there is.
func freeShapes(nodes []node, limit int) []broker.FreeShape {
	frees := make([]capacity.Vector, len(nodes))
	for i, n := range nodes {
		frees[i] = capacity.Floor(n.free)
	}
	var shapes []broker.FreeShape
	for _, precision := range []int{64, 8, 6, 5, 4, 3, 2, 1} {
		rounded := roundedShapes(nodes, frees, precision)
		if len(rounded) > limit && precision > 1 {
			continue
		}
		for _, r := range rounded[:min(len(rounded), limit)] {
			shapes = append(shapes, broker.FreeShape{Nodes: r.nodes, Free: broker.FromList(r.free.List()), Pods: r.pods})
		}
		break
	}
	return shapes
}

// largestNode is the most of each resource that one of the nodes would have free without
// guests.
func largestNode(nodes []node) *broker.ResourceQuantities {
	largest := corev1.ResourceList{}
	for _, n := range nodes {
		for name, amount := range n.free {
			if guests, some := n.guests[name]; some {
				amount = amount.DeepCopy()
				amount.Add(guests)
			}
			if have, known := largest[name]; !known || amount.Cmp(have) > 0 {
				largest[name] = amount
			}
		}
	}
	out := broker.FromList(largest)
	return &out
}

// roundedShape is a number of nodes with the same rounded amounts.
type roundedShape struct {
	nodes, pods int32
	free        capacity.Vector
}

func roundedShapes(nodes []node, frees []capacity.Vector, precision int) []*roundedShape {
	byAmount := map[string]*roundedShape{}
	var key []byte
	for i, n := range nodes {
		if n.freePods == 0 {
			continue
		}
		free := make(capacity.Vector, len(frees[i]))
		for name, amount := range frees[i] {
			free[name] = roundDown(amount/unit(name), precision) * unit(name)
		}
		pods := int32(roundDown(int64(n.freePods), precision))
		key = strconv.AppendInt(key[:0], int64(pods), 10)
		for _, name := range free.Kinds() {
			if free[name] != 0 {
				key = strconv.AppendInt(append(append(key, ' '), name...), free[name], 10)
			}
		}
		if same := byAmount[string(key)]; same != nil {
			same.nodes++
		} else {
			byAmount[string(key)] = &roundedShape{1, pods, free}
		}
	}
	return slices.SortedFunc(maps.Values(byAmount), func(a, b *roundedShape) int {
		return cmp.Or(capacity.Compare(b.free, a.free), cmp.Compare(b.pods, a.pods))
	})
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
