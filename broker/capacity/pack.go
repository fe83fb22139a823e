package capacity

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// Slot is a number of nodes that have the same free capacity each.
type Slot struct {
	// Class has the nodes' labels, taints and architecture. Its name breaks ties
	// between equal amounts.
	Class *broker.NodeClass
	// Node is the node's name where the slot is one node.
	Node string
	// Nodes is how many nodes there are.
	Nodes int64
	// Free is what one node has free, and Pods how many more pods it may run.
	Free Vector
	Pods int64
}

// Slots are the free shapes of node classes. A class without shapes is one node
// that may run no more pods.
func Slots(classes []broker.NodeClass) []Slot {
	var slots []Slot
	for i := range classes {
		class := &classes[i]
		if len(class.FreeShapes) == 0 {
			slots = append(slots, Slot{Class: class, Nodes: 1, Free: Vector{}})
		}
		for _, shape := range class.FreeShapes {
			if shape.Nodes > 0 {
				slots = append(slots, Slot{Class: class, Nodes: int64(shape.Nodes), Free: Floor(shape.Free.List()), Pods: int64(shape.Pods)})
			}
		}
	}
	return slots
}

// Packer places pods into slots: each pod on the fullest node that takes it,
// ties by class. What is placed is taken from the free capacity. Equal nodes
// stay together, so that the cost grows with the number of slots and not of
// nodes. The same slots and calls give the same answer whether equal nodes are
// one slot or several.
type Packer struct {
	// slots, the fullest first.
	slots []Slot
}

// NewPacker makes a Packer. It does not change the slots.
func NewPacker(slots []Slot) *Packer {
	slots = slices.Clone(slots)
	slices.SortStableFunc(slots, compareSlots)
	return &Packer{slots: slots}
}

func compareSlots(a, b Slot) int {
	return cmp.Or(Compare(a.Free, b.Free), cmp.Compare(a.Pods, b.Pods), cmp.Compare(a.Class.Name, b.Class.Name))
}

// Place places up to count pods of a set and returns how many fit.
func (p *Packer) Place(set broker.PodSet, count int64) (placed int64) {
	if count <= 0 {
		return 0
	}
	request, mismatch := Ceil(set.Requests.List()), matcher(set)
	kept, changed := make([]Slot, 0, len(p.slots)), []Slot(nil)
	for i, slot := range p.slots {
		if placed == count {
			kept = append(kept, p.slots[i:]...)
			break
		}
		each := min(slot.Pods, request.FitsIn(slot.Free))
		n := min(count-placed, each*slot.Nodes)
		if n <= 0 || mismatch(&slot) != "" {
			kept = append(kept, slot)
			continue
		}
		placed += n
		add := func(to *[]Slot, nodes, pods int64) {
			if nodes > 0 {
				part := slot
				part.Nodes, part.Free, part.Pods = nodes, slot.Free.Minus(request, pods), slot.Pods-pods
				*to = append(*to, part)
			}
		}
		full, partly := n/each, min(n%each, 1)
		add(&changed, full, each)
		add(&changed, partly, n%each)
		add(&kept, slot.Nodes-full-partly, 0)
	}
	p.slots = merge(kept, changed)
	return placed
}

// spread takes a divisible total from the nodes that accept any pod, the fullest
// first, as far as it is there.
func (p *Packer) spread(total Vector) {
	if total.IsZero() {
		return
	}
	left, mismatch := maps.Clone(total), matcher(broker.PodSet{})
	var kept, changed []Slot
	for _, slot := range p.slots {
		for slot.Nodes > 0 && slot.Pods > 0 && mismatch(&slot) == "" {
			taken, nodes := Vector{}, slot.Nodes
			for name, amount := range left {
				if part := min(amount, slot.Free[name]); part > 0 {
					taken[name], nodes = part, min(nodes, amount/part)
				}
			}
			if len(taken) == 0 {
				break
			}
			left = left.Minus(taken, nodes)
			part := slot
			part.Nodes, part.Free = nodes, slot.Free.Minus(taken, 1)
			changed = append(changed, part)
			slot.Nodes -= nodes
		}
		if slot.Nodes > 0 {
			kept = append(kept, slot)
		}
	}
	p.slots = merge(kept, changed)
}

// merge sorts changed slots into those that are kept, which are sorted.
func merge(kept, changed []Slot) []Slot {
	if len(changed) == 0 {
		return kept
	}
	slices.SortStableFunc(changed, compareSlots)
	out := make([]Slot, 0, len(kept)+len(changed))
	for _, slot := range changed {
		n := slices.IndexFunc(kept, func(k Slot) bool { return compareSlots(k, slot) > 0 })
		if n < 0 {
			n = len(kept)
		}
		out, kept = append(append(out, kept[:n]...), slot), kept[n:]
	}
	return append(out, kept...)
}

// Reserve takes promised capacity from what is free, as far as it is there: pod
// sets, the largest pods first, then a divisible total.
func (p *Packer) Reserve(sets []broker.PodSet, total Vector) {
	for _, set := range Decreasing(sets) {
		p.Place(set, int64(set.Count))
	}
	p.spread(total)
}

// Pack places as much of a capacity as fits beside what is reserved: pod sets,
// the largest pods first, or a divisible total, of which all fits or nothing.
// The rejection explains what does not fit; it is nil if all does. With an
// account, no more is placed than is available by it.
func (p *Packer) Pack(want broker.HeldCapacity, account *Account) (placed broker.HeldCapacity, rejection *Rejection) {
	if len(want.PodSets) == 0 {
		if rejection = p.rejectTotal(Ceil(want.Totals.List()), account); rejection == nil {
			placed = *want.DeepCopy()
		}
		return placed, rejection
	}
	var shortages []shortage
	for _, set := range Decreasing(want.PodSets) {
		request, count := Ceil(set.Requests.List()), int64(set.Count)
		if account != nil {
			count = min(count, request.FitsIn(account.Available))
		}
		fit := p.Place(set, count)
		if account != nil {
			account = account.less(request, fit)
		}
		if fit < int64(set.Count) {
			shortages = append(shortages, p.shortage(set, fit, account))
		}
		set.Count = int32(fit)
		placed.PodSets = append(placed.PodSets, set)
	}
	slices.SortFunc(placed.PodSets, func(a, b broker.PodSet) int { return cmp.Compare(a.Name, b.Name) })
	placed = OfPodSets(placed.PodSets)
	return placed, rejectPods(placed, shortages)
}

// divisible is what the nodes that accept any pod have free together.
func (p *Packer) divisible() Vector {
	sum, mismatch := Vector{}, matcher(broker.PodSet{})
	for _, slot := range p.slots {
		if slot.Pods > 0 && mismatch(&slot) == "" {
			sum.Add(slot.Free, slot.Nodes)
		}
	}
	return sum
}

// Matches reports whether the nodes of a class can run pods of a set if they have the
// capacity.
func Matches(class *broker.NodeClass, set broker.PodSet) bool {
	return matcher(set)(&Slot{Class: class}) == ""
}

// matcher returns a function that reports why the nodes of a slot cannot run pods
// of a set, "" if they can. Each class is matched once.
func matcher(set broker.PodSet) func(*Slot) string {
	var affinity *nodeaffinity.LazyErrorNodeSelector
	if set.NodeAffinity != nil {
		affinity = nodeaffinity.NewLazyErrorNodeSelector(set.NodeAffinity)
	}
	known := map[*broker.NodeClass]string{}
	return func(slot *Slot) string {
		why, ok := known[slot.Class]
		if !ok {
			why = mismatch(slot, set, affinity)
			known[slot.Class] = why
		}
		return why
	}
}

func mismatch(slot *Slot, set broker.PodSet, affinity *nodeaffinity.LazyErrorNodeSelector) string {
	labels := slot.Class.Labels
	if _, ok := labels[corev1.LabelArchStable]; !ok && slot.Class.Arch != "" {
		labels = map[string]string{corev1.LabelArchStable: slot.Class.Arch}
		maps.Copy(labels, slot.Class.Labels)
	}
	for _, key := range slices.Sorted(maps.Keys(set.NodeSelector)) {
		if have, ok := labels[key]; !ok || have != set.NodeSelector[key] {
			return fmt.Sprintf("label %s=%s is missing", key, set.NodeSelector[key])
		}
	}
	if affinity != nil {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: slot.Node, Labels: labels}}
		if match, err := affinity.Match(node); err != nil {
			return "the node affinity is invalid: " + err.Error()
		} else if !match {
			return "the node affinity does not match"
		}
	}
	// The guest requires both, whether or not its pod selects them.
	if arch, ok := labels[corev1.LabelArchStable]; ok && arch != guest.Arch {
		return fmt.Sprintf("the architecture is %s, and only %s pods can overflow", arch, guest.Arch)
	}
	if system, ok := labels[corev1.LabelOSStable]; ok && system != guest.OS {
		return fmt.Sprintf("the operating system is %s, and only %s pods can overflow", system, guest.OS)
	}
	taint, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), slot.Class.Taints, guest.Tolerations(set.Tolerations), func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	if untolerated {
		return "taint " + taint.ToString() + " is not tolerated"
	}
	return ""
}
