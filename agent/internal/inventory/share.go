package inventory

import (
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/utils/ptr"
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
	if slices.EqualFunc(pod.OwnerReferences, last.OwnerReferences, sameOwner) {
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
	if slices.EqualFunc(spec.Tolerations, of.Tolerations, sameToleration) {
		spec.Tolerations = of.Tolerations
	}
	if slices.EqualFunc(spec.Containers, of.Containers, sameContainer) {
		spec.Containers = of.Containers
	}
	if slices.EqualFunc(spec.InitContainers, of.InitContainers, sameContainer) {
		spec.InitContainers = of.InitContainers
	}
	if len(spec.Volumes) > 0 && equality.Semantic.DeepEqual(spec.Volumes, of.Volumes) {
		spec.Volumes = of.Volumes
	}
}

func sameOwner(a, b metav1.OwnerReference) bool {
	return a.UID == b.UID && a.Name == b.Name && a.Kind == b.Kind && a.APIVersion == b.APIVersion &&
		ptr.Equal(a.Controller, b.Controller) && ptr.Equal(a.BlockOwnerDeletion, b.BlockOwnerDeletion)
}

func sameToleration(a, b corev1.Toleration) bool {
	return a.Key == b.Key && a.Operator == b.Operator && a.Value == b.Value && a.Effect == b.Effect && ptr.Equal(a.TolerationSeconds, b.TolerationSeconds)
}

func sameContainer(a, b corev1.Container) bool {
	return a.Name == b.Name && a.SecurityContext == b.SecurityContext && ptr.Equal(a.RestartPolicy, b.RestartPolicy) && quota.Equals(a.Resources.Requests, b.Resources.Requests) &&
		(len(a.Env)+len(b.Env)+len(a.EnvFrom)+len(b.EnvFrom) == 0 ||
			equality.Semantic.DeepEqual(a.Env, b.Env) && equality.Semantic.DeepEqual(a.EnvFrom, b.EnvFrom))
}
