package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// Bounds of an advertisement: those of the CRD, and one on the sum of all shapes
// that keeps the message within the size that the broker accepts.
const (
	maxClasses     = 64
	maxShapes      = 128
	maxTotalShapes = 2048
)

// class is a node class and its nodes.
type class struct {
	broker.NodeClass
	key   string
	nodes []node
}

// nodeClasses are the classes to advertise, with their free shapes, prices and the labels by
// which pods of other clusters can select them. If there are too many, the smallest
// classes are left out: their capacity is not offered.
func nodeClasses(nodes []node, selectionCarried bool, terms *Terms) []broker.NodeClass {
	classes := classify(nodes)
	classes = classes[:min(len(classes), maxClasses)]
	var out []broker.NodeClass
	for _, c := range classes {
		c.FreeShapes = freeShapes(c.nodes, min(maxShapes, maxTotalShapes/len(classes)))
		c.LargestNode, c.Cost = largestNode(c.nodes), terms.costOf(c.Labels)
		out = append(out, c.NodeClass)
	}
	guest.Selectable(out, selectionCarried)
	return out
}

// classify groups nodes by what a pod can tell them apart by, the largest class
// first. If there are too many classes, labels that have a value of their own on
// nearly every node are ignored.
func classify(nodes []node) []class {
	classes := group(nodes, nil)
	if len(classes) > maxClasses {
		values := map[string]map[string]bool{}
		for _, n := range nodes {
			for key, value := range n.Labels {
				if values[key] == nil {
					values[key] = map[string]bool{}
				}
				values[key][value] = true
			}
		}
		ignored := map[string]bool{}
		for key, distinct := range values {
			ignored[key] = len(distinct) > maxClasses
		}
		classes = group(nodes, ignored)
	}
	slices.SortFunc(classes, func(a, b class) int {
		return cmp.Or(cmp.Compare(len(b.nodes), len(a.nodes)), cmp.Compare(a.key, b.key))
	})
	for i := range classes {
		classes[i].Name = fmt.Sprintf("class-%d", i+1)
	}
	return classes
}

func group(nodes []node, ignored map[string]bool) []class {
	var classes []class
	index := map[string]int{}
	for _, n := range nodes {
		labels := map[string]string{}
		for key, value := range n.Labels {
			// A label that names one node does not describe a class.
			if value != n.Name && key != corev1.LabelHostname && !ignored[key] {
				labels[key] = value
			}
		}
		taints := make([]corev1.Taint, 0, len(n.Spec.Taints))
		for _, t := range n.Spec.Taints {
			taints = append(taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: t.Effect})
		}
		slices.SortFunc(taints, func(a, b corev1.Taint) int {
			return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Value, b.Value), cmp.Compare(a.Effect, b.Effect))
		})
		arch := cmp.Or(n.Labels[corev1.LabelArchStable], n.Status.NodeInfo.Architecture)
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
		classes[i].nodes = append(classes[i].nodes, n)
	}
	return classes
}
