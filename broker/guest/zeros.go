package guest

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// listed are the resources that every quota for guests lists, granted or not.
var listed = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}

// Listed are the resources that a provider's quota for guests always lists. Guests may request
// nothing of them by name: without that, the API server would take a limit for the request.
func Listed() []corev1.ResourceName { return slices.Clone(listed) }

// DropZeros makes a guest not name what it requests nothing of, which is the same to Kubernetes.
// Shapes, holds and grants have no amounts of zero either, but a provider's admission refuses
// every resource that is not granted, whatever the amount.
func DropZeros(spec *corev1.PodSpec) {
	for _, of := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range of {
			dropZeros(&of[i].Resources)
		}
	}
	if spec.Resources != nil {
		dropZeros(spec.Resources)
	}
}

func dropZeros(r *corev1.ResourceRequirements) {
	for _, list := range []corev1.ResourceList{r.Requests, r.Limits} {
		maps.DeleteFunc(list, func(name corev1.ResourceName, amount resource.Quantity) bool {
			return amount.IsZero() && !slices.Contains(listed, name)
		})
	}
}
