package reservation

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Bounds of a Reservation. Its status has an allocation for each provider, with the pod
// sets that are held there, and is one object with the spec: etcd takes none above 1.5 MiB.
// Without them, capacity could be held that no status shows.
const (
	// maxAllocationsBytes is the maximum size of all allocations, encoded.
	maxAllocationsBytes = 1 << 20
	// maxReservationBytes is the maximum size of the object without its conditions and the
	// decision, for which 256 KiB remain.
	maxReservationBytes = 1280 << 10
	// allocationOverhead are the bytes of one provider besides that: the price, what the
	// consumer reports, and its part of the attempt, the summary, the withdrawals and
	// managedFields.
	allocationOverhead = 896
)

// limitWidth gives back what would be held at so many providers that the Reservation's
// status could not show it: the last parts, which are those at the least preferred ones.
// Those that have a part may get more. It is too wide, too, if what is missing finds no place,
// and another provider would not do: other Reservations do not wait for what it cannot hold.
func (p *plan) limitWidth(in snapshot) {
	if len(p.grow) == 0 && p.missing.Empty() {
		return
	}
	held, bytes, total := map[string]broker.HeldCapacity{}, map[string]int{}, 0
	for _, h := range in.holds() {
		held[h.cluster], bytes[h.cluster] = h.Promised, in.allocationBytes(h.cluster, h.Promised)
		total += bytes[h.cluster]
	}
	room, grow := in.allocationsRoom(), p.grow[:0:0]
	for _, c := range p.grow {
		after := in.allocationBytes(c.cluster, capacity.Add(held[c.cluster], c.capacity))
		if added := after - bytes[c.cluster]; added <= 0 || total+added <= room {
			bytes[c.cluster], total, grow = after, total+added, append(grow, c)
		} else {
			p.missing = capacity.Add(p.missing, c.capacity)
		}
	}
	trimmed := len(grow) < len(p.grow)
	full := !p.missing.Empty() && total+in.leastBytes(p.missing) > room
	if trimmed || full {
		p.grow, p.tooWide, p.widest = grow, true, len(bytes)
	}
}

// allocationsRoom is how many bytes the allocations of a Reservation may have.
func (in snapshot) allocationsRoom() int {
	rest := *in.reservation
	rest.Status = broker.ReservationStatus{}
	return min(maxAllocationsBytes, maxReservationBytes-encodedBytes(&rest))
}

// allocationBytes is what a provider takes of a Reservation's status at most.
func (in snapshot) allocationBytes(cluster string, held broker.HeldCapacity) int {
	allocation := in.allocation(cluster, nil, held)
	return allocationOverhead + encodedBytes(&allocation)
}

// leastBytes is what another provider takes of a Reservation's status that has a place for any of
// what is missing, with a cluster ID as long as may be.
func (in snapshot) leastBytes(missing broker.HeldCapacity) int {
	cluster := strings.Repeat("x", protocol.MaxClusterID)
	if len(missing.PodSets) == 0 {
		return in.allocationBytes(cluster, missing)
	}
	least := math.MaxInt
	for _, set := range missing.PodSets {
		set.Count = 1
		least = min(least, in.allocationBytes(cluster, capacity.OfPodSets([]broker.PodSet{set})))
	}
	return least
}

func encodedBytes(value any) int {
	// What cannot be encoded is not in any object.
	encoded, _ := json.Marshal(value)
	return len(encoded)
}

// width is why what is missing waits if it is too wide.
func (p *plan) width() string {
	return fmt.Sprintf("The status has room for %d providers. Shorten the node selectors, affinity or tolerations, or request the pods in several Reservations.", p.widest)
}
