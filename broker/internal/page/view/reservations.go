package view

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/queue"
	"github.com/spillway-dev/spillway/broker/text"
)

// maxQuoted is how much of a message a table shows, in bytes.
const maxQuoted = 600

// Queue is the view of the Reservations that wait for capacity, in their order.
type Queue struct {
	Paging
	Rows []Waiting
}

// Waiting is a Reservation that waits.
type Waiting struct {
	Position              int
	Name, Consumer, Owner string
	Priority              int32
	Wanted, Granted       string
	Since                 *Moment
	// Reason is a word, Message what it means, and Fix what to do.
	Reason, Message, Fix string
}

// OfQueue is a page of the view of the queue.
func OfQueue(s Snapshot, page int) Queue {
	var waiting []*broker.Reservation
	for _, r := range s.Reservations {
		status := r.EffectiveStatus()
		if meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued) {
			waiting = append(waiting, r)
		}
	}
	// As package queue orders them.
	slices.SortFunc(waiting, func(a, b *broker.Reservation) int {
		return cmp.Or(cmp.Compare(min(b.Spec.Priority, s.MaxPriority), min(a.Spec.Priority, s.MaxPriority)),
			queue.Since(a, a.Status.QueueTime).Compare(queue.Since(b, b.Status.QueueTime)), cmp.Compare(a.UID, b.UID))
	})
	rows, paging := cut(waiting, page)
	v := Queue{Paging: paging}
	for i, r := range rows {
		w := Waiting{
			Position: paging.First + i, Name: r.Name, Consumer: r.Spec.RequesterID, Owner: owner(r), Priority: r.Spec.Priority,
			Wanted: capacity.Wanted(&r.Spec), Granted: cmp.Or(r.Status.Granted, none), Since: moment(queue.Since(r, r.Status.QueueTime), s.Now),
		}
		if queued := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionQueued); queued != nil {
			w.Reason, w.Message = queued.Reason, text.TruncateTo(queued.Message, maxQuoted)
		}
		if r.Status.Decision != nil {
			if closest := capacity.Closest(r.Status.Decision.Rejections); closest != nil {
				w.Fix = capacity.Fix(closest.Reason)
			}
		}
		v.Rows = append(v.Rows, w)
	}
	return v
}

// owner is whom a Reservation is for, without the consumer.
func owner(r *broker.Reservation) string {
	name, namespace := r.Annotations[broker.LabelSourceName], r.Annotations[broker.LabelSourceNamespace]
	if name == "" {
		return "made in the hub"
	}
	return namespace + "/" + name
}

// Reservations is the view of all Reservations.
type Reservations struct {
	Paging
	// Filter is what their names, consumers, owners, providers, states or phases contain.
	Filter string
	Rows   []Reservation
}

// Reservation is a row of it.
type Reservation struct {
	Name, Consumer, Owner         string
	Wanted, Granted, Where, Price string
	Phase, State                  string
	Good                          bool
	Since                         *Moment
}

// OfReservations is a page of the view of Reservations, the newest first.
func OfReservations(s Snapshot, filter string, page int) Reservations {
	filter = strings.ToLower(strings.TrimSpace(filter))
	matching := make([]*broker.Reservation, 0, len(s.Reservations))
	for _, r := range s.Reservations {
		if filter == "" || matches(r, filter) {
			matching = append(matching, r)
		}
	}
	slices.SortFunc(matching, func(a, b *broker.Reservation) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	rows, paging := cut(matching, page)
	v := Reservations{Paging: paging, Filter: filter}
	for _, r := range rows {
		v.Rows = append(v.Rows, s.row(r))
	}
	return v
}

func matches(r *broker.Reservation, filter string) bool {
	status := r.EffectiveStatus()
	for _, field := range []string{r.Name, r.Spec.RequesterID, owner(r), status.Where, string(status.Phase), state(status)} {
		if strings.Contains(strings.ToLower(field), filter) {
			return true
		}
	}
	return false
}

// state is the reason of condition Ready.
func state(status broker.ReservationStatus) string {
	if ready := meta.FindStatusCondition(status.Conditions, broker.ConditionReady); ready != nil {
		return ready.Reason
	}
	return "new"
}

func (s Snapshot) row(r *broker.Reservation) Reservation {
	status := r.EffectiveStatus()
	return Reservation{
		Name: r.Name, Consumer: r.Spec.RequesterID, Owner: owner(r),
		Wanted: capacity.Wanted(&r.Spec), Granted: cmp.Or(status.Granted, none), Where: cmp.Or(status.Where, none), Price: cmp.Or(status.PricePerHour, none),
		Phase: cmp.Or(string(status.Phase), "new"), State: state(status), Good: meta.IsStatusConditionTrue(status.Conditions, broker.ConditionReady),
		Since: moment(r.CreationTimestamp.Time, s.Now),
	}
}

// Detail is the view of one Reservation.
type Detail struct {
	Reservation
	Message string
	Facts   []Fact
	PodSets []PodSet
	// Steps are what has happened to it, and is to happen, in their order.
	Steps       []Step
	Allocations []Allocation
	Scores      []Score
	Rejections  []Rejection
	// Others are clusters that were not chosen either, by reason.
	Others []broker.RejectionCount
	Pods   []string
}

// Fact is a name and a value.
type Fact struct{ Name, Value string }

// PodSet is a number of pods that are alike.
type PodSet struct {
	Name     string
	Count    int32
	Requests string
	Selects  string
}

// Step is something that has happened, or will.
type Step struct {
	At *Moment
	// What it is, with a reason as one word, and a message.
	What, Reason, Message string
	// Good, Bad and Later say how it is marked; a step that is none of them has just happened.
	Good, Bad, Later bool
}

// Allocation is what one provider holds.
type Allocation struct {
	Cluster, Amount, Price string
	Accepted, Ready        bool
	// Leave is how long pods may stay on what was withdrawn, empty for no withdrawal.
	Leave string
}

// Score is how good a cluster was.
type Score struct {
	Cluster, Score string
	Of             float64
	Chosen         bool
}

// Rejection is why a cluster was not chosen, and what to do about it.
type Rejection struct{ Cluster, Reason, Message, Fix string }

// OfReservation is the view of a Reservation.
func OfReservation(s Snapshot, r *broker.Reservation) Detail {
	status := r.EffectiveStatus()
	d := Detail{Reservation: s.row(r), Facts: facts(r, status), Steps: s.steps(r, status)}
	if ready := meta.FindStatusCondition(status.Conditions, broker.ConditionReady); ready != nil {
		d.Message = ready.Message
	}
	for _, set := range r.Spec.PodSets {
		d.PodSets = append(d.PodSets, PodSet{set.Name, set.Count, amounts(set.Requests.List()), metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: set.NodeSelector})})
	}
	for _, a := range status.Allocations {
		shown := Allocation{Cluster: a.Cluster, Amount: amounts(a.Resources.List()), Price: cmp.Or(a.PricePerHour, "unknown"), Accepted: a.Accepted, Ready: a.VirtualNodeReady}
		if len(a.PodSets) > 0 {
			shown.Amount = capacity.Amount(broker.HeldCapacity{PodSets: a.PodSets}) + ": " + shown.Amount
		}
		for _, w := range status.Withdrawals {
			if w.Cluster == a.Cluster {
				shown.Leave = span(w.LeaveWithin.Duration)
			}
		}
		d.Allocations = append(d.Allocations, shown)
	}
	if status.Decision != nil {
		d.decided(status)
	}
	if status.Used != nil {
		d.Pods = status.Used.Pods
	}
	return d
}

// decided sets why which clusters were chosen.
func (d *Detail) decided(status broker.ReservationStatus) {
	for _, score := range status.Decision.Scores {
		d.Scores = append(d.Scores, Score{score.Cluster, score.Score, percent(score.Score),
			slices.ContainsFunc(status.Allocations, func(a broker.Allocation) bool { return a.Cluster == score.Cluster })})
	}
	for _, rejection := range status.Decision.Rejections {
		d.Rejections = append(d.Rejections, Rejection{rejection.Cluster, rejection.Reason, text.TruncateTo(rejection.Message, maxQuoted), capacity.Fix(rejection.Reason)})
	}
	d.Others = status.Decision.RejectionCounts
}
