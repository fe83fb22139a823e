package reservation

import (
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// maxNamed bounds how many providers a message names.
const maxNamed = 20

// nextStatus is what a reservation's status is to be, given the holds there are
// and the plan that was carried out. It depends on its arguments only.
func nextStatus(in gathered, p plan, committed bool) broker.ReservationStatus {
	r := in.reservation
	status := *r.Status.DeepCopy()
	holds := holdsOf(r, in.advertisements)
	want := wanted(r, in.now)
	ended := over(r, in.now)

	status.ObservedGeneration = r.Generation
	status.Refused = standing(status.Refused, in.advertisements)
	if p.decision != nil {
		status.Decision = p.decision
	}

	var resized bool
	status.Allocations, resized = allocations(r, holds, in.advertisements)
	if resized && !committed {
		// What the requester has reported so far was about other amounts.
		status.Attempt = broker.Attempt{Number: p.attempt.Number}
	}
	if len(status.Allocations) > 0 && status.ReservedAt == nil {
		status.ReservedAt = &metav1.Time{Time: in.now}
		if limit := in.config.limit(r.Spec.Duration); limit > 0 {
			status.ExpiresAt = &metav1.Time{Time: in.now.Add(limit)}
		}
	}

	missing := p.missing
	if len(p.shrink) > 0 {
		missing = broker.HeldCapacity{}
	}
	status.Phase = phase(r, &status, ended)
	status.Summary = summary(&status, want, ended)
	setConditions(in.now, r, &status, holds, want, missing, p, ended)
	return status
}

// allocations are what each hold lets the requester use: what is granted, or,
// where nothing is yet, what is promised and waits for the provider's answer.
// resized tells whether one that had been accepted has another size now.
func allocations(r *broker.Reservation, holds []held, advertisements []broker.ClusterAdvertisement) (out []broker.Allocation, resized bool) {
	for _, h := range holds {
		held := h.hold.Promised
		if h.hold.Granted != nil {
			held = *h.hold.Granted
		}
		if held.Empty() {
			continue
		}
		allocation := broker.Allocation{
			Cluster:   h.cluster,
			Resources: held.Totals,
			PodSets:   held.PodSets,
			Accepted:  h.hold.Granted != nil,
		}
		for i := range advertisements {
			if spec := &advertisements[i].Spec; spec.ClusterID == h.cluster {
				allocation.Endpoint = spec.EndpointURL
				if price, currency, known := decide.Price(spec.Cost, held.Totals); known {
					allocation.PricePerHour = decide.PriceString(price, currency)
				}
			}
		}
		for _, before := range r.Status.Allocations {
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

func phase(r *broker.Reservation, status *broker.ReservationStatus, ended bool) broker.ReservationPhase {
	usable := slices.ContainsFunc(status.Allocations, func(a broker.Allocation) bool { return a.VirtualNodeReady })
	switch {
	case ended:
		return broker.ReservationReleased
	case flaw(&r.Spec) != "":
		return broker.ReservationFailed
	case len(status.Allocations) == 0:
		return broker.ReservationPending
	case usable, r.Status.Phase == broker.ReservationActive:
		return broker.ReservationActive
	default:
		return broker.ReservationReserved
	}
}

// summary is the print column: "3 of 5 pods in paris, 2 in berlin".
func summary(status *broker.ReservationStatus, want broker.HeldCapacity, ended bool) string {
	var parts []string
	for i, a := range status.Allocations {
		pods := broker.HeldCapacity{PodSets: a.PodSets}.Pods()
		switch {
		case len(a.PodSets) == 0:
			parts = append(parts, fmt.Sprintf("%s in %s", a.Resources, a.Cluster))
		case i == 0 && want.Pods() > 0:
			parts = append(parts, fmt.Sprintf("%d of %d pods in %s", pods, want.Pods(), a.Cluster))
		default:
			parts = append(parts, fmt.Sprintf("%d in %s", pods, a.Cluster))
		}
	}
	switch {
	case ended:
		return "released"
	case len(parts) > 0:
		return strings.Join(parts, ", ")
	case len(want.PodSets) > 0:
		return fmt.Sprintf("0 of %d pods", want.Pods())
	default:
		return "nothing"
	}
}

// amount reads as "3 pods", or as the resources of a divisible total.
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

// maxMessage is the most text that a condition carries, in bytes.
const maxMessage = 8 << 10

func setConditions(now time.Time, r *broker.Reservation, status *broker.ReservationStatus, holds []held, want, missing broker.HeldCapacity, p plan, ended bool) {
	set := func(kind string, is bool, reason, message string) {
		value := metav1.ConditionFalse
		if is {
			value = metav1.ConditionTrue
		}
		// The API refuses messages of more than 32 KiB, and with them the status.
		if len(message) > maxMessage {
			message = strings.ToValidUTF8(message[:maxMessage], "") + "…"
		}
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: kind, Status: value, Reason: reason, Message: message,
			ObservedGeneration: r.Generation, LastTransitionTime: metav1.Time{Time: now},
		})
	}
	var placed, pending, releasing, unready []string
	for _, h := range holds {
		if waits := ledger.Pending(h.hold); !waits.Empty() {
			pending = append(pending, fmt.Sprintf("%s to set aside %s", h.cluster, amount(waits)))
		}
		if !h.hold.Promised.Empty() {
			placed = append(placed, fmt.Sprintf("%s in %s", amount(h.hold.Promised), h.cluster))
		}
		if h.hold.Unconfirmed != nil {
			releasing = append(releasing, h.cluster)
		}
	}
	for _, a := range status.Allocations {
		if !a.VirtualNodeReady {
			unready = append(unready, a.Cluster)
		}
	}

	if ended || want.Empty() {
		reason, message := "NothingAsked", "Nothing is asked for."
		switch flawed := flaw(&r.Spec); {
		case ended && r.DeletionTimestamp.IsZero() && status.ExpiresAt != nil:
			reason, message = "Expired", fmt.Sprintf("The reservation ended at %s.", status.ExpiresAt.UTC().Format("2006-01-02 15:04:05 MST"))
		case ended:
			reason, message = "Released", "The reservation has been released."
		case flawed != "":
			reason, message = "CannotBeMet", flawed
		}
		set(broker.ConditionLocked, false, reason, message)
		set(broker.ConditionQueued, false, reason, message)
		set(broker.ConditionProviderAccepted, false, reason, message)
		set(broker.ConditionVirtualNodeReady, false, reason, message)
		set(broker.ConditionReady, false, reason, message)
		if len(releasing) > 0 {
			set(broker.ConditionProviderReleased, false, "Waiting", fmt.Sprintf("Waiting for %s to confirm that nothing is set aside any more.", strings.Join(releasing, ", ")))
		} else if ended {
			set(broker.ConditionProviderReleased, true, "Confirmed", "No provider holds anything for it any more.")
		}
		return
	}
	meta.RemoveStatusCondition(&status.Conditions, broker.ConditionProviderReleased)

	if missing.Empty() {
		set(broker.ConditionLocked, true, "Held", fmt.Sprintf("The ledger holds %s.", strings.Join(placed, " and ")))
		set(broker.ConditionQueued, false, "Placed", "All that is asked for has been placed.")
	} else {
		if len(placed) > 0 {
			set(broker.ConditionLocked, false, "PartlyHeld", fmt.Sprintf("The ledger holds %s; %s wait for room.", strings.Join(placed, " and "), amount(missing)))
		} else {
			set(broker.ConditionLocked, false, "NotHeld", "No provider holds anything yet.")
		}
		set(broker.ConditionQueued, true, "NoRoom", queuedMessage(r, status, missing, p))
	}
	switch {
	case len(pending) > 0:
		set(broker.ConditionProviderAccepted, false, "Waiting", fmt.Sprintf("Waiting for %s.", strings.Join(pending, " and ")))
	case len(placed) > 0:
		set(broker.ConditionProviderAccepted, true, "SetAside", fmt.Sprintf("Set aside: %s.", strings.Join(placed, " and ")))
	case len(status.Refused) > 0:
		last := status.Refused[len(status.Refused)-1]
		set(broker.ConditionProviderAccepted, false, "Refused", fmt.Sprintf("%s refused: %s", last.Cluster, last.Message))
	default:
		set(broker.ConditionProviderAccepted, false, "NotHeld", "No provider has been asked yet.")
	}
	switch {
	case len(status.Allocations) == 0:
		set(broker.ConditionVirtualNodeReady, false, "NotHeld", "There is nothing yet that a virtual node could carry.")
	case len(unready) > 0:
		set(broker.ConditionVirtualNodeReady, false, "Waiting", fmt.Sprintf("Waiting for %s to report the virtual node for %s.", r.Spec.RequesterID, strings.Join(unready, ", ")))
	default:
		set(broker.ConditionVirtualNodeReady, true, "Carried", fmt.Sprintf("The virtual node carries it: %s.", status.Summary))
	}
	for _, kind := range []string{broker.ConditionQueued, broker.ConditionProviderAccepted, broker.ConditionVirtualNodeReady} {
		c := meta.FindStatusCondition(status.Conditions, kind)
		if bad := kind == broker.ConditionQueued; (c.Status == metav1.ConditionTrue) == bad {
			set(broker.ConditionReady, false, c.Reason, c.Message)
			return
		}
	}
	set(broker.ConditionReady, true, "Usable", fmt.Sprintf("Ready for use: %s.", status.Summary))
}

// queuedMessage names each provider and why it does not take what is missing.
func queuedMessage(r *broker.Reservation, status *broker.ReservationStatus, missing broker.HeldCapacity, p plan) string {
	head := amount(missing) + " wait"
	if missing.Pods() == 1 {
		head += "s"
	}
	if p.waits != "" {
		return fmt.Sprintf("%s: %s.", head, p.waits)
	}
	var reasons []string
	var more int
	if status.Decision != nil {
		for _, rejection := range status.Decision.Rejections {
			switch {
			case rejection.Reason == decide.ReasonRequesterItself:
			case len(reasons) == maxNamed:
				more++
			default:
				reasons = append(reasons, fmt.Sprintf("%s: %s", rejection.Cluster, rejection.Message))
			}
		}
	}
	if len(reasons) == 0 {
		return fmt.Sprintf("%s for a provider: no cluster but %s has advertised.", head, r.Spec.RequesterID)
	}
	if more > 0 {
		reasons = append(reasons, fmt.Sprintf("And %d more (see status.decision).", more))
	}
	return fmt.Sprintf("%s for room. %s", head, strings.Join(reasons, " "))
}

func sameStatus(a, b broker.ReservationStatus) bool {
	return apiequality.Semantic.DeepEqual(a, b)
}

// parseScore reads a score as decide prints it.
func parseScore(score string) float64 {
	value, ok := new(big.Rat).SetString(score)
	if !ok {
		return 0
	}
	figure, _ := value.Float64()
	return figure
}
