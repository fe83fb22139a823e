package placeholder

import (
	"cmp"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// HandOver is the place that a guest is to take: on Node, where Placeholders are removed
// for it.
type HandOver struct {
	Node         string
	Placeholders []*corev1.Pod
}

// Part of a hold that a guest is to use: a pod of the set that Shape identifies (as ShapeOf
// does), or some of a total.
type Part struct {
	Hold      types.UID
	Shape     string
	Divisible bool
}

// ShapeOf identifies the shape of a pod set, whatever its name and count.
func ShapeOf(set broker.PodSet) string { return keyOf(set) }

// Places are the placeholders of a consumer that have a place and are not taken yet.
type Places struct{ groups []*group }

// group are the placeholders of one shape of a hold, by name.
type group struct {
	hold  types.UID
	shape string
	// size is what each requests, and room what each leaves, as Ceil and Floor.
	size, room capacity.Vector
	pods       []*corev1.Pod
}

// NewPlaces returns the placeholders that have a place.
func NewPlaces(pods []*corev1.Pod) *Places {
	type key struct {
		hold  types.UID
		shape string
	}
	groups := map[key]*group{}
	for _, pod := range pods {
		if pod.Spec.NodeName == "" {
			continue
		}
		k := key{HoldOf(pod), pod.Labels[broker.LabelShape]}
		if groups[k] == nil {
			requests := requestsOf(pod)
			groups[k] = &group{hold: k.hold, shape: k.shape, size: capacity.Ceil(requests), room: capacity.Floor(requests)}
		}
		groups[k].pods = append(groups[k].pods, pod)
	}
	p := &Places{}
	for _, g := range groups {
		slices.SortFunc(g.pods, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
		p.groups = append(p.groups, g)
	}
	slices.SortFunc(p.groups, func(a, b *group) int {
		return cmp.Or(capacity.Compare(a.size, b.size), cmp.Compare(a.pods[0].Name, b.pods[0].Name))
	})
	return p
}

// Take returns the place of a guest with these requests that uses a part of a hold, and
// takes its placeholders: those of the part, or else the smallest that have room. ok is false
// while no suitable placeholder has a place. suits reports whether the guest may run on a
// node.
func (p *Places) Take(requests corev1.ResourceList, part Part, suits func(node string) bool) (place HandOver, ok bool) {
	need := capacity.Ceil(requests)
	own := func(g *group) bool { return g.hold == part.Hold && (part.Divisible || g.shape == part.Shape) }
	others := func(g *group) bool { return !own(g) }
	if place, ok = p.one(need, own, suits); !ok && part.Divisible {
		place, ok = p.some(need, own, suits)
	}
	if !ok {
		place, ok = p.one(need, others, suits)
	}
	return place, ok
}

// one takes the smallest placeholder with room for a guest.
func (p *Places) one(need capacity.Vector, of func(*group) bool, suits func(node string) bool) (place HandOver, ok bool) {
	for _, g := range p.groups {
		if !of(g) || need.FitsIn(g.room) == 0 {
			continue
		}
		if i := slices.IndexFunc(g.pods, func(pod *corev1.Pod) bool { return suits(pod.Spec.NodeName) }); i >= 0 {
			pod := g.pods[i]
			g.pods = slices.Delete(g.pods, i, i+1)
			return HandOver{pod.Spec.NodeName, []*corev1.Pod{pod}}, true
		}
	}
	return place, false
}

// some takes placeholders of one node that have room for a guest together.
func (p *Places) some(need capacity.Vector, of func(*group) bool, suits func(node string) bool) (place HandOver, ok bool) {
	var parts []*corev1.Pod
	for _, g := range p.groups {
		if of(g) {
			parts = append(parts, g.pods...)
		}
	}
	place, ok = gathered(need, slices.DeleteFunc(parts, func(pod *corev1.Pod) bool { return !suits(pod.Spec.NodeName) }))
	for _, g := range p.groups {
		g.pods = slices.DeleteFunc(g.pods, func(pod *corev1.Pod) bool { return slices.Contains(place.Placeholders, pod) })
	}
	return place, ok
}

// gathered are parts of one node that have room for a guest together.
func gathered(need capacity.Vector, parts []*corev1.Pod) (best HandOver, ok bool) {
	sums, on := map[string]capacity.Vector{}, map[string][]*corev1.Pod{}
	for _, pod := range parts {
		node := pod.Spec.NodeName
		if sums[node] == nil {
			sums[node] = capacity.Vector{}
		}
		if need.FitsIn(sums[node]) > 0 {
			continue
		}
		sums[node].Add(capacity.Floor(requestsOf(pod)), 1)
		on[node] = append(on[node], pod)
		if need.FitsIn(sums[node]) > 0 && (!ok || len(on[node]) < len(best.Placeholders)) {
			best, ok = HandOver{node, on[node]}, true
		}
	}
	return best, ok
}

// RunsOn reports whether a node matches a pod's node selector and required node affinity,
// and the pod tolerates its taints.
func RunsOn(pod *corev1.Pod, node *corev1.Node) bool {
	if match, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node); err != nil || !match {
		return false
	}
	_, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), node.Spec.Taints, pod.Spec.Tolerations, func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	return !untolerated
}
