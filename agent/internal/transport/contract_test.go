package transport_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/contract"
	"github.com/spillway-dev/spillway/agent/internal/transport/kubernetes"
	"github.com/spillway-dev/spillway/agent/internal/transport/mtls"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	controlplane.Main(m)
}

// TestHTTP runs the contract with the REST interface, with streams.
func TestHTTP(t *testing.T) {
	h := startHub(t)
	contract.Test(t, func(t *testing.T, cluster string) transport.BrokerCommunicator {
		return h.connect(t, cluster, h.address)
	})
	if lists := h.lists.Load(); lists > 0 {
		t.Errorf("%d lists, where no stream was cut", lists)
	}
}

// TestHTTPWhereStreamsAreCut runs the contract through a proxy that cuts each connection soon
// after it opened: the agents poll.
func TestHTTPWhereStreamsAreCut(t *testing.T) {
	h := startHub(t)
	proxy := cutting(t, h.address, 500*time.Millisecond)
	began, agents := time.Now(), 0
	// Of each agent, three kinds of streams.
	const each, interval = 3, time.Second
	contract.Test(t, func(t *testing.T, cluster string) transport.BrokerCommunicator {
		agents++
		return &patient{BrokerCommunicator: h.connect(t, cluster, proxy), polling: func() {
			expect.Eventually(t, "all agents to poll", func() (bool, string) {
				lists := h.lists.Load()
				return lists >= int64(3*each), fmt.Sprint(lists)
			})
		}}
	})
	if streams := int(h.streams.Load()); streams > agents*each*3 {
		t.Errorf("%d streams of %d agents were opened, want at most 3 of each kind", streams, agents)
	}
	lists := int(h.lists.Load())
	if most := agents * each * (1 + int(time.Since(began)/interval)); lists == 0 || lists > most {
		t.Errorf("%d lists, want some, and at most %d", lists, most)
	}
}

// patient advertises once the agents poll.
type patient struct {
	transport.BrokerCommunicator
	polling func()
}

func (p *patient) Beat(ctx context.Context, beat protocol.Beat) (known bool, err error) {
	p.polling()
	return p.BrokerCommunicator.Beat(ctx, beat)
}

// TestKubernetes runs the contract with namespaces of the hub, as the clusters' ServiceAccounts.
func TestKubernetes(t *testing.T) {
	h := startHub(t)
	contract.Test(t, h.connectNamespace)
	if calls := h.streams.Load() + h.lists.Load(); calls > 0 {
		t.Errorf("%d calls of the REST interface", calls)
	}
}

// TestMigration moves the consumer and the provider of a hold to namespaces, and back.
func TestMigration(t *testing.T) {
	h := startHub(t)
	contract.TestMigration(t, func(t *testing.T, cluster string) transport.BrokerCommunicator {
		return h.connect(t, cluster, h.address)
	}, h.connectNamespace)
}

// TestKubernetesRestart: the agents' sessions go on with the next broker.
func TestKubernetesRestart(t *testing.T) {
	h := startHub(t)
	contract.TestRestart(t, h.connectNamespace, func() {
		h.stop()
		h.run(t)
	})
}

// connectNamespace returns a connection of a cluster with the token of its ServiceAccount.
func (h *hub) connectNamespace(t *testing.T, cluster string) transport.BrokerCommunicator {
	t.Helper()
	h.register(t, cluster)
	namespace := objects.Namespace(cluster)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "spillway-tenant"}}
	var token authenticationv1.TokenRequest
	expect.Eventually(t, "the namespace of "+cluster, func() (bool, string) {
		err := errors.Join(h.Get(t.Context(), client.ObjectKeyFromObject(account), &rbacv1.RoleBinding{}), h.SubResource("token").Create(t.Context(), account, &token))
		return err == nil, fmt.Sprint(err)
	})
	access := rest.AnonymousClientConfig(h.config)
	access.BearerToken = token.Status.Token
	c, err := kubernetes.New(access, namespace, cluster, logr.Discard())
	expect.NoError(t, err)
	return c
}

// hub is a broker as it runs, with a real API server. A caller is named by its certificate.
type hub struct {
	client.Client
	// config is the API server's admin's, access the broker's.
	config, access *rest.Config
	stop           func()
	address        string
	ca             []byte
	streams, lists atomic.Int64
}

func startHub(t *testing.T) *hub {
	t.Helper()
	h := &hub{config: controlplane.Start(t)}
	// A namespace with a quota is of no use before its use is counted.
	controlplane.StartControllers(t, h.config, "resourcequota-controller")
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	var err error
	h.Client, err = client.New(h.config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	expect.NoError(t, h.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}}))
	h.access = h.limited(t)
	h.run(t)
	return h
}

// run runs a broker until stop, or the end of the test.
func (h *hub) run(t *testing.T) {
	t.Helper()
	mgr, err := ctrl.NewManager(h.access, ctrl.Options{
		Scheme: h.Scheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{DefaultNamespaces: map[string]cache.Config{broker.SystemNamespace: {}}},
		Controller: crconfig.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false)},
	})
	expect.NoError(t, err)
	api, err := program.Add(mgr, program.Parts{
		Namespace: broker.SystemNamespace, Identity: identity{}, CatchUp: program.DefaultCatchUp, Clock: clock.RealClock{}, Workers: 8, Namespaces: true, Log: logr.Discard(),
	})
	expect.NoError(t, err)
	api.Synced()
	handler := api.Handler()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodGet && r.URL.Query().Get("watch") == "true":
			h.streams.Add(1)
		case r.Method == http.MethodGet:
			h.lists.Add(1)
		}
		handler.ServeHTTP(w, r)
	}))
	server.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS12}
	server.StartTLS()
	h.address = server.Listener.Addr().String()
	h.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	h.stop = sync.OnceFunc(func() {
		server.CloseClientConnections()
		server.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("running the broker: %v", err)
		}
	})
	t.Cleanup(h.stop)
	expect.Eventually(t, "the broker to be ready", func() (bool, string) { err := api.Ready(nil); return err == nil, "" })
}

// limited is the access of a broker that was installed by its chart.
func (h *hub) limited(t *testing.T) *rest.Config {
	t.Helper()
	const name = "spillway-broker"
	who := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}}
	own, all := metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: name}, metav1.ObjectMeta{Name: name}
	for _, object := range []client.Object{
		&rbacv1.Role{ObjectMeta: own, Rules: rulesOf(t, "rbac.yaml")}, &rbacv1.ClusterRole{ObjectMeta: all, Rules: rulesOf(t, "namespaces.yaml")},
		&rbacv1.RoleBinding{ObjectMeta: own, Subjects: who, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: all, Subjects: who, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}},
	} {
		expect.NoError(t, h.Create(t.Context(), object))
	}
	config := rest.CopyConfig(h.config)
	config.Impersonate.UserName = name
	return config
}

// rulesOf are the rules of the first role in a template of the broker's chart.
func rulesOf(t *testing.T, template string) (rules []rbacv1.PolicyRule) {
	t.Helper()
	root, err := binaries.Root()
	expect.NoError(t, err)
	content, err := os.ReadFile(filepath.Join(root, "charts/broker/templates", template))
	expect.NoError(t, err)
	_, after, _ := strings.Cut(string(content), "\nrules:\n")
	text, _, _ := strings.Cut(after, "\n---")
	expect.NoError(t, yaml.UnmarshalStrict([]byte(text), &rules))
	if len(rules) == 0 {
		t.Fatalf("%s has no rules", template)
	}
	return rules
}

// register lets a cluster use the broker.
func (h *hub) register(t *testing.T, cluster string) {
	t.Helper()
	expect.NoError(t, client.IgnoreAlreadyExists(h.Create(t.Context(), &broker.ClusterRegistration{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: cluster}, Spec: broker.ClusterRegistrationSpec{ClusterID: cluster, Approval: broker.ApprovalApproved},
	})))
}

// connect returns a connection of a cluster to the broker at an address.
func (h *hub) connect(t *testing.T, cluster, address string) transport.BrokerCommunicator {
	t.Helper()
	h.register(t, cluster)
	return mtls.New("https://"+address, credentials{newCertificate(t, cluster), h.ca}, time.Second, logr.Discard())
}

// identity authenticates a call by the common name of any certificate.
type identity struct{}

func (identity) TLSConfig() *tls.Config { return nil }

func (identity) Join(context.Context, protocol.JoinRequest) (protocol.JoinResponse, error) {
	return protocol.JoinResponse{}, errors.New("all clusters have joined")
}

func (i identity) Authenticate(ctx context.Context, state *tls.ConnectionState) (string, error) {
	cluster, _, err := i.Certified(ctx, state)
	return cluster, err
}

func (identity) Certified(_ context.Context, state *tls.ConnectionState) (clusterID, fingerprint string, err error) {
	name := state.PeerCertificates[0].Subject.CommonName
	return name, name, nil
}

// credentials are a certificate of a cluster, and the broker's CA.
type credentials struct {
	certificate *tls.Certificate
	ca          []byte
}

func (c credentials) Certificate() (*tls.Certificate, error) { return c.certificate, nil }

func (c credentials) CA() (pem []byte, changed <-chan struct{}, err error) { return c.ca, nil, nil }

func newCertificate(t *testing.T, name string) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	expect.NoError(t, err)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// cutting starts a proxy to an address that cuts each connection after a time, and returns the
// address of the proxy.
func cutting(t *testing.T, address string, after time.Duration) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	var open sync.WaitGroup
	open.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", address)
			if err != nil {
				_ = near.Close()
				continue
			}
			time.AfterFunc(after, func() { _ = near.Close(); _ = far.Close() })
			for _, ways := range [][2]net.Conn{{near, far}, {far, near}} {
				open.Go(func() { _, _ = io.Copy(ways[0], ways[1]) })
			}
		}
	})
	t.Cleanup(func() { _ = listener.Close(); open.Wait() })
	return listener.Addr().String()
}
