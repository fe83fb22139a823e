package reservation

import (
	"cmp"
	"fmt"
	"math/big"
	"slices"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// gathered is all that a plan for one reservation depends on.
type gathered struct {
	reservation *broker.Reservation
	// advertisements by cluster ID. A plan does not change them.
	advertisements []broker.ClusterAdvertisement
	config         config
	now            time.Time
	// active and fresh are the clusters that have advertised lately, and lately
	// enough for a new placement.
	active, fresh map[string]bool
	// silentAt is when a cluster will have been silent for so long that an answer
	// is no longer waited for.
	silentAt map[string]time.Time
}

// dependable is the part of a hold that the requester can count on: all that is
// granted by a cluster that is active, and what is promised beyond that as long
// as its answer can be expected.
func (in gathered) dependable(h held) broker.HeldCapacity {
	switch {
	case !in.active[h.cluster]:
		return broker.HeldCapacity{}
	case in.now.Before(in.silentAt[h.cluster]):
		return h.hold.Promised
	default:
		return capacity.Sub(h.hold.Promised, ledger.Pending(h.hold))
	}
}

// plan is what to do next for one reservation.
type plan struct {
	// attempt that commits the changes.
	attempt broker.Attempt
	// shrink or grow, never both: what is too much goes first.
	shrink, grow []change
	// missing is what is asked for and neither held nor about to be.
	missing broker.HeldCapacity
	// decision explains what was chosen and what not, nil if nothing had to be
	// chosen.
	decision *broker.Decision
	// waits says what the missing part waits for, if not for room.
	waits string
}

// change is one hold's: the capacity to shrink to, or to grow by.
type change struct {
	cluster  string
	capacity broker.HeldCapacity
}

func (p plan) changes() []change { return append(slices.Clone(p.shrink), p.grow...) }

// held is a reservation's hold at one cluster.
type held struct {
	cluster string
	hold    broker.Hold
}

// holdsOf lists a reservation's holds, those of its allocations first and in
// their order, so that the last is the latest.
func holdsOf(reservation *broker.Reservation, advertisements []broker.ClusterAdvertisement) []held {
	var holds []held
	for i := range advertisements {
		if hold := ledger.Find(&advertisements[i].Status, reservation.UID); hold != nil {
			holds = append(holds, held{advertisements[i].Spec.ClusterID, *hold})
		}
	}
	place := func(h held) int {
		i := slices.IndexFunc(reservation.Status.Allocations, func(a broker.Allocation) bool { return a.Cluster == h.cluster })
		if i < 0 {
			return len(reservation.Status.Allocations)
		}
		return i
	}
	slices.SortFunc(holds, func(a, b held) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(a.cluster, b.cluster))
	})
	return holds
}

// wanted is what the reservation asks for now: nothing once it is over.
func wanted(reservation *broker.Reservation, now time.Time) broker.HeldCapacity {
	switch spec := &reservation.Spec; {
	case over(reservation, now), flaw(spec) != "":
		return broker.HeldCapacity{}
	case spec.RequestedResources != nil:
		return broker.HeldCapacity{Totals: *spec.RequestedResources}
	default:
		return capacity.OfPodSets(spec.PodSets)
	}
}

// over reports whether the reservation has ended and asks for nothing any more.
func over(reservation *broker.Reservation, now time.Time) bool {
	expires := reservation.Status.ExpiresAt
	return !reservation.DeletionTimestamp.IsZero() ||
		reservation.Status.Phase == broker.ReservationReleased ||
		expires != nil && !now.Before(expires.Time)
}

// flaw says why an ask can never be met as it is written, "" if it can.
func flaw(spec *broker.ReservationSpec) string {
	switch {
	case spec.RequesterID == "":
		return "The reservation does not say who asks (requesterID)."
	case spec.TargetClusterID == spec.RequesterID:
		return "The reservation is pinned to the requester itself (targetClusterID)."
	case spec.TargetClusterID != "" && spec.Placement != nil && slices.Contains(spec.Placement.ExcludeClusters, spec.TargetClusterID):
		return fmt.Sprintf("The reservation is pinned to %s (targetClusterID), which its placement excludes.", spec.TargetClusterID)
	case spec.Duration != nil && spec.Duration.Duration <= 0:
		return "The reservation's duration is not positive."
	}
	return ""
}

// makePlan compares what is asked for with what is held. What silent clusters
// hold stays held, since nobody knows what runs there, but it is no longer
// counted on: as much is asked for elsewhere.
func makePlan(in gathered) plan {
	r := in.reservation
	holds := holdsOf(r, in.advertisements)
	want := wanted(r, in.now)
	number := r.Status.Attempt.Number
	var have, granted broker.HeldCapacity
	for _, h := range holds {
		have = capacity.Add(have, in.dependable(h))
		if in.active[h.cluster] && h.hold.Granted != nil {
			granted = capacity.Add(granted, *h.hold.Granted)
		}
		number = max(number, h.hold.Attempt)
	}
	p := plan{attempt: broker.Attempt{Number: number + 1}}
	replaced := capacity.Sub(want, granted).Empty()
	var counted, silent []held
	for _, h := range holds {
		switch {
		case h.hold.Promised.Empty():
		case !in.dependable(h).Empty():
			counted = append(counted, h)
		case replaced && !carried(r, h.cluster):
			// Others carry it now, and the requester has no node there: what the
			// silent cluster finds on its return is that it is no longer needed.
			p.shrink = append(p.shrink, change{h.cluster, broker.HeldCapacity{}})
		default:
			silent = append(silent, h)
		}
	}
	p.shrink = slices.Concat(tooMuch(r, counted, want, in.dependable), tooMuch(r, silent, want, promised), p.shrink)
	if len(p.shrink) == 0 {
		if p.missing = capacity.Sub(want, have); !p.missing.Empty() {
			p.place(in)
		}
	}
	for _, c := range p.changes() {
		p.attempt.Clusters = append(p.attempt.Clusters, c.cluster)
	}
	return p
}

func promised(h held) broker.HeldCapacity { return h.hold.Promised }

// tooMuch shrinks some of the holds where together they count for more than want.
func tooMuch(r *broker.Reservation, holds []held, want broker.HeldCapacity, counts func(held) broker.HeldCapacity) []change {
	var have broker.HeldCapacity
	for _, h := range holds {
		have = capacity.Add(have, counts(h))
	}
	excess := capacity.Sub(have, want)
	if excess.Empty() {
		return nil
	}
	return shrinking(r, holds, excess)
}

// carried reports whether the requester's virtual node carries what a cluster
// grants it.
func carried(r *broker.Reservation, cluster string) bool {
	return slices.ContainsFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.Cluster == cluster && a.VirtualNodeReady })
}

// place looks for clusters until everything is placed or nobody takes more.
func (p *plan) place(in gathered) {
	r := in.reservation
	for i := range in.advertisements {
		for _, hold := range in.advertisements[i].Status.Holds {
			if hold.ReservationName == r.Name && hold.ReservationUID != r.UID {
				p.waits = fmt.Sprintf("an earlier reservation of the same name is still being released by %s", in.advertisements[i].Spec.ClusterID)
				return
			}
		}
	}
	ask := decide.Request{
		Requester: r.Spec.RequesterID,
		Pin:       r.Spec.TargetClusterID,
		Placement: r.Spec.Placement,
		Budget:    r.Spec.Budget,
		Committed: new(big.Rat),
		Weights:   in.config.weights,
		Refused:   standing(r.Status.Refused, in.advertisements),
	}
	var snapshot decide.Snapshot
	for i := range in.advertisements {
		ad := &in.advertisements[i]
		snapshot.Clusters = append(snapshot.Clusters, decide.Cluster{
			Spec:   ad.Spec,
			Holds:  slices.Clone(ad.Status.Holds),
			Active: in.active[ad.Spec.ClusterID],
			Fresh:  in.fresh[ad.Spec.ClusterID],
		})
		if hold := ledger.Find(&ad.Status, r.UID); hold != nil {
			if price, _, known := decide.Price(ad.Spec.Cost, hold.Promised.Totals); known {
				ask.Committed.Add(ask.Committed, price)
			}
		}
	}
	p.decision = &broker.Decision{}
	for range in.advertisements {
		ask.Want = p.missing
		answer := decide.Choose(ask, snapshot)
		p.decision.Rejections = answer.Rejections
		p.decision.Scores = mergeScores(p.decision.Scores, answer.Scores)
		at := slices.IndexFunc(snapshot.Clusters, func(c decide.Cluster) bool { return c.Spec.ClusterID == answer.Cluster })
		if at < 0 {
			break
		}
		chosen := &snapshot.Clusters[at]
		status := broker.ClusterAdvertisementStatus{Holds: chosen.Holds}
		if changed, err := ledger.Place(&chosen.Spec, &status, growth(r, p.attempt.Number, answer.Placement)); err != nil || !changed {
			break
		}
		chosen.Holds = status.Holds
		p.grow = append(p.grow, change{answer.Cluster, answer.Placement})
		if price, _, known := decide.Price(chosen.Spec.Cost, answer.Placement.Totals); known {
			ask.Committed.Add(ask.Committed, price)
		}
		if p.missing = capacity.Sub(p.missing, answer.Placement); p.missing.Empty() {
			break
		}
	}
	if p.missing.Empty() {
		// Where others were chosen before the last, they rejected only its part.
		p.decision.Rejections = slices.DeleteFunc(p.decision.Rejections, func(rejection broker.ClusterRejection) bool {
			return slices.ContainsFunc(p.grow, func(c change) bool { return c.cluster == rejection.Cluster })
		})
	}
}

// mergeScores adds the scores of a later choice. The first a cluster got stays.
func mergeScores(scores, later []broker.ClusterScore) []broker.ClusterScore {
	for _, s := range later {
		if !slices.ContainsFunc(scores, func(have broker.ClusterScore) bool { return have.Cluster == s.Cluster }) {
			scores = append(scores, s)
		}
	}
	return scores
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

// standing are the refusals that were made on a cluster's present
// advertisement.
func standing(refused []broker.Refusal, advertisements []broker.ClusterAdvertisement) []broker.Refusal {
	var out []broker.Refusal
	for _, refusal := range refused {
		for i := range advertisements {
			if spec := &advertisements[i].Spec; spec.ClusterID == refusal.Cluster && spec.Sequence == refusal.Sequence {
				out = append(out, refusal)
			}
		}
	}
	return out
}

// retained is how many pods the requester keeps at each provider; nil where it
// does not say.
func retained(r *broker.Reservation) map[string]int32 {
	if capacity.OfPodSets(r.Spec.PodSets).Pods() > r.Spec.RetainedCount() {
		return nil
	}
	pods := map[string]int32{}
	for _, at := range r.Spec.Retained {
		pods[at.Cluster] = at.Count
	}
	return pods
}

// shrinking spreads an excess over the holds, the last one first: what nobody
// has accepted yet before what is granted, what no virtual node carries before
// what one does, and what the requester does not keep before the rest.
func shrinking(r *broker.Reservation, holds []held, excess broker.HeldCapacity) []change {
	keep := retained(r)
	to := make([]broker.HeldCapacity, len(holds))
	for i, h := range holds {
		to[i] = *h.hold.Promised.DeepCopy()
	}
	// Where nothing is carried yet, that says nothing.
	usable := slices.ContainsFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.VirtualNodeReady })
	take := func(i int, amount broker.HeldCapacity) {
		amount = capacity.Min(capacity.Min(excess, amount), to[i])
		to[i], excess = capacity.Sub(to[i], amount), capacity.Sub(excess, amount)
	}
	passes := []func(i int){
		func(i int) { take(i, ledger.Pending(holds[i].hold)) },
		func(i int) {
			if usable && !carried(r, holds[i].cluster) {
				take(i, to[i])
			}
		},
		func(i int) {
			if keep != nil {
				take(i, first(to[i], to[i].Pods()-keep[holds[i].cluster]))
			}
		},
		func(i int) { take(i, to[i]) },
	}
	for _, pass := range passes {
		for i := range slices.Backward(holds) {
			pass(i)
		}
	}
	var changes []change
	for i, h := range holds {
		if !capacity.Equal(to[i], h.hold.Promised) {
			changes = append(changes, change{h.cluster, to[i]})
		}
	}
	return changes
}

// first is up to n pods of a capacity.
func first(from broker.HeldCapacity, n int32) broker.HeldCapacity {
	sets := slices.Clone(from.PodSets)
	for i := range sets {
		sets[i].Count = min(sets[i].Count, max(n, 0))
		n -= sets[i].Count
	}
	return capacity.OfPodSets(sets)
}
