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
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
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
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/advertisement"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/history/database"
	"github.com/spillway-dev/spillway/broker/internal/history/recorder"
	"github.com/spillway-dev/spillway/broker/internal/history/report"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

const namespace = "default"

// undecodable is the metric that the broker's main registers.
var undecodable = undecoded.NewGauge("broker")

func init() { ctrlmetrics.Registry.MustRegister(undecodable) }

// testHub is a broker with server, authority and reservation controllers on a real API
// server.
type testHub struct {
	server    *Server
	api       client.Client
	authority *identity.Authority
	url       string
	// metrics is the URL of the broker's metrics.
	metrics string
	token   string
	stop    func()
	// requests counts the broker's calls of the API server, by path.
	requests *requestCounter
}

// requestCounter counts the requests to each path.
type requestCounter struct {
	mutex sync.Mutex
	paths map[string]int
}

// countedRoundTripper counts the requests of one of the broker's clients.
type countedRoundTripper struct {
	*requestCounter
	next http.RoundTripper
}

func (c *countedRoundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	c.mutex.Lock()
	c.paths[r.URL.Path]++
	c.mutex.Unlock()
	return c.next.RoundTrip(r)
}

// to counts the requests to paths that contain part.
func (c *requestCounter) to(part string) int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	total := 0
	for path, count := range c.paths {
		if strings.Contains(path, part) {
			total += count
		}
	}
	return total
}

// core is what the server reports to.
type core struct {
	*reservation.Reconciler
	*advertisement.Clusters
}

func startHub(t *testing.T) *testHub {
	t.Helper()
	ctrl.SetLogger(logr.Discard())
	config := controlplane.Start(t)
	all := runtime.NewScheme()
	expect.NoError(t, errors.Join(scheme.AddToScheme(all), broker.AddToScheme(all)))
	api, err := client.New(config, client.Options{Scheme: all})
	expect.NoError(t, err)
	config = limited(t, api, config)
	requests := &requestCounter{paths: map[string]int{}}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return &countedRoundTripper{requests, next}
	})
	free, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	metrics := free.Addr().String()
	expect.NoError(t, free.Close())
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: all,
		Cache: cache.Options{
			DefaultNamespaces: map[string]cache.Config{namespace: {}},
			NewInformer:       undecoded.New(logr.Discard(), undecodable, clock.RealClock{}).NewInformer,
		},
		Metrics: metricsserver.Options{BindAddress: metrics},
		// Several tests start a manager in one process.
		Controller: ctrlconfig.Controller{SkipNameValidation: new(true), UsePriorityQueue: new(false)},
	})
	expect.NoError(t, err)
	live, err := client.New(config, client.Options{Scheme: all})
	expect.NoError(t, err)
	authority, err := identity.New(t.Context(), identity.Options{Client: live, Cache: mgr.GetClient(), Namespace: namespace})
	expect.NoError(t, err)
	committer := commit.New(commit.Hub{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Namespace: namespace}, clock.RealClock{})
	clusters := advertisement.New(advertisement.Options{Committer: committer, Clock: clock.RealClock{}, Workers: 128})
	reservations := reservation.New(clusters, mgr.GetEventRecorder("spillway-broker"))
	expect.NoError(t, errors.Join(reservations.SetupWithManager(mgr), clusters.SetupWithManager(mgr)))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	kept, err := database.OpenSQLite(filepath.Join(t.TempDir(), "history.db"))
	expect.NoError(t, err)
	t.Cleanup(func() { expect.NoError(t, kept.Close()) })
	writer := recorder.New(recorder.Options{
		Database: kept, Objects: committer.Store, Retention: time.Hour, Clock: clock.RealClock{}, Events: mgr.GetEventRecorder("spillway-broker"), Log: logr.Discard(),
	})
	expect.NoError(t, mgr.Add(writer))
	reservations.Keep(writer)
	server, err := New(mgr, Options{
		Listener: listener, Namespace: namespace, Identity: authority, Reconciler: core{reservations, clusters}, Store: committer.Store,
		History: &report.Calls{Store: kept, Clock: clock.RealClock{}}, Log: logr.Discard(),
	})
	expect.NoError(t, err)
	secret := &corev1.Secret{}
	expect.NoError(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: identity.TokenName}, secret))

	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	hub := &testHub{server: server, api: api, authority: authority, url: "https://" + listener.Addr().String(), token: string(secret.Data[identity.TokenKey]), requests: requests, metrics: "http://" + metrics + "/metrics"}
	hub.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the broker failed: %v", err)
			}
		case <-time.After(expect.Deadline):
			t.Error("the broker did not stop")
		}
	})
	t.Cleanup(hub.stop)
	eventually(t, "the broker to be ready", func() error {
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

// limited is the broker's access to the API server: a Role in its namespace.
func limited(t *testing.T, api client.Client, config *rest.Config) *rest.Config {
	t.Helper()
	const name = "spillway-broker"
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	expect.NoError(t, api.Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{broker.Group}, Resources: []string{"brokerconfigs"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusterregistrations"}, Verbs: []string{"get", "list", "watch", "create", "update"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusterregistrations/status"}, Verbs: []string{"update", "patch"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusteradvertisements"}, Verbs: []string{"get", "list", "watch", "create", "update", "delete"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"reservations"}, Verbs: []string{"get", "list", "watch", "create", "update", "delete"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"clusteradvertisements/status", "reservations/status"}, Verbs: []string{"update"}},
		{APIGroups: []string{""}, Resources: []string{"secrets", "configmaps"}, Verbs: []string{"create"}},
		{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}, ResourceNames: []string{identity.CAName, identity.TokenName}},
		{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"update"}, ResourceNames: []string{identity.CAName}},
		{APIGroups: []string{"events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	}}))
	expect.NoError(t, api.Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: meta,
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
	expect.NoError(t, err)
	return h.with(t, id, key, answer)
}

func (h *testHub) with(t *testing.T, id string, key *ecdsa.PrivateKey, answer protocol.JoinResponse) *cluster {
	t.Helper()
	return h.through(t, h.url, id, &tls.Certificate{Certificate: [][]byte{decodePEM(t, answer.Certificate)}, PrivateKey: key})
}

func (h *testHub) through(t *testing.T, url, id string, certificate *tls.Certificate) *cluster {
	t.Helper()
	config, err := protocol.TLSConfig(h.authority.CAPEM(), func() (*tls.Certificate, error) { return certificate, nil })
	expect.NoError(t, err)
	c, err := protocol.NewClient(url, config, logr.Discard())
	expect.NoError(t, err)
	t.Cleanup(c.Close)
	return &cluster{id: id, tls: config, client: c}
}

// answer is an HTTP response.
type answer struct {
	status int
	body   []byte
	header http.Header
	err    error
}

func (a answer) refusal() error {
	refusal := &protocol.Error{}
	if err := json.Unmarshal(a.body, refusal); err != nil {
		return fmt.Errorf("status %d with a body that is not an Error: %q", a.status, a.body)
	}
	return refusal
}

// call sends a request. Without a config the caller has no certificate.
func (h *testHub) call(t *testing.T, config *tls.Config, method, path string, body []byte) answer {
	t.Helper()
	transport := h.transport(config)
	defer transport.CloseIdleConnections()
	return h.callThrough(t, transport, method, path, body)
}

// transport is that of a caller, which has no certificate without a config.
func (h *testHub) transport(config *tls.Config) *http.Transport {
	if config == nil {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(h.authority.CAPEM())
		config = &tls.Config{RootCAs: roots}
	}
	return &http.Transport{TLSClientConfig: config, MaxIdleConnsPerHost: callsAtOnce}
}

func (h *testHub) callThrough(t *testing.T, transport *http.Transport, method, path string, body []byte) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, h.url+path, bytes.NewReader(body))
	expect.NoError(t, err)
	return h.send(t, transport, request)
}

// callsAtOnce is how many calls untilLimited makes at once.
const callsAtOnce = 16

// untilLimited makes calls until one of them is refused because there are too many: several
// at once, since a busy machine may take longer for each than the limit allows anyway.
func (h *testHub) untilLimited(t *testing.T, what string, config *tls.Config, call func(transport *http.Transport) answer) {
	t.Helper()
	transport := h.transport(config)
	defer transport.CloseIdleConnections()
	eventually(t, what, func() error {
		var group sync.WaitGroup
		var limited atomic.Int32
		for range callsAtOnce {
			group.Go(func() {
				if call(transport).status == http.StatusTooManyRequests {
					limited.Add(1)
				}
			})
		}
		group.Wait()
		if limited.Load() == 0 {
			return errors.New("no call was refused")
		}
		return nil
	})
}

func (h *testHub) send(t *testing.T, transport http.RoundTripper, request *http.Request) answer {
	t.Helper()
	response, err := (&http.Client{Transport: transport, Timeout: expect.Deadline}).Do(request)
	if err != nil {
		return answer{err: err}
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	return answer{status: response.StatusCode, body: content, err: err}
}

// expect fails unless the response is an error with this status and part in its message.
func (a answer) expect(t *testing.T, status int, part string) {
	t.Helper()
	if a.err != nil {
		t.Fatalf("no response: %v", a.err)
	}
	refusal := a.refusal()
	if a.status != status || !strings.Contains(refusal.Error(), part) {
		t.Fatalf("want %d with %q, got %d: %v", status, part, a.status, refusal)
	}
}

func expectCode(t *testing.T, err error, code string) {
	t.Helper()
	if !protocol.HasCode(err, code) {
		t.Fatalf("want the broker's %s, got %v", code, err)
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
		case <-time.After(expect.Deadline):
			t.Error("Watch did not end with its context")
		}
	})
	return events
}

// expectEvent skips events until one matches.
func expectEvent(t *testing.T, events chan protocol.Event, what string, match func(protocol.Event) bool) protocol.Event {
	t.Helper()
	deadline := time.After(expect.Deadline)
	var last protocol.Event
	for {
		select {
		case last = <-events:
			if match(last) {
				return last
			}
		case <-deadline:
			t.Fatalf("timed out waiting for %s: the last event was %+v", what, last)
		}
	}
}

// proxy is a TCP proxy whose connections can be closed.
type proxy struct {
	address string
	mutex   sync.Mutex
	ends    map[net.Conn]bool
}

func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	p := &proxy{address: listener.Addr().String(), ends: map[net.Conn]bool{}}
	t.Cleanup(func() {
		_ = listener.Close()
		p.closeAll()
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
			p.mutex.Lock()
			p.ends[from], p.ends[to] = true, true
			p.mutex.Unlock()
			for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
				go func() {
					_, _ = io.Copy(pair[0], pair[1])
					_, _ = pair[0].Close(), pair[1].Close()
					p.mutex.Lock()
					delete(p.ends, from)
					delete(p.ends, to)
					p.mutex.Unlock()
				}()
			}
		}
	}()
	return p
}

func (p *proxy) closeAll() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for end := range p.ends {
		_ = end.Close()
	}
}

func (p *proxy) open() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return len(p.ends)
}

func certificateOf(t *testing.T, c *cluster) *tls.Certificate {
	t.Helper()
	certificate, err := c.tls.GetClientCertificate(nil)
	expect.NoError(t, err)
	return certificate
}

func newCSR(t *testing.T, name string) (*ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name}}, key)
	expect.NoError(t, err)
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
		Cost:        &broker.Cost{CPUCost: "0.1", MemoryCost: "0.01", Currency: "EUR"},
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
	expect.NoError(t, err)
	return string(encoded)
}

// eventually waits until check succeeds.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	expect.Eventually(t, what, func() (bool, string) {
		err := check()
		return err == nil, fmt.Sprint(err)
	})
}
