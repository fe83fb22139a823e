package view

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// facts are what a Reservation requests and has, but for what has places of its own.
func facts(r *broker.Reservation, status broker.ReservationStatus) (facts []Fact) {
	add := func(name, value string) {
		if value != "" {
			facts = append(facts, Fact{name, value})
		}
	}
	length := func(d *metav1.Duration) string {
		if d == nil {
			return ""
		}
		return span(d.Duration)
	}
	if r.Spec.RequestedResources != nil {
		add("Divisible total", amounts(r.Spec.RequestedResources.List()))
	}
	if r.Spec.Priority != 0 {
		add("Priority", strconv.Itoa(int(r.Spec.Priority)))
	}
	if r.Spec.MinAvailable > 0 {
		add("Of use from", plural(int(r.Spec.MinAvailable), "pod"))
	}
	if status.QueuePosition > 0 {
		add("Place in the queue", fmt.Sprintf("about %d", status.QueuePosition))
	}
	add("Only provider", r.Spec.TargetClusterID)
	if p := r.Spec.Placement; p != nil {
		add("Regions", strings.Join(p.Regions, ", "))
		add("Zones", strings.Join(p.Zones, ", "))
		add("Not in", strings.Join(p.ExcludeClusters, ", "))
	}
	if b := r.Spec.Budget; b != nil {
		add("Budget", b.MaxPricePerHour+" "+b.Currency+" an hour")
	}
	add("Namespaces", strings.Join(r.Spec.Namespaces, ", "))
	if r.Spec.PodSelector != nil {
		add("Pods", metav1.FormatLabelSelector(r.Spec.PodSelector))
	}
	add("Waits at most", length(r.Spec.Deadline))
	add("Lease", length(status.LeaseDuration))
	if status.Used != nil {
		add("Used", status.Used.Summary)
	}
	if n := status.Attempt.Number; n > 0 {
		add("Attempt", fmt.Sprintf("%d: %s", n, cmp.Or(strings.Join(status.Attempt.Clusters, ", "), "none")))
	}
	return facts
}

// dated is a step with its time.
type dated struct {
	at time.Time
	Step
}

// titles say what a condition means when it is True, and when it is not.
var titles = []struct{ condition, is, not string }{
	{broker.ConditionQueued, "Waits for capacity", "Does not wait for capacity"},
	{broker.ConditionLocked, "All of it is held", "Not all of it is held"},
	{broker.ConditionProviderAccepted, "The providers have accepted", "The providers have not accepted"},
	{broker.ConditionPeered, "The clusters are peered", "The clusters are not peered"},
	{broker.ConditionVirtualNodeReady, "The virtual nodes provide it", "The virtual nodes do not provide it yet"},
	{broker.ConditionProviderReleased, "The providers have released it", "The providers have not released it yet"},
	{broker.ConditionReady, "Can be used", "Cannot be used in full"},
}

// steps are those of a Reservation, in the order of time.
func (s Snapshot) steps(r *broker.Reservation, status broker.ReservationStatus) []Step {
	all := []dated{{r.CreationTimestamp.Time, Step{What: "Requested", Message: fmt.Sprintf("By %s, for %s.", r.Spec.RequesterID, owner(r))}}}
	add := func(at *metav1.Time, step Step) {
		if at != nil && !at.IsZero() {
			all = append(all, dated{at.Time, step})
		}
	}
	if status.QueueTime != nil {
		all = append(all, dated{status.QueueTime.Time, Step{What: "Queued again", Message: "The request has grown."}})
	}
	add(status.ReservedAt, Step{What: "Capacity held", Good: true})
	for _, title := range titles {
		for _, c := range status.Conditions {
			if c.Type != title.condition {
				continue
			}
			step := Step{What: title.not, Reason: c.Reason, Message: c.Message}
			is := c.Status == metav1.ConditionTrue
			if is {
				step.What = title.is
			}
			step.Good = is != (c.Type == broker.ConditionQueued)
			// What has ended as it should is not bad.
			step.Bad = !step.Good && c.Reason != broker.ReasonReleased
			add(&c.LastTransitionTime, step)
		}
	}
	add(r.DeletionTimestamp, Step{What: "Deleted", Message: "Capacity goes back as pods end."})
	if status.Phase != broker.ReservationReleased {
		add(status.ExpiresAt, Step{What: "The lease ends", Message: "About then, unless pods use the capacity."})
	}
	slices.SortStableFunc(all, func(a, b dated) int { return a.at.Compare(b.at) })
	steps := make([]Step, len(all))
	for i, step := range all {
		steps[i] = step.Step
		steps[i].At, steps[i].Later = moment(step.at, s.Now), step.at.After(s.Now)
	}
	return steps
}

// percent is a number from 0 to 100; 0 if it is none.
func percent(score string) float64 {
	value, err := strconv.ParseFloat(score, 64)
	if err != nil || !(value > 0) {
		return 0
	}
	return min(value, 100)
}
