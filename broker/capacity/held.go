package capacity

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// OfPodSets is the capacity of pod sets, with its totals. Sets without pods are
// left out.
func OfPodSets(sets []broker.PodSet) broker.HeldCapacity {
	var c broker.HeldCapacity
	total := corev1.ResourceList{}
	for _, set := range sets {
		if set.Count <= 0 {
			continue
		}
		c.PodSets = append(c.PodSets, *set.DeepCopy())
		broker.AddTo(total, broker.Times(set.Requests.List(), set.Count))
	}
	c.Totals = broker.FromList(total)
	return c
}

// Requests are what one pod of each set requests that has pods, or a divisible total.
func Requests(c broker.HeldCapacity) []Vector {
	if len(c.PodSets) == 0 {
		return []Vector{ceilOf(&c.Totals)}
	}
	var requests []Vector
	for i := range c.PodSets {
		if set := &c.PodSets[i]; set.Count > 0 {
			requests = append(requests, ceilOf(&set.Requests))
		}
	}
	return requests
}

// Add is the sum of a and b.
func Add(a, b broker.HeldCapacity) broker.HeldCapacity {
	out := a.DeepCopy()
	for _, set := range b.PodSets {
		if i := find(out.PodSets, set); i >= 0 {
			out.PodSets[i].Count += set.Count
		} else if set.Count > 0 {
			out.PodSets = append(out.PodSets, *set.DeepCopy())
		}
	}
	out.Totals = broker.FromList(broker.AddTo(a.Totals.List(), b.Totals.List()))
	return *out
}

// Sub is a less b, set by set, or resource by resource for divisible totals,
// never below zero.
func Sub(a, b broker.HeldCapacity) broker.HeldCapacity {
	if len(a.PodSets) > 0 {
		sets := slices.Clone(a.PodSets)
		for i := range sets {
			sets[i].Count -= Count(b, sets[i])
		}
		return OfPodSets(sets)
	}
	left := a.Totals.List()
	if len(b.PodSets) > 0 {
		return broker.HeldCapacity{Totals: broker.FromList(left)}
	}
	return broker.HeldCapacity{Totals: broker.FromList(Subtract(left, b.Totals.List()))}
}

// First is the first n pods of a capacity of pod sets.
func First(from broker.HeldCapacity, n int32) broker.HeldCapacity {
	sets := slices.Clone(from.PodSets)
	for i := range sets {
		sets[i].Count = min(sets[i].Count, max(n, 0))
		n -= sets[i].Count
	}
	return OfPodSets(sets)
}

// Min is the smaller amount of each set, or of each resource of divisible totals.
func Min(a, b broker.HeldCapacity) broker.HeldCapacity { return Sub(a, Sub(a, b)) }

// Max is the larger amount of each set, and of each resource in the totals. The
// totals may be less than the sum of the sets, because a and b are never needed
// at once.
func Max(a, b broker.HeldCapacity) broker.HeldCapacity {
	out := a.DeepCopy()
	for _, set := range b.PodSets {
		if i := find(out.PodSets, set); i >= 0 {
			out.PodSets[i].Count = max(out.PodSets[i].Count, set.Count)
		} else if set.Count > 0 {
			out.PodSets = append(out.PodSets, *set.DeepCopy())
		}
	}
	out.Totals = broker.FromList(Larger(a.Totals.List(), b.Totals.List()))
	return *out
}

// Equal reports whether a and b are the same amounts.
func Equal(a, b broker.HeldCapacity) bool {
	if !apiequality.Semantic.DeepEqual(a.Totals.List(), b.Totals.List()) || a.Pods() != b.Pods() {
		return false
	}
	return !slices.ContainsFunc(a.PodSets, func(set broker.PodSet) bool { return Count(b, set) != set.Count })
}

// Count is the number of pods in c that have the name and shape of a set.
func Count(c broker.HeldCapacity, set broker.PodSet) int32 {
	if i := find(c.PodSets, set); i >= 0 {
		return c.PodSets[i].Count
	}
	return 0
}

func find(sets []broker.PodSet, set broker.PodSet) int {
	return slices.IndexFunc(sets, func(s broker.PodSet) bool { return s.Name == set.Name && sameShape(&s, &set) })
}

// sameShape reports whether a place that was found for a pod of one set is one for a pod of
// the other.
func sameShape(a, b *broker.PodSet) bool {
	return apiequality.Semantic.DeepEqual(a.Requests.List(), b.Requests.List()) &&
		apiequality.Semantic.DeepEqual(a.NodeSelector, b.NodeSelector) &&
		apiequality.Semantic.DeepEqual(a.NodeAffinity, b.NodeAffinity) &&
		apiequality.Semantic.DeepEqual(a.Tolerations, b.Tolerations) &&
		a.PodSecurity == b.PodSecurity
}

// Larger raises the amounts of a to those of b, in place, and returns a.
func Larger(a, b corev1.ResourceList) corev1.ResourceList {
	for name, amount := range b {
		if have, ok := a[name]; !ok || have.Cmp(amount) < 0 {
			a[name] = amount
		}
	}
	return a
}

// Subtract takes b from a, in place, stops at zero, and returns a without the
// amounts that are zero. A list that a was cloned from stays as it is.
func Subtract(a, b corev1.ResourceList) corev1.ResourceList {
	for name, amount := range b {
		have, ok := a[name]
		if !ok {
			continue
		}
		if have.Cmp(amount) <= 0 {
			delete(a, name)
			continue
		}
		// A copy of a quantity may share its digits.
		have = have.DeepCopy()
		have.Sub(amount)
		a[name] = have
	}
	return a
}

// Amount formats a capacity as "3 pods", or as the resources of a divisible total.
func Amount(c broker.HeldCapacity) string {
	switch n := c.Pods(); {
	case len(c.PodSets) == 0:
		return c.Totals.String()
	case n == 1:
		return "1 pod"
	default:
		return fmt.Sprintf("%d pods", n)
	}
}

// Requested is what a Reservation requests: pod sets, or a divisible total.
func Requested(spec *broker.ReservationSpec) broker.HeldCapacity {
	if spec.RequestedResources != nil {
		return broker.HeldCapacity{Totals: *spec.RequestedResources}
	}
	return OfPodSets(spec.PodSets)
}

// MaxWanted is the maximum size of an amount in a print column, in bytes.
const MaxWanted = 120

// Wanted formats what a Reservation requests for a print column.
func Wanted(spec *broker.ReservationSpec) string {
	return text.TruncateTo(Amount(Requested(spec)), MaxWanted)
}

// Grew reports whether there is more of any resource.
func Grew(before, after broker.ResourceQuantities) bool {
	return ceilOf(&after).FitsIn(ceilOf(&before)) == 0
}
