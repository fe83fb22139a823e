package reservation

import (
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// plan is what to do next for one Reservation.
type plan struct {
	// attempt that commits the changes.
	attempt broker.Attempt
	// shrink releases what is too much, before anything grows; grow is what other clusters
	// get. Both only if providers did not answer, or if the consumer cannot use what they
	// granted: what they lose is placed elsewhere.
	shrink, grow []change
	// fence are the clusters whose holds stay as they are, but for which an attempt was
	// recorded that their ledgers do not show: another broker may still write it.
	fence []string
	// missing is the requested capacity that is neither held nor about to be.
	missing broker.HeldCapacity
	// decision explains the choice of clusters; nil if there was nothing to choose.
	decision *broker.Decision
	// blockedBy is the cluster that must first release an earlier Reservation of the
	// same name; "" if none.
	blockedBy string
	// gaveUp is whether the deadline of the Reservation has passed, so that what is missing
	// is not placed any more.
	gaveUp bool
	// impossible is why nothing can be placed, unless the clusters change.
	impossible impossibility
}

// change is the capacity that one cluster's hold shrinks to, or grows by.
type change struct {
	cluster  string
	capacity broker.HeldCapacity
}

// empty reports whether no hold is to change its size.
func (p plan) empty() bool { return len(p.shrink)+len(p.grow) == 0 }

// writes reports whether any ledger is to be written.
func (p plan) writes() bool { return !p.empty() || len(p.fence) > 0 }

// newPlan compares the requested capacity with the holds.
func newPlan(in snapshot) plan {
	holds, requested := in.holds(), in.requested()
	var reliable broker.HeldCapacity
	for _, h := range holds {
		reliable = capacity.Add(reliable, in.reliable(h))
	}
	p := plan{attempt: broker.Attempt{Number: in.nextAttempt()}}
	if p.shrink = shrink(in, holds, requested); p.shrink == nil {
		p.shrink = lost(in, holds)
		if p.missing = capacity.Sub(requested, reliable); !p.missing.Empty() {
			if p.gaveUp = in.deadlineExceeded(); !p.gaveUp {
				if p.place(in); len(p.grow) == 0 && len(holds) == 0 {
					p.impossible = in.impossible()
				}
			}
			p.allOrNothing(in, holds)
		}
	}
	for _, c := range slices.Concat(p.shrink, p.grow) {
		p.attempt.Clusters = append(p.attempt.Clusters, c.cluster)
	}
	p.fence = p.inDoubt(in, holds)
	return p
}

// nextAttempt is the number of an attempt after those that are recorded and those that the
// ledgers show.
func (in snapshot) nextAttempt() int64 {
	number := in.reservation.Status.Attempt.Number
	for _, h := range in.holds() {
		number = max(number, h.Attempt)
	}
	return number + 1
}

// inDoubt are the clusters of the last attempt whose holds do not show it and are not
// changed by the plan.
func (p plan) inDoubt(in snapshot, holds []clusterHold) (clusters []string) {
	last := in.reservation.Status.Attempt
	for _, h := range holds {
		if h.Attempt < last.Number && !h.Promised.Empty() && slices.Contains(last.Clusters, h.cluster) && !slices.Contains(p.attempt.Clusters, h.cluster) {
			clusters = append(clusters, h.cluster)
		}
	}
	return clusters
}

// lost takes back what providers have neither accepted nor refused before the deadline, and
// what the consumer cannot use.
func lost(in snapshot, holds []clusterHold) []change {
	var changes []change
	for _, h := range holds {
		if in.cannotUse(h) {
			changes = append(changes, change{h.cluster, broker.HeldCapacity{}})
		} else if in.overdue(h) {
			changes = append(changes, change{h.cluster, capacity.Sub(h.Promised, ledger.Pending(h.Hold))})
		}
	}
	return changes
}

// shrink releases what the Reservation does not need any more. What an inactive
// cluster holds, or one that the consumer cannot connect to, may still be used there: it
// stays held, but does not count, and is released when other clusters have granted as much and no virtual node uses it.
func shrink(in snapshot, holds []clusterHold, requested broker.HeldCapacity) []change {
	var granted broker.HeldCapacity
	for _, h := range holds {
		if in.counts(h) && h.Granted != nil {
			granted = capacity.Add(granted, *h.Granted)
		}
	}
	replaced := capacity.Sub(requested, granted).Empty()
	var counted, unreliable []clusterHold
	var unneeded []change
	for _, h := range holds {
		switch {
		case h.Promised.Empty():
		case !in.reliable(h).Empty():
			counted = append(counted, h)
		case replaced && !virtualNodeReady(in.reservation, h.cluster):
			unneeded = append(unneeded, change{h.cluster, broker.HeldCapacity{}})
		default:
			unreliable = append(unreliable, h)
		}
	}
	promised := func(h clusterHold) broker.HeldCapacity { return h.Promised }
	return slices.Concat(
		shrinkTo(in.reservation, counted, requested, in.reliable),
		shrinkTo(in.reservation, unreliable, requested, promised),
		unneeded,
	)
}

// virtualNodeReady reports whether the consumer's virtual node provides the allocation
// of a cluster.
func virtualNodeReady(r *broker.Reservation, cluster string) bool {
	return slices.ContainsFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.Cluster == cluster && a.VirtualNodeReady })
}

// shrinkTo shrinks the holds if together they count for more than requested. The
// newest hold shrinks first. Of all holds, what is not granted goes first, then what no
// virtual node provides, then what the consumer does not retain.
func shrinkTo(r *broker.Reservation, holds []clusterHold, requested broker.HeldCapacity, counts func(clusterHold) broker.HeldCapacity) []change {
	var have broker.HeldCapacity
	for _, h := range holds {
		have = capacity.Add(have, counts(h))
	}
	excess := capacity.Sub(have, requested)
	if excess.Empty() {
		return nil
	}
	to := make([]broker.HeldCapacity, len(holds))
	for i, h := range holds {
		to[i] = *h.Promised.DeepCopy()
	}
	take := func(i int, amount broker.HeldCapacity) {
		amount = capacity.Min(capacity.Min(excess, amount), to[i])
		to[i], excess = capacity.Sub(to[i], amount), capacity.Sub(excess, amount)
	}
	retained := retainedPods(r)
	// Without any virtual node, none prefers one cluster to another.
	anyReady := slices.ContainsFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.VirtualNodeReady })
	for _, pass := range []func(i int){
		func(i int) { take(i, ledger.Pending(holds[i].Hold)) },
		func(i int) {
			if anyReady && !virtualNodeReady(r, holds[i].cluster) {
				take(i, to[i])
			}
		},
		func(i int) {
			if retained != nil {
				take(i, firstPods(to[i], to[i].Pods()-retained[holds[i].cluster]))
			}
		},
		func(i int) { take(i, to[i]) },
	} {
		for i := range slices.Backward(holds) {
			pass(i)
		}
	}
	var changes []change
	for i, h := range holds {
		if !capacity.Equal(to[i], h.Promised) {
			changes = append(changes, change{h.cluster, to[i]})
		}
	}
	return changes
}

// retainedPods is the number of pods that the consumer retains at each provider; nil if
// it does not say.
func retainedPods(r *broker.Reservation) map[string]int32 {
	if capacity.OfPodSets(r.Spec.PodSets).Pods() > r.Spec.RetainedCount() {
		return nil
	}
	pods := map[string]int32{}
	for _, retained := range r.Spec.Retained {
		pods[retained.Cluster] = retained.Count
	}
	return pods
}

// firstPods is the first n pods of a capacity.
func firstPods(from broker.HeldCapacity, n int32) broker.HeldCapacity {
	sets := slices.Clone(from.PodSets)
	for i := range sets {
		sets[i].Count = min(sets[i].Count, max(n, 0))
		n -= sets[i].Count
	}
	return capacity.OfPodSets(sets)
}

// place chooses clusters until nothing is missing or no cluster takes any more.
func (p *plan) place(in snapshot) {
	if p.blockedBy = in.holderOfEarlier(); p.blockedBy != "" {
		return
	}
	request, snapshot := p.request(in)
	// A cluster may take another part: what it has not released yet covers the first one, and
	// its nodes have room for more. A ledger takes each attempt once, here one for each part.
	attempt := p.attempt.Number
	parts, missing, decision := decide.Split(request, snapshot, func(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold, amount broker.HeldCapacity) ([]broker.Hold, *capacity.Rejection) {
		status := broker.ClusterAdvertisementStatus{Holds: slices.Clone(holds)}
		_, err := ledger.Place(spec, &status, growth(in.reservation, attempt, amount))
		attempt++
		return status.Holds, rejectionOf(err)
	})
	p.missing, p.decision = missing, &decision
	for _, part := range parts {
		if at := slices.IndexFunc(p.grow, func(c change) bool { return c.cluster == part.Cluster }); at >= 0 {
			p.grow[at].capacity = capacity.Add(p.grow[at].capacity, part.Capacity)
			continue
		}
		p.grow = append(p.grow, change{part.Cluster, part.Capacity})
	}
}

// rejectionOf is why a cluster is not chosen if its ledger refuses a growth, nil for no
// error.
func rejectionOf(err error) *capacity.Rejection {
	var full *ledger.FullError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &full):
		return &capacity.Rejection{Reason: reasonLedgerFull, Message: err.Error()}
	default:
		return &capacity.Rejection{Reason: capacity.ReasonInsufficientCapacity, Message: err.Error() + "."}
	}
}

// request is what decides on what is missing.
func (p *plan) request(in snapshot) (decide.Request, decide.Snapshot) {
	request, snapshot := in.placement()
	request.Rejected = in.rejected(p)
	for _, h := range in.holds() {
		if in.overdue(h) {
			h.Promised = capacity.Sub(h.Promised, ledger.Pending(h.Hold))
		}
		if price, _, known := decide.Price(h.Cost, h.Promised.Totals); known {
			request.Committed.Add(request.Committed, price)
		}
	}
	request.Want = p.missing
	return request, snapshot
}

// rejected are the clusters that must not be chosen because of their answers so far, because
// their ledger is full, because they have just lost their attempt, or because they count as
// unreachable.
func (in snapshot) rejected(p *plan) map[string]capacity.Rejection {
	rejected, _ := in.rejections(p.missing)
	rejected = maps.Clone(rejected)
	if rejected == nil {
		rejected = map[string]capacity.Rejection{}
	}
	reject := func(cluster string, rejection capacity.Rejection) {
		if _, known := rejected[cluster]; !known {
			rejected[cluster] = rejection
		}
	}
	for cluster, rejection := range in.full(p.missing) {
		reject(cluster, rejection)
	}
	for _, c := range p.shrink {
		reject(c.cluster, capacity.Rejection{Reason: decide.ReasonNotAnswering, Message: "The provider has not answered in time."})
	}
	for _, cluster := range in.reportedUnreachable() {
		reject(cluster, capacity.Rejection{Reason: decide.ReasonUnreachable, Message: fmt.Sprintf(
			"Cluster %s has reported that it cannot connect to its API server, and changes its reports too often: the last one counts after a while.", in.reservation.Spec.RequesterID)})
	}
	return rejected
}

// holderOfEarlier returns a cluster with a hold of an earlier Reservation of the same name.
func (in snapshot) holderOfEarlier() string {
	for _, cluster := range in.holders {
		ad := in.advertisement(cluster)
		if ad != nil && slices.ContainsFunc(ad.Status.Holds, func(h broker.Hold) bool {
			return h.ReservationName == in.reservation.Name && h.ReservationUID != in.reservation.UID
		}) {
			return cluster
		}
	}
	return ""
}

// placement is the input for decide, but for what is missing and what is committed.
func (in snapshot) placement() (decide.Request, decide.Snapshot) {
	spec := &in.reservation.Spec
	request := decide.Request{
		Requester: spec.RequesterID,
		Pin:       spec.TargetClusterID,
		Placement: spec.Placement,
		Budget:    spec.Budget,
		Committed: new(big.Rat),
		Providers: in.providers(),
		Weights:   in.config.weights,
	}
	return request, in.clusters.KeepFree(in.first, in.refuseFirst)
}

// providers are the clusters that hold capacity for the Reservation.
func (in snapshot) providers() (clusters []string) {
	for _, h := range in.holds() {
		clusters = append(clusters, h.cluster)
	}
	return clusters
}

func growth(r *broker.Reservation, attempt int64, capacity broker.HeldCapacity) ledger.Growth {
	return ledger.Growth{
		ReservationUID:  r.UID,
		ReservationName: r.Name,
		Requester:       r.Spec.RequesterID,
		Attempt:         attempt,
		Capacity:        capacity,
	}
}

// amount formats a capacity as "3 pods", or as the resources of a divisible total.
func amount(c broker.HeldCapacity) string {
	switch n := c.Pods(); {
	case len(c.PodSets) == 0:
		return c.Totals.String()
	case n == 1:
		return "1 pod"
	default:
		return fmt.Sprintf("%d pods", n)
	}
}
