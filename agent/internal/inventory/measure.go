package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Bounds of an advertisement: the CRD's, and one on all shapes together that
// keeps the message within what the broker takes.
const (
	maxClasses     = 64
	maxShapes      = 128
	maxShapesInAll = 2048
)

// Terms is what an advertisement says besides what is measured.
type Terms struct {
	ClusterID   string
	ClusterName string
	EndpointURL string
	PeerKey     string
	Lending     broker.Lending
	// Headroom is kept for the cluster's own pods: never advertised.
	Headroom corev1.ResourceList
	Cost     *broker.Cost
	// Region and Zone; where empty, what all nodes agree on.
	Region, Zone string
}

// Measurement is the input of Measure.
type Measurement struct {
	Terms Terms
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// GuestOf tells whose guest a pod is.
	GuestOf  func(*corev1.Pod) (consumer string, ok bool)
	Now      time.Time
	Sequence int64
}

// Measure says what the cluster has to offer.
func Measure(m Measurement) broker.ClusterAdvertisementSpec {
	spec := broker.ClusterAdvertisementSpec{
		ClusterID:   m.Terms.ClusterID,
		ClusterName: m.Terms.ClusterName,
		EndpointURL: m.Terms.EndpointURL,
		PeerKey:     m.Terms.PeerKey,
		Lending:     m.Terms.Lending,
		Cost:        m.Terms.Cost,
		Timestamp:   metav1.NewTime(m.Now),
		Sequence:    m.Sequence,
	}
	slots, tenants := occupy(m.Nodes, m.Pods, m.Terms.Headroom)
	var capacity, allocatable, allocated corev1.ResourceList
	for _, slot := range slots {
		capacity = broker.AddTo(capacity, slot.Node.Status.Capacity)
		allocatable = broker.AddTo(allocatable, slot.Node.Status.Allocatable)
	}
	for name, keep := range m.Terms.Headroom {
		rest, ok := allocatable[name]
		if !ok {
			continue
		}
		rest.Sub(keep)
		if rest.Sign() < 0 {
			rest = resource.Quantity{Format: rest.Format}
		}
		allocatable[name] = rest
	}
	used, guests := map[string]corev1.ResourceList{}, map[string]int32{}
	for _, t := range tenants {
		if consumer, ok := m.GuestOf(t.pod); ok {
			used[consumer] = broker.AddTo(used[consumer], t.requests)
			guests[consumer]++
			continue
		}
		allocated = broker.AddTo(allocated, t.requests)
	}
	spec.Resources = broker.AdvertisedResources{
		Capacity:    broker.FromList(capacity),
		Allocatable: broker.FromList(allocatable),
		Allocated:   broker.FromList(allocated),
	}
	spec.ObservedHolds = observedHolds(used, guests)
	spec.NodeClasses = nodeClasses(slots)
	spec.Region = cmp.Or(m.Terms.Region, agreed(slots, corev1.LabelTopologyRegion))
	spec.Zone = cmp.Or(m.Terms.Zone, agreed(slots, corev1.LabelTopologyZone))
	return spec
}

func observedHolds(used map[string]corev1.ResourceList, guests map[string]int32) []broker.ObservedHold {
	var out []broker.ObservedHold
	for _, consumer := range slices.Sorted(maps.Keys(used)) {
		out = append(out, broker.ObservedHold{Requester: consumer, Used: broker.FromList(used[consumer]), Pods: guests[consumer]})
	}
	return out
}

// agreed is the value of a label that every node has, empty where they differ.
func agreed(slots []Slot, label string) string {
	var value string
	for i, slot := range slots {
		v := slot.Node.Labels[label]
		if i > 0 && v != value {
			return ""
		}
		value = v
	}
	return value
}

// nodeClasses groups slots by what a pod can tell them apart by. Where there are
// too many classes, labels with a value of their own on nearly every node are
// dropped first, and then the smallest classes: what is left out is not lent.
func nodeClasses(slots []Slot) []broker.NodeClass {
	drop := map[string]bool{}
	classes := groupSlots(slots, drop)
	if len(classes) > maxClasses {
		values := map[string]map[string]bool{}
		for _, slot := range slots {
			for key, value := range slot.Node.Labels {
				if values[key] == nil {
					values[key] = map[string]bool{}
				}
				values[key][value] = true
			}
		}
		for key, distinct := range values {
			drop[key] = len(distinct) > maxClasses
		}
		classes = groupSlots(slots, drop)
	}
	slices.SortFunc(classes, func(a, b class) int {
		return cmp.Or(cmp.Compare(len(b.slots), len(a.slots)), cmp.Compare(a.key, b.key))
	})
	classes = classes[:min(len(classes), maxClasses)]
	limit := maxShapes
	if len(classes) > 0 {
		limit = min(limit, maxShapesInAll/len(classes))
	}
	var out []broker.NodeClass
	for i, c := range classes {
		c.NodeClass.Name = fmt.Sprintf("class-%d", i+1)
		c.NodeClass.FreeShapes = histogram(c.slots, limit)
		out = append(out, c.NodeClass)
	}
	return out
}

type class struct {
	broker.NodeClass
	key   string
	slots []Slot
}

func groupSlots(slots []Slot, drop map[string]bool) []class {
	var classes []class
	index := map[string]int{}
	for _, slot := range slots {
		labels := map[string]string{}
		for key, value := range slot.Node.Labels {
			// What names one node tells nothing about where a pod of another
			// cluster could go.
			if value != slot.Node.Name && key != corev1.LabelHostname && !drop[key] {
				labels[key] = value
			}
		}
		taints := make([]corev1.Taint, 0, len(slot.Node.Spec.Taints))
		for _, t := range slot.Node.Spec.Taints {
			taints = append(taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: t.Effect})
		}
		slices.SortFunc(taints, func(a, b corev1.Taint) int {
			return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Value, b.Value), cmp.Compare(a.Effect, b.Effect))
		})
		arch := cmp.Or(slot.Node.Labels[corev1.LabelArchStable], slot.Node.Status.NodeInfo.Architecture)
		var key strings.Builder
		for _, name := range slices.Sorted(maps.Keys(labels)) {
			fmt.Fprintf(&key, "%s=%s,", name, labels[name])
		}
		fmt.Fprintf(&key, "|%v|%s", taints, arch)
		i, ok := index[key.String()]
		if !ok {
			i = len(classes)
			index[key.String()] = i
			classes = append(classes, class{key: key.String(), NodeClass: broker.NodeClass{
				Labels: labels, Taints: taints, Arch: arch,
			}})
		}
		classes[i].slots = append(classes[i].slots, slot)
	}
	return classes
}

// histogram sums up slots in at most limit entries, largest first. Amounts are
// rounded down to ever fewer significant bits until the entries fit; what does
// not fit even so is left out, smallest first. So it never promises more than
// there is.
func histogram(slots []Slot, limit int) []broker.FreeShape {
	var shapes []broker.FreeShape
	for _, precision := range []int{64, 8, 6, 5, 4, 3, 2, 1} {
		shapes = roundedShapes(slots, precision)
		if len(shapes) <= limit {
			break
		}
	}
	return shapes[:min(len(shapes), limit)]
}

func roundedShapes(slots []Slot, precision int) []broker.FreeShape {
	type rounded struct {
		free  corev1.ResourceList
		pods  int32
		nodes int32
	}
	byKey := map[string]*rounded{}
	for _, slot := range slots {
		if slot.Pods == 0 {
			continue
		}
		r := rounded{free: corev1.ResourceList{}, pods: int32(roundDown(int64(slot.Pods), precision)), nodes: 1}
		var key strings.Builder
		for _, name := range slices.Sorted(maps.Keys(slot.Free)) {
			amount := slot.Free[name]
			r.free[name] = roundQuantity(name, amount, precision)
			value := r.free[name]
			fmt.Fprintf(&key, "%s=%s,", name, value.String())
		}
		fmt.Fprintf(&key, "pods=%d", r.pods)
		if same := byKey[key.String()]; same != nil {
			same.nodes++
		} else {
			byKey[key.String()] = &r
		}
	}
	keys := slices.SortedFunc(maps.Keys(byKey), func(a, b string) int {
		x, y := byKey[a], byKey[b]
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, broker.ResourceGPU} {
			p, q := x.free[name], y.free[name]
			if c := q.Cmp(p); c != 0 {
				return c
			}
		}
		return cmp.Or(cmp.Compare(y.pods, x.pods), cmp.Compare(a, b))
	})
	var shapes []broker.FreeShape
	for _, key := range keys {
		r := byKey[key]
		shapes = append(shapes, broker.FreeShape{Nodes: r.nodes, Free: broker.FromList(r.free), Pods: r.pods})
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
