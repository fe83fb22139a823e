package placeholder

import (
	"cmp"
	"encoding/json"
	"maps"
	"math/bits"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

const (
	// maxParts is the number of placeholders that a divisible total is held in, at most.
	maxParts = 64
	// AnnotationPart is what a part of a divisible total holds, as broker.ResourceQuantities in
	// JSON: admission may raise what its placeholder requests.
	AnnotationPart = broker.Group + "/part"
)

// part is a placeholder of a divisible total.
type part struct {
	pod  *corev1.Pod
	size capacity.Vector
}

// parts are the placeholders of a divisible total: together exactly what is unused of it, in
// whole units. As many as possible of those that exist are kept, those with a place first and
// of these the largest; new ones hold what they leave.
func (in Input) parts(of int, existing map[string][]*corev1.Pod) []planned {
	h := in.Holds[of]
	left := whole(h.Unused.Totals.List())
	byKey := map[string]*planned{}
	at := func(s shape) *planned {
		if byKey[s.key] == nil {
			s.set.Count = 0
			byKey[s.key] = &planned{shape: s}
		}
		return byKey[s.key]
	}
	leaving := 0
	for _, pod := range in.Leaving {
		if size, ok := sizeOf(pod); ok && HoldOf(pod) == h.UID {
			// It is there until the guest takes it: what the guest leaves is held then.
			at(shapeOf(pod, size)).hold(pod)
			left = left.Minus(size, 1)
			leaving++
		}
	}
	candidates, remove := in.candidates(existing)
	var keep []part
	for _, p := range candidates {
		if p.size.FitsIn(left) > 0 {
			left, keep = left.Minus(p.size, 1), append(keep, p)
		} else {
			remove = append(remove, p)
			in.leaves(p.pod)
		}
	}
	if !left.IsZero() && len(keep) >= maxParts {
		// The smallest ones are replaced by larger ones.
		for _, p := range keep[maxParts/2:] {
			left.Add(p.size, 1)
		}
		keep, remove = keep[:maxParts/2], append(remove, keep[maxParts/2:]...)
	}
	for _, p := range remove {
		removed := at(shapeOf(p.pod, p.size))
		removed.remove = append(removed.remove, p.pod)
	}
	for _, p := range keep {
		at(shapeOf(p.pod, p.size)).hold(p.pod)
	}
	for _, s := range in.divide(left, in.beside(of, byKey), maxParts-len(keep), len(keep)+leaving > 0) {
		// A placeholder that is removed may have the key of a part, and say no size.
		p := at(s)
		p.size, p.set.Requests = s.size, s.set.Requests
		p.set.Count += s.set.Count
	}
	var out []planned
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		out = append(out, *byKey[key])
	}
	return out
}

// hold adds a placeholder that is kept.
func (p *planned) hold(pod *corev1.Pod) {
	p.keep = append(p.keep, pod)
	p.set.Count++
}

// leaves counts a placeholder that leaves its node to a guest that is expected there.
func (in Input) leaves(pod *corev1.Pod) {
	if in.Expected[pod.Spec.NodeName] > 0 {
		in.Expected[pod.Spec.NodeName]--
	}
}

// candidates are the placeholders of a divisible total that may be kept, in this order, and
// those that hold nothing.
func (in Input) candidates(existing map[string][]*corev1.Pod) (candidates, remove []part) {
	for _, key := range slices.Sorted(maps.Keys(existing)) {
		for _, pod := range existing[key] {
			if size, ok := sizeOf(pod); ok && in.holds(pod) {
				candidates = append(candidates, part{pod, size})
			} else {
				remove = append(remove, part{pod, size})
			}
		}
	}
	rank := func(pod *corev1.Pod) int {
		switch {
		case pod.Spec.NodeName == "":
			return 2
		case in.Expected[pod.Spec.NodeName] > 0:
			return 1
		}
		return 0
	}
	slices.SortFunc(candidates, func(a, b part) int {
		return cmp.Or(cmp.Compare(rank(a.pod), rank(b.pod)), capacity.Compare(b.size, a.size), cmp.Compare(a.pod.Name, b.pod.Name))
	})
	return candidates, remove
}

// beside are the pods that need a place beside new parts of a hold: the parts that are kept, and
// those of the consumer's other holds.
func (in Input) beside(of int, kept map[string]*planned) (sets []broker.PodSet) {
	for _, p := range kept {
		sets = append(sets, p.set)
	}
	for i, h := range in.Holds {
		if i == of {
			continue
		}
		sets = append(sets, h.Unused.PodSets...)
		if len(h.Unused.PodSets) == 0 {
			sets = append(sets, in.partsOf(h)...)
		}
	}
	return sets
}

// partsOf are the parts of a divisible total that exist.
func (in Input) partsOf(h Hold) (sets []broker.PodSet) {
	for _, pod := range slices.Concat(in.Pods, in.Leaving) {
		if size, ok := sizeOf(pod); ok && HoldOf(pod) == h.UID {
			set := partSet(size)
			set.Count = 1
			sets = append(sets, set)
		}
	}
	return sets
}

// divide returns the parts that hold an amount: as few as fit the nodes, and not more than most.
// If none do, few are kept: one beside others, which may wait for a place alone.
func (in Input) divide(amount capacity.Vector, beside []broker.PodSet, most int, others bool) (parts []shape) {
	// Steps that powers of two are among: of as many equal nodes, each takes a part.
	for n := 1; n <= most; n += 1 << max(0, bits.Len(uint(n))-3) {
		parts = split(amount, int64(n))
		sets := slices.Clone(beside)
		for _, p := range parts {
			sets = append(sets, p.set)
		}
		if len(parts) == 0 || in.Fits == nil || in.Fits(sets) {
			return parts
		}
	}
	if others {
		return split(amount, 1)
	}
	return parts
}

// split divides an amount into n parts that differ by one unit of each resource at most, the
// largest first. Parts of nothing are left out.
func split(amount capacity.Vector, n int64) (parts []shape) {
	var last capacity.Vector
	for i := range n {
		size := capacity.Vector{}
		for name, a := range amount {
			units := a / Unit(name)
			if i < units%n {
				units += n
			}
			if units >= n {
				size[name] = units / n * Unit(name)
			}
		}
		switch {
		case size.IsZero():
			return parts
		case maps.Equal(size, last):
			parts[len(parts)-1].set.Count++
		default:
			s := shape{set: partSet(size), size: size}
			s.key, s.set.Count = keyOf(s.set), 1
			parts, last = append(parts, s), size
		}
	}
	return parts
}

// whole is a free amount in whole units.
func whole(total corev1.ResourceList) capacity.Vector {
	amount := capacity.Floor(total)
	for name, a := range amount {
		amount[name] = a - a%Unit(name)
	}
	return amount
}

// Unit is the smallest amount of a resource that a pod can request, in thousandths.
func Unit(name corev1.ResourceName) int64 {
	if name == corev1.ResourceCPU {
		return 1
	}
	if size, huge := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix); huge {
		if page, err := resource.ParseQuantity(size); err == nil && page.Value() > 0 {
			return 1000 * page.Value()
		}
	}
	return 1000
}

// partSet is a part as a pod set.
func partSet(size capacity.Vector) broker.PodSet {
	return broker.PodSet{Name: "total", Requests: broker.FromList(size.List())}
}

// shapeOf is the shape of a placeholder of a divisible total.
func shapeOf(pod *corev1.Pod, size capacity.Vector) shape {
	return shape{pod.Labels[broker.LabelShape], partSet(size), size}
}

// sizeOf is what a placeholder of a divisible total holds; ok is false if it is none.
func sizeOf(pod *corev1.Pod) (size capacity.Vector, ok bool) {
	var holds broker.ResourceQuantities
	if json.Unmarshal([]byte(pod.Annotations[AnnotationPart]), &holds) != nil {
		return nil, false
	}
	size = capacity.Ceil(holds.List())
	return size, !size.IsZero()
}
