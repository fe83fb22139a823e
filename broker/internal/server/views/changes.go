package views

import (
	"cmp"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Viewer is a cluster in a role.
type Viewer struct {
	Cluster string
	Role    protocol.Role
}

// Changes are the IDs of the views that may have changed, by who sees them.
type Changes map[Viewer][]string

func (c Changes) add(cluster string, role protocol.Role, ids ...string) {
	if cluster != "" && len(ids) > 0 {
		key := Viewer{cluster, role}
		c[key] = append(c[key], ids...)
	}
}

// OfReservation is what a change of a Reservation changes, nil for none before or after it.
func OfReservation(before, after *broker.Reservation) Changes {
	changed := Changes{}
	if before != nil {
		changed.add(before.Spec.RequesterID, protocol.RoleRequester, before.Name)
	}
	if after != nil && (before == nil || before.Spec.RequesterID != after.Spec.RequesterID) {
		changed.add(after.Spec.RequesterID, protocol.RoleRequester, after.Name)
	}
	return changed
}

// OfAdvertisement is what a change of an advertisement changes, nil for none before or after
// it. A cluster's endpoint and key are in the views of the Reservations that it provides for,
// its key in the views of the providers that hold capacity for it, and its holds in its own. A
// Reservation of which a ledger does not show the hold yet, or any more, is about to change
// itself.
func (v Views) OfAdvertisement(before, after *broker.ClusterAdvertisement) Changes {
	changed := Changes{}
	cluster := cmp.Or(after, before).Name
	before, after = orEmpty(before), orEmpty(after)
	if before.Spec.EndpointURL != after.Spec.EndpointURL || before.Spec.PeerKey != after.Spec.PeerKey {
		for _, holds := range [][]broker.Hold{before.Status.Holds, after.Status.Holds} {
			for i := range holds {
				changed.add(holds[i].Requester, protocol.RoleRequester, holds[i].ReservationName)
			}
		}
	}
	if before.Spec.PeerKey != after.Spec.PeerKey {
		for _, reservation := range v.Store.ReservationsOf(cluster) {
			for _, provider := range v.Store.HoldersOf(reservation.Name) {
				changed.add(provider, protocol.RoleProvider, reservation.Name)
			}
		}
	}
	for _, c := range ledger.Changes(before.Status.Holds, after.Status.Holds) {
		changed.add(cluster, protocol.RoleProvider, cmp.Or(c.Now, c.Was).ReservationName)
	}
	return changed
}

func orEmpty(advertisement *broker.ClusterAdvertisement) *broker.ClusterAdvertisement {
	if advertisement == nil {
		return &broker.ClusterAdvertisement{}
	}
	return advertisement
}
