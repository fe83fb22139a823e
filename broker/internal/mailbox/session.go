package mailbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// fieldOwner applies the statuses.
const fieldOwner = client.FieldOwner("spillway-broker")

// viewer is a cluster in a role, or the receiver of messages with role "".
type viewer struct {
	cluster string
	role    protocol.Role
}

// session keeps the objects of a viewer up to date, from a stream of the REST interface.
type session struct {
	*Mailbox
	viewer
	// id of the agent's session, value what it last wrote, and renewed when this broker saw that.
	id, value string
	renewed   time.Time
	cancel    context.CancelFunc
	ended     chan struct{}
	// stream is the ID of the stream, and messages the number of its messages that were written.
	stream   string
	messages int
}

// open opens the session that an agent has written, or renews it. One that has ended opens again
// when it is renewed.
func (m *Mailbox) open(of viewer, value string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.sessions[of]
	if value == "" || before != nil && before.value == value || m.ctx.Err() != nil {
		return
	}
	id := objects.SessionOf(value)
	if before != nil && before.id == id {
		select {
		case <-before.ended:
		default:
			before.value, before.renewed = value, m.Clock.Now()
			return
		}
	}
	ctx, cancel := context.WithCancel(m.ctx)
	s := &session{Mailbox: m, viewer: of, id: id, value: value, stream: string(uuid.NewUUID()), renewed: m.Clock.Now(), cancel: cancel, ended: make(chan struct{})}
	m.sessions[of] = s
	if before != nil {
		before.cancel()
	}
	m.running.Go(func() {
		defer close(s.ended)
		defer cancel()
		if before != nil {
			// Its last write must not come after the first of this one.
			<-before.ended
		}
		s.Log.V(1).Info("Session ended", "cluster", of.cluster, "role", of.role, "reason", fmt.Sprint(s.follow(ctx)))
	})
}

// follow writes what the stream sends until it ends.
func (s *session) follow(ctx context.Context) error {
	path, query := protocol.PathRelay, url.Values{"watch": {"true"}}
	if s.role != "" {
		path = protocol.PathReservations
		query.Set("role", string(s.role))
	}
	call, err := http.NewRequestWithContext(s.As(ctx, s.cluster), http.MethodGet, path+"?"+query.Encode(), nil)
	if err != nil {
		return fmt.Errorf("opening a stream: %w", err)
	}
	call.Header.Set(protocol.HeaderVersion, protocol.Version)
	events := &events{response: response{header: http.Header{}, status: http.StatusOK}, apply: func(event protocol.Event) error { return s.apply(ctx, event) }}
	s.Handler.ServeHTTP(events, call)
	if events.err == nil {
		events.err = errors.New(events.body.String())
	}
	return events.err
}

// events is the response of a stream, which writes a line at a time.
type events struct {
	response
	apply func(protocol.Event) error
	err   error
}

// Write implements http.ResponseWriter. Without success, it is the body of a refusal.
func (e *events) Write(line []byte) (int, error) {
	if e.status != http.StatusOK {
		return e.response.Write(line)
	}
	var event protocol.Event
	if e.err = json.Unmarshal(line, &event); e.err == nil {
		e.err = e.apply(event)
	}
	if e.err != nil {
		return 0, e.err
	}
	return len(line), nil
}

// FlushError lets the stream flush.
func (e *events) FlushError() error { return nil }

// apply makes the objects what an event says.
func (s *session) apply(ctx context.Context, event protocol.Event) error {
	switch event.Type {
	case protocol.EventHeartbeat:
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.Clock.Since(s.renewed) > 3*objects.RenewSeconds*time.Second {
			return errors.New("the agent has not renewed it")
		}
		return nil
	case protocol.EventDelete:
		defer s.lock(s.cluster, event.ID)()
		return client.IgnoreNotFound(s.api.Delete(ctx, object(s.kind(), objects.Namespace(s.cluster), event.ID)))
	case protocol.EventRelist:
		if err := s.relist(ctx, event); err != nil {
			return err
		}
	}
	for _, view := range event.Consumer {
		unlock := s.lock(s.cluster, view.ID)
		err := s.putConsumer(ctx, s.cluster, view)
		unlock()
		if err := s.without(view.ID, err); err != nil {
			return err
		}
	}
	for _, view := range event.Provider {
		if err := s.without(view.ID, s.putProvider(ctx, view)); err != nil {
			return err
		}
	}
	if event.Type == protocol.EventRelist {
		if err := s.say(ctx, objects.AnnotationListed(s.role), objects.Session(s.id, s.stream)); err != nil {
			return err
		}
	}
	for _, message := range event.Relay {
		s.messages++
		text, err := json.Marshal(objects.Inbox{Session: s.id, Stream: s.stream, Number: s.messages, Message: message})
		if err != nil {
			return fmt.Errorf("encoding a message: %w", err)
		}
		if err := s.say(ctx, objects.AnnotationInbox, string(text)); err != nil {
			return err
		}
	}
	return nil
}

// without leaves out a view that the API server refuses, for the sake of the others.
func (s *session) without(id string, err error) error {
	if refused(err) {
		s.Log.Error(err, "A view cannot be written, and its cluster does not see it", "cluster", s.cluster, "role", s.role, "reservation", id)
		return nil
	}
	return err
}

// refused reports whether the same write would fail again.
func refused(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) || apierrors.IsRequestEntityTooLargeError(err)
}

// say writes something about the session.
func (s *session) say(ctx context.Context, key, value string) error {
	return s.annotate(ctx, object(kindAdvertisement, objects.Namespace(s.cluster), s.cluster), key, value)
}

// kind of the objects with the views.
func (s *session) kind() string {
	if s.role == protocol.RoleRequester {
		return kindReservation
	}
	return kindInstruction
}

// relist deletes the objects without a view. Those with a request that is not answered are kept
// until the answer says that there is none.
func (s *session) relist(ctx context.Context, all protocol.Event) error {
	if s.role == "" {
		return nil
	}
	exists := map[string]bool{}
	for _, view := range all.Consumer {
		exists[view.ID] = true
	}
	for _, view := range all.Provider {
		exists[view.ID] = true
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(broker.GroupVersion.WithKind(s.kind() + "List"))
	if err := s.api.List(ctx, list, client.InNamespace(objects.Namespace(s.cluster))); err != nil {
		return fmt.Errorf("listing what the cluster sees: %w", err)
	}
	for i := range list.Items {
		item := &list.Items[i]
		if _, open := pending(item.Annotations); exists[item.Name] || open {
			continue
		}
		if err := s.discard(ctx, item); err != nil {
			return fmt.Errorf("deleting what the cluster does not see any more: %w", err)
		}
	}
	return nil
}

// putConsumer makes a cluster's Reservation what it sees.
func (m *Mailbox) putConsumer(ctx context.Context, cluster string, view protocol.ConsumerView) error {
	return m.put(ctx, object(kindReservation, objects.Namespace(cluster), view.ID), cluster, view, &view.Spec, &view.Status)
}

// putProvider makes a cluster's ProviderInstruction what it sees.
func (s *session) putProvider(ctx context.Context, view protocol.ProviderView) error {
	promised := view.Hold.Promised
	zero := resource.Quantity{}
	return s.put(ctx, object(kindInstruction, objects.Namespace(s.cluster), view.ID), s.cluster, view, &broker.ProviderInstructionSpec{
		ReservationName: view.ID, ReservationUID: view.Hold.ReservationUID, RequesterClusterID: view.Requester, RequesterPeerKey: view.RequesterPeerKey,
		RequestedCPU: ptr.Deref(promised.Totals.CPU, zero), RequestedMemory: ptr.Deref(promised.Totals.Memory, zero),
		RequestedResources: promised.Totals, PodSets: promised.PodSets, Releasing: view.Releasing(), Attempt: view.Hold.Attempt, AnswerWithin: view.AnswerWithin,
	}, nil)
}

// put writes a view to its object, with the spec and status for those who read it with kubectl.
func (m *Mailbox) put(ctx context.Context, stored *unstructured.Unstructured, cluster string, view, spec any, status *broker.ReservationStatus) error {
	packed, err := objects.Pack(view)
	if err != nil {
		return err
	}
	wanted, err := runtime.DefaultUnstructuredConverter.ToUnstructured(spec)
	if err != nil {
		return fmt.Errorf("encoding a spec: %w", err)
	}
	err = retry.OnError(retry.DefaultRetry, func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }, func() error {
		err := m.api.Get(ctx, client.ObjectKeyFromObject(stored), stored)
		missing := apierrors.IsNotFound(err)
		if err != nil && !missing {
			return err
		}
		annotations, marked := stored.GetAnnotations(), stored.GetLabels()
		if !missing && annotations[objects.AnnotationView] == packed && marked[objects.LabelTenant] == cluster {
			return nil
		}
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[objects.AnnotationView] = packed
		stored.SetAnnotations(annotations)
		stored.SetLabels(map[string]string{objects.LabelTenant: cluster, broker.LabelManagedBy: broker.ManagedBySpillway})
		if missing || stored.GetKind() == kindInstruction {
			stored.Object["spec"] = wanted
		}
		if missing {
			return m.api.Create(ctx, stored)
		}
		return m.api.Update(ctx, stored)
	})
	if err != nil || status == nil {
		return err
	}
	return m.putStatus(ctx, stored, status)
}

// putStatus writes the status of a Reservation.
func (m *Mailbox) putStatus(ctx context.Context, stored *unstructured.Unstructured, status *broker.ReservationStatus) error {
	wanted, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return fmt.Errorf("encoding a status: %w", err)
	}
	if equality.Semantic.DeepEqual(stored.Object["status"], any(wanted)) || len(wanted) == 0 {
		return nil
	}
	applied := object(stored.GetKind(), stored.GetNamespace(), stored.GetName())
	applied.Object["status"] = wanted
	return client.IgnoreNotFound(m.api.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(applied), client.ForceOwnership, fieldOwner))
}
