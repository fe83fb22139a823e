package server

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// requesterField indexes Reservations in the cache by requester.
const requesterField = "server.requester"

func requesterOf(object client.Object) []string {
	return []string{object.(*broker.Reservation).Spec.RequesterID}
}

// advertisementCache has the advertisements that were read for one list.
type advertisementCache map[string]*broker.ClusterAdvertisement

// advertisement returns a cluster's advertisement; an empty one if there is none.
func (s *Server) advertisement(ctx context.Context, cached advertisementCache, cluster string) (*broker.ClusterAdvertisement, error) {
	if found, ok := cached[cluster]; ok {
		return found, nil
	}
	found := &broker.ClusterAdvertisement{}
	if err := s.client.Get(ctx, s.key(cluster), found); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading the advertisement of %s: %w", cluster, err)
	}
	cached[cluster] = found
	return found, nil
}

// consumerViews lists the reservations of a requester, sorted by ID.
func (s *Server) consumerViews(ctx context.Context, requester string) ([]protocol.ConsumerView, error) {
	var list broker.ReservationList
	if err := s.client.List(ctx, &list, client.InNamespace(s.Namespace), client.MatchingFields{requesterField: requester}); err != nil {
		return nil, fmt.Errorf("listing the reservations of %s: %w", requester, err)
	}
	cached := advertisementCache{}
	views := make([]protocol.ConsumerView, 0, len(list.Items))
	for i := range list.Items {
		view, err := s.consumerView(ctx, &list.Items[i], cached)
		if err != nil {
			return nil, err
		}
		views = append(views, view)
	}
	slices.SortFunc(views, func(a, b protocol.ConsumerView) int { return strings.Compare(a.ID, b.ID) })
	return views, nil
}

// consumerView is a reservation as its requester sees it. It takes ownership of the
// reservation.
func (s *Server) consumerView(ctx context.Context, reservation *broker.Reservation, cached advertisementCache) (protocol.ConsumerView, error) {
	view := protocol.ConsumerView{
		ID:               reservation.Name,
		UID:              reservation.UID,
		SourceUID:        sourceUID(reservation),
		SourceNamespace:  reservation.Annotations[annotationSourceNamespace],
		SourceName:       reservation.Annotations[annotationSourceName],
		SourceGeneration: sourceGeneration(reservation),
		Spec:             reservation.Spec,
		Status:           reservation.Status,
	}
	for i := range view.Status.Allocations {
		allocation := &view.Status.Allocations[i]
		provider, err := s.advertisement(ctx, cached, allocation.Cluster)
		if err != nil {
			return view, err
		}
		allocation.Endpoint = provider.Spec.EndpointURL
		if provider.Spec.PeerKey != "" {
			if view.PeerKeys == nil {
				view.PeerKeys = map[string]string{}
			}
			view.PeerKeys[allocation.Cluster] = provider.Spec.PeerKey
		}
	}
	return view, nil
}

// providerViews lists the holds on a provider, sorted by reservation ID.
func (s *Server) providerViews(ctx context.Context, provider string) ([]protocol.ProviderView, error) {
	cached := advertisementCache{}
	own, err := s.advertisement(ctx, cached, provider)
	if err != nil {
		return nil, err
	}
	views := make([]protocol.ProviderView, 0, len(own.Status.Holds))
	for _, hold := range own.Status.Holds {
		requester, err := s.advertisement(ctx, cached, hold.Requester)
		if err != nil {
			return nil, err
		}
		views = append(views, protocol.ProviderView{ID: hold.ReservationName, Requester: hold.Requester, RequesterPeerKey: requester.Spec.PeerKey, Hold: hold})
	}
	slices.SortFunc(views, func(a, b protocol.ProviderView) int { return strings.Compare(a.ID, b.ID) })
	return views, nil
}
