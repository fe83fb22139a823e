package guest

import (
	"cmp"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// A container without a memory limit may use MemoryOvercommit times its request and an equal
// share of MemoryPerPod: somewhat more than was judged, as pods do that have no limit, but
// not the whole of its node.
const MemoryOvercommit, MemoryPerPod = 2, 256 << 20

// BoundMemory bounds what a guest may use of its node's memory: it limits the containers
// that have no limit, and the emptyDirs in memory that have none to what the containers may use
// together. The provider's policies refuse an emptyDir without a limit, and the quota of driver
// direct a container without one. A container of a pod that has a limit itself gets that one:
// otherwise, a LimitRange would give it another one. It reports whether it has limited a
// container further than its pod.
func BoundMemory(spec *corev1.PodSpec) (limited bool) {
	usable := usableMemory(spec)
	if limit := podLimit(spec); limit > 0 {
		usable = min(usable, limit)
	}
	limited = limitContainers(spec)
	for i := range spec.Volumes {
		if v := spec.Volumes[i].EmptyDir; v != nil && v.Medium != corev1.StorageMediumDefault && v.SizeLimit == nil {
			v.SizeLimit = resource.NewQuantity(usable, resource.BinarySI)
		}
	}
	return limited
}

// beyondMemory returns why providers refuse the emptyDirs in memory of a pod, as Refused does;
// empty if they do not.
func beyondMemory(spec *corev1.PodSpec) string {
	for _, volume := range spec.Volumes {
		v := volume.EmptyDir
		if v == nil || v.Medium == corev1.StorageMediumDefault || v.SizeLimit == nil {
			continue
		}
		if usable := resource.NewQuantity(usableMemory(spec), resource.BinarySI); v.SizeLimit.Cmp(*usable) > 0 {
			return fmt.Sprintf("volume %q is an emptyDir in memory with sizeLimit %s, more than the %s that its containers may use at a provider; raise their memory limits or lower the sizeLimit", volume.Name, v.SizeLimit, usable)
		}
	}
	return ""
}

// usableMemory is the sum of the memory limits of a pod's containers once it is bounded: the
// provider's policies refuse an emptyDir in memory that may be larger.
func usableMemory(spec *corev1.PodSpec) (usable int64) {
	for _, of := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range of {
			usable += limitOf(spec, of[i].Resources)
		}
	}
	return usable
}

// podLimit is the memory limit of a pod itself, 0 if it has none.
func podLimit(spec *corev1.PodSpec) int64 {
	if spec.Resources == nil {
		return 0
	}
	return spec.Resources.Limits.Memory().Value()
}

// limitOf is the memory limit of a container of a bounded pod.
func limitOf(spec *corev1.PodSpec, r corev1.ResourceRequirements) int64 {
	containers := int64(len(spec.InitContainers) + len(spec.Containers))
	return cmp.Or(r.Limits.Memory().Value(), podLimit(spec), MemoryOvercommit*r.Requests.Memory().Value()+MemoryPerPod/containers)
}

// limitContainers limits the memory of the containers that have no limit, and reports whether
// there are any of a pod that has none either.
func limitContainers(spec *corev1.PodSpec) (limited bool) {
	for _, of := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range of {
			if r := &of[i].Resources; r.Limits.Memory().IsZero() {
				limit(r, limitOf(spec, *r))
				limited = podLimit(spec) == 0
			}
		}
	}
	return limited
}

// limit sets a memory limit. The API server would take it for the request of a container
// that has none.
func limit(r *corev1.ResourceRequirements, memory int64) {
	for _, list := range []*corev1.ResourceList{&r.Requests, &r.Limits} {
		if *list == nil {
			*list = corev1.ResourceList{}
		}
	}
	if _, requested := r.Requests[corev1.ResourceMemory]; !requested {
		r.Requests[corev1.ResourceMemory] = resource.Quantity{Format: resource.DecimalSI}
	}
	r.Limits[corev1.ResourceMemory] = *resource.NewQuantity(memory, resource.BinarySI)
}
