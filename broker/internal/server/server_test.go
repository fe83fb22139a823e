package server

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

const (
	namespace = "default"
	patience  = 20 * time.Second
)

// testHub is a broker under test: the real server, authority and reservation
// controllers over a real API server.
type testHub struct {
	api       client.Client
	authority *identity.Authority
	url       string
	token     string
	stop      func()
}

func startHub(t *testing.T) *testHub {
	t.Helper()
	ctrl.SetLogger(logr.Discard())
	config := controlplane.Start(t)
	all := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(all), broker.AddToScheme(all)); err != nil {
		t.Fatal(err)
	}
	api, err := client.New(config, client.Options{Scheme: all})
	must(t, err)
	config = limited(t, api, config)
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:  all,
		Cache:   cache.Options{DefaultNamespaces: map[string]cache.Config{namespace: {}}},
		Metrics: metricsserver.Options{BindAddress: "0"},
		// Each test starts a manager of its own in one process.
		Controller: ctrlconfig.Controller{SkipNameValidation: new(true)},
	})
	must(t, err)
	live, err := client.New(config, client.Options{Scheme: all})
	must(t, err)
	authority, err := identity.New(t.Context(), identity.Options{Client: live, Cache: mgr.GetClient(), Namespace: namespace})
	must(t, err)
	receipts := NewReceipts(clock.RealClock{})
	core := reservation.New(mgr, reservation.Options{Namespace: namespace, Freshness: receipts})
	must(t, core.SetupWithManager(mgr))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	_, err = New(mgr, Options{Listener: listener, Namespace: namespace, Identity: authority, Core: core, Receipts: receipts, Log: logr.Discard()})
	must(t, err)
	secret := &corev1.Secret{}
	must(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: identity.TokenName}, secret))

	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	hub := &testHub{api: api, authority: authority, url: "https://" + listener.Addr().String(), token: string(secret.Data[identity.TokenKey])}
	hub.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the broker ended with: %v", err)
			}
		case <-time.After(patience):
			t.Error("the broker did not end")
		}
	})
	t.Cleanup(hub.stop)
	eventually(t, "the broker is ready", func() error {
		answer := hub.call(t, nil, http.MethodGet, protocol.PathReadyz, nil)
		if answer.err != nil {
			return answer.err
		}
		if answer.status != http.StatusOK {
			return answer.refusal()
		}
		return nil
	})
	return hub
}

// limited is the broker's own access to the API server: that of a Role in its
// namespace, and no more.
func limited(t *testing.T, api client.Client, config *rest.Config) *rest.Config {
	t.Helper()
	const name = "spillway-broker"
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	must(t, api.Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{broker.Group}, Resources: []string{"brokerconfigs"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusterregistrations"}, Verbs: []string{"get", "list", "watch", "create"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusterregistrations/status"}, Verbs: []string{"update", "patch"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusteradvertisements"}, Verbs: []string{"get", "list", "watch", "create", "update"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"reservations"}, Verbs: []string{"get", "list", "watch", "create", "update", "delete"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusteradvertisements/status", "reservations/status"}, Verbs: []string{"update"}},
		{APIGroups: []string{""}, Resources: []string{"secrets", "configmaps"}, Verbs: []string{"create"}},
		{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}, ResourceNames: []string{identity.CAName, identity.TokenName}},
		{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"update"}, ResourceNames: []string{identity.CAName}},
		{APIGroups: []string{"events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	}}))
	must(t, api.Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: meta,
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
	}))
	config = rest.CopyConfig(config)
	config.Impersonate.UserName = name
	return config
}

// cluster is an agent's side of a joined cluster.
type cluster struct {
	id     string
	tls    *tls.Config
	client *protocol.Client
}

func (h *testHub) join(t *testing.T, id string) *cluster {
	t.Helper()
	key, csr := newCSR(t, id)
	answer, err := protocol.Join(t.Context(), h.url, h.authority.CAHash(), id, h.token, csr)
	must(t, err)
	return h.with(t, id, key, answer)
}

func (h *testHub) with(t *testing.T, id string, key *ecdsa.PrivateKey, answer protocol.JoinResponse) *cluster {
	t.Helper()
	return h.through(t, h.url, id, &tls.Certificate{Certificate: [][]byte{decodePEM(t, answer.Certificate)}, PrivateKey: key})
}

func (h *testHub) through(t *testing.T, url, id string, certificate *tls.Certificate) *cluster {
	t.Helper()
	config, err := protocol.TLSConfig(h.authority.CAPEM(), func() (*tls.Certificate, error) { return certificate, nil })
	must(t, err)
	c, err := protocol.NewClient(url, config, logr.Discard())
	must(t, err)
	t.Cleanup(c.Close)
	return &cluster{id: id, tls: config, client: c}
}

// answer is a raw one.
type answer struct {
	status int
	body   []byte
	err    error
}

func (a answer) refusal() error {
	refusal := &protocol.Error{}
	if err := json.Unmarshal(a.body, refusal); err != nil {
		return fmt.Errorf("status %d with a body that is no Error: %q", a.status, a.body)
	}
	return refusal
}

// call makes a call by hand. Without a config the caller has no certificate.
func (h *testHub) call(t *testing.T, config *tls.Config, method, path string, body []byte) answer {
	t.Helper()
	if config == nil {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(h.authority.CAPEM())
		config = &tls.Config{RootCAs: roots}
	}
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), method, h.url+path, bytes.NewReader(body))
	must(t, err)
	response, err := (&http.Client{Transport: transport, Timeout: patience}).Do(request)
	if err != nil {
		return answer{err: err}
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	return answer{status: response.StatusCode, body: content, err: err}
}

// expect fails unless an answer refuses with this status and a sentence.
func (a answer) expect(t *testing.T, status int, sentence string) {
	t.Helper()
	if a.err != nil {
		t.Fatalf("no answer: %v", a.err)
	}
	refusal := a.refusal()
	if a.status != status || !strings.Contains(refusal.Error(), sentence) {
		t.Fatalf("want %d with %q, got %d: %v", status, sentence, a.status, refusal)
	}
}

func expectCode(t *testing.T, err error, code string) {
	t.Helper()
	if !protocol.HasCode(err, code) {
		t.Fatalf("want the broker's %s, got %v", code, err)
	}
}

func TestJoining(t *testing.T) {
	hub := startHub(t)
	hash := hub.authority.CAHash()
	key, csr := newCSR(t, "rome")
	first, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, csr)
	must(t, err)
	rome := hub.with(t, "rome", key, first)
	if _, err := rome.client.Advertisements(t.Context()); err != nil {
		t.Fatalf("the first call with a new certificate: %v", err)
	}
	t.Run("the same key may join again", func(t *testing.T) {
		again, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, csr)
		must(t, err)
		if again.Certificate == first.Certificate {
			t.Fatal("want a new certificate")
		}
	})
	t.Run("another key may not", func(t *testing.T) {
		_, other := newCSR(t, "rome")
		_, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, other)
		expectCode(t, err, protocol.CodeConflict)
		if !strings.Contains(err.Error(), "delete clusterregistration rome") {
			t.Fatalf("the refusal does not say what to do: %v", err)
		}
	})
	t.Run("a wrong token", func(t *testing.T) {
		_, csr := newCSR(t, "paris")
		_, err := protocol.Join(t.Context(), hub.url, hash, "paris", hub.token+"x", csr)
		expectCode(t, err, protocol.CodeUnauthorized)
	})
	t.Run("a request for another name", func(t *testing.T) {
		_, csr := newCSR(t, "paris")
		_, err := protocol.Join(t.Context(), hub.url, hash, "berlin", hub.token, csr)
		expectCode(t, err, protocol.CodeInvalid)
	})
	t.Run("a name that is none", func(t *testing.T) {
		_, csr := newCSR(t, "Paris!")
		_, err := protocol.Join(t.Context(), hub.url, hash, "Paris!", hub.token, csr)
		expectCode(t, err, protocol.CodeInvalid)
	})
	t.Run("a wrong hash of the CA", func(t *testing.T) {
		_, csr := newCSR(t, "paris")
		_, err := protocol.Join(t.Context(), hub.url, "sha256:"+strings.Repeat("0", 64), "paris", hub.token, csr)
		if err == nil || !strings.Contains(err.Error(), "check broker.caHash") {
			t.Fatalf("want a refusal that names broker.caHash, got %v", err)
		}
	})
	t.Run("no certificate", func(t *testing.T) {
		for _, route := range (&Server{}).routes() {
			if !route.open {
				path := strings.ReplaceAll(route.path, "{id}", "some")
				hub.call(t, nil, route.method, path, nil).expect(t, http.StatusUnauthorized, "needs the certificate")
			}
		}
	})
	t.Run("a certificate of another CA", func(t *testing.T) {
		foreign, _ := newCSR(t, "rome")
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "rome"}, NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		der, err := x509.CreateCertificate(rand.Reader, template, template, foreign.Public(), foreign)
		must(t, err)
		stranger := hub.through(t, hub.url, "rome", &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: foreign})
		if got := hub.call(t, stranger.tls, http.MethodGet, protocol.PathAdvertisements, nil); got.err == nil {
			t.Fatalf("want the handshake to fail, got %d", got.status)
		}
	})
	t.Run("the broker's own certificate is no cluster's", func(t *testing.T) {
		serving, err := hub.authority.TLSConfig().GetCertificate(nil)
		must(t, err)
		stranger := hub.through(t, hub.url, "broker", serving)
		if got := hub.call(t, stranger.tls, http.MethodGet, protocol.PathAdvertisements, nil); got.err == nil {
			t.Fatalf("want the handshake to fail, got %d", got.status)
		}
	})
	t.Run("a registration that is deleted ends the certificate and frees the name", func(t *testing.T) {
		must(t, hub.api.Delete(t.Context(), &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "rome"}}))
		eventually(t, "rome is turned away", func() error {
			if _, err := rome.client.Advertisements(t.Context()); !protocol.HasCode(err, protocol.CodeUnauthorized) {
				return fmt.Errorf("got %v", err)
			}
			return nil
		})
		_, other := newCSR(t, "rome")
		_, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, other)
		must(t, err)
	})
	t.Run("too many attempts", func(t *testing.T) {
		eventually(t, "the address is told to wait", func() error {
			got := hub.call(t, nil, http.MethodPost, protocol.PathJoin, []byte(`{}`))
			if got.status != http.StatusTooManyRequests {
				return fmt.Errorf("got %d", got.status)
			}
			return nil
		})
	})
}

func TestCalls(t *testing.T) {
	hub := startHub(t)
	rome, paris, berlin := hub.join(t, "rome"), hub.join(t, "paris"), hub.join(t, "berlin")

	t.Run("bodies are strict and bounded", func(t *testing.T) {
		post := func(path, body string) answer {
			return hub.call(t, rome.tls, http.MethodPost, path, []byte(body))
		}
		post(protocol.PathAdvertisements, `{"clusterID":"rome","resources":{"reserved":{}}}`).expect(t, 400, `unknown field "reserved"`)
		post(protocol.PathAdvertisements, `{"clusterID":"rome"} {}`).expect(t, 400, "something after it")
		post(protocol.PathAdvertisements, `[]`).expect(t, 400, "not the JSON")
		post(protocol.PathRelay, `{"to":"`+strings.Repeat("x", protocol.MaxBody)+`"}`).expect(t, 413, "bytes")
		post(protocol.PathAdvertisements, `{"clusterID":"paris"}`).expect(t, 403, "must be its own")
		request := newRequest("home")
		request.Spec.RequesterID = "paris"
		post(protocol.PathReservations, encode(t, request)).expect(t, 403, "must be empty or its own")
		request = newRequest("home")
		request.SourceUID = "../x"
		post(protocol.PathReservations, encode(t, request)).expect(t, 400, "sourceUID")
		request = newRequest("home")
		request.Spec.PodSets[0].Requests.CPU = quantity("-1")
		post(protocol.PathReservations, encode(t, request)).expect(t, 400, "must not be negative")
		post("/api/v2/reservations", `{}`).expect(t, 404, "there is no POST")
	})

	t.Run("advertisements", func(t *testing.T) {
		spec := newAdvertisement("berlin")
		got, err := berlin.client.PublishAdvertisement(t.Context(), spec)
		must(t, err)
		if got.Sequence != spec.Sequence {
			t.Fatalf("want sequence %d acknowledged, got %d", spec.Sequence, got.Sequence)
		}
		key := client.ObjectKey{Namespace: namespace, Name: "berlin"}
		var before, after broker.ClusterAdvertisement
		eventually(t, "others see it", func() error {
			view, err := rome.client.Advertisement(t.Context(), "berlin")
			if err == nil && view.Spec.EndpointURL != spec.EndpointURL {
				return fmt.Errorf("got %+v", view)
			}
			return err
		})
		eventually(t, "its account is up to date", func() error {
			must(t, hub.api.Get(t.Context(), key, &before))
			if !before.Status.Active {
				return errors.New("it is not active")
			}
			return nil
		})
		spec.Sequence++
		_, err = berlin.client.PublishAdvertisement(t.Context(), spec)
		must(t, err)
		must(t, hub.api.Get(t.Context(), key, &after))
		if before.ResourceVersion != after.ResourceVersion {
			t.Fatal("an advertisement that says nothing new was written")
		}
	})

	t.Run("a reservation is its requester's and its provider's only", func(t *testing.T) {
		_, err := paris.client.PublishAdvertisement(t.Context(), newAdvertisement("paris"))
		must(t, err)
		_, err = rome.client.PublishAdvertisement(t.Context(), withoutLending(newAdvertisement("rome")))
		must(t, err)
		request := newRequest("mine")
		request.Spec.TargetClusterID = "paris"
		view, err := rome.client.PutReservation(t.Context(), request)
		must(t, err)
		again, err := rome.client.PutReservation(t.Context(), request)
		must(t, err)
		if view.ID != again.ID || view.ID != "rome-"+string(request.SourceUID) {
			t.Fatalf("the same ask is two reservations: %s and %s", view.ID, again.ID)
		}
		stored := &broker.Reservation{}
		must(t, hub.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: view.ID}, stored))
		for label, want := range map[string]string{broker.LabelRequester: "rome", broker.LabelSourceNamespace: "shop", broker.LabelSourceName: "mine"} {
			if stored.Labels[label] != want {
				t.Errorf("label %s is %q, not %q", label, stored.Labels[label], want)
			}
		}
		var hold protocol.ProviderView
		eventually(t, "paris sees the hold", func() (err error) {
			hold, err = paris.client.ProviderReservation(t.Context(), view.ID)
			return err
		})
		if hold.Requester != "rome" || hold.RequesterPeerKey != "key-of-rome" {
			t.Fatalf("the hold does not say whose it is: %+v", hold)
		}
		eventually(t, "rome sees its provider", func() error {
			view, err := rome.client.ConsumerReservation(t.Context(), view.ID)
			if err == nil && (len(view.Status.Allocations) != 1 || view.Status.Allocations[0].Endpoint != "https://paris.test:6443" || view.PeerKeys["paris"] != "key-of-paris") {
				return fmt.Errorf("got %+v", view)
			}
			return err
		})
		// Nobody else sees or touches it, on either side.
		_, err = berlin.client.ConsumerReservation(t.Context(), view.ID)
		expectCode(t, err, protocol.CodeNotFound)
		_, err = berlin.client.ProviderReservation(t.Context(), view.ID)
		expectCode(t, err, protocol.CodeNotFound)
		_, err = paris.client.ConsumerReservation(t.Context(), view.ID)
		expectCode(t, err, protocol.CodeNotFound)
		expectCode(t, berlin.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: hold.Hold.ReservationUID, Attempt: hold.Hold.Attempt, Accepted: true}), protocol.CodeNotFound)
		expectCode(t, berlin.client.AckRequester(t.Context(), view.ID, protocol.RequesterAck{Attempt: hold.Hold.Attempt}), protocol.CodeNotFound)
		for _, other := range []*cluster{paris, berlin} {
			hub.call(t, other.tls, http.MethodDelete, protocol.PathReservations+"/"+view.ID, nil).expect(t, 404, "not this cluster's")
			if list, err := other.client.ConsumerReservations(t.Context()); err != nil || len(list) != 0 {
				t.Fatalf("%s lists %v, %v", other.id, list, err)
			}
		}
		others, err := berlin.client.Advertisement(t.Context(), "paris")
		must(t, err)
		if len(others.Status.Holds) != 0 {
			t.Fatalf("berlin sees who holds what in paris: %+v", others.Status.Holds)
		}
		must(t, paris.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: hold.Hold.ReservationUID, Attempt: hold.Hold.Attempt, Accepted: true}))
		eventually(t, "rome sees that paris accepted", func() error {
			view, err := rome.client.ConsumerReservation(t.Context(), view.ID)
			if err == nil && !slices.ContainsFunc(view.Status.Allocations, func(a broker.Allocation) bool { return a.Accepted }) {
				return fmt.Errorf("got %+v", view.Status)
			}
			return err
		})

		request.Spec.PodSets[0].NodeSelector = map[string]string{"another": "shape"}
		request.SourceGeneration++
		_, err = rome.client.PutReservation(t.Context(), request)
		expectCode(t, err, protocol.CodeConflict)
	})

	t.Run("an older ask changes nothing", func(t *testing.T) {
		request := newRequest("late")
		request.SourceGeneration = 2
		_, err := rome.client.PutReservation(t.Context(), request)
		must(t, err)
		newer := request
		newer.SourceGeneration, newer.Spec.PodSets = 3, slices.Clone(request.Spec.PodSets)
		newer.Spec.PodSets[0].Count = 9
		newer.Spec.Retained = []broker.RetainedPods{{Cluster: "paris", Count: 1}}
		_, err = rome.client.PutReservation(t.Context(), newer)
		must(t, err)
		view, err := rome.client.PutReservation(t.Context(), request)
		must(t, err)
		stored := &broker.Reservation{}
		must(t, hub.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: view.ID}, stored))
		if stored.Spec.PodSets[0].Count != 9 || len(stored.Spec.Retained) != 1 {
			t.Fatalf("want the newer ask to stand, got %+v", stored)
		}
	})

	t.Run("relay", func(t *testing.T) {
		received := watch(t, paris, "")
		expectEvent(t, received, "a Relist", func(event protocol.Event) bool {
			return event.Type == protocol.EventRelist && len(event.Relay) == 0
		})
		must(t, rome.client.Relay(t.Context(), protocol.RelayMessage{To: "paris", ID: "1", Sealed: []byte("secret")}))
		expectEvent(t, received, "the message", func(event protocol.Event) bool {
			return event.Type == protocol.EventPut && len(event.Relay) == 1 && event.Relay[0].From == "rome" && string(event.Relay[0].Sealed) == "secret"
		})
		for reason, message := range map[string]protocol.RelayMessage{
			protocol.CodeNotFound:  {To: "nowhere", ID: "1", Sealed: []byte("x")},
			protocol.CodeTooLarge:  {To: "paris", ID: "1", Sealed: make([]byte, protocol.MaxSealed+1)},
			protocol.CodeForbidden: {From: "berlin", To: "paris", ID: "1", Sealed: []byte("x")},
			protocol.CodeInvalid:   {To: "paris", Sealed: []byte("x")},
		} {
			expectCode(t, rome.client.Relay(t.Context(), message), reason)
		}
		letter := []byte(encode(t, protocol.RelayMessage{To: "berlin", ID: "1", Sealed: []byte("x")}))
		for range maxMail {
			if got := hub.call(t, rome.tls, http.MethodPost, protocol.PathRelay, letter); got.status != http.StatusAccepted {
				t.Fatalf("got %d: %s", got.status, got.body)
			}
		}
		hub.call(t, rome.tls, http.MethodPost, protocol.PathRelay, letter).expect(t, http.StatusTooManyRequests, "wait for cluster berlin")
		expectEvent(t, watch(t, berlin, ""), "what was waiting", func(event protocol.Event) bool {
			return event.Type == protocol.EventRelist && len(event.Relay) == maxMail
		})
	})
}

func TestStreams(t *testing.T) {
	hub := startHub(t)
	rome, paris := hub.join(t, "rome"), hub.join(t, "paris")
	_, err := paris.client.PublishAdvertisement(t.Context(), newAdvertisement("paris"))
	must(t, err)

	line := cuttable(t, strings.TrimPrefix(hub.url, "https://"))
	shaky := hub.through(t, "https://"+line.address, "rome", certificateOf(t, rome))
	consumer, provider, broken := watch(t, rome, protocol.RoleRequester), watch(t, paris, protocol.RoleProvider), watch(t, shaky, protocol.RoleRequester)
	for _, events := range []chan protocol.Event{consumer, provider, broken} {
		expectEvent(t, events, "an empty Relist", func(event protocol.Event) bool {
			return event.Type == protocol.EventRelist && len(event.Consumer) == 0 && len(event.Provider) == 0
		})
	}

	// The holds of the first reservation are let go of by hand, as paris would.
	view, err := rome.client.PutReservation(t.Context(), newRequest("first"))
	must(t, err)
	expectEvent(t, consumer, "a Put of the reservation", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && event.Consumer[0].ID == view.ID && event.Consumer[0].SourceName == "first"
	})
	hold := expectEvent(t, provider, "a Put of the hold", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && event.Provider[0].ID == view.ID && event.Provider[0].Hold.Promised.Pods() == 2
	}).Provider[0]
	must(t, paris.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: hold.Hold.ReservationUID, Attempt: hold.Hold.Attempt, Accepted: true}))
	expectEvent(t, consumer, "a Put of the acceptance", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && len(event.Consumer[0].Status.Allocations) == 1 && event.Consumer[0].Status.Allocations[0].Accepted
	})

	line.cut()
	expectEvent(t, broken, "a full Relist after the break", func(event protocol.Event) bool {
		return event.Type == protocol.EventRelist && len(event.Consumer) == 1 && event.Consumer[0].ID == view.ID
	})

	must(t, rome.client.DeleteReservation(t.Context(), view.ID))
	released := expectEvent(t, provider, "a Put of the release", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && event.Provider[0].ID == view.ID && event.Provider[0].Releasing()
	}).Provider[0]
	must(t, paris.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: released.Hold.ReservationUID, Attempt: released.Hold.Attempt, Accepted: true}))
	for _, events := range []chan protocol.Event{consumer, provider, broken} {
		expectEvent(t, events, "a Delete", func(event protocol.Event) bool { return event.Type == protocol.EventDelete && event.ID == view.ID })
	}
	must(t, rome.client.DeleteReservation(t.Context(), view.ID))

	t.Run("a cluster whose registration goes hears no more", func(t *testing.T) {
		must(t, hub.api.Delete(t.Context(), &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "rome"}}))
		eventually(t, "its streams end", func() error {
			if open := line.open(); open > 0 {
				return fmt.Errorf("%d are open", open)
			}
			return nil
		})
	})
	t.Run("stopping ends the streams", func(t *testing.T) {
		began := time.Now()
		hub.stop()
		if took := time.Since(began); took > shutdownGrace {
			t.Fatalf("it took %s", took)
		}
	})
}

// TestOpenAPICoversTheRoutes compares the document with the server, both ways.
func TestOpenAPICoversTheRoutes(t *testing.T) {
	var document struct {
		Paths map[string]map[string]struct {
			Security []any `json:"security"`
		} `json:"paths"`
	}
	must(t, json.Unmarshal(protocol.OpenAPI, &document))
	described := 0
	for _, item := range document.Paths {
		described += len(item)
	}
	routes := (&Server{}).routes()
	for _, route := range routes {
		operation, there := document.Paths[route.path][strings.ToLower(route.method)]
		if !there {
			t.Errorf("the document lacks %s %s", route.method, route.path)
		} else if open := len(operation.Security) == 0; open != route.open {
			t.Errorf("the document is wrong on whether %s %s needs a certificate", route.method, route.path)
		}
	}
	if described != len(routes) {
		t.Errorf("the document describes %d calls, the server has %d", described, len(routes))
	}
}

// watch collects a role's events until the test ends.
func watch(t *testing.T, of *cluster, role protocol.Role) chan protocol.Event {
	t.Helper()
	events := make(chan protocol.Event, 1024)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		of.client.Watch(ctx, role, func(event protocol.Event) { events <- event })
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(patience):
			t.Error("Watch did not end with its context")
		}
	})
	return events
}

// expectEvent skips events until one is as wanted.
func expectEvent(t *testing.T, events chan protocol.Event, what string, wanted func(protocol.Event) bool) protocol.Event {
	t.Helper()
	deadline := time.After(patience)
	var last protocol.Event
	for {
		select {
		case last = <-events:
			if wanted(last) {
				return last
			}
		case <-deadline:
			t.Fatalf("waited for %s; the last event was %+v", what, last)
		}
	}
}

// cuttableLine is a TCP proxy whose connections can be broken.
type cuttableLine struct {
	address string
	mutex   sync.Mutex
	ends    map[net.Conn]bool
}

func cuttable(t *testing.T, target string) *cuttableLine {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	line := &cuttableLine{address: listener.Addr().String(), ends: map[net.Conn]bool{}}
	t.Cleanup(func() {
		_ = listener.Close()
		line.cut()
	})
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", target)
			if err != nil {
				_ = from.Close()
				continue
			}
			line.mutex.Lock()
			line.ends[from], line.ends[to] = true, true
			line.mutex.Unlock()
			for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
				go func() {
					_, _ = io.Copy(pair[0], pair[1])
					_, _ = pair[0].Close(), pair[1].Close()
					line.mutex.Lock()
					delete(line.ends, from)
					delete(line.ends, to)
					line.mutex.Unlock()
				}()
			}
		}
	}()
	return line
}

func (l *cuttableLine) cut() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	for end := range l.ends {
		_ = end.Close()
	}
}

func (l *cuttableLine) open() int {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return len(l.ends)
}

func certificateOf(t *testing.T, c *cluster) *tls.Certificate {
	t.Helper()
	certificate, err := c.tls.GetClientCertificate(nil)
	must(t, err)
	return certificate
}

func newCSR(t *testing.T, name string) (*ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name}}, key)
	must(t, err)
	return key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

func decodePEM(t *testing.T, text string) []byte {
	t.Helper()
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		t.Fatal("not PEM")
	}
	return block.Bytes
}

func quantity(text string) *resource.Quantity {
	parsed := resource.MustParse(text)
	return &parsed
}

func newRequest(name string) protocol.ReservationRequest {
	return protocol.ReservationRequest{
		SourceUID: types.UID(uuid.NewUUID()), SourceNamespace: "shop", SourceName: name, SourceGeneration: 1,
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.ResourceQuantities{CPU: quantity("300m"), Memory: quantity("64Mi")}}}},
	}
}

func newAdvertisement(id string) broker.ClusterAdvertisementSpec {
	all := broker.ResourceQuantities{CPU: quantity("8"), Memory: quantity("16Gi")}
	return broker.ClusterAdvertisementSpec{
		ClusterID: id, EndpointURL: "https://" + id + ".test:6443", PeerKey: "key-of-" + id,
		Lending:     broker.Lending{Enabled: true},
		Resources:   broker.AdvertisedResources{Capacity: all, Allocatable: all},
		NodeClasses: []broker.NodeClass{{Name: "plain", Arch: "amd64", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: all, Pods: 100}}}},
		Timestamp:   metav1.Now().Rfc3339Copy(), Sequence: 1,
	}
}

func withoutLending(spec broker.ClusterAdvertisementSpec) broker.ClusterAdvertisementSpec {
	spec.Lending.Enabled = false
	return spec
}

func encode(t *testing.T, value any) string {
	t.Helper()
	encoded, err := json.Marshal(value)
	must(t, err)
	return string(encoded)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually polls until check succeeds.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited until %s: %v", what, err)
		}
		<-tick.C
	}
}
