package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// listedWithin is how long the broker may take to list the views before that is logged.
const listedWithin = 30 * time.Second

// Watch implements transport.Watcher. A session lasts until a watch of the API server ends, and the
// next one begins with a Relist, as a stream does.
func (c *Client) Watch(ctx context.Context, role protocol.Role, handle func(protocol.Event)) {
	for {
		s := &session{Client: c, role: role, handle: handle, id: string(uuid.NewUUID()), views: map[string]string{}}
		err := s.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		c.log.Info("Session ended; opening another one", "role", role, "reason", err.Error())
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait.Jitter(time.Second, 1)):
		}
	}
}

// session follows the views of a role. The broker keeps them up to date while it is renewed, and
// says when all are there.
type session struct {
	*Client
	role     protocol.Role
	handle   func(protocol.Event)
	id       string
	renewals int
	// listed is what the broker has said of the session, last, and received the last relayed
	// message.
	listed   string
	received objects.Inbox
	// views by their IDs, as packed.
	views map[string]string
}

// follow opens the session and hands over its events until something fails.
func (s *session) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := s.ensureAdvertisement(ctx); err != nil {
		return err
	}
	said, err := s.watch(ctx, kindAdvertisement, "", s.cluster)
	if err != nil {
		return fmt.Errorf("watching what the broker says: %w", err)
	}
	defer said.Stop()
	if err := s.renew(ctx); err != nil {
		return err
	}
	renewal := time.NewTicker(objects.RenewSeconds * time.Second)
	defer renewal.Stop()
	late := time.NewTimer(listedWithin)
	defer late.Stop()
	var changes <-chan watch.Event
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-renewal.C:
			err = s.renew(ctx)
		case <-late.C:
			if s.listed == "" {
				s.log.Info("The broker does not list what there is for this cluster: does it run with --broker-interface=kubernetes, and is the cluster approved?", "role", s.role, "namespace", s.namespace, "since", listedWithin)
			}
		case event, open := <-said.ResultChan():
			var object *metav1.PartialObjectMetadata
			if object, err = objectOf(event, open); err != nil || object == nil {
				break
			}
			if s.isListed(object) {
				var views watch.Interface
				if views, err = s.relist(ctx); err == nil && views != nil {
					defer views.Stop()
					changes = views.ResultChan()
				}
			}
			s.receive(object)
		case event, open := <-changes:
			var object *metav1.PartialObjectMetadata
			if object, err = objectOf(event, open); err == nil && object != nil {
				err = s.change(object, event.Type == watch.Deleted)
			}
		}
		if err != nil {
			return err
		}
	}
}

// objectOf is the object of an event, nil for none.
func objectOf(event watch.Event, open bool) (*metav1.PartialObjectMetadata, error) {
	if !open {
		return nil, errors.New("the API server has closed the watch")
	}
	if event.Type == watch.Error {
		return nil, apierrors.FromObject(event.Object)
	}
	object, _ := event.Object.(*metav1.PartialObjectMetadata)
	return object, nil
}

// ensureAdvertisement creates the object of this cluster's sessions and calls, of which nothing is
// advertised before the first call that says so. One that exists is not created again, which would
// count for the namespace's quota.
func (s *session) ensureAdvertisement(ctx context.Context) error {
	object := &broker.ClusterAdvertisement{ObjectMeta: s.meta(s.cluster), Spec: broker.ClusterAdvertisementSpec{ClusterID: s.cluster, Timestamp: metav1.Now()}}
	existing := s.carrier(kindAdvertisement, s.cluster)
	err := s.api.Get(ctx, client.ObjectKeyFromObject(existing), existing)
	if apierrors.IsNotFound(err) {
		err = s.api.Create(ctx, object)
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating the ClusterAdvertisement in namespace %s of the hub: %w", s.namespace, err)
	}
	return nil
}

func (s *session) renew(ctx context.Context) error {
	s.renewals++
	if err := s.annotate(ctx, s.carrier(kindAdvertisement, s.cluster), objects.AnnotationSession(s.role), objects.Session(s.id, strconv.Itoa(s.renewals))); err != nil {
		return fmt.Errorf("renewing the session: %w", err)
	}
	return nil
}

// isListed reports whether the broker, or another one, has listed all views of the session.
func (s *session) isListed(advertisement *metav1.PartialObjectMetadata) bool {
	listed := advertisement.Annotations[objects.AnnotationListed(s.role)]
	if objects.SessionOf(listed) != s.id || listed == s.listed {
		return false
	}
	s.listed = listed
	return true
}

// relist hands over all views, and watches them from there on.
func (s *session) relist(ctx context.Context) (watch.Interface, error) {
	event := protocol.Event{Type: protocol.EventRelist}
	if s.role == "" {
		s.handle(event)
		return nil, nil
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(broker.GroupVersion.WithKind(s.kind() + "List"))
	if err := s.api.List(ctx, list, client.InNamespace(s.namespace)); err != nil {
		return nil, fmt.Errorf("listing the views: %w", err)
	}
	clear(s.views)
	for i := range list.Items {
		packed := list.Items[i].Annotations[objects.AnnotationView]
		if packed == "" {
			continue
		}
		if err := s.add(&event, packed); err != nil {
			return nil, err
		}
		s.views[list.Items[i].Name] = packed
	}
	s.handle(event)
	return s.watch(ctx, s.kind(), list.ResourceVersion, "")
}

// kind of the objects with the views.
func (s *session) kind() string {
	if s.role == protocol.RoleRequester {
		return kindReservation
	}
	return kindInstruction
}

// change hands over what has changed of a view.
func (s *session) change(object *metav1.PartialObjectMetadata, deleted bool) error {
	before, known := s.views[object.Name]
	packed := object.Annotations[objects.AnnotationView]
	switch {
	case deleted && known:
		delete(s.views, object.Name)
		s.handle(protocol.Event{Type: protocol.EventDelete, ID: object.Name})
		return nil
	case deleted, packed == "", packed == before:
		return nil
	}
	event := protocol.Event{Type: protocol.EventPut}
	if err := s.add(&event, packed); err != nil {
		return err
	}
	s.views[object.Name] = packed
	s.handle(event)
	return nil
}

// add adds a view to an event.
func (s *session) add(event *protocol.Event, packed string) error {
	if s.role == protocol.RoleRequester {
		var view protocol.ConsumerView
		if err := objects.Unpack(packed, &view); err != nil {
			return err
		}
		event.Consumer = append(event.Consumer, view)
		return nil
	}
	var view protocol.ProviderView
	if err := objects.Unpack(packed, &view); err != nil {
		return err
	}
	event.Provider = append(event.Provider, view)
	return nil
}

// receive hands over a relayed message.
func (s *session) receive(advertisement *metav1.PartialObjectMetadata) {
	var inbox objects.Inbox
	text := advertisement.Annotations[objects.AnnotationInbox]
	if s.role != "" || text == "" || json.Unmarshal([]byte(text), &inbox) != nil || inbox.Session != s.id || inbox.Stream == s.received.Stream && inbox.Number <= s.received.Number {
		return
	}
	s.received = inbox
	s.handle(protocol.Event{Type: protocol.EventPut, Relay: []protocol.RelayMessage{inbox.Message}})
}
