package inventory

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// CacheByObject makes the manager's cache keep only what the agent reads of
// the objects of which a cluster has many, and equal parts of pods once.
func CacheByObject() map[client.Object]cache.ByObject {
	equal := &sharer{last: map[types.UID]*corev1.Pod{}}
	transform := func(object any) (any, error) {
		object, err := TrimPod(object)
		if pod, ok := object.(*corev1.Pod); ok {
			equal.share(pod)
		}
		return object, err
	}
	return map[client.Object]cache.ByObject{
		&corev1.Pod{}:  {Transform: transform},
		&corev1.Node{}: {Transform: trimNode},
	}
}

// TrimPod removes what no part of the agent reads: what the containers run, and
// their individual statuses but for resources that are being changed, and of the security
// contexts all but the Pod Security Standard that the pod complies with. Of the pods that wait
// for a node it keeps their scheduler, and whether they can overflow (demand.Admissible), but
// not why not; of those on virtual nodes which ConfigMaps and Secrets they refer to; of the
// cluster's own pods that have a node, little more than what they use of it.
func TrimPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	whole, status := pod.Spec, pod.Status
	_, refused := demand.Admissible(pod)
	trimMeta(&pod.ObjectMeta)
	pod.Spec = corev1.PodSpec{
		NodeName:         pod.Spec.NodeName,
		SchedulingGates:  pod.Spec.SchedulingGates,
		NodeSelector:     pod.Spec.NodeSelector,
		Affinity:         pod.Spec.Affinity,
		Tolerations:      pod.Spec.Tolerations,
		RuntimeClassName: pod.Spec.RuntimeClassName,
		SchedulingGroup:  pod.Spec.SchedulingGroup,
		Overhead:         pod.Spec.Overhead,
		Resources:        pod.Spec.Resources,
		Priority:         pod.Spec.Priority,
		InitContainers:   trimContainers(pod.Spec.InitContainers),
		Containers:       trimContainers(pod.Spec.Containers),
		// It stands for each field that is not kept and because of which a pod cannot overflow:
		// volumes, ports, spread constraints and others.
		HostNetwork: refused != "",
	}
	if whole.NodeName == "" {
		pod.Spec.SchedulerName = whole.SchedulerName
	}
	virtual := strings.HasPrefix(whole.NodeName, broker.VirtualNodePrefix)
	if virtual {
		keepSources(&pod.Spec, &whole)
	}
	keepSecurity(&pod.Spec, &whole)
	pod.Status = corev1.PodStatus{
		Phase:      pod.Status.Phase,
		Reason:     pod.Status.Reason,
		Conditions: trimConditions(pod.Status.Conditions),
		StartTime:  pod.Status.StartTime,

		NominatedNodeName: pod.Status.NominatedNodeName,

		ContainerStatuses:     trimStatuses(pod.Status.ContainerStatuses, whole.Containers),
		InitContainerStatuses: trimStatuses(pod.Status.InitContainerStatuses, whole.InitContainers),
	}
	keepResources(pod, status)
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

// trimMeta keeps the annotations of mirror pods, gangs and placeholders and, of the pods of
// workloads, the labels that a part of Spillway gives a meaning.
func trimMeta(meta *metav1.ObjectMeta) {
	meta.ManagedFields = nil
	annotations := meta.Annotations
	meta.Annotations = nil
	for _, key := range []string{corev1.MirrorPodAnnotationKey, broker.AnnotationWorkload, placeholder.AnnotationPart} {
		if value, ok := annotations[key]; ok {
			metav1.SetMetaDataAnnotation(meta, key, value)
		}
	}
	if !ofWorkload(meta) {
		return
	}
	labels := meta.Labels
	meta.Labels = nil
	for key, value := range labels {
		if key == broker.LabelPodGroup || strings.HasPrefix(key, broker.Group+"/") {
			metav1.SetMetaDataLabel(meta, key, value)
		}
	}
}

// trimLocal removes what only matters of pods that wait, overflowed or are guests.
func trimLocal(pod *corev1.Pod) {
	pod.Spec.Tolerations, pod.Spec.NodeSelector, pod.Spec.RuntimeClassName, pod.Spec.Affinity = nil, nil, nil, nil
	var resizes []corev1.PodCondition
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress {
			resizes = append(resizes, c)
		}
	}
	pod.Status.Conditions, pod.Status.StartTime = resizes, nil
}

// trimConditions keeps of the conditions that a kubelet sets the one that depends on the others,
// if there is it, and the text of the scheduler's and of resizes only.
func trimConditions(conditions []corev1.PodCondition) []corev1.PodCondition {
	var out []corev1.PodCondition
	ready := slices.ContainsFunc(conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady })
	for _, c := range conditions {
		switch c.Type {
		case corev1.PodScheduled, corev1.PodResizePending, corev1.PodResizeInProgress: // their reasons are read
			out = append(out, c)
			continue
		case corev1.PodInitialized, corev1.ContainersReady, corev1.PodReadyToStartContainers:
			if ready {
				continue
			}
		}
		out = append(out, corev1.PodCondition{Type: c.Type, Status: c.Status, LastTransitionTime: c.LastTransitionTime})
	}
	return slices.Clip(out)
}

// trimStatuses keeps the resources of containers that are not those of their spec.
func trimStatuses(statuses []corev1.ContainerStatus, specs []corev1.Container) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for _, s := range statuses {
		i := slices.IndexFunc(specs, func(c corev1.Container) bool { return c.Name == s.Name })
		if i >= 0 && (s.Resources == nil || quota.Equals(s.Resources.Requests, specs[i].Resources.Requests)) &&
			(s.AllocatedResources == nil || quota.Equals(s.AllocatedResources, specs[i].Resources.Requests)) {
			continue
		}
		if s.Resources != nil || s.AllocatedResources != nil {
			out = append(out, corev1.ContainerStatus{Name: s.Name, Resources: s.Resources, AllocatedResources: s.AllocatedResources})
		}
	}
	return out
}

// keepResources keeps what a kubelet reports of the resources of a pod as a whole, as those of
// 1.36 and later do of each, if the pod requests more or less because of it.
func keepResources(trimmed *corev1.Pod, status corev1.PodStatus) {
	if status.Resources == nil && status.AllocatedResources == nil {
		return
	}
	without := Requests(trimmed)
	trimmed.Status.AllocatedResources = status.AllocatedResources
	if status.Resources != nil {
		trimmed.Status.Resources = &corev1.ResourceRequirements{Requests: status.Resources.Requests}
	}
	if quota.Equals(without, Requests(trimmed)) {
		trimmed.Status.AllocatedResources, trimmed.Status.Resources = nil, nil
	}
}

func trimContainers(containers []corev1.Container) []corev1.Container {
	var out []corev1.Container
	for _, c := range containers {
		out = append(out, corev1.Container{Name: c.Name, Resources: corev1.ResourceRequirements{Requests: c.Resources.Requests}, RestartPolicy: c.RestartPolicy})
	}
	return out
}

// What is kept of the security contexts of a pod that complies with the Pod Security Standard
// restricted, the same for all of them: that it does is part of its shape.
var (
	compliantPod       = &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
	compliantContainer = &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
)

// keepSecurity keeps in a trimmed spec which standard the pod complies with.
func keepSecurity(trimmed, whole *corev1.PodSpec) {
	if guest.PodSecurity(whole) != broker.PodSecurityRestricted {
		return
	}
	trimmed.SecurityContext = compliantPod
	for _, containers := range [][]corev1.Container{trimmed.InitContainers, trimmed.Containers} {
		for i := range containers {
			containers[i].SecurityContext = compliantContainer
		}
	}
}

// keepSources copies to a trimmed spec what refers to ConfigMaps and Secrets.
func keepSources(trimmed, whole *corev1.PodSpec) {
	trimmed.ImagePullSecrets = whole.ImagePullSecrets
	for _, v := range whole.Volumes {
		trimmed.Volumes = append(trimmed.Volumes, sourcesOf(v.VolumeSource)...)
	}
	for i := range whole.InitContainers {
		keepEnvironment(&trimmed.InitContainers[i], &whole.InitContainers[i])
	}
	for i := range whole.Containers {
		keepEnvironment(&trimmed.Containers[i], &whole.Containers[i])
	}
}

// sourcesOf are volumes with the ConfigMaps and Secrets that a volume refers to, and nothing
// else.
func sourcesOf(v corev1.VolumeSource) (out []corev1.Volume) {
	configMap := func(name string, optional *bool) {
		out = append(out, corev1.Volume{VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: name}, Optional: optional}}})
	}
	secret := func(name string, optional *bool) {
		out = append(out, corev1.Volume{VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name, Optional: optional}}})
	}
	switch {
	case v.ConfigMap != nil:
		configMap(v.ConfigMap.Name, v.ConfigMap.Optional)
	case v.Secret != nil:
		secret(v.Secret.SecretName, v.Secret.Optional)
	case v.Projected != nil:
		for _, p := range v.Projected.Sources {
			if p.ConfigMap != nil && p.ConfigMap.Name != rootCA {
				configMap(p.ConfigMap.Name, p.ConfigMap.Optional)
			}
			if p.Secret != nil {
				secret(p.Secret.Name, p.Secret.Optional)
			}
		}
	}
	return out
}

// rootCA is the ConfigMap that each namespace has, and each pod with a token refers to.
const rootCA = "kube-root-ca.crt"

func keepEnvironment(trimmed, whole *corev1.Container) {
	trimmed.EnvFrom = whole.EnvFrom
	for _, e := range whole.Env {
		if e.ValueFrom != nil && (e.ValueFrom.ConfigMapKeyRef != nil || e.ValueFrom.SecretKeyRef != nil) {
			trimmed.Env = append(trimmed.Env, e)
		}
	}
}

// trimNode removes the lists of images and volumes, and the managed fields.
func trimNode(object any) (any, error) {
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
