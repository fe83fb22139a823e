package guest

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// A container without a memory limit may use MemoryOvercommit times its request and an equal
// share of MemoryPerPod: somewhat more than was judged, as pods do that have no limit, but
// not the whole of its node.
const MemoryOvercommit, MemoryPerPod = 2, 256 << 20

// BoundMemory bounds what a guest may use of its node's memory: it limits the containers
// that have no limit, nor their pod, and the emptyDirs in memory that have none to what the
// containers may use together. The provider's policies refuse an emptyDir without a limit, and
// the quota of driver direct a container without one. It reports whether it has limited a
// container.
func BoundMemory(spec *corev1.PodSpec) (limited bool) {
	limited = limitContainers(spec)
	var usable int64
	for _, of := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range of {
			usable += cmp.Or(of[i].Resources.Limits.Memory().Value(), of[i].Resources.Requests.Memory().Value())
		}
	}
	for i := range spec.Volumes {
		if v := spec.Volumes[i].EmptyDir; v != nil && v.Medium != corev1.StorageMediumDefault && v.SizeLimit == nil {
			v.SizeLimit = resource.NewQuantity(usable, resource.BinarySI)
		}
	}
	return limited
}

// limitContainers limits the memory of the containers that have no limit, nor their pod, and
// reports whether there are any.
func limitContainers(spec *corev1.PodSpec) (limited bool) {
	if spec.Resources != nil && !spec.Resources.Limits.Memory().IsZero() {
		return false
	}
	containers := len(spec.InitContainers) + len(spec.Containers)
	for _, of := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range of {
			if r := &of[i].Resources; r.Limits.Memory().IsZero() {
				limit(r, MemoryOvercommit*r.Requests.Memory().Value()+int64(MemoryPerPod)/int64(containers))
				limited = true
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
