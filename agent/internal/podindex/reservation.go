package podindex

import (
	"slices"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Pod is what decides which hold the pods use. Those that wait use none yet: their label is their
// author's.
func (g Group) Pod(resolve demand.Resolve) charge.Pod[demand.Key] {
	pod := charge.Pod[demand.Key]{Namespace: g.Namespace}
	if g.Use != Waits {
		pod.Label = g.Hold
	}
	owner, ok := demand.OwnerOf(g.Member, resolve)
	if ok {
		pod.Key, pod.Keyed = demand.Key{Namespace: g.Namespace, OwnerUID: owner.UID, Shape: g.Shape}.OfReservation(), true
	}
	return pod
}

// ServedBy returns the groups of pods on virtual nodes, and of those that wait if they may get one
// (optedIn), that may use a Reservation with a key, as all of them were at one time, without what they
// request. Those on virtual nodes may use another one.
func (x *Index) ServedBy(reservation *broker.Reservation, key demand.Key, optedIn bool, resolve demand.Resolve) []Group {
	return slices.DeleteFunc(x.candidatesWith(candidatesFor(reservation, key)...), func(g Group) bool {
		return g.Use == Waits && !optedIn || !g.mayUse(reservation, key, resolve)
	})
}

// candidatesFor returns what the pods of a Reservation with a key have at least one of.
func candidatesFor(reservation *broker.Reservation, key demand.Key) []candidateKey {
	candidates := []candidateKey{{namespace: key.Namespace, shape: key.Shape}}
	if key.IsGang() {
		candidates[0] = candidateKey{namespace: key.Namespace, gang: key.OwnerUID}
	}
	if reservation.Status.ID != "" {
		candidates = append(candidates, candidateKey{namespace: key.Namespace, hold: charge.Label(reservation.Status.ID)})
	}
	return candidates
}

// mayUse reports whether pods have the key of a Reservation, or its label.
func (g Group) mayUse(reservation *broker.Reservation, key demand.Key, resolve demand.Resolve) bool {
	pod := g.Pod(resolve)
	return pod.Keyed && pod.Key == key || pod.Label != "" && pod.Label == charge.Label(reservation.Status.ID)
}
