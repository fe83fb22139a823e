package capacity

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Vector is an amount of each resource, in thousandths of a unit. A missing
// resource is zero.
type Vector map[corev1.ResourceName]int64

// Unit is one unit of a resource in a Vector: one core, byte, device or pod.
const Unit = 1000

// Floor is a free amount, rounded down.
func Floor(list corev1.ResourceList) Vector { return vectorOf(list, false) }

// Ceil is a requested amount, rounded up, so that rounding never creates
// capacity.
func Ceil(list corev1.ResourceList) Vector { return vectorOf(list, true) }

// ceilOf is Ceil(q.List()) without the list, which costs more than all else of a small
// amount.
func ceilOf(q *broker.ResourceQuantities) Vector {
	v := Vector{}
	q.Each(func(name corev1.ResourceName, amount resource.Quantity) {
		if !amount.IsZero() {
			v[name] = milli(amount, true)
		}
	})
	return v
}

func vectorOf(list corev1.ResourceList, up bool) Vector {
	v := Vector{}
	for name, quantity := range list {
		v[name] = milli(quantity, up)
	}
	return v
}

func milli(q resource.Quantity, up bool) int64 {
	if q.CmpInt64(math.MaxInt64/Unit) >= 0 {
		return math.MaxInt64
	}
	m := q.MilliValue() // rounds up
	if !up && resource.NewMilliQuantity(m, q.Format).Cmp(q) > 0 {
		m--
	}
	return max(m, 0)
}

// FitsIn is how many times v fits in free, of which more may be in use than there is; math.MaxInt64
// if v is zero.
func (v Vector) FitsIn(free Vector) int64 {
	n := int64(math.MaxInt64)
	for name, amount := range v {
		if amount > 0 {
			n = min(n, free[name]/amount)
		}
	}
	return max(n, 0)
}

// Add adds n times amount, which is not below zero, to v in place, and stops at math.MaxInt64 and
// its negative. v may be below zero: more can be in use than there is.
func (v Vector) Add(amount Vector, n int64) {
	for name, a := range amount {
		switch {
		case a == 0 || n == 0:
		case n > 0 && a > (math.MaxInt64-max(v[name], 0))/n:
			v[name] = math.MaxInt64
		case n < 0 && a > (math.MaxInt64+min(v[name], 0))/-n:
			v[name] = -math.MaxInt64
		default:
			v[name] += n * a
		}
	}
}

// Minus is v less n times amount, in a new vector, never below zero.
func (v Vector) Minus(amount Vector, n int64) Vector {
	out := maps.Clone(v)
	for name, a := range amount {
		if n > 0 && a > out[name]/n {
			out[name] = 0
		} else {
			out[name] -= n * a
		}
	}
	return out
}

// IsZero reports whether v has no amount above zero.
func (v Vector) IsZero() bool {
	for _, amount := range v {
		if amount != 0 {
			return false
		}
	}
	return true
}

// Kinds are the resources of v: GPU, CPU, memory, then all others by name.
func (v Vector) Kinds() []corev1.ResourceName {
	rank := func(name corev1.ResourceName) int {
		if i := slices.Index(scarcest, name); i >= 0 {
			return i
		}
		return len(scarcest)
	}
	return slices.SortedFunc(maps.Keys(v), func(a, b corev1.ResourceName) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a, b))
	})
}

// scarcest resources first: they decide which of two amounts is larger.
var scarcest = []corev1.ResourceName{broker.ResourceGPU, corev1.ResourceCPU, corev1.ResourceMemory}

// Compare orders amounts by their kinds, in the order of Kinds.
func Compare(a, b Vector) int {
	if c := compareBy(scarcest, a, b); c != 0 || maps.Equal(a, b) {
		return c
	}
	both := maps.Clone(a)
	maps.Copy(both, b)
	return compareBy(both.Kinds(), a, b)
}

func compareBy(kinds []corev1.ResourceName, a, b Vector) int {
	for _, name := range kinds {
		if c := cmp.Compare(a[name], b[name]); c != 0 {
			return c
		}
	}
	return 0
}

// Decreasing orders pod sets by what one pod requests, the largest first, then
// by name.
func Decreasing(sets []broker.PodSet) []broker.PodSet {
	// Converting the requests costs more than sorting does: once for each set.
	requests, order := make([]Vector, len(sets)), make([]int, len(sets))
	for i := range sets {
		requests[i], order[i] = ceilOf(&sets[i].Requests), i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(Compare(requests[b], requests[a]), cmp.Compare(sets[a].Name, sets[b].Name))
	})
	sorted := make([]broker.PodSet, len(sets))
	for i, at := range order {
		sorted[i] = sets[at]
	}
	return sorted
}

// List is v as a Kubernetes resource list.
func (v Vector) List() corev1.ResourceList {
	list := corev1.ResourceList{}
	for name := range v {
		list[name] = v.quantity(name)
	}
	return list
}

func (v Vector) quantity(name corev1.ResourceName) resource.Quantity {
	format := resource.DecimalSI
	if name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
		format = resource.BinarySI
	}
	if v[name]%Unit == 0 {
		return *resource.NewQuantity(v[name]/Unit, format)
	}
	return *resource.NewMilliQuantity(v[name], format)
}

// format prints v's amount of one resource as "1200m" or "900Mi".
func (v Vector) format(name corev1.ResourceName) string {
	quantity := v.quantity(name)
	return quantity.String()
}
