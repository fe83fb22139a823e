package rehearsal

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/broker/internal/queue"
	"github.com/spillway-dev/spillway/broker/internal/settings"
)

// Hub is a copy of what is known of the hub.
type Hub struct {
	now      time.Time
	settings settings.Settings
	// ads by cluster ID, and the same for decisions.
	ads      []*broker.ClusterAdvertisement
	clusters decide.Store
	activity decide.Activity
	// holders are the clusters with a hold of a Reservation, by its name.
	holders map[string][]string
	queue   *queue.Queue
	queued  map[types.UID]*broker.Reservation
	// newest is the latest time by which a Reservation is ordered in the queue: clocks differ.
	newest time.Time
	// decided is how many Reservations Decide has decided on.
	decided int
	// reservations is how many Reservations each consumer has.
	reservations map[string]int
}

// Offer is how one cluster compares with the others.
type Offer = decide.Offer

// Decision is what the broker would decide.
type Decision struct {
	// Status is that of the Reservation, before any provider has answered.
	Status broker.ReservationStatus
	// Offers of all clusters for all that is requested, by cluster ID. A request that fits nowhere
	// as a whole is divided: the status says how.
	Offers []Offer
	// Ahead are the Reservations before it in the queue, KeptFree the first of them for which capacity
	// is kept free, nil for none.
	Ahead    []*broker.Reservation
	KeptFree *broker.Reservation
}

// New copies what a hub has. It does not change its arguments.
func New(now time.Time, ads []broker.ClusterAdvertisement, reservations []broker.Reservation, configs []broker.BrokerConfig) *Hub {
	h := &Hub{
		now: now, newest: now, settings: settings.Of(&broker.BrokerConfigSpec{}), activity: decide.Activity{}, holders: map[string][]string{},
		queue: queue.New(), queued: map[types.UID]*broker.Reservation{}, reservations: map[string]int{},
	}
	for i := range configs {
		if configs[i].Name == settings.Name {
			h.settings = settings.Of(&configs[i].Spec)
		}
	}
	for i := range ads {
		ad := &ads[i]
		if ad.Name != ad.Spec.ClusterID {
			continue // an agent's copy of its own
		}
		h.ads = append(h.ads, ad)
		h.clusters.Upsert(&ad.Spec, ad.Status.Holds)
		if ad.Status.Active {
			h.activity[ad.Name] = true
		}
		for j := range ad.Status.Holds {
			if name := ad.Status.Holds[j].ReservationName; !slices.Contains(h.holders[name], ad.Name) {
				h.holders[name] = append(h.holders[name], ad.Name)
			}
		}
	}
	slices.SortFunc(h.ads, func(a, b *broker.ClusterAdvertisement) int { return cmp.Compare(a.Name, b.Name) })
	for i := range reservations {
		h.reservations[reservations[i].Spec.RequesterID]++
		h.newest = lease.Later(h.newest, queue.Since(&reservations[i], reservations[i].Status.QueueTime))
		h.enqueue(&reservations[i])
	}
	h.keepFree()
	return h
}

// Notes are about what the decisions on so many new Reservations of a consumer leave out.
func (h *Hub) Notes(requester string, wanted int) (notes []string) {
	if h.settings.Weights.Reliability > 0 {
		notes = append(notes, "The score has a weight for reliability, but how providers have kept their promises is known to the broker's process only: all count as equal.")
	}
	all := 0
	for _, n := range h.reservations {
		all += n
	}
	for _, of := range []struct {
		quota     string
		has, most int
	}{
		{"reservationsPerCluster", h.reservations[requester], h.settings.ReservationsPerCluster},
		{"reservations", all, h.settings.Reservations},
	} {
		if of.has+wanted > of.most {
			notes = append(notes, fmt.Sprintf("The broker would refuse what exceeds quotas.%s of the BrokerConfig, %d: it has %d Reservations, and this would be %d more.", of.quota, of.most, of.has, wanted))
		}
	}
	return notes
}

// enqueue adds a Reservation that waits to the queue.
func (h *Hub) enqueue(r *broker.Reservation) {
	if in := h.input(r); in.Queued() {
		if entry := in.Entry(); !entry.Request.Want.Empty() {
			h.queue.Set(entry)
			h.queued[r.UID] = r
		}
	}
}

// keepFree finds the first in the queue for which capacity is kept free: it holds back all others.
func (h *Hub) keepFree() {
	for _, e := range h.queue.Entries() {
		if e.KeepFree {
			return
		}
		if entry := *e; h.input(h.queued[e.UID]).KeepFree(entry.Request) {
			entry.KeepFree = true
			h.queue.Set(entry)
			return
		}
	}
}

// input is what a decision on a Reservation depends on. What no object says is as for a broker that
// has just started, but that all that answer have been heard.
func (h *Hub) input(r *broker.Reservation) plan.Input {
	in := plan.Input{
		Reservation: r, Advertisements: h.ads, Holders: h.holders[r.Name], Settings: h.settings, Now: h.now, Heard: h.now,
		Times: lease.Times{FirstSeen: h.now}, Active: map[string]bool{}, QueueTime: r.Status.QueueTime,
		Choice: plan.Choice{Clusters: h.clusters.Snapshot(h.activity)},
	}
	for _, cluster := range in.Holders {
		in.Active[cluster] = h.activity[cluster]
	}
	if waits := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionQueued); waits != nil && waits.Status == metav1.ConditionTrue {
		in.Times.Waiting = waits.LastTransitionTime.Time
	}
	return in
}

// Decide decides on a Reservation as if it were created now. The copy then has what it gets, so that
// the next one finds less.
func (h *Hub) Decide(wanted *broker.Reservation) (d Decision) {
	r := wanted.DeepCopy()
	h.decided++
	r.Name = fmt.Sprintf("rehearsal-%06d", h.decided)
	r.UID, r.Generation = types.UID(r.Name), 1 // behind all of the same time
	r.CreationTimestamp, r.DeletionTimestamp, r.Status = metav1.Time{Time: h.newest}, nil, broker.ReservationStatus{}
	in := h.input(r)
	if h.settings.Queueing != broker.QueueingNone {
		h.look(&in, &d)
	}
	in.Choice.Full = h.full(in.Missing())
	p := plan.New(in)
	d.Offers = decide.Compare(p.Request(in, in.Requested()))
	h.place(r, p)
	if !p.Empty() {
		r.Status.Attempt = p.Attempt
	}
	after := h.input(r)
	after.First, after.Position = in.First, in.Position
	r.Status = plan.Status(after, p, !p.Empty())
	d.Status = r.Status
	h.enqueue(r)
	h.keepFree()
	return d
}

// look says who is ahead in the queue, and for whom capacity is kept free.
func (h *Hub) look(in *plan.Input, d *Decision) {
	entry := in.Entry()
	position := h.queue.Position(entry)
	for _, e := range h.queue.Entries()[:position-1] {
		d.Ahead = append(d.Ahead, h.queued[e.UID])
	}
	in.Position = int32(position)
	if first := h.queue.First(entry); first != nil {
		in.First, d.KeptFree = &first.Request, h.queued[first.UID]
	}
}

// full are the clusters whose ledgers have no room for a hold of that capacity.
func (h *Hub) full(want broker.HeldCapacity) map[string]capacity.Rejection {
	full := map[string]capacity.Rejection{}
	for _, ad := range h.ads {
		if err := ledger.SizeOf(&ad.Spec, ad.Status.Holds).Room(want); err != nil {
			full[ad.Name] = capacity.Rejection{Reason: ledger.ReasonFull, Message: err.Error()}
		}
	}
	return full
}

// place adds what a plan places to the copies of the ledgers.
func (h *Hub) place(r *broker.Reservation, p plan.Plan) {
	h.ads = slices.Clone(h.ads)
	for _, c := range p.Grow {
		at := slices.IndexFunc(h.ads, func(ad *broker.ClusterAdvertisement) bool { return ad.Name == c.Cluster })
		ad := ledger.Draft(h.ads[at])
		if _, err := ledger.Place(&ad.Spec, &ad.Status, plan.Growth(r, p.Attempt.Number, c.Capacity)); err != nil {
			continue // as another one would have come first
		}
		h.ads[at] = ad
		h.clusters.Upsert(&ad.Spec, ad.Status.Holds)
		h.holders[r.Name] = append(h.holders[r.Name], c.Cluster)
	}
}
