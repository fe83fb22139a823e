package mailbox

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"
	"k8s.io/utils/keymutex"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// newMailbox has the objects of rome in memory.
func newMailbox(t *testing.T, handler http.HandlerFunc, failing interceptor.Funcs, exists ...client.Object) *Mailbox {
	t.Helper()
	scheme := runtime.NewScheme()
	expect.NoError(t, broker.AddToScheme(scheme))
	return &Mailbox{
		Options: Options{Handler: handler, As: func(ctx context.Context, _ string) context.Context { return ctx }, Clock: clock.RealClock{}, Log: logr.Discard()},
		api:     fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(failing).WithObjects(exists...).Build(),
		writing: keymutex.NewHashed(4), sessions: map[viewer]*session{},
	}
}

func seen(t *testing.T, m *Mailbox, id string) (view protocol.ConsumerView, exists bool) {
	t.Helper()
	stored := object(kindReservation, objects.Namespace("rome"), id)
	if err := m.api.Get(t.Context(), client.ObjectKeyFromObject(stored), stored); err != nil {
		expect.NoError(t, client.IgnoreNotFound(err))
		return view, false
	}
	expect.NoError(t, objects.Unpack(stored.GetAnnotations()[objects.AnnotationView], &view))
	return view, true
}

// TestStreamIsNewer: what a stream says while a call is made stays, and what it deletes does not
// come back with the response.
func TestStreamIsNewer(t *testing.T) {
	for what, newer := range map[string]protocol.Event{
		"changed": {Type: protocol.EventPut, Consumer: []protocol.ConsumerView{{ID: "one", SourceGeneration: 2}}},
		"deleted": {Type: protocol.EventDelete, ID: "one"},
	} {
		t.Run(what, func(t *testing.T) {
			var s *session
			streamed := make(chan error, 1)
			m := newMailbox(t, func(w http.ResponseWriter, _ *http.Request) {
				go func() { streamed <- s.apply(t.Context(), newer) }()
				select {
				case err := <-streamed:
					streamed <- err
				case <-time.After(200 * time.Millisecond):
				}
				_ = json.NewEncoder(w).Encode(protocol.ConsumerView{ID: "one", SourceGeneration: 1})
			}, interceptor.Funcs{})
			s = &session{Mailbox: m, viewer: viewer{"rome", protocol.RoleRequester}}
			carrier := object(kindReservation, objects.Namespace("rome"), "one")
			carrier.Object["spec"] = map[string]any{}
			expect.NoError(t, m.api.Create(t.Context(), carrier.DeepCopy()))
			answer, err := m.answer(t.Context(), "rome", carrier, objects.Request{ID: "1", Expires: time.Now().Add(time.Hour), Method: http.MethodPost, Path: protocol.PathReservations, Body: []byte("{}")})
			if expect.NoError(t, err); answer.Error != nil {
				t.Fatal(answer.Error)
			}
			expect.NoError(t, <-streamed)
			if view, exists := seen(t, m, "one"); exists != (what == "changed") || exists && view.SourceGeneration != 2 {
				t.Errorf("rome sees %t, %+v", exists, view)
			}
		})
	}
}

// live is a cache that has what the API server has.
type live struct {
	cache.Cache
	api client.Reader
}

func (l live) Get(ctx context.Context, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
	return l.api.Get(ctx, key, into, options...)
}

// TestCallAboutNothing: an object that a Relist has left, as a call was about it, ends with that
// call; what is there remains, whatever a call is refused for.
func TestCallAboutNothing(t *testing.T) {
	for code, remains := range map[string]bool{protocol.CodeNotFound: false, protocol.CodeConflict: true} {
		m := newMailbox(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusConflict)
			_ = json.NewEncoder(w).Encode(protocol.Error{Code: code})
		}, interceptor.Funcs{})
		m.tenants = live{api: m.api}
		request, err := json.Marshal(objects.Request{ID: "1", Expires: time.Now().Add(time.Hour), Method: http.MethodPost, Path: protocol.PathReservations + "/one/renew?role=requester"})
		expect.NoError(t, err)
		carrier := object(kindReservation, objects.Namespace("rome"), "one")
		carrier.SetAnnotations(map[string]string{objects.AnnotationRequest: string(request)})
		expect.NoError(t, m.api.Create(t.Context(), carrier))
		expect.NoError(t, m.putConsumer(t.Context(), "rome", protocol.ConsumerView{ID: "one"}))
		s := &session{Mailbox: m, viewer: viewer{"rome", protocol.RoleRequester}}
		expect.NoError(t, s.relist(t.Context(), protocol.Event{Type: protocol.EventRelist}))
		if _, exists := seen(t, m, "one"); !exists {
			t.Error("a Relist deletes what a call is about")
		}
		expect.NoError(t, m.reconcile(t.Context(), kindReservation, client.ObjectKeyFromObject(carrier)))
		if _, exists := seen(t, m, "one"); exists != remains {
			t.Errorf("after %s, it exists: %t", code, exists)
		}
	}
}

// TestViewThatCannotBeWritten: the cluster sees the others, and that all of them are there.
func TestViewThatCannotBeWritten(t *testing.T) {
	advertisement := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: objects.Namespace("rome"), Name: "rome"}}
	m := newMailbox(t, nil, interceptor.Funcs{Create: func(ctx context.Context, api client.WithWatch, o client.Object, options ...client.CreateOption) error {
		if o.GetName() == "large" {
			return apierrors.NewInvalid(broker.GroupVersion.WithKind(kindReservation).GroupKind(), o.GetName(), nil)
		}
		return api.Create(ctx, o, options...)
	}}, advertisement)
	s := &session{Mailbox: m, viewer: viewer{"rome", protocol.RoleRequester}, id: "mine", stream: "first"}
	expect.NoError(t, s.apply(t.Context(), protocol.Event{Type: protocol.EventRelist, Consumer: []protocol.ConsumerView{{ID: "large"}, {ID: "one"}}}))
	if _, exists := seen(t, m, "one"); !exists {
		t.Error("rome does not see the other view")
	}
	expect.NoError(t, m.api.Get(t.Context(), client.ObjectKeyFromObject(advertisement), advertisement))
	if listed := advertisement.Annotations[objects.AnnotationListed(protocol.RoleRequester)]; listed != objects.Session("mine", "first") {
		t.Errorf("listed: %q", listed)
	}
}

// TestLateRequest: what an agent does not wait for any more is not done.
func TestLateRequest(t *testing.T) {
	m := newMailbox(t, func(http.ResponseWriter, *http.Request) { t.Error("it was called") }, interceptor.Funcs{})
	request := objects.Request{ID: "1", Expires: time.Now().Add(-time.Second), Method: http.MethodDelete, Path: protocol.PathReservations + "/one"}
	answer, err := m.answer(t.Context(), "rome", object(kindReservation, objects.Namespace("rome"), "one"), request)
	if err != nil || answer.ID != "1" || answer.Error == nil || answer.Error.Code != protocol.CodeUnavailable {
		t.Errorf("%+v, %v", answer, err)
	}
}
