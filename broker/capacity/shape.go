package capacity

import (
	"encoding/binary"
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

// shape is what the pods of a set request and where they may run. It compares itself
// with each node class once. It is not safe for concurrent use.
type shape struct {
	set      *broker.PodSet
	request  Vector
	affinity *nodeaffinity.LazyErrorNodeSelector
	// key of the shape in a Catalog.
	key string
	// matches of classes, by id. They are the Catalog's until they are own.
	matches []match
	own     bool
}

type match byte

const (
	matchUnknown match = iota
	matchYes
	matchNo
)

// newShape returns a shape that knows what the catalog (nil for none) knows of it.
func newShape(catalog *Catalog, set *broker.PodSet) *shape {
	s := &shape{set: set, request: ceilOf(&set.Requests)}
	if catalog != nil {
		s.key = shapeKey(set)
		catalog.mu.Lock()
		s.matches = catalog.matches[s.key]
		catalog.mu.Unlock()
	}
	return s
}

// learn tells the catalog (nil for none) what the shape found out.
func (s *shape) learn(catalog *Catalog) {
	if catalog == nil || !s.own {
		return
	}
	s.own = false
	catalog.mu.Lock()
	defer catalog.mu.Unlock()
	if len(catalog.matches) >= maxShapes || catalog.matches == nil {
		catalog.matches = map[string][]match{}
	}
	catalog.matches[s.key] = s.matches
}

// Matches reports whether the nodes of a class can run pods of a set if they have the
// capacity.
func Matches(class *broker.NodeClass, set broker.PodSet) bool {
	return newShape(nil, &set).mismatch(newNodeClass(0, class, "")) == ""
}

// shapeKey has all that decides on which nodes pods may run.
func shapeKey(set *broker.PodSet) string {
	key := binary.AppendUvarint(nil, uint64(len(set.NodeSelector)))
	add := func(text string) {
		key = append(binary.AppendUvarint(key, uint64(len(text))), text...)
	}
	for _, name := range slices.Sorted(maps.Keys(set.NodeSelector)) {
		add(name)
		add(set.NodeSelector[name])
	}
	key = binary.AppendUvarint(key, uint64(len(set.Tolerations)))
	for i := range set.Tolerations {
		t := &set.Tolerations[i]
		add(t.Key)
		add(string(t.Operator))
		add(t.Value)
		add(string(t.Effect))
	}
	if set.NodeAffinity == nil {
		return string(key)
	}
	terms := set.NodeAffinity.NodeSelectorTerms
	key = binary.AppendUvarint(key, uint64(len(terms)))
	for i := range terms {
		for _, requirements := range [][]corev1.NodeSelectorRequirement{terms[i].MatchExpressions, terms[i].MatchFields} {
			key = binary.AppendUvarint(key, uint64(len(requirements)))
			for j := range requirements {
				add(requirements[j].Key)
				add(string(requirements[j].Operator))
				key = binary.AppendUvarint(key, uint64(len(requirements[j].Values)))
				for _, value := range requirements[j].Values {
					add(value)
				}
			}
		}
	}
	return string(key)
}

// fits reports whether the pods may run on the nodes of a class. row is the class as
// in a slot's row.
func (s *shape) fits(classes []*nodeClass, row int64) bool {
	id := int(row & (1<<32 - 1))
	if id < len(s.matches) && s.matches[id] != matchUnknown {
		return s.matches[id] == matchYes
	}
	return s.compare(class(classes, id))
}

func (s *shape) compare(class *nodeClass) bool {
	if !s.own {
		s.matches, s.own = slices.Clone(s.matches), true
	}
	if more := class.id + 1 - len(s.matches); more > 0 {
		s.matches = append(s.matches, make([]match, more)...)
	}
	result := matchYes
	if s.mismatch(class) != "" {
		result = matchNo
	}
	s.matches[class.id] = result
	return result == matchYes
}

// class finds a class by its id: it is at that index if there is only one cluster.
func class(classes []*nodeClass, id int) *nodeClass {
	if id < len(classes) && classes[id].id == id {
		return classes[id]
	}
	return classes[slices.IndexFunc(classes, func(c *nodeClass) bool { return c.id == id })]
}

// mismatch reports why the nodes of a class cannot run the pods, "" if they can.
func (s *shape) mismatch(class *nodeClass) string {
	for _, key := range slices.Sorted(maps.Keys(s.set.NodeSelector)) {
		if have, ok := class.labels[key]; !ok || have != s.set.NodeSelector[key] {
			return fmt.Sprintf("label %s=%s is missing", key, s.set.NodeSelector[key])
		}
	}
	if s.set.NodeAffinity != nil {
		if s.affinity == nil {
			s.affinity = nodeaffinity.NewLazyErrorNodeSelector(s.set.NodeAffinity)
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: class.node, Labels: class.labels}}
		if match, err := s.affinity.Match(node); err != nil {
			return "the node affinity is invalid: " + err.Error()
		} else if !match {
			return "the node affinity does not match"
		}
	}
	// The guest requires both, whether or not its pod selects them.
	if arch, ok := class.labels[corev1.LabelArchStable]; ok && arch != guest.Arch {
		return fmt.Sprintf("the architecture is %s, and only %s pods can overflow", arch, guest.Arch)
	}
	if system, ok := class.labels[corev1.LabelOSStable]; ok && system != guest.OS {
		return fmt.Sprintf("the operating system is %s, and only %s pods can overflow", system, guest.OS)
	}
	taint, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), class.taints, guest.Tolerations(s.set.Tolerations), func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	if untolerated {
		return "taint " + taint.ToString() + " is not tolerated"
	}
	return ""
}
