package inventory

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// CacheByObject makes the manager's cache keep only what the agent reads of
// the objects of which a cluster has many.
func CacheByObject() map[client.Object]cache.ByObject {
	return map[client.Object]cache.ByObject{
		&corev1.Pod{}:  {Transform: TrimPod},
		&corev1.Node{}: {Transform: TrimNode},
	}
}

// TrimPod removes what no part of the agent reads: what the containers run, and
// their individual statuses but for resources that are being changed. Of the pods on virtual
// nodes it keeps which ConfigMaps and Secrets they refer to; of the cluster's own pods that
// have a node, little more than what they use of it.
func TrimPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	whole := pod.Spec
	trimMeta(&pod.ObjectMeta)
	pod.Spec = corev1.PodSpec{
		NodeName:         pod.Spec.NodeName,
		SchedulingGates:  pod.Spec.SchedulingGates,
		NodeSelector:     pod.Spec.NodeSelector,
		Affinity:         pod.Spec.Affinity,
		Tolerations:      pod.Spec.Tolerations,
		RuntimeClassName: pod.Spec.RuntimeClassName,
		WorkloadRef:      pod.Spec.WorkloadRef,
		Overhead:         pod.Spec.Overhead,
		Resources:        pod.Spec.Resources,
		Priority:         pod.Spec.Priority,
		InitContainers:   trimContainers(pod.Spec.InitContainers),
		Containers:       trimContainers(pod.Spec.Containers),
	}
	virtual := strings.HasPrefix(whole.NodeName, broker.VirtualNodePrefix)
	if virtual {
		keepSources(&pod.Spec, &whole)
	}
	pod.Status = corev1.PodStatus{
		Phase:      pod.Status.Phase,
		Reason:     pod.Status.Reason,
		Conditions: pod.Status.Conditions,
		StartTime:  pod.Status.StartTime,

		NominatedNodeName: pod.Status.NominatedNodeName,

		ContainerStatuses:     trimStatuses(pod.Status.ContainerStatuses, whole.Containers),
		InitContainerStatuses: trimStatuses(pod.Status.InitContainerStatuses, whole.InitContainers),
	}
	if whole.NodeName != "" && !virtual && ofWorkload(pod) {
		trimLocal(pod)
	}
	return pod, nil
}

// ofWorkload reports whether a controller of Kubernetes itself controls a pod: such a pod is
// no guest.
func ofWorkload(pod metav1.Object) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner != nil && (strings.HasPrefix(owner.APIVersion, "apps/") || strings.HasPrefix(owner.APIVersion, "batch/"))
}

// trimMeta keeps the annotation of mirror pods and, of the pods of workloads, the labels that
// a part of Spillway gives a meaning.
func trimMeta(meta *metav1.ObjectMeta) {
	meta.ManagedFields = nil
	mirror, isMirror := meta.Annotations[corev1.MirrorPodAnnotationKey]
	meta.Annotations = nil
	if isMirror {
		meta.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: mirror}
	}
	if !ofWorkload(meta) {
		return
	}
	labels := meta.Labels
	meta.Labels = nil
	for key, value := range labels {
		if key == demand.LabelPodGroup || strings.HasPrefix(key, broker.Group+"/") {
			metav1.SetMetaDataLabel(meta, key, value)
		}
	}
}

// trimLocal removes what only matters of pods that wait, overflowed or are guests.
func trimLocal(pod *corev1.Pod) {
	affinity := pod.Spec.Affinity
	pod.Spec.Tolerations, pod.Spec.NodeSelector, pod.Spec.RuntimeClassName, pod.Spec.Affinity = nil, nil, nil, nil
	if affinity != nil && affinity.PodAntiAffinity != nil {
		pod.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: affinity.PodAntiAffinity}
	}
	var resizes []corev1.PodCondition
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress {
			resizes = append(resizes, c)
		}
	}
	pod.Status.Conditions, pod.Status.StartTime = resizes, nil
}

// trimStatuses keeps the resources of containers that are not those of their spec.
func trimStatuses(statuses []corev1.ContainerStatus, specs []corev1.Container) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for _, s := range statuses {
		i := slices.IndexFunc(specs, func(c corev1.Container) bool { return c.Name == s.Name })
		if i >= 0 && (s.Resources == nil || sameAmounts(s.Resources.Requests, specs[i].Resources.Requests)) &&
			(s.AllocatedResources == nil || sameAmounts(s.AllocatedResources, specs[i].Resources.Requests)) {
			continue
		}
		if s.Resources != nil || s.AllocatedResources != nil {
			out = append(out, corev1.ContainerStatus{Name: s.Name, Resources: s.Resources, AllocatedResources: s.AllocatedResources})
		}
	}
	return out
}

func sameAmounts(a, b corev1.ResourceList) bool {
	return maps.EqualFunc(a, b, func(x, y resource.Quantity) bool { return x.Cmp(y) == 0 })
}

func trimContainers(containers []corev1.Container) []corev1.Container {
	var out []corev1.Container
	for _, c := range containers {
		out = append(out, corev1.Container{Name: c.Name, Resources: corev1.ResourceRequirements{Requests: c.Resources.Requests}, RestartPolicy: c.RestartPolicy})
	}
	return out
}

// keepSources copies to a trimmed spec what refers to ConfigMaps and Secrets.
func keepSources(trimmed, whole *corev1.PodSpec) {
	trimmed.ImagePullSecrets = whole.ImagePullSecrets
	for _, v := range whole.Volumes {
		if v.ConfigMap != nil || v.Secret != nil || v.Projected != nil {
			trimmed.Volumes = append(trimmed.Volumes, v)
		}
	}
	for i := range whole.InitContainers {
		keepEnvironment(&trimmed.InitContainers[i], &whole.InitContainers[i])
	}
	for i := range whole.Containers {
		keepEnvironment(&trimmed.Containers[i], &whole.Containers[i])
	}
}

func keepEnvironment(trimmed, whole *corev1.Container) {
	trimmed.EnvFrom = whole.EnvFrom
	for _, e := range whole.Env {
		if e.ValueFrom != nil && (e.ValueFrom.ConfigMapKeyRef != nil || e.ValueFrom.SecretKeyRef != nil) {
			trimmed.Env = append(trimmed.Env, e)
		}
	}
}

// TrimNode removes the lists of images and volumes, and the managed fields.
func TrimNode(object any) (any, error) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	node.ManagedFields = nil
	node.Status.Images = nil
	node.Status.VolumesAttached = nil
	node.Status.VolumesInUse = nil
	return node, nil
}
