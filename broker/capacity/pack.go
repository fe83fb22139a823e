package capacity

import (
	"cmp"
	"maps"
	"math"
	"math/bits"
	"slices"
	"sort"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
// one slot or several. The zero value can be used after Reset.
type Packer struct {
	// catalog of the room, nil for none.
	catalog *Catalog
	layout  *layout
	classes []*nodeClass
	// slots as in a Room. A slot without nodes counts for nothing.
	slots []int64
	// changed are slots while a set is placed; available is what an account has left
	// while a Demand is placed.
	changed, available []int64
}

// NewPacker makes a Packer. It does not change the slots.
func NewPacker(slots []Slot) *Packer {
	classes, kinds := make(map[*broker.NodeClass]*nodeClass, len(slots)), Vector{}
	for i := range slots {
		if class := slots[i].Class; classes[class] == nil {
			classes[class] = newNodeClass(len(classes), class, slots[i].Node)
		}
		maps.Copy(kinds, slots[i].Free)
	}
	var p Packer
	p.Reset(newRoom(nil, &layout{kinds: kinds.Kinds()}, slots, classes))
	return &p
}

// Reset gives the packer the free capacity of a room.
func (p *Packer) Reset(r *Room) {
	p.catalog, p.layout, p.classes, p.slots = r.catalog, r.layout, r.classes, append(p.slots[:0], r.slots...)
}

// width of a slot's row.
func (p *Packer) width() int { return len(p.layout.kinds) + rowFigures }

// Place places up to count pods of a set and returns how many fit.
func (p *Packer) Place(set broker.PodSet, count int64) (placed int64) {
	s := newShape(p.catalog, &set)
	if !p.layout.has(s.request) {
		return 0
	}
	placed = p.place(s, p.layout.write(s.request), count)
	p.merge()
	s.learn(p.catalog)
	return placed
}

// place places up to count pods that request amounts in the packer's layout. The
// changed slots are not merged yet.
func (p *Packer) place(s *shape, request []int64, count int64) (placed int64) {
	kinds, width := len(request), p.width()
	changed := p.changed[:0]
slots:
	for at := 0; at < len(p.slots) && placed < count; at += width {
		slot := p.slots[at : at+width : at+width]
		free, figures := slot[:kinds:kinds], slot[kinds:]
		for i, amount := range request {
			if amount > free[i] {
				continue slots
			}
		}
		if figures[rowPods] <= 0 || figures[rowNodes] <= 0 || !s.fits(p.classes, figures[rowClass]) {
			continue
		}
		each := figures[rowPods]
		for i, amount := range request {
			// A division costs more than all else here.
			if high, low := bits.Mul64(uint64(each), uint64(amount)); high > 0 || low > uint64(free[i]) {
				each = free[i] / amount
			}
		}
		n := min(count-placed, each*figures[rowNodes])
		placed += n
		full, rest := n/each, n%each
		changed = appendTaken(changed, slot, request, full, each)
		figures[rowNodes] -= full
		if rest > 0 {
			changed = appendTaken(changed, slot, request, 1, rest)
			figures[rowNodes]--
		}
	}
	p.changed = changed
	return placed
}

// appendTaken appends a number of nodes of a slot without n times the request.
func appendTaken(to, slot, request []int64, nodes, n int64) []int64 {
	if nodes == 0 {
		return to
	}
	at := len(to)
	to = append(to, slot...)
	for i, amount := range request {
		to[at+i] -= n * amount
	}
	figures := to[at+len(request):]
	figures[rowPods] -= n
	figures[rowNodes] = nodes
	return to
}

// spread takes a divisible total from the nodes that accept any pod, the fullest
// first, as far as it is there.
func (p *Packer) spread(total Vector) {
	if total.IsZero() {
		return
	}
	left, any := p.layout.write(total), newShape(nil, &broker.PodSet{})
	kinds, width := len(left), p.width()
	p.changed = p.changed[:0]
	taken := make([]int64, kinds)
	for at := 0; at < len(p.slots); at += width {
		slot := p.slots[at : at+width]
		figures := slot[kinds:]
		for figures[rowNodes] > 0 && figures[rowPods] > 0 && any.fits(p.classes, figures[rowClass]) {
			nodes, some := figures[rowNodes], false
			for i, amount := range left {
				if taken[i] = min(amount, slot[i]); taken[i] > 0 {
					some, nodes = true, min(nodes, amount/taken[i])
				}
			}
			if !some {
				break
			}
			p.changed = append(p.changed, slot...)
			part := p.changed[len(p.changed)-width:]
			for i := range left {
				left[i] -= nodes * taken[i]
				part[i] -= taken[i]
			}
			part[kinds+rowNodes] = nodes
			figures[rowNodes] -= nodes
		}
	}
	p.merge()
}

// merge sorts the changed slots into the others.
func (p *Packer) merge() {
	if len(p.changed) == 0 {
		return
	}
	width := p.width()
	kept := p.dropEmpty()
	changed := p.changed
	for at := width; at < len(changed); at += width {
		for i := at; i > 0 && less(changed[i:i+width], changed[i-width:i]); i -= width {
			for j := i; j < i+width; j++ {
				changed[j], changed[j-width] = changed[j-width], changed[j]
			}
		}
	}
	// From the end, so that each slot moves once.
	size := kept + len(changed)
	p.slots = slices.Grow(p.slots[:kept], len(changed))[:size]
	to := size
	for last := len(changed); last > 0; last -= width {
		slot := changed[last-width : last]
		// Behind those that are equal.
		at := width * sort.Search(kept/width, func(i int) bool { return less(slot, p.slots[i*width:(i+1)*width]) })
		copy(p.slots[to-(kept-at):to], p.slots[at:kept])
		to -= kept - at + width
		copy(p.slots[to:to+width], slot)
		kept = at
	}
}

// dropEmpty moves the slots that have nodes to the front, and returns where they end.
func (p *Packer) dropEmpty() (kept int) {
	width := p.width()
	run := 0
	move := func(end int) {
		if kept < run {
			copy(p.slots[kept:], p.slots[run:end])
		}
		kept += end - run
	}
	for nodes := width - rowFigures + rowNodes; nodes < len(p.slots); nodes += width {
		if p.slots[nodes] <= 0 {
			at := nodes + rowFigures - rowNodes - width
			move(at)
			run = at + width
		}
	}
	move(len(p.slots))
	return kept
}

// less orders slots: by what is free, by pods, by the class's name.
func less(a, b []int64) bool {
	figures := len(a) - rowFigures
	for i, amount := range a[:figures+rowPods+1] {
		if other := b[i]; amount != other {
			return amount < other
		}
	}
	return a[figures+rowClass]>>32 < b[figures+rowClass]>>32
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
	sum := make([]int64, len(p.layout.kinds))
	p.addDivisible(sum, newShape(nil, &broker.PodSet{}))
	return p.layout.vector(sum)
}

func (p *Packer) addDivisible(sum []int64, any *shape) {
	for at := 0; at < len(p.slots); at += p.width() {
		slot := p.slots[at : at+p.width()]
		if figures := slot[len(sum):]; figures[rowPods] > 0 && figures[rowNodes] > 0 && any.fits(p.classes, figures[rowClass]) {
			for i := range sum {
				sum[i] = addTimes(sum[i], slot[i], figures[rowNodes])
			}
		}
	}
}

// addTimes is sum plus n times amount, at most math.MaxInt64.
func addTimes(sum, amount, n int64) int64 {
	if amount > 0 && n > (math.MaxInt64-sum)/amount {
		return math.MaxInt64
	}
	return sum + n*amount
}
