package plan

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

// Plan is what to do next for one Reservation.
type Plan struct {
	// Attempt that commits the changes.
	Attempt broker.Attempt
	// Shrink releases what is too much, before anything grows; Grow is what other clusters
	// get. Both only if providers did not answer, or if the consumer cannot use what they
	// granted: what they lose is placed elsewhere.
	Shrink, Grow []Change
	// Fence are the clusters whose holds stay as they are, but for which an attempt was
	// recorded that their ledgers do not show: another broker may still write it.
	Fence []string
	// Missing is the requested capacity that is neither held nor about to be.
	Missing broker.HeldCapacity
	// Decision explains the choice of clusters; nil if there was nothing to choose.
	Decision *broker.Decision
	// blockedBy is the cluster that must first release an earlier Reservation of the
	// same name; "" if none.
	blockedBy string
	// overQuota is the part of what is missing for which the consumer's quota has no room.
	overQuota broker.HeldCapacity
	// gaveUp is whether the deadline of the Reservation has passed, so that what is missing
	// is not placed any more.
	gaveUp bool
	// Impossible is why nothing can be placed, unless the clusters change.
	Impossible Impossibility
}

// Change is the capacity that one cluster's hold shrinks to, or grows by.
type Change struct {
	Cluster  string
	Capacity broker.HeldCapacity
}

// Empty reports whether no hold is to change its size.
func (p Plan) Empty() bool { return len(p.Shrink)+len(p.Grow) == 0 }

// Writes reports whether any ledger is to be written.
func (p Plan) Writes() bool { return !p.Empty() || len(p.Fence) > 0 }

// New compares the requested capacity with the holds.
func New(in Input) Plan {
	holds, requested := in.Holds(), in.Requested()
	p := Plan{Attempt: broker.Attempt{Number: in.nextAttempt()}}
	if p.Shrink = shrink(in, holds, requested); p.Shrink == nil {
		p.Shrink = lost(in, holds)
		if p.Missing = in.Missing(); !p.Missing.Empty() {
			if p.gaveUp = in.deadlineExceeded(); !p.gaveUp {
				if p = p.place(in); len(p.Grow) == 0 && len(holds) == 0 {
					p.Impossible = in.impossible()
				}
			}
			p = p.allOrNothing(in, holds)
		}
	}
	for _, c := range slices.Concat(p.Shrink, p.Grow) {
		p.Attempt.Clusters = append(p.Attempt.Clusters, c.Cluster)
	}
	p.Fence = p.inDoubt(in, holds)
	return p
}

// Missing is what the Reservation requests and cannot count on.
func (in Input) Missing() broker.HeldCapacity {
	var reliable broker.HeldCapacity
	for _, h := range in.Holds() {
		reliable = capacity.Add(reliable, in.reliable(h))
	}
	return capacity.Sub(in.Requested(), reliable)
}

// nextAttempt is the number of an attempt after those that are recorded and those that the
// ledgers show.
func (in Input) nextAttempt() int64 {
	number := in.Reservation.Status.Attempt.Number
	for _, h := range in.Holds() {
		number = max(number, h.Attempt)
	}
	return number + 1
}

// inDoubt are the clusters of the last attempt whose holds do not show it and are not
// changed by the plan.
func (p Plan) inDoubt(in Input, holds []Hold) (clusters []string) {
	last := in.Reservation.Status.Attempt
	for _, h := range holds {
		if h.Attempt < last.Number && !h.Promised.Empty() && slices.Contains(last.Clusters, h.Cluster) && !slices.Contains(p.Attempt.Clusters, h.Cluster) {
			clusters = append(clusters, h.Cluster)
		}
	}
	return clusters
}

// lost takes back what providers have neither accepted nor refused before the deadline, and
// what the consumer cannot use.
func lost(in Input, holds []Hold) []Change {
	var changes []Change
	for _, h := range holds {
		if in.cannotUse(h) {
			changes = append(changes, Change{h.Cluster, broker.HeldCapacity{}})
		} else if in.Overdue(h) {
			changes = append(changes, Change{h.Cluster, capacity.Sub(h.Promised, ledger.Pending(h.Hold))})
		}
	}
	return changes
}

// shrink releases what the Reservation does not need any more. What an inactive
// cluster holds, or one that the consumer cannot connect to, may still be used there: it
// stays held, but does not count, and is released when other clusters have granted as much and no virtual node uses it.
func shrink(in Input, holds []Hold, requested broker.HeldCapacity) []Change {
	var granted broker.HeldCapacity
	for _, h := range holds {
		if in.counts(h) && h.Granted != nil {
			granted = capacity.Add(granted, *h.Granted)
		}
	}
	replaced := capacity.Sub(requested, granted).Empty()
	var counted, unreliable []Hold
	var unneeded []Change
	for _, h := range holds {
		switch {
		case h.Promised.Empty():
		case !in.reliable(h).Empty():
			counted = append(counted, h)
		case replaced && !virtualNodeReady(in.Reservation, h.Cluster):
			unneeded = append(unneeded, Change{h.Cluster, broker.HeldCapacity{}})
		default:
			unreliable = append(unreliable, h)
		}
	}
	promised := func(h Hold) broker.HeldCapacity { return h.Promised }
	return slices.Concat(
		shrinkTo(in.Reservation, counted, requested, in.reliable),
		shrinkTo(in.Reservation, unreliable, requested, promised),
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
func shrinkTo(r *broker.Reservation, holds []Hold, requested broker.HeldCapacity, counts func(Hold) broker.HeldCapacity) []Change {
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
			if anyReady && !virtualNodeReady(r, holds[i].Cluster) {
				take(i, to[i])
			}
		},
		func(i int) {
			if retained != nil {
				take(i, capacity.First(to[i], to[i].Pods()-retained[holds[i].Cluster]))
			}
		},
		func(i int) { take(i, to[i]) },
	} {
		for i := range slices.Backward(holds) {
			pass(i)
		}
	}
	var changes []Change
	for i, h := range holds {
		if !capacity.Equal(to[i], h.Promised) {
			changes = append(changes, Change{h.Cluster, to[i]})
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

// place chooses clusters until nothing is missing or no cluster takes any more.
func (p Plan) place(in Input) Plan {
	if p.blockedBy = in.holderOfEarlier(); p.blockedBy != "" {
		return p
	}
	want := in.withinQuota(p.Missing)
	if p.overQuota = capacity.Sub(p.Missing, want); want.Empty() {
		return p
	}
	request, snapshot := p.Request(in, want)
	// A cluster may take another part: what it has not released yet covers the first one, and
	// its nodes have room for more. A ledger takes each attempt once, here one for each part.
	attempt := p.Attempt.Number
	parts, missing, decision := decide.Split(request, snapshot, func(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold, amount broker.HeldCapacity) ([]broker.Hold, *capacity.Rejection) {
		status := broker.ClusterAdvertisementStatus{Holds: slices.Clone(holds)}
		_, err := ledger.Place(spec, &status, Growth(in.Reservation, attempt, amount))
		attempt++
		return status.Holds, rejectionOf(err)
	})
	p.Missing, p.Decision = capacity.Add(missing, p.overQuota), &decision
	for _, part := range parts {
		if at := slices.IndexFunc(p.Grow, func(c Change) bool { return c.Cluster == part.Cluster }); at >= 0 {
			p.Grow[at].Capacity = capacity.Add(p.Grow[at].Capacity, part.Capacity)
			continue
		}
		p.Grow = append(p.Grow, Change{part.Cluster, part.Capacity})
	}
	return p
}

// rejectionOf is why a cluster is not chosen if its ledger refuses a growth, nil for no
// error.
func rejectionOf(err error) *capacity.Rejection {
	var full *ledger.FullError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &full):
		return &capacity.Rejection{Reason: ledger.ReasonFull, Message: err.Error()}
	default:
		return &capacity.Rejection{Reason: capacity.ReasonInsufficientCapacity, Message: err.Error() + "."}
	}
}

// Request is what decides on a capacity, for which the input has a choice.
func (p Plan) Request(in Input, want broker.HeldCapacity) (decide.Request, decide.Snapshot) {
	request := in.request(want)
	request.Weights, request.Records, request.Rejected = in.Settings.Weights, in.Choice.Records, in.rejected(p)
	for _, h := range in.Holds() {
		if in.Overdue(h) {
			h.Promised = capacity.Sub(h.Promised, ledger.Pending(h.Hold))
		}
		in.commit(&request, h)
	}
	return request, in.Choice.Clusters.KeepFree(in.First, in.RefuseFirst)
}

// request is what the Reservation asks of any cluster, before anything is committed.
func (in Input) request(want broker.HeldCapacity) decide.Request {
	spec := &in.Reservation.Spec
	request := decide.Request{
		Requester: spec.RequesterID,
		Want:      want,
		Pin:       spec.TargetClusterID,
		Placement: spec.Placement,
		Budget:    spec.Budget,
		Committed: new(big.Rat),
		Held:      map[string]broker.HeldCapacity{},

		ExchangeRates: in.Settings.ExchangeRates,
	}
	for _, h := range in.Holds() {
		request.Providers = append(request.Providers, h.Cluster)
		request.Held[h.Cluster] = in.reliable(h)
	}
	return request
}

// commit takes what a hold costs from the budget of a request.
func (in Input) commit(request *decide.Request, h Hold) {
	if request.Budget == nil || h.Promised.Empty() {
		return
	}
	if price, known := request.PriceOf(in.regionOf(h.Cluster), h.Cost, h.Promised); known {
		request.Committed.Add(request.Committed, price)
	} else {
		request.Unpriced = h.Cluster
	}
}

// rejected are the clusters that must not be chosen because of their answers so far, because
// their ledger is full, because they have just lost their attempt, or because they count as
// unreachable.
func (in Input) rejected(p Plan) map[string]capacity.Rejection {
	rejected := maps.Clone(in.Choice.Refused)
	if rejected == nil {
		rejected = map[string]capacity.Rejection{}
	}
	reject := func(cluster string, rejection capacity.Rejection) {
		if _, known := rejected[cluster]; !known {
			rejected[cluster] = rejection
		}
	}
	for cluster, rejection := range in.Choice.Full {
		reject(cluster, rejection)
	}
	for _, c := range p.Shrink {
		reject(c.Cluster, capacity.Rejection{Reason: decide.ReasonNotAnswering, Message: "The provider has not answered in time."})
	}
	for _, cluster := range in.reportedUnreachable() {
		reject(cluster, capacity.Rejection{Reason: decide.ReasonUnreachable, Message: fmt.Sprintf(
			"Cluster %s has reported that it cannot connect to its API server, and changes its reports too often: the last one counts after a while.", in.Reservation.Spec.RequesterID)})
	}
	return rejected
}

// holderOfEarlier returns a cluster with a hold of an earlier Reservation of the same name.
func (in Input) holderOfEarlier() string {
	for _, cluster := range in.Holders {
		ad := in.Advertisement(cluster)
		if ad != nil && slices.ContainsFunc(ad.Status.Holds, func(h broker.Hold) bool {
			return h.ReservationName == in.Reservation.Name && h.ReservationUID != in.Reservation.UID
		}) {
			return cluster
		}
	}
	return ""
}

// regionOf is the region that a cluster states.
func (in Input) regionOf(cluster string) string {
	if ad := in.Advertisement(cluster); ad != nil {
		return ad.Spec.Region
	}
	return ""
}

// Growth is what a cluster is asked for.
func Growth(r *broker.Reservation, attempt int64, capacity broker.HeldCapacity) ledger.Growth {
	return ledger.Growth{
		ReservationUID:  r.UID,
		ReservationName: r.Name,
		Requester:       r.Spec.RequesterID,
		Attempt:         attempt,
		Capacity:        capacity,
	}
}

// RecordsFirst reports whether the attempt of a plan is recorded in an annotation: the first
// one of a Reservation that the broker has created for a cluster.
func RecordsFirst(in Input, p Plan) bool {
	r := in.Reservation
	return r.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway && r.Annotations[broker.AnnotationFirstAttempt] == "" &&
		p.Attempt.Number == 1 && len(in.Holds()) == 0 && len(p.Grow) > 0
}
