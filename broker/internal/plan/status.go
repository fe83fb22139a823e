package plan

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
)

// maxWhere is how many providers a status names in one line.
const maxWhere = 3

// Status is the Reservation's status for the holds in the input and the plan
// that was written. It depends on its arguments only.
func Status(in Input, p Plan, committed bool) broker.ReservationStatus {
	status := *in.Reservation.Status.DeepCopy()
	status.ObservedGeneration = in.Reservation.Generation
	if p.Decision != nil {
		status.Decision = p.Decision
	}
	if resized := in.followLedgers(&status); resized && !committed {
		// The consumer's reports so far are about other amounts.
		status.Attempt = broker.Attempt{Number: p.Attempt.Number}
	}
	in.setTimes(&status)
	if !in.ended() {
		status.QueueTime, status.Requested = in.QueueTime, totalOf(&in.Reservation.Spec)
	}
	status.QueuePosition = 0
	if in.queues(p) {
		status.QueuePosition = in.Position
	}
	status.Phase = phase(in, p, &status)
	setSummaries(in, &status)
	setConditions(in, p, &status)
	return status
}

// followLedgers sets what a status says of the holds. It reports whether an accepted
// allocation has changed its size.
func (in Input) followLedgers(status *broker.ReservationStatus) (resized bool) {
	status.Allocations, resized = allocations(in)
	status.Withdrawals = withdrawals(in)
	status.TargetClusterEndpoint = ""
	if len(status.Allocations) > 0 {
		status.TargetClusterEndpoint = status.Allocations[0].Endpoint
	}
	return resized
}

// Recorded is the status with which the plan's attempt is recorded before any hold has its
// number. What is only released cannot fail: its status is the one after it.
func Recorded(in Input, p Plan) broker.ReservationStatus {
	if len(p.Grow) == 0 {
		status := in.Reservation.Status
		status.Attempt = p.Attempt
		return Status(in.with(status).shrunk(p), p, true)
	}
	// What is released, because the consumer cannot use it, ceases to be granted first.
	status := in.with(in.Lowered()).shrunk(p).Lowered()
	if in.Reservation.Status.Phase == "" {
		status.Phase = broker.ReservationPending
	}
	status.Attempt = p.Attempt
	return status
}

// shrunk is the input after the plan's releases.
func (in Input) shrunk(p Plan) Input {
	in.Advertisements = slices.Clone(in.Advertisements)
	for _, c := range p.Shrink {
		at, found := in.find(c.Cluster)
		if !found {
			continue
		}
		ad := ledger.Draft(in.Advertisements[at])
		ledger.Shrink(&ad.Status, in.Reservation.UID, p.Attempt.Number, c.Capacity)
		in.Advertisements[at] = ad
	}
	return in
}

// Lowered is the status, which grants no more than the ledgers do. If that is less than before,
// the consumer's reports so far are about other amounts. Clusters whose ledgers may still get
// the last attempt remain recorded.
func (in Input) Lowered() broker.ReservationStatus {
	if len(in.Overstated()) == 0 {
		return in.Reservation.Status
	}
	status := *in.Reservation.Status.DeepCopy()
	in.followLedgers(&status)
	setSummaries(in, &status)
	status.Attempt = broker.Attempt{Number: in.nextAttempt(), Clusters: in.unseen(status.Attempt)}
	return status
}

// unseen are the clusters of an attempt whose ledgers do not show it.
func (in Input) unseen(attempt broker.Attempt) (clusters []string) {
	holds := in.Holds()
	for _, cluster := range attempt.Clusters {
		if !slices.ContainsFunc(holds, func(h Hold) bool { return h.Cluster == cluster && h.Attempt >= attempt.Number }) {
			clusters = append(clusters, cluster)
		}
	}
	return clusters
}

// Overstated are the clusters of which the status grants more than their ledgers.
func (in Input) Overstated() (clusters []string) {
	granted := map[string]broker.HeldCapacity{}
	for _, h := range in.Holds() {
		if h.Granted != nil {
			granted[h.Cluster] = *h.Granted
		}
	}
	for _, a := range in.Reservation.Status.Allocations {
		said := broker.HeldCapacity{Totals: a.Resources, PodSets: a.PodSets}
		if a.Accepted && !capacity.Sub(said, granted[a.Cluster]).Empty() {
			clusters = append(clusters, a.Cluster)
		}
	}
	return clusters
}

// queues reports whether the Reservation waits for capacity.
func (in Input) queues(p Plan) bool {
	return !p.Missing.Empty() && !p.gaveUp && p.Impossible.Reason == "" && !in.Requested().Empty()
}

// setTimes sets when the current holds began and, if the lease has a length, that and when
// it ends. An end that is about right stays.
func (in Input) setTimes(status *broker.ReservationStatus) {
	switch {
	case in.ended():
		return
	case len(status.Allocations) == 0:
		status.ReservedAt, status.ExpiresAt, status.LeaseDuration = nil, nil, nil
		return
	case status.ReservedAt == nil || len(in.Reservation.Status.Allocations) == 0:
		status.ReservedAt = &metav1.Time{Time: in.Now}
		status.ExpiresAt = nil
	}
	length := in.Settings.Duration(in.Reservation.Spec.Duration)
	if length <= 0 {
		status.ExpiresAt, status.LeaseDuration = nil, nil
		return
	}
	status.LeaseDuration = &metav1.Duration{Duration: length}
	end, exists := in.expiry()
	if !exists {
		end = in.Now.Add(length)
	}
	if status.ExpiresAt == nil || status.ExpiresAt.Sub(end).Abs() > length/4 {
		status.ExpiresAt = &metav1.Time{Time: end}
	}
}

// allocations are the capacity of each hold: what is granted or, before the provider's
// first answer, what is promised. resized reports whether an accepted one has changed
// its size.
func allocations(in Input) (out []broker.Allocation, resized bool) {
	usable := in.usable()
	for _, h := range in.Holds() {
		held := h.Promised
		if h.Granted != nil {
			held = *h.Granted
		}
		if held.Empty() {
			continue
		}
		allocation := in.allocation(h.Cluster, h.Cost, held)
		allocation.Accepted = h.Granted != nil && usable
		for _, before := range in.Reservation.Status.Allocations {
			if before.Cluster != h.Cluster || !before.Accepted {
				continue
			}
			if capacity.Equal(broker.HeldCapacity{Totals: before.Resources, PodSets: before.PodSets}, held) {
				allocation.VirtualNodeReady = before.VirtualNodeReady && allocation.Accepted
			} else {
				resized = true
			}
		}
		out = append(out, allocation)
	}
	return out, resized
}

// allocation is what one provider holds, as the status shows it, before it is accepted.
func (in Input) allocation(cluster string, cost *broker.Cost, held broker.HeldCapacity) broker.Allocation {
	allocation := broker.Allocation{Cluster: cluster, Resources: held.Totals, PodSets: held.PodSets}
	if price, currency, known := pricing.Of(cost, held.Totals); known {
		allocation.PricePerHour = text.Price(price, currency)
	}
	if ad := in.Advertisement(cluster); ad != nil {
		allocation.Endpoint = ad.Spec.EndpointURL
		allocation.NodeLabels = guest.NodeLabels(ad.Spec.NodeClasses, held.PodSets)
		allocation.PodSecurity = ad.Spec.Lending.PodSecurity
	}
	return allocation
}

// withdrawals are what the providers have withdrawn last of what pods could use; none once
// the Reservation has ended.
func withdrawals(in Input) (out []broker.Withdrawal) {
	if in.ended() {
		return nil
	}
	for _, h := range in.Holds() {
		if h.LeaveWithin != nil && in.couldUse(h) {
			out = append(out, broker.Withdrawal{Cluster: h.Cluster, Attempt: h.WithdrawnAttempt, LeaveWithin: *h.LeaveWithin})
		}
	}
	return out
}

// couldUse reports whether pods may have used what a provider has withdrawn: the status has
// granted it, or says so already. A gang that has never been granted as a whole has none.
func (in Input) couldUse(h Hold) bool {
	status := in.Reservation.Status
	return slices.ContainsFunc(status.Allocations, func(a broker.Allocation) bool { return a.Cluster == h.Cluster && a.Accepted }) ||
		slices.ContainsFunc(status.Withdrawals, func(w broker.Withdrawal) bool {
			return w.Cluster == h.Cluster && w.Attempt == h.WithdrawnAttempt
		})
}

func phase(in Input, p Plan, status *broker.ReservationStatus) broker.ReservationPhase {
	ready := slices.ContainsFunc(status.Allocations, func(a broker.Allocation) bool { return a.VirtualNodeReady })
	switch {
	case in.ended():
		return broker.ReservationReleased
	case invalidReason(&in.Reservation.Spec) != "":
		return broker.ReservationFailed
	case len(status.Allocations) == 0 && madeByHand(in.Reservation) && in.Requested().Empty():
		return broker.ReservationFailed
	case len(status.Allocations) == 0 && (p.gaveUp || p.Impossible.Reason != ""):
		return broker.ReservationFailed
	case len(status.Allocations) == 0:
		return broker.ReservationPending
	case ready, in.Reservation.Status.Phase == broker.ReservationActive:
		return broker.ReservationActive
	default:
		return broker.ReservationReserved
	}
}

// setSummaries sets what kubectl prints of a status whose allocations are set.
func setSummaries(in Input, status *broker.ReservationStatus) {
	status.Summary = summary(in, status)
	if !in.ended() { // then they stay
		status.Owner, status.Wanted = ownerOf(in.Reservation), capacity.Wanted(&in.Reservation.Spec)
	}
	accepted := slices.DeleteFunc(slices.Clone(status.Allocations), func(a broker.Allocation) bool { return !a.Accepted })
	status.Granted, status.Where, status.PricePerHour = granted(accepted), where(accepted), totalPrice(accepted)
}

// ownerOf returns whom a Reservation of the hub is for.
func ownerOf(r *broker.Reservation) string {
	if name := r.Annotations[broker.LabelSourceName]; name != "" {
		return r.Spec.RequesterID + "/" + r.Annotations[broker.LabelSourceNamespace] + "/" + name
	}
	return r.Spec.RequesterID
}

// granted formats what providers have accepted.
func granted(allocations []broker.Allocation) string {
	var sum broker.HeldCapacity
	for _, a := range allocations {
		sum = capacity.Add(sum, broker.HeldCapacity{Totals: a.Resources, PodSets: a.PodSets})
	}
	if sum.Empty() {
		return broker.NothingGranted
	}
	return text.TruncateTo(capacity.Amount(sum), capacity.MaxWanted)
}

// where names the first providers by name.
func where(allocations []broker.Allocation) string {
	var clusters []string
	for _, a := range allocations {
		clusters = append(clusters, a.Cluster)
	}
	slices.Sort(clusters)
	if more := len(clusters) - maxWhere; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(clusters[:maxWhere], ", "), more)
	}
	return strings.Join(clusters, ", ")
}

// totalPrice sums up the prices of allocations by currency: "0.25 EUR + unknown" if some have none.
func totalPrice(allocations []broker.Allocation) string {
	var prices text.Prices
	for _, a := range allocations {
		prices.AddText(a.PricePerHour)
	}
	return prices.Per("")
}

// summary formats the allocations in one line, such as "3 of 5 pods in paris"
// or "5 of 5 pods: 3 in paris, 2 in berlin".
func summary(in Input, status *broker.ReservationStatus) string {
	requested := in.Requested()
	var pods int32
	var parts []string
	for _, a := range status.Allocations {
		held := broker.HeldCapacity{Totals: a.Resources, PodSets: a.PodSets}
		pods += held.Pods()
		if len(a.PodSets) > 0 {
			parts = append(parts, fmt.Sprintf("%d in %s", held.Pods(), a.Cluster))
		} else {
			parts = append(parts, fmt.Sprintf("%s in %s", a.Resources, a.Cluster))
		}
	}
	switch wanted := requested.Pods(); {
	case in.ended():
		return broker.SummaryReleased
	case wanted > 0 && len(parts) == 0:
		return fmt.Sprintf("0 of %d pods", wanted)
	case wanted > 0 && len(parts) == 1:
		return fmt.Sprintf("%d of %d pods in %s", pods, wanted, status.Allocations[0].Cluster)
	case wanted > 0:
		return fmt.Sprintf("%d of %d pods: %s", min(pods, wanted), wanted, strings.Join(parts, ", "))
	case len(parts) > 0:
		return strings.Join(parts, ", ")
	default:
		return "none"
	}
}
