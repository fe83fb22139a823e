package mailbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"k8s.io/utils/keymutex"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// Kinds of the objects. They are read as they are stored: decoding what a cluster has written is
// for the REST interface, which refuses what costs too much.
const (
	kindAdvertisement = "ClusterAdvertisement"
	kindReservation   = "Reservation"
	kindInstruction   = "ProviderInstruction"
)

const (
	// workers is the number of calls at once.
	workers = 32
	// writers is enough for views of different clusters seldom to wait for each other.
	writers = 1024
)

// Options of a Mailbox.
type Options struct {
	// Handler is the REST interface. A request with a context of As is one of that cluster.
	Handler http.Handler
	As      func(ctx context.Context, cluster string) context.Context
	Clock   clock.PassiveClock
	Log     logr.Logger
}

// Mailbox serves the clusters with a namespace.
type Mailbox struct {
	Options
	// tenants has the objects in all namespaces of clusters. api reads live.
	tenants cache.Cache
	api     client.Client
	// writing has the views that are being written, by cluster and ID.
	writing keymutex.KeyMutex

	// ctx is that of the sessions.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu       sync.Mutex
	sessions map[viewer]*session
}

// New adds a Mailbox to a manager, whose leader runs it.
func New(mgr manager.Manager, options Options) error {
	m := &Mailbox{Options: options, writing: keymutex.NewHashed(writers), sessions: map[viewer]*session{}}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	owned, err := labels.NewRequirement(objects.LabelTenant, selection.Exists, nil)
	if err != nil {
		return fmt.Errorf("selecting the objects of clusters: %w", err)
	}
	m.tenants, err = cache.New(mgr.GetConfig(), cache.Options{
		Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), DefaultLabelSelector: labels.NewSelector().Add(*owned), DefaultTransform: cache.TransformStripManagedFields(),
	})
	if err != nil {
		return fmt.Errorf("creating the cache of the clusters' namespaces: %w", err)
	}
	if m.api, err = client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper()}); err != nil {
		return fmt.Errorf("creating a client of the clusters' namespaces: %w", err)
	}
	if err := errors.Join(mgr.Add(m.tenants), mgr.Add(m)); err != nil {
		return err
	}
	skip := mgr.GetControllerOptions().SkipNameValidation
	for _, kind := range []string{kindAdvertisement, kindReservation, kindInstruction} {
		calls, err := controller.New("calls-"+strings.ToLower(kind), mgr, controller.Options{
			MaxConcurrentReconciles: workers, SkipNameValidation: skip,
			Reconciler: reconcile.Func(func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
				return ctrl.Result{}, m.reconcile(ctx, kind, request.NamespacedName)
			}),
		})
		if err != nil {
			return fmt.Errorf("adding the controller of calls: %w", err)
		}
		if err := calls.Watch(source.Kind[client.Object](m.tenants, object(kind, "", ""), &handler.EnqueueRequestForObject{})); err != nil {
			return fmt.Errorf("watching the %ss of clusters: %w", kind, err)
		}
	}
	return nil
}

// Start implements manager.Runnable: it ends the sessions with ctx.
func (m *Mailbox) Start(ctx context.Context) error {
	<-ctx.Done()
	m.cancel()
	m.running.Wait()
	return nil
}

func object(kind, namespace, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(broker.GroupVersion.WithKind(kind))
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

// reconcile makes the call of an object, unless it was answered, and opens its sessions.
func (m *Mailbox) reconcile(ctx context.Context, kind string, key types.NamespacedName) error {
	cluster, ok := strings.CutPrefix(key.Namespace, objects.Namespace(""))
	if !ok {
		return nil
	}
	if kind == kindAdvertisement && key.Name != cluster {
		// A cluster has one.
		return nil
	}
	carrier := object(kind, "", "")
	if err := m.tenants.Get(ctx, key, carrier); err != nil {
		return client.IgnoreNotFound(err)
	}
	annotations := carrier.GetAnnotations()
	if kind == kindAdvertisement {
		for _, role := range []protocol.Role{protocol.RoleRequester, protocol.RoleProvider, ""} {
			m.open(viewer{cluster, role}, annotations[objects.AnnotationSession(role)])
		}
	}
	request, open := pending(annotations)
	if !open {
		return nil
	}
	answer, err := m.answer(ctx, cluster, carrier, request)
	if err != nil {
		return err
	}
	encoded, err := json.Marshal(answer)
	if err != nil {
		return fmt.Errorf("encoding the answer: %w", err)
	}
	answered := object(kind, key.Namespace, key.Name)
	if err := m.annotate(ctx, answered, objects.AnnotationAnswer, string(encoded)); err != nil {
		return client.IgnoreNotFound(err)
	}
	if kind != kindAdvertisement && answer.Error != nil && answer.Error.Code == protocol.CodeNotFound {
		// A Relist may have left it for the call's sake.
		return m.discard(ctx, answered)
	}
	return nil
}

// discard deletes an object as it was read.
func (m *Mailbox) discard(ctx context.Context, stale client.Object) error {
	err := m.api.Delete(ctx, stale, client.Preconditions{ResourceVersion: ptr.To(stale.GetResourceVersion())})
	if apierrors.IsConflict(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}

// pending is the request of an object that has not been answered.
func pending(annotations map[string]string) (request objects.Request, open bool) {
	if json.Unmarshal([]byte(annotations[objects.AnnotationRequest]), &request) != nil || request.ID == "" {
		return request, false
	}
	var answer objects.Answer
	return request, json.Unmarshal([]byte(annotations[objects.AnnotationAnswer]), &answer) != nil || answer.ID != request.ID
}

// annotate sets an annotation of an object that exists.
func (m *Mailbox) annotate(ctx context.Context, of client.Object, key, value string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{key: value}}})
	if err != nil {
		return fmt.Errorf("encoding an annotation: %w", err)
	}
	return m.api.Patch(ctx, of, client.RawPatch(types.MergePatchType, patch))
}

// answer makes a call of a cluster. What it changes of a view is there before the answer.
func (m *Mailbox) answer(ctx context.Context, cluster string, carrier *unstructured.Unstructured, request objects.Request) (objects.Answer, error) {
	answer := objects.Answer{ID: request.ID}
	refuse := func(code, message string) (objects.Answer, error) {
		answer.Error = &protocol.Error{Code: code, Message: message}
		return answer, nil
	}
	if request.Method != http.MethodPost && request.Method != http.MethodDelete {
		return refuse(protocol.CodeInvalid, "only POST and DELETE are calls of objects: what there is to read is in the objects")
	}
	if now := m.Clock.Now(); now.After(request.Expires) {
		return refuse(protocol.CodeUnavailable, fmt.Sprintf("the request expired at %s, and the broker's clock says %s: make it again, with a clock that is right", request.Expires.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339)))
	}
	body, err := bodyOf(carrier, request)
	if err != nil {
		return refuse(protocol.CodeInvalid, err.Error())
	}
	call, err := http.NewRequestWithContext(m.As(ctx, cluster), request.Method, request.Path, bytes.NewReader(body))
	if err != nil {
		return refuse(protocol.CodeInvalid, "path is not one of the REST interface")
	}
	call.Header.Set(protocol.HeaderVersion, request.Version)
	if request.Path == protocol.PathReservations {
		// What a stream says of the object meanwhile is newer, and comes after.
		defer m.lock(cluster, carrier.GetName())()
	}
	response := &response{header: http.Header{}, status: http.StatusOK}
	m.Handler.ServeHTTP(response, call)
	switch {
	case response.status/100 != 2:
		answer.Error = &protocol.Error{}
		if json.Unmarshal(response.body.Bytes(), answer.Error) != nil {
			answer.Error.Code = protocol.CodeInternal
		}
		seconds, _ := strconv.Atoi(response.header.Get("Retry-After"))
		answer.RetryAfter = time.Duration(seconds) * time.Second
	case request.Path == protocol.PathReservations:
		var view protocol.ConsumerView
		if err := json.Unmarshal(response.body.Bytes(), &view); err != nil {
			return answer, fmt.Errorf("decoding a view: %w", err)
		}
		if err := m.putConsumer(ctx, cluster, view); refused(err) {
			return refuse(protocol.CodeTooLarge, "the view cannot be written: "+err.Error())
		} else if err != nil {
			return answer, err
		}
	case response.body.Len() > objects.MaxAnswer:
		return refuse(protocol.CodeTooLarge, "the response is too large for an annotation")
	default:
		answer.Body = bytes.TrimSpace(response.body.Bytes())
	}
	return answer, nil
}

// lock has the view of an object to itself until unlock.
func (m *Mailbox) lock(cluster, id string) (unlock func()) {
	key := cluster + "/" + id
	m.writing.LockKey(key)
	return func() { _ = m.writing.UnlockKey(key) }
}

// bodyOf is the body of a call, with the spec of its object.
func bodyOf(carrier *unstructured.Unstructured, request objects.Request) ([]byte, error) {
	spec, err := json.Marshal(carrier.Object["spec"])
	if err != nil {
		return nil, fmt.Errorf("encoding the spec: %w", err)
	}
	switch {
	case request.Path == protocol.PathAdvertisements && carrier.GetKind() == kindAdvertisement:
		return spec, nil
	case request.Path == protocol.PathReservations && carrier.GetKind() == kindReservation:
		var body map[string]json.RawMessage
		if err := json.Unmarshal(request.Body, &body); err != nil || body == nil {
			return nil, errors.New("the body is not a request for a reservation")
		}
		body["spec"] = spec
		return json.Marshal(body)
	}
	return request.Body, nil
}

// response is a response in memory.
type response struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *response) Header() http.Header               { return r.header }
func (r *response) WriteHeader(status int)            { r.status = status }
func (r *response) Write(content []byte) (int, error) { return r.body.Write(content) }
