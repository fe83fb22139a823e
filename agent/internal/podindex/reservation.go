package podindex

import (
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// ServedBy returns the groups of pods on virtual nodes, and of those that wait if they may get one
// (optedIn), that belong to a Reservation with a key, without what they request.
func (x *Index) ServedBy(reservation *broker.Reservation, key demand.Key, optedIn bool, resolve demand.Resolve) []Group {
	return slices.DeleteFunc(x.candidatesWith(candidatesFor(reservation, key)...), func(g Group) bool {
		return g.Use == Waits && !optedIn || !g.belongsTo(reservation, key, resolve)
	})
}

// candidatesFor returns what the pods of a Reservation with a key have at least one of.
func candidatesFor(reservation *broker.Reservation, key demand.Key) []candidateKey {
	candidates := []candidateKey{{namespace: key.Namespace, shape: key.Shape}}
	if key.IsGang() {
		candidates[0] = candidateKey{namespace: key.Namespace, gang: key.OwnerUID}
	}
	if reservation.Status.ID != "" {
		candidates = append(candidates, candidateKey{namespace: key.Namespace, hold: demand.HoldLabel(reservation.Status.ID)})
	}
	return candidates
}

// belongsTo reports whether pods have the key of a Reservation. Pods whose owner is gone
// belong to it by their hold label.
func (g Group) belongsTo(reservation *broker.Reservation, key demand.Key, resolve demand.Resolve) bool {
	owner, ok := demand.OwnerOf(g.Member, resolve)
	if !ok {
		return reservation.Status.ID != "" && g.Hold == demand.HoldLabel(reservation.Status.ID)
	}
	// Those of a gang belong to it whatever their shape.
	return owner.UID == key.OwnerUID && (key.IsGang() || g.Shape == key.Shape)
}
