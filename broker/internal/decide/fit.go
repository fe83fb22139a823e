package decide

import (
	"cmp"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// offer is the part of a request that fits in one cluster.
type offer struct {
	cluster *cluster
	account capacity.Account
	placed  broker.HeldCapacity
	// rejection explains why not all of the request fits, nil if all does.
	rejection *capacity.Rejection
	score     capacity.Score
}

func (o *offer) complete() bool { return o.rejection == nil }

// fit packs a request into a cluster's free capacity, after all that its holds
// may still claim there.
func fit(request *Request, cluster *cluster) *offer {
	reserved, available := ledger.Account(cluster.Spec, &broker.ClusterAdvertisementStatus{Holds: cluster.Holds})
	o := &offer{cluster: cluster, account: capacity.Account{
		Allocatable: capacity.Floor(cluster.Spec.Resources.Allocatable.List()),
		Allocated:   capacity.Ceil(cluster.Spec.Resources.Allocated.List()),
		Reserved:    capacity.Ceil(reserved.List()),
		Available:   capacity.Floor(available.List()),
	}}
	packer := capacity.NewPacker(capacity.Slots(cluster.Spec.NodeClasses))
	packer.Reserve(unused(cluster))
	o.placed, o.rejection = packer.Pack(request.Want, &o.account)
	return o
}

// unused is what holds are charged for and guests do not use yet: what guests
// use is not advertised as free.
func unused(cluster *cluster) (sets []broker.PodSet, total capacity.Vector) {
	holds := slices.SortedStableFunc(slices.Values(cluster.Holds), func(a, b broker.Hold) int {
		return cmp.Or(cmp.Compare(a.Requester, b.Requester), cmp.Compare(a.ReservationName, b.ReservationName))
	})
	total = capacity.Vector{}
	for len(holds) > 0 {
		requester := holds[0].Requester
		var held []broker.PodSet
		divisible := capacity.Vector{}
		for ; len(holds) > 0 && holds[0].Requester == requester; holds = holds[1:] {
			charged := ledger.Charged(holds[0])
			if held = append(held, charged.PodSets...); len(charged.PodSets) == 0 {
				divisible.Add(capacity.Ceil(charged.Totals.List()), 1)
			}
		}
		held = capacity.Decreasing(held)
		running, unattributed := attribute(held, cluster, requester)
		for i := range held {
			held[i].Count -= int32(running[i])
		}
		sets = append(sets, held...)
		total.Add(divisible.Minus(unattributed, 1), 1)
	}
	return sets, total
}

// attribute reports how many pods of each set (in decreasing order) are among a
// consumer's guests, of which only the number and the sum are known, and how
// much of what they use belongs to no set. If no attribution is exact, the guests
// are attributed to the smaller pods, so that the larger claims stay.
func attribute(sets []broker.PodSet, cluster *cluster, requester string) (running []int64, rest capacity.Vector) {
	used, guests := capacity.Vector{}, int64(0)
	for _, hold := range cluster.Spec.ObservedHolds {
		if hold.Requester == requester {
			guests += int64(hold.Pods)
			used.Add(capacity.Floor(hold.Used.List()), 1)
		}
	}
	try := func(order []int) (running []int64, rest capacity.Vector, exact bool) {
		running, rest = make([]int64, len(sets)), used
		left := guests
		for _, i := range order {
			request := capacity.Ceil(sets[i].Requests.List())
			n := min(left, int64(sets[i].Count), request.FitsIn(rest))
			running[i], rest, left = n, rest.Minus(request, n), left-n
		}
		return running, rest, left == 0 && rest.IsZero()
	}
	order := make([]int, len(sets))
	for i := range order {
		order[i] = i
	}
	if running, rest, exact := try(order); exact {
		return running, rest
	}
	slices.Reverse(order)
	running, rest, _ = try(order)
	return running, rest
}
