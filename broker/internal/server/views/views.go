package views

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Annotations of a broker's Reservation name the one in the consumer's cluster, with those of the
// keys of labels: a label has the same value for selecting, as far as it is a valid one.
const (
	AnnotationSourceUID        = broker.Group + "/source-uid"
	AnnotationSourceGeneration = broker.Group + "/source-generation"
)

// Views are those of the objects in a store.
type Views struct{ Store *store.Store }

// advertisement is a cluster's advertisement, an empty one if there is none.
func (v Views) advertisement(cluster string) *broker.ClusterAdvertisement {
	return orEmpty(v.Store.Advertisement(cluster))
}

// Reservation is the Reservation of a name and requester, nil if there is none.
func (v Views) Reservation(requester, name string) *broker.Reservation {
	if found := v.Store.Reservation(name); found != nil && found.Spec.RequesterID == requester {
		return found
	}
	return nil
}

// Consumer lists the reservations of a requester, sorted by ID; with an id, only that one.
func (v Views) Consumer(requester, id string) []protocol.ConsumerView {
	var found []*broker.Reservation
	if id == "" {
		found = v.Store.ReservationsOf(requester)
	} else if reservation := v.Reservation(requester, id); reservation != nil {
		found = append(found, reservation)
	}
	views := make([]protocol.ConsumerView, 0, len(found))
	for _, reservation := range found {
		views = append(views, v.OfConsumer(reservation))
	}
	return views
}

// OfConsumer is a reservation as its requester sees it. It shares its content with the
// reservation.
func (v Views) OfConsumer(reservation *broker.Reservation) protocol.ConsumerView {
	view := protocol.ConsumerView{
		ID:               reservation.Name,
		UID:              reservation.UID,
		SourceUID:        SourceUID(reservation),
		SourceNamespace:  reservation.Annotations[broker.LabelSourceNamespace],
		SourceName:       reservation.Annotations[broker.LabelSourceName],
		SourceGeneration: SourceGeneration(reservation),
		Spec:             reservation.Spec,
		Status:           reservation.EffectiveStatus(),
	}
	view.Status.Decision = decide.ForConsumer(view.Status.Decision)
	contact := func(cluster string) (endpoint string) {
		provider := v.advertisement(cluster)
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

// Provider lists the holds on a provider, sorted by reservation ID; with an id, only those of
// that reservation. deadline is that for the answer to a hold.
func (v Views) Provider(provider, id string, deadline time.Duration) []protocol.ProviderView {
	own := v.advertisement(provider)
	views := []protocol.ProviderView{}
	for i := range own.Status.Holds {
		hold := &own.Status.Holds[i]
		if id == "" || hold.ReservationName == id {
			key := v.advertisement(hold.Requester).Spec.PeerKey
			views = append(views, protocol.ProviderView{ID: hold.ReservationName, Requester: hold.Requester, RequesterPeerKey: key, Hold: *hold, AnswerWithin: answerWithin(*hold, deadline)})
		}
	}
	slices.SortStableFunc(views, func(a, b protocol.ProviderView) int { return cmp.Compare(a.ID, b.ID) })
	return views
}

// answerWithin is how long the reconciler waits for the provider's answer to a hold, nil if the
// provider has nothing to accept.
func answerWithin(hold broker.Hold, deadline time.Duration) *metav1.Duration {
	pending := ledger.Pending(hold)
	if pending.Empty() {
		return nil
	}
	return &metav1.Duration{Duration: answers.Deadline(deadline, pending)}
}

// Advertisements lists those that the caller sees, sorted by cluster ID.
func (v Views) Advertisements(caller string) []protocol.AdvertisementView {
	views := []protocol.AdvertisementView{}
	for _, advertisement := range v.Store.Advertisements() {
		if view, visible := ofAdvertisement(advertisement, caller); visible {
			views = append(views, view)
		}
	}
	return views
}

// Advertisement is a cluster's advertisement, unless the caller does not see it.
func (v Views) Advertisement(cluster, caller string) (view protocol.AdvertisementView, visible bool) {
	return ofAdvertisement(v.advertisement(cluster), caller)
}

// ofAdvertisement is an advertisement as the caller sees it: its own in full. Of
// another cluster, which must lend to the caller or hold capacity for it, the caller sees
// what it needs to choose a target: terms, location, and whether there is capacity. The
// rest, such as its nodes, its other consumers, its endpoint and its key, is for the
// broker, or comes with a reservation.
func ofAdvertisement(advertisement *broker.ClusterAdvertisement, caller string) (view protocol.AdvertisementView, visible bool) {
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

// SourceGeneration is 0 for a Reservation that was created in the hub.
func SourceGeneration(reservation *broker.Reservation) int64 {
	generation, err := strconv.ParseInt(reservation.Annotations[AnnotationSourceGeneration], 10, 64)
	if err != nil {
		return 0
	}
	return generation
}

// SourceUID is empty for a Reservation that was created in the hub.
func SourceUID(reservation *broker.Reservation) types.UID {
	return types.UID(reservation.Annotations[AnnotationSourceUID])
}
