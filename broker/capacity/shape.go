package capacity

import (
	"fmt"
	"maps"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// shape is what the pods of a set request and where they may run. It compares itself
// with each node class once. It is not safe for concurrent use.
type shape struct {
	set      *broker.PodSet
	request  Vector
	affinity *nodeaffinity.LazyErrorNodeSelector
	// matches of classes, by id.
	matches []match
}

type match byte

const (
	matchUnknown match = iota
	matchYes
	matchNo
)

func newShape(set *broker.PodSet) *shape {
	s := &shape{set: set, request: Ceil(set.Requests.List())}
	if set.NodeAffinity != nil {
		s.affinity = nodeaffinity.NewLazyErrorNodeSelector(set.NodeAffinity)
	}
	return s
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
	if s.affinity != nil {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: class.node, Labels: class.labels}}
		if match, err := s.affinity.Match(node); err != nil {
			return "the node affinity is invalid: " + err.Error()
		} else if !match {
			return "the node affinity does not match"
		}
	}
	taint, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), class.taints, s.set.Tolerations, func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	if untolerated {
		return "taint " + taint.ToString() + " is not tolerated"
	}
	return ""
}
