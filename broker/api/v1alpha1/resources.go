package v1alpha1

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// ResourceGPU is the name of the resource in the gpu field of ResourceQuantities.
const ResourceGPU corev1.ResourceName = "nvidia.com/gpu"

// PodsOfTotal is how many pods may run on a divisible total: the kubelet's default for one node.
const PodsOfTotal = 110

// ResourceQuantities is an amount of resources. An unset field is zero.
type ResourceQuantities struct {
	// cpu in cores.
	CPU *resource.Quantity `json:"cpu,omitempty"`
	// memory in bytes.
	Memory *resource.Quantity `json:"memory,omitempty"`
	// gpu is the number of nvidia.com/gpu devices.
	GPU *resource.Quantity `json:"gpu,omitempty"`
	// storage is ephemeral storage in bytes.
	Storage *resource.Quantity `json:"storage,omitempty"`
	// extended is any other resource by its Kubernetes name.
	// +kubebuilder:validation:MaxProperties=32
	Extended map[corev1.ResourceName]resource.Quantity `json:"extended,omitempty"`
}

// FromList converts a Kubernetes resource list, without zero amounts and the resource "pods".
func FromList(list corev1.ResourceList) ResourceQuantities {
	var q ResourceQuantities
	for name, amount := range list {
		if amount.IsZero() {
			continue
		}
		amount := amount.DeepCopy()
		switch name {
		case corev1.ResourcePods:
		case corev1.ResourceCPU:
			q.CPU = &amount
		case corev1.ResourceMemory:
			q.Memory = &amount
		case ResourceGPU:
			q.GPU = &amount
		case corev1.ResourceEphemeralStorage:
			q.Storage = &amount
		default:
			if q.Extended == nil {
				q.Extended = map[corev1.ResourceName]resource.Quantity{}
			}
			q.Extended[name] = amount
		}
	}
	return q
}

// Each calls f for each amount that is set, with its Kubernetes name.
func (q *ResourceQuantities) Each(f func(name corev1.ResourceName, amount resource.Quantity)) {
	names := [...]corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, ResourceGPU, corev1.ResourceEphemeralStorage}
	for i, amount := range [...]*resource.Quantity{q.CPU, q.Memory, q.GPU, q.Storage} {
		if amount != nil {
			f(names[i], *amount)
		}
	}
	for name, amount := range q.Extended {
		f(name, amount)
	}
}

// List is q as a Kubernetes resource list of the caller's, without zero amounts.
func (q ResourceQuantities) List() corev1.ResourceList { return q.list(false) }

// Limits is List with zero amounts: a limit of zero is one too.
func (q ResourceQuantities) Limits() corev1.ResourceList { return q.list(true) }

func (q ResourceQuantities) list(zeros bool) corev1.ResourceList {
	list := corev1.ResourceList{}
	q.Each(func(name corev1.ResourceName, amount resource.Quantity) {
		if zeros || !amount.IsZero() {
			list[name] = amount.DeepCopy()
		}
	})
	return list
}

// String formats q as "cpu 300m, memory 64Mi", sorted by name; "nothing" if empty.
func (q ResourceQuantities) String() string {
	list := q.List()
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(list)) {
		amount := list[name]
		parts = append(parts, string(name)+" "+amount.String())
	}
	return cmp.Or(strings.Join(parts, ", "), "nothing")
}

// AddTo adds b to a in place and returns a, or a new list if a is nil.
func AddTo(a, b corev1.ResourceList) corev1.ResourceList {
	if a == nil {
		a = corev1.ResourceList{}
	}
	for name, amount := range b {
		sum := a[name]
		sum.Add(amount)
		a[name] = sum
	}
	return a
}

// Times returns n times list in a new list.
func Times(list corev1.ResourceList, n int32) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, amount := range list {
		amount := amount.DeepCopy()
		amount.Mul(int64(n))
		out[name] = amount
	}
	return out
}
