package inventory

import (
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// maxControllers limits the controllers of which a pod is remembered.
const maxControllers = 4096

// sharer lets the trimmed pods of one controller share what is equal in them: of a cluster
// with many pods, most differ in little more than their names. Like all that is in a cache,
// the parts must not be changed. It is safe for concurrent use.
type sharer struct {
	mu sync.Mutex
	// last pod of a controller.
	last map[types.UID]*corev1.Pod
}

// share replaces parts of a pod by those of the last one of its controller that are equal.
func (s *sharer) share(pod *corev1.Pod) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.last[owner.UID]
	if last == nil && len(s.last) >= maxControllers {
		clear(s.last)
	}
	s.last[owner.UID] = pod
	if last == nil {
		return
	}
	if pod.Namespace == last.Namespace { // users write references to owners
		pod.Namespace = last.Namespace
	}
	if equality.Semantic.DeepEqual(pod.OwnerReferences, last.OwnerReferences) {
		pod.OwnerReferences = last.OwnerReferences
	}
	if maps.Equal(pod.Labels, last.Labels) {
		pod.Labels = last.Labels
	}
	spec, of := &pod.Spec, &last.Spec
	if spec.NodeName == of.NodeName {
		spec.NodeName = of.NodeName
	}
	if spec.SchedulerName == of.SchedulerName {
		spec.SchedulerName = of.SchedulerName
	}
	if maps.Equal(spec.NodeSelector, of.NodeSelector) {
		spec.NodeSelector = of.NodeSelector
	}
	if spec.Affinity != nil && equality.Semantic.DeepEqual(spec.Affinity, of.Affinity) {
		spec.Affinity = of.Affinity
	}
	if equality.Semantic.DeepEqual(spec.Tolerations, of.Tolerations) {
		spec.Tolerations = of.Tolerations
	}
	if equality.Semantic.DeepEqual(spec.Containers, of.Containers) {
		spec.Containers = of.Containers
	}
	if equality.Semantic.DeepEqual(spec.InitContainers, of.InitContainers) {
		spec.InitContainers = of.InitContainers
	}
	if len(spec.Volumes) > 0 && equality.Semantic.DeepEqual(spec.Volumes, of.Volumes) {
		spec.Volumes = of.Volumes
	}
}
