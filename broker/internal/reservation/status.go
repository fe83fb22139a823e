package reservation

import (
	"context"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// nextStatus is the Reservation's status for the holds in the snapshot and the plan
// that was written. It depends on its arguments only.
func nextStatus(in snapshot, p plan, committed bool) broker.ReservationStatus {
	status := *in.reservation.Status.DeepCopy()
	status.ObservedGeneration = in.reservation.Generation
	if p.decision != nil {
		status.Decision = p.decision
	}
	if resized := in.followLedgers(&status); resized && !committed {
		// The consumer's reports so far are about other amounts.
		status.Attempt = broker.Attempt{Number: p.attempt.Number}
	}
	in.setTimes(&status)
	if !in.ended() {
		status.QueueTime, status.Requested = in.queueTime, totalOf(&in.reservation.Spec)
	}
	status.QueuePosition = 0
	if in.queued(p) {
		status.QueuePosition = in.position
	}
	status.Phase = phase(in, p, &status)
	status.Summary = summary(in, &status)
	setConditions(in, p, &status)
	return status
}

// followLedgers sets what a status says of the holds. It reports whether an accepted
// allocation has changed its size.
func (in snapshot) followLedgers(status *broker.ReservationStatus) (resized bool) {
	status.Allocations, resized = allocations(in)
	status.Withdrawals = withdrawals(in)
	status.TargetClusterEndpoint = ""
	if len(status.Allocations) > 0 {
		status.TargetClusterEndpoint = status.Allocations[0].Endpoint
	}
	return resized
}

// followWithdrawals lowers the status to what the ledgers grant, before it is written for
// another reason, such as an attempt that places the rest elsewhere. The ledgers are read
// live, since the store may be behind with what another broker has granted.
func (r *Reconciler) followWithdrawals(ctx context.Context, in *snapshot) error {
	lowered := in.lowered()
	for _, cluster := range lowered {
		if err := r.readLedger(ctx, cluster); err != nil {
			return err
		}
	}
	if len(lowered) == 0 {
		return nil
	}
	r.readLedgers(in)
	in.followLowered()
	return nil
}

// followLowered lowers the status to what the ledgers grant. The consumer's reports so far
// are then about other amounts. Clusters whose ledgers may still get the last attempt remain
// recorded.
func (in snapshot) followLowered() {
	if len(in.lowered()) == 0 {
		return
	}
	status := *in.reservation.Status.DeepCopy()
	in.followLedgers(&status)
	status.Summary = summary(in, &status)
	status.Attempt = broker.Attempt{Number: in.nextAttempt(), Clusters: in.unseen(status.Attempt)}
	in.reservation.Status = status
}

// unseen are the clusters of an attempt whose ledgers do not show it.
func (in snapshot) unseen(attempt broker.Attempt) (clusters []string) {
	holds := in.holds()
	for _, cluster := range attempt.Clusters {
		if !slices.ContainsFunc(holds, func(h clusterHold) bool { return h.cluster == cluster && h.Attempt >= attempt.Number }) {
			clusters = append(clusters, cluster)
		}
	}
	return clusters
}

// lowered are the clusters of which the status grants more than their ledgers.
func (in snapshot) lowered() (clusters []string) {
	granted := map[string]broker.HeldCapacity{}
	for _, h := range in.holds() {
		if h.Granted != nil {
			granted[h.cluster] = *h.Granted
		}
	}
	for _, a := range in.reservation.Status.Allocations {
		said := broker.HeldCapacity{Totals: a.Resources, PodSets: a.PodSets}
		if a.Accepted && !capacity.Sub(said, granted[a.Cluster]).Empty() {
			clusters = append(clusters, a.Cluster)
		}
	}
	return clusters
}

// queued reports whether the Reservation waits for capacity.
func (in snapshot) queued(p plan) bool {
	return !p.missing.Empty() && !p.gaveUp && p.impossible.reason == "" && !in.requested().Empty()
}

// setTimes sets when the current holds began and, if the lease has a length, that and when
// it ends. An end that is about right stays.
func (in snapshot) setTimes(status *broker.ReservationStatus) {
	switch {
	case in.ended():
		return
	case len(status.Allocations) == 0:
		status.ReservedAt, status.ExpiresAt, status.LeaseDuration = nil, nil, nil
		return
	case status.ReservedAt == nil || len(in.reservation.Status.Allocations) == 0:
		status.ReservedAt = &metav1.Time{Time: in.now}
		status.ExpiresAt = nil
	}
	length := in.config.duration(in.reservation.Spec.Duration)
	if length <= 0 {
		status.ExpiresAt, status.LeaseDuration = nil, nil
		return
	}
	status.LeaseDuration = &metav1.Duration{Duration: length}
	end, exists := in.expiry()
	if !exists {
		end = in.now.Add(length)
	}
	if status.ExpiresAt == nil || status.ExpiresAt.Sub(end).Abs() > length/4 {
		status.ExpiresAt = &metav1.Time{Time: end}
	}
}

// allocations are the capacity of each hold: what is granted or, before the provider's
// first answer, what is promised. resized reports whether an accepted one has changed
// its size.
func allocations(in snapshot) (out []broker.Allocation, resized bool) {
	usable := in.usable()
	for _, h := range in.holds() {
		held := h.Promised
		if h.Granted != nil {
			held = *h.Granted
		}
		if held.Empty() {
			continue
		}
		allocation := in.allocation(h.cluster, h.Cost, held)
		allocation.Accepted = h.Granted != nil && usable
		for _, before := range in.reservation.Status.Allocations {
			if before.Cluster != h.cluster || !before.Accepted {
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
func (in snapshot) allocation(cluster string, cost *broker.Cost, held broker.HeldCapacity) broker.Allocation {
	allocation := broker.Allocation{Cluster: cluster, Resources: held.Totals, PodSets: held.PodSets}
	if price, currency, known := decide.Price(cost, held.Totals); known {
		allocation.PricePerHour = decide.PriceString(price, currency)
	}
	if ad := in.advertisement(cluster); ad != nil {
		allocation.Endpoint = ad.Spec.EndpointURL
		allocation.NodeLabels = guest.NodeLabels(ad.Spec.NodeClasses, held.PodSets)
		allocation.PodSecurity = ad.Spec.Lending.PodSecurity
	}
	return allocation
}

// withdrawals are what the providers have withdrawn last of what pods could use; none once
// the Reservation has ended.
func withdrawals(in snapshot) (out []broker.Withdrawal) {
	if in.ended() {
		return nil
	}
	for _, h := range in.holds() {
		if h.LeaveWithin != nil && in.couldUse(h) {
			out = append(out, broker.Withdrawal{Cluster: h.cluster, Attempt: h.WithdrawnAttempt, LeaveWithin: *h.LeaveWithin})
		}
	}
	return out
}

// couldUse reports whether pods may have used what a provider has withdrawn: the status has
// granted it, or says so already. A gang that has never been granted as a whole has none.
func (in snapshot) couldUse(h clusterHold) bool {
	status := in.reservation.Status
	return slices.ContainsFunc(status.Allocations, func(a broker.Allocation) bool { return a.Cluster == h.cluster && a.Accepted }) ||
		slices.ContainsFunc(status.Withdrawals, func(w broker.Withdrawal) bool {
			return w.Cluster == h.cluster && w.Attempt == h.WithdrawnAttempt
		})
}

func phase(in snapshot, p plan, status *broker.ReservationStatus) broker.ReservationPhase {
	ready := slices.ContainsFunc(status.Allocations, func(a broker.Allocation) bool { return a.VirtualNodeReady })
	switch {
	case in.ended():
		return broker.ReservationReleased
	case invalidReason(&in.reservation.Spec) != "":
		return broker.ReservationFailed
	case len(status.Allocations) == 0 && madeByHand(in.reservation) && in.requested().Empty():
		return broker.ReservationFailed
	case len(status.Allocations) == 0 && (p.gaveUp || p.impossible.reason != ""):
		return broker.ReservationFailed
	case len(status.Allocations) == 0:
		return broker.ReservationPending
	case ready, in.reservation.Status.Phase == broker.ReservationActive:
		return broker.ReservationActive
	default:
		return broker.ReservationReserved
	}
}

// summary formats the allocations for the print column, such as "3 of 5 pods in paris"
// or "5 of 5 pods: 3 in paris, 2 in berlin".
func summary(in snapshot, status *broker.ReservationStatus) string {
	requested := in.requested()
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
