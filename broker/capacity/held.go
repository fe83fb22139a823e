package capacity

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// OfPodSets is the capacity of pod sets: those without pods are left out, the
// totals filled in.
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

// Add is a and b together.
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

// Sub is what a has more than b, set by set, or resource by resource for
// divisible totals. It is never below zero.
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

// Min is what a and b have in common.
func Min(a, b broker.HeldCapacity) broker.HeldCapacity { return Sub(a, Sub(a, b)) }

// Max is enough for either of a and b: of each set, and of each resource in
// the totals, the larger amount. The totals may be less than the sum of the
// sets, because a and b are never needed at once.
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
	for _, set := range a.PodSets {
		if Count(b, set) != set.Count {
			return false
		}
	}
	return true
}

// Count is how many pods of a set's name and requests c is for.
func Count(c broker.HeldCapacity, set broker.PodSet) int32 {
	if i := find(c.PodSets, set); i >= 0 {
		return c.PodSets[i].Count
	}
	return 0
}

func find(sets []broker.PodSet, set broker.PodSet) int {
	return slices.IndexFunc(sets, func(s broker.PodSet) bool {
		return s.Name == set.Name && apiequality.Semantic.DeepEqual(s.Requests.List(), set.Requests.List())
	})
}

// Larger is the larger amount of each resource, in place of a.
func Larger(a, b corev1.ResourceList) corev1.ResourceList {
	for name, amount := range b {
		if have, ok := a[name]; !ok || have.Cmp(amount) < 0 {
			a[name] = amount
		}
	}
	return a
}

// Subtract takes b from a, in place, and stops at zero.
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
		have.Sub(amount)
		a[name] = have
	}
	return a
}
