package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// maxOvertaken is how often later requests may be granted what one could use that waits:
// a provider that has refused a request may take a smaller one, and the broker may see a
// growth when less is granted than at the last check.
const maxOvertaken = 4

// holdKey is the hold of a Reservation at a cluster.
type holdKey struct {
	reservation types.UID
	cluster     string
}

// holdings are the Reservations of the hub with what the ledgers hold for them, in CPUs.
type holdings struct {
	reservations      map[types.UID]*broker.Reservation
	promised, granted map[holdKey]int64
	total             pledges
}

func (w *world) holdings() *holdings {
	h := &holdings{reservations: map[types.UID]*broker.Reservation{}, promised: map[holdKey]int64{}, granted: map[holdKey]int64{}, total: pledges{}}
	var list broker.ReservationList
	must(w.client.List(context.Background(), &list, client.UnsafeDisableDeepCopy))
	for n := range list.Items {
		h.reservations[list.Items[n].UID] = &list.Items[n]
	}
	var ads broker.ClusterAdvertisementList
	must(w.client.List(context.Background(), &ads, client.UnsafeDisableDeepCopy))
	for n := range ads.Items {
		for _, hold := range ads.Items[n].Status.Holds {
			key := holdKey{hold.ReservationUID, ads.Items[n].Name}
			h.promised[key], h.granted[key] = cpus(&hold.Promised), cpus(hold.Granted)
			h.total[hold.ReservationUID] += cpus(&hold.Promised)
		}
	}
	return h
}

// pods is the number of pods that a Reservation requests, and how many it needs at least.
func pods(r *broker.Reservation) (requested, least int64) {
	requested = int64(broker.HeldCapacity{PodSets: r.Spec.PodSets}.Pods())
	return requested, min(requested, int64(r.Spec.MinAvailable))
}

// waits reports whether a Reservation is in the queue.
func (h *holdings) waits(r *broker.Reservation) bool {
	requested, _ := pods(r)
	return meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued) && r.DeletionTimestamp.IsZero() && !ended(r) && h.total[r.UID] < requested
}

// before reports whether a Reservation is before another one in the queue: that of a higher
// priority, and then the one that was created or queued again earlier.
func (i *invariants) before(a, b *broker.Reservation) bool {
	return cmp.Or(cmp.Compare(b.Spec.Priority, a.Spec.Priority), i.since(a).Compare(i.since(b))) < 0
}

func (i *invariants) since(r *broker.Reservation) time.Time {
	if at, grew := i.grew[r.UID]; grew {
		return at
	}
	return r.CreationTimestamp.Time
}

// observeGrowth notes which Reservations queue again: those that have been placed and request
// more pods than before.
func (i *invariants) observeGrowth(h *holdings) {
	for uid, r := range h.reservations {
		now, _ := pods(r)
		if before, known := i.requested[uid]; known && now > before && len(r.Status.Allocations) > 0 {
			i.grew[uid] = time.Now()
		}
		i.requested[uid] = now
	}
}

// providersFor are the clusters that could provide for a consumer now.
func (w *world) providersFor(consumer string) []*cluster {
	return slices.DeleteFunc(w.members(), func(c *cluster) bool {
		return c.id == consumer || c.deaf || c.cut || c.id == w.refuses
	})
}

// delays reports whether what another one was granted is missing for a Reservation that
// waits: it could be placed if nothing was held for others, and what is free is too little.
func (w *world) delays(h *holdings, r *broker.Reservation) bool {
	if spreads(r) {
		return false // it may be unable to use what is free
	}
	requested, least := pods(r)
	var room, free int64
	for _, c := range w.providersFor(r.Spec.RequesterID) {
		own := min(c.capacity, c.offered()) - int64(len(c.localPods()))
		room += own
		free += max(own-w.account(c).taken(), 0)
	}
	return room >= max(least, 1) && free < requested-h.total[r.UID]
}

// checkTurns checks that a request that waits is not overtaken without end: that later ones
// are not promised, and then granted, what it could use.
func (i *invariants) checkTurns(w *world) {
	h := w.holdings()
	i.observeGrowth(h)
	for key, now := range h.promised {
		later := h.reservations[key.reservation]
		if later == nil || now <= i.holdings.promised[key] {
			continue
		}
		i.passed[key] = nil
		for uid, r := range h.reservations {
			waited := i.holdings.reservations[uid]
			if waited != nil && i.holdings.waits(waited) && h.waits(r) && i.before(r, later) && r.Spec.RequesterID != key.cluster && w.delays(h, r) {
				i.passed[key] = append(i.passed[key], uid)
			}
		}
	}
	for key, now := range h.granted {
		if now <= i.holdings.granted[key] {
			continue
		}
		for _, uid := range i.passed[key] {
			if i.overtaken[uid]++; i.overtaken[uid] > maxOvertaken && !w.restored {
				i.fail(invariantTurn, "%s has waited while %d later requests were granted what it could use, at last %s by %s", uid, i.overtaken[uid], key.reservation, key.cluster)
			}
		}
		delete(i.passed, key)
	}
	i.holdings = h
}

// checkGangs checks that a gang is granted as a whole. What pods may use already stays when
// a part is lost.
func (i *invariants) checkGangs() {
	for uid, r := range i.holdings.reservations {
		_, least := pods(r)
		granted := accepted(r)
		switch {
		case least == 0 || !r.DeletionTimestamp.IsZero() || ended(r):
		case granted >= least:
			i.complete[uid] = true
		case granted == 0 && len(r.Status.Withdrawals) == 0:
			delete(i.complete, uid)
		case granted > 0 && !i.complete[uid]:
			i.fail(invariantGang, "%s needs %d pods at least, and %d are granted", r.Name, least, granted)
		}
	}
}

// partOfGang describes a gang for which less is held than it needs, so that another one could
// wait for that; "" if there is none.
func (w *world) partOfGang() string {
	h := w.holdings()
	for uid, r := range h.reservations {
		_, least := pods(r)
		if held := h.total[uid]; held > 0 && held < least && r.DeletionTimestamp.IsZero() && !w.checks.complete[uid] {
			return fmt.Sprintf("%s needs %d pods at least, and capacity for %d is held", r.Name, least, held)
		}
	}
	return ""
}

// spreads reports whether a Reservation is divided among clusters.
func spreads(r *broker.Reservation) bool {
	return r.Spec.Placement != nil && r.Spec.Placement.Spread != nil
}

// room is what is free at a provider.
func (w *world) room(c *cluster) int64 {
	return max(c.capacity-int64(len(c.localPods()))-w.account(c).taken(), 0)
}

// of is what a cluster holds for a consumer's Reservation.
func (h *holdings) of(r *broker.Reservation, at string) int64 {
	for uid, copied := range h.reservations {
		if strings.HasSuffix(copied.Name, string(r.UID)) {
			return h.promised[holdKey{uid, at}]
		}
	}
	return 0
}

// mostByDomain is how many pods of a consumer's Reservation a provider may hold. With a spread, they are maxSkew
// more than the fewest that a provider can have, also one that does not answer.
func (w *world) mostByDomain(h *holdings, r *broker.Reservation, consumer string) int64 {
	most := int64(math.MaxInt64)
	for _, c := range w.members() {
		if spreads(r) && c.id != consumer && c.capacity > 0 {
			most = min(most, h.of(r, c.id)+w.room(c)+int64(r.Spec.Placement.Spread.MaxSkew))
		}
	}
	return most
}

// ahead reports whether a gang or a Reservation with a spread waits for which capacity may be kept free
// before a consumer's Reservation.
func (h *holdings) ahead(of *broker.Reservation) bool {
	for _, r := range h.reservations {
		if _, least := pods(r); (least > 0 || spreads(r)) && h.waits(r) && r.Spec.Priority >= of.Spec.Priority && !strings.HasSuffix(r.Name, string(of.UID)) {
			return true
		}
	}
	return false
}
