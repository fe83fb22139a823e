package capacity

import (
	"math"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Demand is capacity to place, prepared for comparing it with the rooms of many
// clusters of one Catalog. It is not safe for concurrent use.
type Demand struct {
	// shapes of the pod sets, the largest first, and how many pods of each are wanted.
	shapes []*shape
	wanted []int64
	// anyPod is the shape of the pods that use a divisible total.
	anyPod *shape
	total  Vector
	// exact is whether the requests are whole thousandths: their multiples then need no
	// rounding.
	exact bool
	// figures by layout.
	figures []*demandFigures
}

// demandFigures are a Demand's amounts in one layout.
type demandFigures struct {
	// requests of each shape; nil if it requests a resource that is not in the layout.
	requests [][]int64
	// total of all that is wanted; nil if it has a resource that is not in the layout.
	total []int64
}

// NewDemand prepares a capacity. The catalog is that of the rooms.
func NewDemand(catalog *Catalog, want broker.HeldCapacity) *Demand {
	d := &Demand{exact: true}
	sets := Decreasing(want.PodSets)
	for i := range sets {
		d.shapes = append(d.shapes, newShape(catalog, &sets[i]))
		for name, amount := range sets[i].Requests.List() {
			milli := d.shapes[i].request[name]
			d.exact = d.exact && milli < math.MaxInt64 && resource.NewMilliQuantity(milli, amount.Format).Cmp(amount) == 0
		}
	}
	if len(sets) == 0 {
		d.anyPod = newShape(catalog, &broker.PodSet{})
	}
	for i := range sets {
		d.wanted = append(d.wanted, int64(sets[i].Count))
	}
	d.setWanted(want)
	return d
}

// Want changes the amounts. The pod sets must be among those of NewDemand.
func (d *Demand) Want(want broker.HeldCapacity) {
	for i, s := range d.shapes {
		d.wanted[i] = int64(Count(want, *s.set))
	}
	d.setWanted(want)
}

func (d *Demand) setWanted(want broker.HeldCapacity) {
	d.figures = nil
	if len(d.shapes) == 0 {
		d.total = ceilOf(&want.Totals)
		return
	}
	d.total = d.totalOf(d.wanted)
}

// Learn tells the catalog which classes of nodes match, for other demands.
func (d *Demand) Learn(catalog *Catalog) {
	for _, s := range d.shapes {
		s.learn(catalog)
	}
	if d.anyPod != nil {
		d.anyPod.learn(catalog)
	}
}

// Shapes is how many shapes of pods there are, 0 for a divisible total.
func (d *Demand) Shapes() int { return len(d.shapes) }

// Wanted is how many of the shapes are wanted.
func (d *Demand) Wanted() (n int) {
	for _, count := range d.wanted {
		if count > 0 {
			n++
		}
	}
	return n
}

// Equals reports whether exactly these pods of each shape are wanted.
func (d *Demand) Equals(pods []int64) bool { return len(pods) > 0 && slices.Equal(pods, d.wanted) }

// Within reports whether at least as many pods of each shape are wanted.
func (d *Demand) Within(pods []int64) bool {
	for i, n := range pods {
		if n > d.wanted[i] {
			return false
		}
	}
	return true
}

func (d *Demand) in(l *layout) *demandFigures {
	if more := l.id + 1 - len(d.figures); more > 0 {
		d.figures = append(d.figures, make([]*demandFigures, more)...)
	}
	f := d.figures[l.id]
	if f == nil {
		f = &demandFigures{requests: make([][]int64, len(d.shapes))}
		for i, s := range d.shapes {
			if l.has(s.request) {
				f.requests[i] = l.write(s.request)
			}
		}
		if l.has(d.total) {
			f.total = l.write(d.total)
		}
		d.figures[l.id] = f
	}
	return f
}

// Outcome is how much of a Demand fits.
type Outcome int

// Outcomes, in the order of preference.
const (
	// FitsNone: nothing fits; fitsNowhere: nothing fits, and for some pods no node
	// matches at all.
	fitsNowhere Outcome = iota
	FitsNone
	FitsPartly
	FitsAll
)

// Reason of the Rejection by Pack for the same Demand; "" if all fits.
func (o Outcome) Reason() string {
	return [...]string{ReasonNoMatchingNodes, ReasonInsufficientCapacity, ReasonPartialCapacity, ""}[o]
}

// Fit is Pack without words: it places as much of a Demand as fits in a room by an
// account of which only the available amounts count, and sets pods to the number of
// pods of each shape.
func (p *Packer) Fit(d *Demand, room *Room, available, pods []int64) Outcome {
	if len(d.shapes) == 0 {
		return p.fitTotal(d, room, available)
	}
	p.Reset(room)
	p.changed = p.changed[:0]
	p.available = append(p.available[:0], available...)
	figures, complete, some := d.in(room.layout), true, false
	for i, s := range d.shapes {
		request := figures.requests[i]
		pods[i] = 0
		if request != nil && d.wanted[i] > 0 {
			// What the shape before has changed.
			p.merge()
			pods[i] = p.place(s, request, min(d.wanted[i], times(request, p.available)))
			for k, amount := range request {
				p.available[k] -= pods[i] * amount
			}
		}
		some = some || pods[i] > 0
		complete = complete && pods[i] == d.wanted[i]
	}
	switch {
	case complete:
		return FitsAll
	case some:
		return FitsPartly
	}
	for i, s := range d.shapes {
		matches := func(c *nodeClass) bool { return s.fits(room.classes, int64(c.id)) }
		if d.wanted[i] > 0 && len(room.classes) > 0 && !slices.ContainsFunc(room.classes, matches) {
			return fitsNowhere
		}
	}
	return FitsNone
}

func (p *Packer) fitTotal(d *Demand, room *Room, available []int64) Outcome {
	total := d.in(room.layout).total
	if total == nil || times(total, available) == 0 {
		return FitsNone
	}
	p.Reset(room)
	p.available = append(p.available[:0], make([]int64, len(total))...)
	if p.addDivisible(p.available, d.anyPod); times(total, p.available) == 0 {
		return FitsNone
	}
	return FitsAll
}

// times is how many times a request fits in free; math.MaxInt64 if it is zero.
func times(request, free []int64) int64 {
	n := int64(math.MaxInt64)
	for i, amount := range request {
		if amount > 0 {
			n = min(n, free[i]/amount)
		}
	}
	return n
}

// Share is the AvailableShare, over the kinds that are placed, of what is available
// after a number of pods of each shape are placed (Fit). All amounts are those of the
// room.
func (d *Demand) Share(outcome Outcome, pods []int64, room *Room, available, allocatable []int64) float64 {
	total, kinds := d.in(room.layout).total, d.total
	if outcome != FitsAll {
		kinds = d.totalOf(pods)
		total = room.layout.write(kinds)
	}
	if len(kinds) == 0 {
		return 1
	}
	var sum float64
	for i, name := range room.layout.kinds {
		if _, ok := kinds[name]; ok && allocatable[i] > 0 {
			sum += float64(max(available[i]-total[i], 0)) / float64(allocatable[i])
		}
	}
	return sum / float64(len(kinds))
}

// totalOf is what a number of pods of each shape request together.
func (d *Demand) totalOf(pods []int64) Vector {
	if !d.exact {
		sets := make([]broker.PodSet, len(pods))
		for i, s := range d.shapes {
			sets[i] = *s.set
			sets[i].Count = int32(pods[i])
		}
		return Ceil(OfPodSets(sets).Totals.List())
	}
	total := Vector{}
	for i, s := range d.shapes {
		if pods[i] > 0 {
			total.Add(s.request, pods[i])
		}
	}
	return total
}
