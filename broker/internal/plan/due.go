package plan

import (
	"maps"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/lease"
)

// Urgency is how much a plan's write matters.
type Urgency int

const (
	Nothing Urgency = iota
	// Figures may be written, one now and then of all Reservations.
	Figures
	// News is written at once.
	News
)

// Outdated is what there is to write and, if that is nothing or only figures, until when if
// not for good: consumers go by what providers say of their nodes and the guests that they
// take.
func (in Input) Outdated(p Plan) (Urgency, time.Time) {
	r := in.Reservation
	switch {
	case in.Deleted() && !slices.Contains(r.Finalizers, broker.FinalizerLedger):
		return Nothing, time.Time{}
	case in.Deleted() || slices.Contains(r.Finalizers, broker.FinalizerLedger) != in.NeedsFinalizer() || p.Writes():
		return News, time.Time{}
	}
	next := Status(in, p, false)
	var until time.Time
	switch {
	case apiequality.Semantic.DeepEqual(r.Status, next):
		return Nothing, until
	case !differInFiguresOnly(r.Status, next):
		return News, until
	case differInTerms(r.Status, next):
		until = in.Now.Add(figuresAfter)
	}
	if in.Now.Before(lease.Later(in.Times.FirstSeen, in.Times.Written).Add(figuresAfter)) {
		return Nothing, until
	}
	return Figures, until
}

// NeedsFinalizer reports whether the Reservation must be kept: until it has ended and the
// providers have released its holds. Those that do not advertise any more are not
// waited for: what they hold stays charged without the Reservation.
func (in Input) NeedsFinalizer() bool {
	if !in.ended() {
		return true
	}
	return slices.ContainsFunc(in.Holds(), func(h Hold) bool { return !h.Promised.Empty() || in.Active[h.Cluster] })
}

// Due is when the Reservation is to be reconciled again without an event: when it expires, when
// a provider's answer is overdue, or after a while if it waits. refusedUntil is when the first
// of the clusters may be asked that have refused all of it. Zero for never.
func (in Input) Due(refusedUntil time.Time) (next time.Time) {
	at := func(due time.Time) {
		if due.IsZero() {
			return
		}
		if soon := in.Now.Add(time.Second); due.Before(soon) {
			due = soon
		}
		if next.IsZero() || due.Before(next) {
			next = due
		}
	}
	if in.ended() {
		if in.Deleted() && in.NeedsFinalizer() && !in.StatusDue() {
			at(in.Times.Deleted.Add(releaseShownAfter))
		}
		return next
	}
	if end, _, exists := in.leaseEnd(); exists {
		at(end)
	}
	for _, h := range in.Holds() {
		if due, pending := in.due(h); pending {
			at(due)
		}
		if due, unreachable := in.cutOffAt(h); unreachable && in.Now.Before(due) {
			at(due)
		}
	}
	if in.Reservation.Status.Phase == broker.ReservationFailed {
		at(in.Now.Add(queuedRetryAfter)) // it may have become possible
	}
	if in.Queued() {
		at(in.Now.Add(queuedRetryAfter))
		at(refusedUntil)
		if deadline := in.Reservation.Spec.Deadline; deadline != nil {
			since := in.Times.Waiting
			if since.IsZero() {
				since = in.Now
			}
			at(since.Add(deadline.Duration))
		}
	}
	return next
}

// differInFiguresOnly reports whether two statuses say the same but for the position in
// the queue, the explanation of the decision, if both have one, the text of conditions, and
// what providers advertise besides capacity. Such a difference is not worth a write at every
// event. The consumer gets the endpoint from the advertisement itself.
func differInFiguresOnly(a, b broker.ReservationStatus) bool {
	return explained(a) == explained(b) && apiequality.Semantic.DeepEqual(withoutFigures(a), withoutFigures(b))
}

// differInTerms reports whether two statuses with the same allocations differ in what consumers
// go by of what providers advertise.
func differInTerms(a, b broker.ReservationStatus) bool {
	return !slices.EqualFunc(a.Allocations, b.Allocations, func(a, b broker.Allocation) bool {
		return a.PodSecurity == b.PodSecurity && maps.Equal(a.NodeLabels, b.NodeLabels)
	})
}

// explained reports whether a status says why clusters were not chosen.
func explained(status broker.ReservationStatus) bool {
	return status.Decision != nil && len(status.Decision.Rejections) > 0
}

func withoutFigures(status broker.ReservationStatus) broker.ReservationStatus {
	// Whether there is any explanation is more than a figure.
	why := explained(status)
	status.QueuePosition, status.Decision = 0, nil
	if why {
		status.Decision = &broker.Decision{}
	}
	status.TargetClusterEndpoint = ""
	status.Allocations = slices.Clone(status.Allocations)
	for i := range status.Allocations {
		a := &status.Allocations[i]
		a.Endpoint, a.NodeLabels, a.PodSecurity = "", nil, ""
	}
	status.Conditions = slices.Clone(status.Conditions)
	for i := range status.Conditions {
		c := &status.Conditions[i]
		c.Message, c.LastTransitionTime = "", metav1.Time{}
	}
	return status
}
