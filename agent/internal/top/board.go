package top

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// Board is what is shown.
type Board struct {
	Cluster  string           `json:"cluster,omitempty"`
	At       time.Time        `json:"at"`
	Clusters []health.Cluster `json:"clusters"`
	Flows    []Flow           `json:"flows"`
	// Placed and Failed count Reservations, Waiting those of the queue, of which Queue has the first.
	Placed  int      `json:"placed"`
	Failed  int      `json:"failed"`
	Waiting int      `json:"waiting"`
	Queue   []Queued `json:"queue"`
	// PricePerHour is that of all that is granted.
	PricePerHour string               `json:"pricePerHour,omitempty"`
	Unreadable   []explain.Unreadable `json:"unreadable,omitempty"`
	// Problem is why it is not up to date, empty if it is.
	Problem string `json:"problem,omitempty"`
}

// Flow is what one cluster has been granted by another.
type Flow struct {
	From         string                    `json:"from"`
	To           string                    `json:"to"`
	Reservations int                       `json:"reservations"`
	Pods         int32                     `json:"pods"`
	Resources    broker.ResourceQuantities `json:"resources"`
	PricePerHour string                    `json:"pricePerHour,omitempty"`
}

// Queued is a Reservation that waits.
type Queued struct {
	Name     string    `json:"name"`
	Position int32     `json:"position,omitempty"`
	Wanted   string    `json:"wanted,omitempty"`
	Since    time.Time `json:"since"`
}

// maxQueue is how many Reservations of the queue are kept, maxFlows how many flows.
const (
	maxQueue = 100
	maxFlows = 1000
)

// Of sums up what was observed. overflowed are the pods on virtual nodes. In the hub, its own
// Reservations count, elsewhere those of the cluster.
func Of(o *health.Observed, overflowed []corev1.Pod) Board {
	table := health.Clusters(o, overflowed, nil)
	b := Board{Cluster: text.Line(o.ClusterID(), 63), At: o.Now, Clusters: table.Clusters, Unreadable: table.Unreadable}
	inHub := slices.ContainsFunc(o.Reservations, func(r broker.Reservation) bool { return ofHub(o, &r) })
	type ends struct{ from, to string }
	flows, prices, total := map[ends]*Flow{}, map[ends]*text.Prices{}, text.Prices{}
	amounts := map[ends]corev1.ResourceList{}
	for i := range o.Reservations {
		r := &o.Reservations[i]
		if ofHub(o, r) != inHub {
			continue
		}
		status := r.EffectiveStatus()
		b.count(r, &status)
		for j := range status.Allocations {
			a := &status.Allocations[j]
			if !a.Accepted {
				continue
			}
			of := ends{cmp.Or(r.Spec.RequesterID, b.Cluster), a.Cluster}
			if flows[of] == nil {
				flows[of], prices[of] = &Flow{From: text.Line(of.from, 63), To: text.Line(of.to, 63)}, &text.Prices{}
			}
			flows[of].Reservations++
			flows[of].Pods += broker.HeldCapacity{PodSets: a.PodSets}.Pods()
			amounts[of] = broker.AddTo(amounts[of], a.Resources.List())
			prices[of].AddText(a.PricePerHour)
			total.AddText(a.PricePerHour)
		}
	}
	for of, flow := range flows {
		flow.Resources, flow.PricePerHour = broker.FromList(amounts[of]), prices[of].Per("/h")
		b.Flows = append(b.Flows, *flow)
	}
	slices.SortFunc(b.Flows, func(x, y Flow) int {
		return cmp.Or(cmp.Compare(y.Pods, x.Pods), cmp.Compare(x.From, y.From), cmp.Compare(x.To, y.To))
	})
	b.Flows = b.Flows[:min(len(b.Flows), maxFlows)]
	slices.SortFunc(b.Queue, func(x, y Queued) int {
		return cmp.Or(cmp.Compare(x.Position, y.Position), x.Since.Compare(y.Since), cmp.Compare(x.Name, y.Name))
	})
	b.Queue = b.Queue[:min(len(b.Queue), maxQueue)]
	b.PricePerHour = text.Line(total.Per("/h"), 100)
	return b
}

// Empty reports whether it shows nothing.
func (b *Board) Empty() bool {
	return len(b.Clusters)+len(b.Flows)+b.Placed+b.Waiting+b.Failed == 0
}

// ofHub reports whether a Reservation is the broker's.
func ofHub(o *health.Observed, r *broker.Reservation) bool {
	return r.Namespace == o.System && r.Labels[broker.LabelRequester] != ""
}

// count counts a Reservation.
func (b *Board) count(r *broker.Reservation, status *broker.ReservationStatus) {
	switch {
	case status.Phase == broker.ReservationReleased:
	case status.Phase == broker.ReservationFailed:
		b.Failed++
	case meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued):
		b.Waiting++
		b.Queue = append(b.Queue, Queued{Name: text.Line(health.NameOf(r), 120), Position: status.QueuePosition, Wanted: text.Line(status.Wanted, 80), Since: r.CreationTimestamp.Time})
	default:
		b.Placed++
	}
}
