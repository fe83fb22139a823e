package server

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/server/stream"
	"github.com/spillway-dev/spillway/broker/internal/server/views"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/text"
)

// maxAckMessage is the maximum size of an ack's message in bytes: it becomes part of the
// Reservation's status.
const maxAckMessage = 512

func (s *Server) postReservation(w http.ResponseWriter, r *http.Request, caller string) error {
	var request protocol.ReservationRequest
	if err := decode(r, &request); err != nil {
		return err
	}
	if err := validateRequest(&request, caller); err != nil {
		return err
	}
	audit(r, "sourceNamespace", request.SourceNamespace, "sourceName", request.SourceName, "generation", request.SourceGeneration,
		"pods", broker.HeldCapacity{PodSets: request.Spec.PodSets}.Pods(), "target", request.Spec.TargetClusterID)
	reservation, err := s.put(r.Context(), caller, newReservation(s.Namespace, caller, request))
	if err != nil {
		return err
	}
	return respond(w, http.StatusOK, s.views.OfConsumer(reservation))
}

// newReservation is the broker's Reservation for a request.
func newReservation(namespace, caller string, request protocol.ReservationRequest) *broker.Reservation {
	labels := map[string]string{
		broker.LabelManagedBy:       broker.ManagedBySpillway,
		broker.LabelRequester:       caller,
		broker.LabelSourceNamespace: request.SourceNamespace,
	}
	if len(request.SourceName) <= validation.LabelValueMaxLength {
		labels[broker.LabelSourceName] = request.SourceName
	}
	if request.ByHand {
		labels[broker.LabelByHand] = "true"
	}
	annotations := map[string]string{
		views.AnnotationSourceUID:        string(request.SourceUID),
		broker.LabelSourceNamespace:      request.SourceNamespace,
		broker.LabelSourceName:           request.SourceName,
		views.AnnotationSourceGeneration: strconv.FormatInt(request.SourceGeneration, 10),
	}
	if request.SourceOwner != "" {
		annotations[broker.AnnotationSourceOwner] = request.SourceOwner
	}
	return &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   namespace,
			Name:        protocol.ReservationID(caller, request.SourceUID),
			Labels:      labels,
			Annotations: annotations,
			// With it, the reconciler needs no write of its own to set it.
			Finalizers: []string{broker.FinalizerLedger},
		},
		Spec: request.Spec,
	}
}

// put creates or updates the stored Reservation and returns it. It starts from what the store
// knows, so that a request without changes does not reach the API server, and is not a
// write of the caller. If that is outdated, the write fails with a conflict and is
// retried on a live read.
func (s *Server) put(ctx context.Context, caller string, want *broker.Reservation) (*broker.Reservation, error) {
	size, err := specSize(&want.Spec)
	if err != nil {
		return nil, err
	}
	takeWrite := sync.OnceValue(func() error { return s.takeWrite(caller, size) })
	var stored *broker.Reservation
	live := false
	err = retry.OnError(retry.DefaultRetry, func(err error) bool {
		return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
	}, func() error {
		stored = s.Store.Reservation(want.Name).DeepCopy()
		if live {
			stored = &broker.Reservation{}
			if err := s.live.Get(ctx, client.ObjectKeyFromObject(want), stored); apierrors.IsNotFound(err) {
				stored = nil
			} else if err != nil {
				return err
			}
		}
		live = true
		if stored == nil {
			if err := takeWrite(); err != nil {
				return err
			}
			stored = want.DeepCopy()
			return s.create(ctx, stored)
		}
		sets := len(stored.Spec.PodSets)
		if changed, err := update(stored, want); err != nil || !changed {
			return err
		}
		if len(stored.Spec.PodSets) > sets {
			if err := s.checkSize(&stored.Spec); err != nil {
				return err
			}
		}
		if err := takeWrite(); err != nil {
			return err
		}
		return s.client.Update(ctx, stored)
	})
	if err != nil {
		return nil, fmt.Errorf("storing reservation %s: %w", want.Name, err)
	}
	return stored, nil
}

// create creates a Reservation within the quotas of its requester.
func (s *Server) create(ctx context.Context, reservation *broker.Reservation) error {
	limits := s.Store.Settings()
	if err := s.checkSize(&reservation.Spec); err != nil {
		return err
	}
	requester := reservation.Spec.RequesterID
	switch s.Store.Admit(requester, reservation.Name, limits.ReservationsPerCluster, limits.Reservations) {
	case store.HubFull:
		return refuse(protocol.CodeTooMany, "the broker takes %d Reservations of all clusters together: delete those that are not needed, or raise spec.quotas.reservations of the BrokerConfig in the hub", limits.Reservations)
	case store.QuotaReached:
		return refuse(protocol.CodeTooMany, "cluster %s has %d Reservations at the broker, its quota: delete those that are not needed, or raise spec.quotas.reservationsPerCluster of the BrokerConfig in the hub", requester, limits.ReservationsPerCluster)
	}
	defer s.Store.Unadmit(requester, reservation.Name)
	if err := s.client.Create(ctx, reservation); err != nil {
		return err
	}
	created := reservation.DeepCopy()
	created.ManagedFields = nil // as the watch shows it
	s.Store.PutReservation(created)
	return nil
}

// checkSize refuses a spec that is larger than the quota.
func (s *Server) checkSize(spec *broker.ReservationSpec) error {
	size, err := specSize(spec)
	if err != nil {
		return err
	}
	most := s.Store.Settings().ReservationBytes
	if size > most {
		return refuse(protocol.CodeTooLarge, "spec has %d bytes, the quota of the broker is %d: shorten its node selectors, affinity or tolerations, or raise spec.quotas.reservationBytes of the BrokerConfig in the hub", size, most)
	}
	return nil
}

// update applies the changes of a request to the stored Reservation, as far as they are
// allowed, and reports whether there were any. A request of an older generation than the
// stored one is late and changes nothing.
func update(stored, want *broker.Reservation) (changed bool, err error) {
	if stored.Spec.RequesterID != want.Spec.RequesterID {
		return false, refuse(protocol.CodeConflict, "reservation %s belongs to another cluster", want.Name)
	}
	if stored.DeletionTimestamp != nil {
		return false, refuse(protocol.CodeConflict, "reservation %s is being released: retry when it is deleted", want.Name)
	}
	if views.SourceUID(stored) != views.SourceUID(want) {
		return false, refuse(protocol.CodeConflict, "reservation %s was created in the hub, not by this cluster", want.Name)
	}
	if views.SourceGeneration(want) < views.SourceGeneration(stored) {
		return false, nil
	}
	spec := stored.Spec.DeepCopy()
	if spec.RequestedResources != nil && want.Spec.RequestedResources != nil {
		spec.RequestedResources = want.Spec.RequestedResources
	}
	spec.Retained, spec.Priority, spec.PodSelector = want.Spec.Retained, want.Spec.Priority, want.Spec.PodSelector
	spec.Deadline, spec.MinAvailable = want.Spec.Deadline, want.Spec.MinAvailable
	spec.PodSets = updatedSets(spec.PodSets, want.Spec.PodSets)
	if !equality.Semantic.DeepEqual(*spec, want.Spec) {
		return false, refuse(protocol.CodeConflict, "reservation %s is immutable except for its amounts, further pod sets, minAvailable, priority, deadline and podSelector: create another Reservation for another shape, placement, budget or duration", want.Name)
	}
	annotations := maps.Clone(stored.Annotations)
	maps.Copy(annotations, want.Annotations)
	if equality.Semantic.DeepEqual(*spec, stored.Spec) && maps.Equal(annotations, stored.Annotations) {
		return false, nil
	}
	stored.Spec, stored.Annotations = *spec, annotations
	return true, nil
}

// updatedSets returns the stored pod sets with the counts of the wanted ones, and those that
// were added. A stored set is never changed otherwise, nor removed.
func updatedSets(stored, want []broker.PodSet) []broker.PodSet {
	var sets []broker.PodSet
	for _, wanted := range want {
		if i := slices.IndexFunc(stored, func(set broker.PodSet) bool { return set.Name == wanted.Name }); i >= 0 {
			count := wanted.Count
			wanted = stored[i]
			wanted.Count = count
		}
		sets = append(sets, wanted)
	}
	for _, set := range stored {
		if !slices.ContainsFunc(want, func(wanted broker.PodSet) bool { return wanted.Name == set.Name }) {
			sets = append(sets, set)
		}
	}
	return sets
}

func (s *Server) listReservations(w http.ResponseWriter, r *http.Request, caller string) error {
	role := protocol.Role(r.URL.Query().Get("role"))
	switch {
	case role == protocol.RoleRequester && watching(r):
		return s.stream(w, r, caller, role, &stream.Tracker[protocol.ConsumerView]{
			Views: func(id string) []protocol.ConsumerView { return s.views.Consumer(caller, id) },
			ID:    func(view protocol.ConsumerView) string { return view.ID },
			Wrap:  func(some []protocol.ConsumerView) protocol.Event { return protocol.Event{Consumer: some} },
		})
	case role == protocol.RoleProvider && watching(r):
		return s.stream(w, r, caller, role, &stream.Tracker[protocol.ProviderView]{
			Views: func(id string) []protocol.ProviderView { return s.providerViews(caller, id) },
			ID:    func(view protocol.ProviderView) string { return view.ID },
			Wrap:  func(some []protocol.ProviderView) protocol.Event { return protocol.Event{Provider: some} },
		})
	case role == protocol.RoleRequester:
		return respondList(w, r, protocol.ConsumerList{Items: s.views.Consumer(caller, "")})
	case role == protocol.RoleProvider:
		return respondList(w, r, protocol.ProviderList{Items: s.providerViews(caller, "")})
	case role == "" && !watching(r):
		return respondList(w, r, protocol.ReservationList{Requester: s.views.Consumer(caller, ""), Provider: s.providerViews(caller, "")})
	}
	return invalidRole()
}

// providerViews lists the holds on a provider; with an id, only those of that reservation.
func (s *Server) providerViews(provider, id string) []protocol.ProviderView {
	return s.views.Provider(provider, id, s.Store.Settings().ProofDeadline)
}

func invalidRole() error {
	return refuse(protocol.CodeInvalid, "role is invalid: add ?role=%s for the caller's reservations, or ?role=%s for the holds on it", protocol.RoleRequester, protocol.RoleProvider)
}

func (s *Server) getReservation(w http.ResponseWriter, r *http.Request, caller string) error {
	id := r.PathValue("id")
	switch protocol.Role(r.URL.Query().Get("role")) {
	case protocol.RoleRequester:
		if own := s.views.Consumer(caller, id); len(own) > 0 {
			return respond(w, http.StatusOK, own[0])
		}
		return notFound()
	case protocol.RoleProvider:
		if holds := s.providerViews(caller, id); len(holds) > 0 {
			return respond(w, http.StatusOK, holds[0])
		}
		return notFound()
	}
	return invalidRole()
}

// getDecision reports why each cluster that lends to the caller is not chosen for one of its
// reservations, and how many do not lend to it. It compares the reservation with all clusters.
func (s *Server) getDecision(w http.ResponseWriter, r *http.Request, caller string) error {
	rejections, err := s.Reconciler.Explain(caller, r.PathValue("id"))
	if err != nil {
		return fmt.Errorf("explaining the decision: %w", err)
	}
	seen := decide.ForConsumer(&broker.Decision{Rejections: rejections})
	view := protocol.DecisionView{Rejections: seen.Rejections, RejectionCounts: seen.RejectionCounts}
	if view.Rejections == nil {
		view.Rejections = []broker.ClusterRejection{}
	}
	return respond(w, http.StatusOK, view)
}

// notFound does not disclose whether the reservation exists in another cluster.
func notFound() error {
	return refuse(protocol.CodeNotFound, "the object does not exist, or belongs to another cluster")
}

// deleteReservation begins the release: the Reservation is deleted when its holds are.
// It is read live if it may not be the one in the store: a Reservation that is not there
// yet, or that follows a deleted one of its name, must not be reported as deleted. The
// deletion of one in the store does not count as a write of the caller: there are no more
// of them than creations, and capacity is given back without delay.
func (s *Server) deleteReservation(w http.ResponseWriter, r *http.Request, caller string) error {
	known := s.views.Reservation(caller, r.PathValue("id"))
	if known == nil || known.DeletionTimestamp != nil || s.release(r.Context(), known) != nil {
		if err := s.takeWrite(caller, 0); err != nil {
			return err
		}
		live := &broker.Reservation{}
		if err := s.live.Get(r.Context(), client.ObjectKey{Namespace: s.Namespace, Name: r.PathValue("id")}, live); err != nil {
			return fmt.Errorf("reading reservation: %w", err)
		}
		if live.Spec.RequesterID != caller {
			return notFound()
		}
		if err := s.release(r.Context(), live); err != nil {
			return fmt.Errorf("releasing reservation %s: %w", live.Name, err)
		}
	}
	return respond(w, http.StatusNoContent, nil)
}

// release deletes a version of a Reservation, unless that was done.
func (s *Server) release(ctx context.Context, reservation *broker.Reservation) error {
	if reservation.DeletionTimestamp != nil {
		return nil
	}
	// A Reservation of the store is shared, and the response changes the object.
	return s.client.Delete(ctx, &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: reservation.Namespace, Name: reservation.Name}},
		client.Preconditions{UID: &reservation.UID})
}

func (s *Server) ack(w http.ResponseWriter, r *http.Request, caller string) error {
	id := r.PathValue("id")
	var err error
	switch protocol.Role(r.URL.Query().Get("role")) {
	case protocol.RoleProvider:
		var ack protocol.ProviderAck
		if err = decode(r, &ack); err == nil {
			ack.Message = text.Line(ack.Message, maxAckMessage)
			audit(r, "attempt", ack.Attempt, "accepted", ack.Accepted, "message", ack.Message)
			err = s.Reconciler.ApplyProviderAck(r.Context(), caller, id, ack)
		}
	case protocol.RoleRequester:
		if err := s.takeWrite(caller, 0); err != nil {
			return err
		}
		var ack protocol.RequesterAck
		if err = decode(r, &ack); err == nil {
			audit(r, "attempt", ack.Attempt, "ready", len(ack.Ready), "unusable", len(ack.Unusable))
			for cluster, why := range ack.Unusable {
				ack.Unusable[cluster] = text.Line(why, maxAckMessage)
			}
			if err = validateUse(ack.Used); err != nil {
				return err
			}
			err = s.Reconciler.ApplyRequesterAck(r.Context(), caller, id, ack)
		}
	default:
		return invalidRole()
	}
	if err != nil {
		return fmt.Errorf("applying the ack of %s: %w", caller, err)
	}
	return respond(w, http.StatusNoContent, nil)
}

func (s *Server) renew(w http.ResponseWriter, r *http.Request, caller string) error {
	if protocol.Role(r.URL.Query().Get("role")) != protocol.RoleRequester {
		return refuse(protocol.CodeInvalid, "role is invalid: add ?role=%s", protocol.RoleRequester)
	}
	var renewal protocol.Renewal
	if err := decode(r, &renewal); err != nil {
		return err
	}
	if err := s.Reconciler.Renew(caller, r.PathValue("id"), renewal.ReservationUID); err != nil {
		return fmt.Errorf("renewing the lease of a reservation of %s: %w", caller, err)
	}
	leaseRenewals.Inc()
	return respond(w, http.StatusNoContent, nil)
}
