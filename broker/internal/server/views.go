package server

import (
	"cmp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// consumerViews lists the reservations of a requester, sorted by ID; with an id, only that one.
func (s *Server) consumerViews(requester, id string) []protocol.ConsumerView {
	reservations := s.index.reservationsOf(requester, id)
	views := make([]protocol.ConsumerView, 0, len(reservations))
	for _, reservation := range reservations {
		views = append(views, s.consumerView(reservation))
	}
	return views
}

// consumerView is a reservation as its requester sees it. It shares its content with the
// reservation.
func (s *Server) consumerView(reservation *broker.Reservation) protocol.ConsumerView {
	view := protocol.ConsumerView{
		ID:               reservation.Name,
		UID:              reservation.UID,
		SourceUID:        sourceUID(reservation),
		SourceNamespace:  reservation.Annotations[annotationSourceNamespace],
		SourceName:       reservation.Annotations[annotationSourceName],
		SourceGeneration: sourceGeneration(reservation),
		Spec:             reservation.Spec,
		Status:           reservation.EffectiveStatus(),
	}
	view.Status.Decision = decide.ForConsumer(view.Status.Decision)
	contact := func(cluster string) (endpoint string) {
		provider := s.index.advertisement(cluster)
		if provider.Spec.PeerKey != "" {
			if view.PeerKeys == nil {
				view.PeerKeys = map[string]string{}
			}
			view.PeerKeys[cluster] = provider.Spec.PeerKey
		}
		return provider.Spec.EndpointURL
	}
	view.Status.Allocations = slices.Clone(view.Status.Allocations)
	for i := range view.Status.Allocations {
		allocation := &view.Status.Allocations[i]
		allocation.Endpoint = contact(allocation.Cluster)
	}
	if reservation.DeletionTimestamp.IsZero() {
		for _, cluster := range reservation.FirstAsked() {
			view.Asked = append(view.Asked, protocol.AskedCluster{Cluster: cluster, Endpoint: contact(cluster)})
		}
	}
	return view
}

// providerViews lists the holds on a provider, sorted by reservation ID; with an id, only
// those of that reservation.
func (s *Server) providerViews(provider, id string) []protocol.ProviderView {
	own := s.index.advertisement(provider)
	views := []protocol.ProviderView{}
	for i := range own.Status.Holds {
		hold := &own.Status.Holds[i]
		if id == "" || hold.ReservationName == id {
			key := s.index.advertisement(hold.Requester).Spec.PeerKey
			views = append(views, protocol.ProviderView{ID: hold.ReservationName, Requester: hold.Requester, RequesterPeerKey: key, Hold: *hold, AnswerWithin: s.answerWithin(*hold)})
		}
	}
	slices.SortStableFunc(views, func(a, b protocol.ProviderView) int { return cmp.Compare(a.ID, b.ID) })
	return views
}

// answerWithin is how long the reconciler waits for the provider's answer to a hold, nil if the
// provider has nothing to accept.
func (s *Server) answerWithin(hold broker.Hold) *metav1.Duration {
	pending := ledger.Pending(hold)
	if pending.Empty() {
		return nil
	}
	deadline := answers.DefaultDeadline
	if config := s.config.Load(); config != nil && config.Spec.ProofDeadline != nil {
		deadline = config.Spec.ProofDeadline.Duration
	}
	return &metav1.Duration{Duration: answers.Deadline(deadline, pending)}
}

// advertisementView is an advertisement as the caller sees it: its own in full. Of
// another cluster, which must lend to the caller or hold capacity for it, the caller sees
// what it needs to choose a target: terms, location, and whether there is capacity. The
// rest, such as its nodes, its other consumers, its endpoint and its key, is for the
// broker, or comes with a reservation.
func advertisementView(advertisement *broker.ClusterAdvertisement, caller string) (view protocol.AdvertisementView, visible bool) {
	spec, status := &advertisement.Spec, &advertisement.Status
	if spec.ClusterID == caller {
		return protocol.AdvertisementView{Spec: *spec, Status: *status}, true
	}
	for _, hold := range status.Holds {
		if hold.Requester == caller {
			view.Status.Holds = append(view.Status.Holds, hold)
		}
	}
	for _, hold := range spec.ObservedHolds {
		if hold.Requester == caller {
			view.Spec.ObservedHolds = append(view.Spec.ObservedHolds, hold)
		}
	}
	lends := capacity.AdmitReason(spec.Lending, caller, nil) == ""
	if !lends && view.Status.Holds == nil && view.Spec.ObservedHolds == nil {
		return view, false
	}
	view.Spec.ClusterID, view.Spec.ClusterName = spec.ClusterID, spec.ClusterName
	view.Spec.Region, view.Spec.Zone, view.Spec.Cost = spec.Region, spec.Zone, spec.Cost
	view.Spec.Lending.Enabled = lends
	view.Spec.Timestamp, view.Spec.Sequence = spec.Timestamp, spec.Sequence
	view.Status.Active, view.Status.Phase = status.Active, status.Phase
	view.Status.Available, view.Status.Score = status.Available, status.Score
	return view, true
}
