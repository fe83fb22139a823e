package inventory

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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
// their individual statuses but for resources. Of the pods on virtual nodes it keeps which
// ConfigMaps and Secrets they refer to.
func TrimPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	pod.ManagedFields = nil
	whole := pod.Spec
	pod.Spec = corev1.PodSpec{
		NodeName:         pod.Spec.NodeName,
		SchedulerName:    pod.Spec.SchedulerName,
		SchedulingGates:  pod.Spec.SchedulingGates,
		NodeSelector:     pod.Spec.NodeSelector,
		Affinity:         pod.Spec.Affinity,
		Tolerations:      pod.Spec.Tolerations,
		RuntimeClassName: pod.Spec.RuntimeClassName,
		Overhead:         pod.Spec.Overhead,
		Resources:        pod.Spec.Resources,
		Priority:         pod.Spec.Priority,
		InitContainers:   trimContainers(pod.Spec.InitContainers),
		Containers:       trimContainers(pod.Spec.Containers),
	}
	if strings.HasPrefix(whole.NodeName, broker.VirtualNodePrefix) {
		keepSources(&pod.Spec, &whole)
	}
	pod.Status = corev1.PodStatus{
		Phase:      pod.Status.Phase,
		Reason:     pod.Status.Reason,
		Message:    pod.Status.Message,
		Conditions: pod.Status.Conditions,
		StartTime:  pod.Status.StartTime,

		NominatedNodeName: pod.Status.NominatedNodeName,

		ContainerStatuses:     trimStatuses(pod.Status.ContainerStatuses),
		InitContainerStatuses: trimStatuses(pod.Status.InitContainerStatuses),
	}
	return pod, nil
}

// trimStatuses keeps the resources of containers.
func trimStatuses(statuses []corev1.ContainerStatus) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for _, s := range statuses {
		if s.Resources != nil || s.AllocatedResources != nil {
			out = append(out, corev1.ContainerStatus{Name: s.Name, Resources: s.Resources, AllocatedResources: s.AllocatedResources})
		}
	}
	return out
}

func trimContainers(containers []corev1.Container) []corev1.Container {
	var out []corev1.Container
	for _, c := range containers {
		out = append(out, corev1.Container{Name: c.Name, Resources: c.Resources, RestartPolicy: c.RestartPolicy})
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
