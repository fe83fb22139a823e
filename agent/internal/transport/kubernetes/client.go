package kubernetes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/keymutex"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

const (
	// answerTimeout is how long the broker may take to answer.
	answerTimeout = 10 * time.Second
	// clockSkew is how much the clocks of the agent and the broker may differ.
	clockSkew = time.Minute
)

// Kinds of objects in the namespace.
const (
	kindAdvertisement = "ClusterAdvertisement"
	kindReservation   = "Reservation"
	kindInstruction   = "ProviderInstruction"
)

// Client implements transport.BrokerCommunicator.
type Client struct {
	api                client.WithWatch
	namespace, cluster string
	log                logr.Logger
	// calling lets each object have one request at a time.
	calling keymutex.KeyMutex
}

// New returns the connection of a cluster, with access to its namespace in the hub.
func New(hub *rest.Config, namespace, cluster string, log logr.Logger) (*Client, error) {
	scheme := runtime.NewScheme()
	if err := broker.AddToScheme(scheme); err != nil {
		return nil, err
	}
	hub = rest.CopyConfig(hub)
	hub.QPS, hub.Burst = 200, 400
	api, err := client.NewWithWatch(hub, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("creating a client of the hub: %w", err)
	}
	return &Client{api: api, namespace: namespace, cluster: cluster, log: log, calling: keymutex.NewHashed(64)}, nil
}

// PublishAdvertisement implements transport.BrokerCommunicator.
func (c *Client) PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	object := &broker.ClusterAdvertisement{ObjectMeta: c.meta(c.cluster), Spec: spec}
	var response protocol.AdvertisementResponse
	err := c.call(ctx, object, kindAdvertisement, http.MethodPost, protocol.PathAdvertisements, nil, &response)
	if err == nil && response.Sequence > spec.Sequence {
		return &protocol.OutdatedError{Latest: response.Sequence}
	}
	return err
}

// Beat implements transport.BrokerCommunicator.
func (c *Client) Beat(ctx context.Context, beat protocol.Beat) (known bool, err error) {
	var response protocol.BeatResponse
	err = c.call(ctx, c.carrier(kindAdvertisement, c.cluster), kindAdvertisement, http.MethodPost, protocol.PathBeat, beat, &response)
	if protocol.HasCode(err, protocol.CodeNotFound) {
		return false, nil
	}
	return response.Known, err
}

// PutReservation implements transport.BrokerCommunicator.
func (c *Client) PutReservation(ctx context.Context, request protocol.ReservationRequest) (view protocol.ConsumerView, err error) {
	object := &broker.Reservation{ObjectMeta: c.meta(protocol.ReservationID(c.cluster, request.SourceUID)), Spec: request.Spec}
	// As in one that the broker has created, where it cannot be changed.
	object.Spec.RequesterID = cmp.Or(object.Spec.RequesterID, c.cluster)
	request.Spec = broker.ReservationSpec{}
	if err := c.call(ctx, object, kindReservation, http.MethodPost, protocol.PathReservations, request, nil); err != nil {
		return view, err
	}
	stored := c.carrier(kindReservation, object.Name)
	if err := c.api.Get(ctx, client.ObjectKeyFromObject(stored), stored); err != nil {
		return view, refusalOf(err)
	}
	return view, objects.Unpack(stored.Annotations[objects.AnnotationView], &view)
}

// DeleteReservation implements transport.BrokerCommunicator.
func (c *Client) DeleteReservation(ctx context.Context, id string) error {
	err := c.call(ctx, c.carrier(kindReservation, id), kindReservation, http.MethodDelete, protocol.PathReservations+"/"+url.PathEscape(id), nil, nil)
	if protocol.HasCode(err, protocol.CodeNotFound) {
		return nil
	}
	return err
}

// AckProvider implements transport.BrokerCommunicator.
func (c *Client) AckProvider(ctx context.Context, id string, ack protocol.ProviderAck) error {
	return c.about(ctx, kindInstruction, id, "/ack", protocol.RoleProvider, ack)
}

// AckRequester implements transport.BrokerCommunicator.
func (c *Client) AckRequester(ctx context.Context, id string, ack protocol.RequesterAck) error {
	return c.about(ctx, kindReservation, id, "/ack", protocol.RoleRequester, ack)
}

// Renew implements transport.BrokerCommunicator.
func (c *Client) Renew(ctx context.Context, id string, uid types.UID) error {
	return c.about(ctx, kindReservation, id, "/renew", protocol.RoleRequester, protocol.Renewal{ReservationUID: uid})
}

// about makes a call about a reservation.
func (c *Client) about(ctx context.Context, kind, id, what string, role protocol.Role, body any) error {
	path := protocol.PathReservations + "/" + url.PathEscape(id) + what + "?" + url.Values{"role": {string(role)}}.Encode()
	return c.call(ctx, c.carrier(kind, id), kind, http.MethodPost, path, body, nil)
}

// Relay implements transport.BrokerCommunicator.
func (c *Client) Relay(ctx context.Context, message protocol.RelayMessage) error {
	return c.call(ctx, c.carrier(kindAdvertisement, c.cluster), kindAdvertisement, http.MethodPost, protocol.PathRelay, message, nil)
}

func (c *Client) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: c.namespace, Name: name, Labels: map[string]string{objects.LabelTenant: c.cluster}}
}

// carrier is an object that exists, without its content.
func (c *Client) carrier(kind, name string) *metav1.PartialObjectMetadata {
	object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name}}
	object.SetGroupVersionKind(broker.GroupVersion.WithKind(kind))
	return object
}

// call writes a request to an object, with its spec, and reads the answer into the
// response.
func (c *Client) call(ctx context.Context, object client.Object, kind, method, path string, body, response any) error {
	of := kind + "/" + object.GetName()
	c.calling.LockKey(of)
	defer func() { _ = c.calling.UnlockKey(of) }()
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	request := objects.Request{ID: string(uuid.NewUUID()), Version: protocol.Version, Expires: time.Now().Add(answerTimeout + clockSkew), Method: method, Path: path}
	var err error
	if body != nil {
		if request.Body, err = json.Marshal(body); err != nil {
			return fmt.Errorf("encoding the request %s %s: %w", method, path, err)
		}
	}
	if err := c.send(ctx, object, kind, request); err != nil {
		return refusalOf(err)
	}
	return c.await(ctx, kind, object, request.ID, response)
}

// send writes a request to its object.
func (c *Client) send(ctx context.Context, object client.Object, kind string, request objects.Request) error {
	encoded, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("encoding the request: %w", err)
	}
	if _, exists := object.(*metav1.PartialObjectMetadata); exists {
		return c.annotate(ctx, object, objects.AnnotationRequest, string(encoded))
	}
	wanted, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return fmt.Errorf("encoding the object: %w", err)
	}
	stored := &unstructured.Unstructured{}
	stored.SetGroupVersionKind(broker.GroupVersion.WithKind(kind))
	stored.SetNamespace(object.GetNamespace())
	stored.SetName(object.GetName())
	// The spec is replaced: of one that the broker has created, server-side apply would keep the fields
	// that this one does not have. The broker writes the status.
	err = retry.OnError(retry.DefaultRetry, apierrors.IsAlreadyExists, func() error {
		_, err := controllerutil.CreateOrPatch(ctx, c.api, stored, func() error {
			stored.Object["spec"] = wanted["spec"]
			return errors.Join(
				unstructured.SetNestedField(stored.Object, c.cluster, "metadata", "labels", objects.LabelTenant),
				unstructured.SetNestedField(stored.Object, string(encoded), "metadata", "annotations", objects.AnnotationRequest))
		})
		return err
	})
	object.SetResourceVersion(stored.GetResourceVersion())
	return err
}

// annotate sets an annotation of an object that exists.
func (c *Client) annotate(ctx context.Context, object client.Object, key, value string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{key: value}}})
	if err != nil {
		return fmt.Errorf("encoding an annotation: %w", err)
	}
	return c.api.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch))
}

// await waits for the answer to a request, and reads it into the response.
func (c *Client) await(ctx context.Context, kind string, object client.Object, id string, response any) error {
	events, err := c.watch(ctx, kind, object.GetResourceVersion(), object.GetName())
	if err != nil {
		return refusalOf(err)
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		changed, err := objectOf(event, true)
		switch {
		case err != nil:
			return refusalOf(err)
		case changed == nil:
		case event.Type == watch.Deleted:
			return errors.New("the object of the request was deleted before the broker answered")
		default:
			if answered, err := answerTo(id, changed.Annotations[objects.AnnotationAnswer], response); answered {
				return err
			}
		}
	}
	return errors.New("the broker has not answered in time")
}

// answerTo reads the answer to a request, unless the text is none or that to another one.
func answerTo(id, text string, response any) (answered bool, err error) {
	var answer objects.Answer
	switch {
	case text == "" || json.Unmarshal([]byte(text), &answer) != nil || answer.ID != id:
		return false, nil
	case answer.Error != nil:
		answer.Error.RetryAfter = answer.RetryAfter
		return true, answer.Error
	case response == nil:
		return true, nil
	}
	if err := json.Unmarshal(answer.Body, response); err != nil {
		return true, fmt.Errorf("decoding the broker's answer: %w", err)
	}
	return true, nil
}

// watch watches the objects of a kind from a version on, or the one of a name.
func (c *Client) watch(ctx context.Context, kind, version, name string) (watch.Interface, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(broker.GroupVersion.WithKind(kind + "List"))
	options := &client.ListOptions{Namespace: c.namespace, Raw: &metav1.ListOptions{ResourceVersion: version}}
	if name != "" {
		options.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name)
	}
	return c.api.Watch(ctx, list, options)
}

// refusalOf is what an error of the hub's API server means: what it refuses, the broker would.
func refusalOf(err error) error {
	code := ""
	switch {
	case apierrors.IsNotFound(err):
		code = protocol.CodeNotFound
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		code = protocol.CodeInvalid
	case apierrors.IsForbidden(err):
		code = protocol.CodeForbidden
	case apierrors.IsUnauthorized(err):
		code = protocol.CodeUnauthorized
	case apierrors.IsRequestEntityTooLargeError(err):
		code = protocol.CodeTooLarge
	}
	if code == "" {
		return fmt.Errorf("calling the broker through the hub's API server: %w", err)
	}
	return &protocol.Error{Code: code, Message: err.Error()}
}
