// Package capacitytest makes capacities for tests.
package capacitytest

import (
	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Set returns a pod set of which each pod requests the same.
func Set(name string, count int32, requests corev1.ResourceList) broker.PodSet {
	return broker.PodSet{Name: name, Count: count, Requests: broker.FromList(requests)}
}

// Pods returns the capacity of pod sets.
func Pods(sets ...broker.PodSet) broker.HeldCapacity {
	c := capacity.OfPodSets(sets)
	c.PodSets = sets
	return c
}

// Total returns a capacity that pods of any size may share.
func Total(amounts corev1.ResourceList) broker.HeldCapacity {
	return broker.HeldCapacity{Totals: broker.FromList(amounts)}
}
