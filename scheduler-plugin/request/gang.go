package request

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// gangSets returns the pods of a gang that need capacity, by shape; none while there are
// fewer pods than the gang requires. It is requested as a whole: its pods that have found
// a node of this cluster do not keep it if the others find none.
func (c *Controller) gangSets(key demand.Key) []broker.PodSet {
	members, required := c.Gangs.MembersOf(key)
	if int32(len(members)) < required {
		return nil
	}
	sets := map[string]broker.PodSet{}
	for _, pod := range members {
		if pod.Spec.NodeName != "" && !c.Placements.IsVirtual(pod.Spec.NodeName) {
			continue
		}
		ok, _ := c.Gangs.Admissible(pod)
		of, known := c.Keys.Get(pod)
		if !known || !ok && pod.Spec.NodeName == "" {
			continue
		}
		set, counted := sets[of.Key.Shape]
		if !counted {
			set = of.Set
		}
		set.Count++
		sets[of.Key.Shape] = set
	}
	return slices.SortedFunc(maps.Values(sets), func(a, b broker.PodSet) int { return cmp.Compare(a.Name, b.Name) })
}

// isOutdated reports whether a gang's Reservation was made for pods that have come back with
// other requests: it lacks a shape, and requests another that no pod has any more. Then the
// agent deletes it, and capacity is requested for the pods as they are now. While pods run
// with its capacity, further shapes are added to it instead.
func (c *Controller) isOutdated(r *broker.Reservation, request demand.Request) bool {
	lacks := func(sets, others []broker.PodSet) bool {
		return slices.ContainsFunc(others, func(set broker.PodSet) bool { return usage.PodsOf(sets, set.Name) == 0 })
	}
	if !lacks(r.Spec.PodSets, request.PodSets) || !lacks(request.PodSets, r.Spec.PodSets) {
		return false
	}
	members, _ := c.Gangs.MembersOf(request.Key)
	return !slices.ContainsFunc(members, func(pod *corev1.Pod) bool {
		return pod.Spec.NodeName != "" && c.Placements.IsVirtual(pod.Spec.NodeName)
	})
}

// minAvailable returns how many pods of a request are of use: as many as the gang requires
// beside those that are bound in this cluster.
func (c *Controller) minAvailable(request demand.Request) int32 {
	if !request.Key.IsGang() {
		return 0
	}
	members, required := c.Gangs.MembersOf(request.Key)
	if required == 0 {
		return 0
	}
	for _, pod := range members {
		if pod.Spec.NodeName != "" && !c.Placements.IsVirtual(pod.Spec.NodeName) {
			required--
		}
	}
	return max(0, min(required, request.Pods()))
}
