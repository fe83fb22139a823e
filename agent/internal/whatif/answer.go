package whatif

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/rehearsal"
	"github.com/spillway-dev/spillway/broker/text"
)

// Outcome sums up an answer.
type Outcome string

// Outcomes.
const (
	// OutcomePlaced: providers would be asked for all of it.
	OutcomePlaced Outcome = "Placed"
	// OutcomeQueued: a part of it, or all, would wait.
	OutcomeQueued Outcome = "Queued"
	OutcomeFailed Outcome = "Failed"
	// OutcomeNotRequested: nothing would be requested.
	OutcomeNotRequested Outcome = "NotRequested"
	// OutcomeUnknown: the hub is not known.
	OutcomeUnknown Outcome = "Unknown"
)

// Answer is what would become of a workload, of several that share a Reservation, or of a Reservation.
type Answer struct {
	explain.Object
	With     []explain.Object `json:"with,omitempty"`
	Requests string           `json:"requests,omitempty"`
	Outcome  Outcome          `json:"outcome"`
	Summary  string           `json:"summary"`
	Steps    []explain.Step   `json:"steps"`
	Fix      *explain.Fix     `json:"fix,omitempty"`
	// Offers compare the clusters, and Status is the Reservation's before any provider has answered.
	Offers     []rehearsal.Offer         `json:"offers,omitempty"`
	Status     *broker.ReservationStatus `json:"status,omitempty"`
	Unreadable []explain.Unreadable      `json:"unreadable,omitempty"`

	limited bool
}

// decide says what the broker would decide.
func (a *ask) decide() {
	if a.blocked {
		return
	}
	a.Requests = explain.CapacityOf(a.reservation)
	if a.limit(); a.Outcome == OutcomeNotRequested {
		return
	}
	r := a.reservation
	r.Spec.RequesterID = a.Cluster
	a.step("Reservation", explain.OK, "would request "+explain.CapacityOf(r))
	if a.Hub == nil {
		a.step("Providers", explain.Unknown, "not known: "+a.NoHub)
		a.Outcome, a.Summary = OutcomeUnknown, "What the broker would decide is not known: "+a.NoHub+"."
		return
	}
	d := a.Hub.Decide(r)
	a.Status, a.Offers = &d.Status, d.Offers
	a.queue(d)
	a.providers(d)
	a.conclude(&d.Status)
}

// asked names the clusters that would be asked, and the price of an hour.
func asked(status *broker.ReservationStatus) string {
	var clusters []string
	var prices text.Prices
	for _, allocation := range status.Allocations {
		clusters = append(clusters, allocation.Cluster)
		prices.AddText(allocation.PricePerHour)
	}
	words := strings.Join(clusters, ", ") + " would be asked for all of it"
	if price := prices.Per("/h"); price != "" {
		words += ", at " + price
	}
	return words + "."
}

// maxAhead is how many Reservations in front are listed.
const maxAhead = 8

// queue says what is in front of it.
func (a *ask) queue(d rehearsal.Decision) {
	const name = "Queue"
	state, n := explain.OK, len(d.Ahead)
	message := fmt.Sprintf("%d Reservations wait in front of it", n)
	switch n {
	case 0:
		message = "no other Reservation waits in front of it"
	case 1:
		message = "1 Reservation waits in front of it"
	}
	if d.KeptFree != nil {
		state = explain.Waiting
		message += fmt.Sprintf("; what %s waits for is kept free", health.NameOf(d.KeptFree))
	}
	var details []explain.Detail
	for _, r := range d.Ahead[:min(n, maxAhead)] {
		details = append(details, explain.Detail{State: explain.Waiting, Subject: health.NameOf(r), Message: "waits for " + explain.CapacityOf(r)})
	}
	if n > maxAhead {
		details = append(details, explain.Detail{State: explain.Waiting, Subject: fmt.Sprintf("(%d more)", n-maxAhead)})
	}
	a.step(name, state, message, details...)
}

// providers says which clusters are chosen, with the score of each, and why the others are not.
func (a *ask) providers(d rehearsal.Decision) {
	const name = "Providers"
	offers, took := map[string]rehearsal.Offer{}, map[string]bool{}
	for _, o := range d.Offers {
		offers[o.Cluster] = o
	}
	var details []explain.Detail
	var chosen []string
	for _, allocation := range d.Status.Allocations {
		part := allocation.Resources.String()
		if pods := (broker.HeldCapacity{PodSets: allocation.PodSets}).Pods(); pods > 0 {
			part = fmt.Sprintf("%d pods, %s", pods, part)
		}
		if allocation.PricePerHour != "" {
			part += " at " + allocation.PricePerHour + " per hour"
		}
		took[allocation.Cluster] = true
		chosen = append(chosen, allocation.Cluster)
		details = append(details, explain.Detail{State: explain.OK, Subject: allocation.Cluster, Message: part + score(offers[allocation.Cluster])})
	}
	for _, o := range d.Offers {
		if took[o.Cluster] || o.Cluster == a.Cluster {
			continue
		}
		state := explain.Failed
		if o.Score != "" {
			state = explain.Skipped
		}
		details = append(details, explain.Detail{State: state, Subject: o.Cluster, Reason: o.Reason, Message: strings.TrimSuffix(o.Message, ".") + score(o)})
	}
	switch {
	case len(chosen) > 0:
		a.step(name, explain.OK, strings.Join(chosen, ", ")+" would be asked", details...)
	case len(details) == 0:
		a.step(name, explain.Failed, "no other cluster has sent an advertisement")
	default:
		a.step(name, explain.Failed, "no cluster would be asked", details...)
	}
}

// score words the parts of a score, after other words; empty if there is none.
func score(o rehearsal.Offer) string {
	if o.Score == "" {
		return ""
	}
	return fmt.Sprintf("; score %s: %s", o.Score, o.Detail)
}

// conclude sums up what the broker would write.
func (a *ask) conclude(status *broker.ReservationStatus) {
	ready, queued := meta.FindStatusCondition(status.Conditions, broker.ConditionReady), meta.FindStatusCondition(status.Conditions, broker.ConditionQueued)
	switch {
	case status.Phase == broker.ReservationFailed:
		a.Outcome, a.Summary = OutcomeFailed, ready.Message
	case meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued):
		a.Outcome, a.Summary = OutcomeQueued, fmt.Sprintf("It would wait as number %d of the queue: %s", status.QueuePosition, queued.Message)
		if len(status.Allocations) > 0 {
			a.Summary = status.Summary + ". The rest would wait: " + queued.Message
		}
	default:
		a.Outcome, a.Summary = OutcomePlaced, asked(status)
	}
	if a.limited {
		a.Summary += " Its other pods wait for the limit of the policy."
	}
}

// printable bounds what is shown, and makes it one line each.
func (a *Answer) printable() {
	const most = 600
	object := func(o *explain.Object) {
		o.Kind, o.Namespace, o.Name = text.Line(o.Kind, 63), text.Line(o.Namespace, 63), text.Line(o.Name, 253)
	}
	a.Requests, a.Summary = text.Line(a.Requests, most), text.Line(a.Summary, most)
	object(&a.Object)
	for i := range a.With {
		object(&a.With[i])
	}
	var fixes []explain.Fix
	if a.Fix != nil {
		fixes = []explain.Fix{*a.Fix}
		a.Fix = &fixes[0]
	}
	explain.Printable(a.Steps, fixes, a.Unreadable)
}

// Placed reports whether all of the manifest would be placed, and known, whether that is known.
func (a *Answers) Placed() (placed, known bool) {
	placed, known = true, true
	for i := range a.Answers {
		placed = placed && a.Answers[i].Outcome == OutcomePlaced && !a.Answers[i].limited
		known = known && a.Answers[i].Outcome != OutcomeUnknown
	}
	return placed, known
}

// Text returns the answers as lines for people.
func (a *Answers) Text(style explain.Style) string {
	var b strings.Builder
	for i := range a.Answers {
		answer := &a.Answers[i]
		head := answer.Object.String()
		for _, with := range answer.With {
			head += ", " + with.String()
		}
		if answer.Requests != "" {
			head += ": " + answer.Requests
		}
		var fixes []explain.Fix
		if answer.Fix != nil {
			fixes = []explain.Fix{*answer.Fix}
		}
		b.WriteString(explain.Page(style, []string{head}, answer.Steps, answer.Summary, fixes, answer.Unreadable) + "\n")
	}
	for _, note := range a.Notes {
		b.WriteString(explain.Wrap("Note: "+text.Line(note, 600), "", style.Width))
	}
	return b.String()
}
