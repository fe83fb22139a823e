package liqo

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresource "k8s.io/component-helpers/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// quotaOf is what Liqo counts for a pod: the sum of its containers or its largest init
// container, by resource. To Liqo a sidecar is an init container like others, and it
// compares init containers in whole units: of 100m and 900m of CPU it takes the first.
func quotaOf(pod *corev1.PodSpec) corev1.ResourceList {
	sum, largest := corev1.ResourceList{}, corev1.ResourceList{}
	for i := range pod.Containers {
		broker.AddTo(sum, pod.Containers[i].Resources.Requests)
	}
	for i := range pod.InitContainers {
		for name, amount := range pod.InitContainers[i].Resources.Requests {
			if have, ok := largest[name]; !ok || have.Value() < amount.Value() {
				largest[name] = amount
			}
		}
	}
	return capacity.Larger(sum, largest)
}

// requestsOf is what the scheduler counts for a pod.
func requestsOf(pod *corev1.PodSpec) corev1.ResourceList {
	return podresource.PodRequests(&corev1.Pod{Spec: *pod}, podresource.PodResourcesOptions{ExcludeOverhead: true, SkipPodLevelResources: true})
}

// makeCounted changes the requests of a pod so that Liqo counts what the scheduler does, which
// stays the same: the first init container that is no sidecar gets the requests of the whole
// pod, because it runs alone. What sidecars before it request, or all if there is none such, is
// moved to the first container. Devices cannot be moved: the chart's policy refuses such pods.
func makeCounted(pod *corev1.PodSpec) {
	if len(pod.Containers) == 0 {
		return
	}
	first := slices.IndexFunc(pod.InitContainers, func(c corev1.Container) bool { return !isSidecar(&c) })
	before := pod.InitContainers
	if first >= 0 {
		before = before[:first]
	}
	counted := quotaOf(pod)
	for name, amount := range requestsOf(pod) {
		if have := counted[name]; have.Cmp(amount) >= 0 {
			continue
		}
		if movable(name) {
			moveRequests(before, &pod.Containers[0].Resources, name)
		}
		alone := !slices.ContainsFunc(before, func(c corev1.Container) bool { return !c.Resources.Requests.Name(name, resource.DecimalSI).IsZero() })
		if first >= 0 && alone {
			request(&pod.InitContainers[first].Resources, name, amount)
		}
	}
}

func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// movable reports whether a container may use what another one of its pod requests.
func movable(name corev1.ResourceName) bool {
	return name == corev1.ResourceCPU || name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage
}

// moveRequests moves what containers request of a resource to another one.
func moveRequests(from []corev1.Container, to *corev1.ResourceRequirements, name corev1.ResourceName) {
	for i := range from {
		requests := from[i].Resources.Requests
		amount, ok := requests[name]
		if !ok {
			continue
		}
		sum := to.Requests[name]
		sum.Add(amount)
		request(to, name, sum)
		// The API server would take its limit for a request that is absent.
		requests[name] = resource.Quantity{Format: amount.Format}
	}
}

// request sets a request, and raises the limit to it.
func request(r *corev1.ResourceRequirements, name corev1.ResourceName, amount resource.Quantity) {
	if r.Requests == nil {
		r.Requests = corev1.ResourceList{}
	}
	r.Requests[name] = amount
	limit, limited := r.Limits[name]
	if limited && limit.Cmp(amount) < 0 || !limited && !movable(name) {
		if r.Limits == nil {
			r.Limits = corev1.ResourceList{}
		}
		r.Limits[name] = amount
	}
}
