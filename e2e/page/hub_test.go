//go:build e2e

package page

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

const namespace = broker.SystemNamespace

// hub is an API server with a broker as it runs, and its page.
type hub struct {
	client.Client
	broker *program.Broker
	join   string
}

func startHub(t *testing.T, history program.HistoryOptions) *hub {
	t.Helper()
	ctrl.SetLogger(logr.Discard())
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(scheme))
	expect.NoError(t, broker.AddToScheme(scheme))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	b, err := program.New(t.Context(), config, program.Options{Namespace: namespace, Listen: "127.0.0.1:0", Metrics: "0", Probes: "0", CatchUp: program.DefaultCatchUp, Page: "127.0.0.1:0", History: history})
	expect.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		expect.NoError(t, <-ended)
	})
	secret := &corev1.Secret{}
	expect.NoError(t, c.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "spillway-join-token"}, secret))
	return &hub{c, b, string(secret.Data["token"])}
}

// token is one of a new ServiceAccount that may list kinds.
func (h *hub) token(t *testing.T, name string, kinds ...string) string {
	t.Helper()
	meta := metav1.ObjectMeta{Namespace: namespace, Name: name}
	account := &corev1.ServiceAccount{ObjectMeta: meta}
	expect.NoError(t, h.Create(t.Context(), account))
	expect.NoError(t, h.Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{broker.Group}, Resources: kinds, Verbs: []string{"list"}}}}))
	expect.NoError(t, h.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}},
	}))
	request := &authenticationv1.TokenRequest{}
	expect.NoError(t, h.SubResource("token").Create(t.Context(), account, request))
	return request.Status.Token
}

// agent is a cluster that has joined, and accepts what it is asked for.
type agent struct {
	*protocol.Client
	spec broker.ClusterAdvertisementSpec
	// refuses is what it says instead; empty to accept.
	refuses string
}

// joins joins a cluster, which advertises, and answers until the test ends.
func (h *hub) joins(t *testing.T, spec broker.ClusterAdvertisementSpec, refuses string) *agent {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: spec.ClusterID}}, key)
	expect.NoError(t, err)
	url := "https://" + h.broker.Address.String()
	var answer protocol.JoinResponse
	expect.Eventually(t, spec.ClusterID+" to join", func() (bool, string) {
		answer, err = protocol.Join(t.Context(), url, h.broker.CAHash, spec.ClusterID, h.join, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
		return err == nil, fmt.Sprint(err)
	})
	private, err := x509.MarshalPKCS8PrivateKey(key)
	expect.NoError(t, err)
	pair, err := tls.X509KeyPair([]byte(answer.Certificate), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	expect.NoError(t, err)
	config, err := protocol.TLSConfig([]byte(answer.CA), func() (*tls.Certificate, error) { return &pair, nil })
	expect.NoError(t, err)
	a := &agent{spec: spec, refuses: refuses}
	a.Client, err = protocol.NewClient(url, config, logr.Discard())
	expect.NoError(t, err)
	a.advertise(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{}, 2)
	for _, role := range []protocol.Role{protocol.RoleProvider, protocol.RoleRequester} {
		go func() {
			a.Watch(ctx, role, func(e protocol.Event) { a.answer(ctx, e) })
			ended <- struct{}{}
		}()
	}
	t.Cleanup(func() {
		cancel()
		<-ended
		<-ended
	})
	return a
}

func (a *agent) advertise(t *testing.T) {
	t.Helper()
	a.spec.Sequence++
	a.spec.Timestamp = metav1.Now()
	_, err := a.PublishAdvertisement(t.Context(), a.spec)
	expect.NoError(t, err)
}

// answer answers what a stream brings. What fails comes again.
func (a *agent) answer(ctx context.Context, e protocol.Event) {
	for _, view := range e.Provider {
		if hold := view.Hold; hold.AcceptedAttempt != hold.Attempt || hold.Unconfirmed != nil {
			_ = a.AckProvider(ctx, view.ID, protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Accepted: a.refuses == "", Message: a.refuses})
		}
	}
	for _, view := range e.Consumer {
		var ready []string
		news := false
		for _, allocation := range view.Status.Allocations {
			if allocation.Accepted {
				ready = append(ready, allocation.Cluster)
				news = news || !allocation.VirtualNodeReady
			}
		}
		if news {
			_ = a.AckRequester(ctx, view.ID, protocol.RequesterAck{ReservationUID: view.UID, Attempt: view.Status.Attempt.Number, Ready: ready})
		}
	}
}

func amounts(pairs ...string) broker.ResourceQuantities {
	return broker.FromList(expect.Resources(pairs...))
}

// cluster is the advertisement of one with two nodes.
func cluster(id, cpu, memory, price string) broker.ClusterAdvertisementSpec {
	all := amounts("cpu", cpu, "memory", memory)
	spec := broker.ClusterAdvertisementSpec{
		ClusterID: id, EndpointURL: "https://192.0.2.1:6443", Lending: broker.Lending{Enabled: price != ""}, Timestamp: metav1.Now(),
		Resources:   broker.AdvertisedResources{Capacity: all, Allocatable: all, Allocated: amounts("cpu", "6", "memory", "20Gi")},
		NodeClasses: []broker.NodeClass{{Name: "nodes", Arch: "amd64", FreeShapes: []broker.FreeShape{{Nodes: 2, Free: amounts("cpu", "16", "memory", "64Gi"), Pods: 110}}}},
	}
	if price != "" {
		spec.Cost = &broker.Cost{CPUCost: price, MemoryCost: "0.004", Currency: "EUR"}
	}
	return spec
}

// reserve creates a Reservation of a consumer in the hub, as its agent does.
func (h *hub) reserve(t *testing.T, consumer, owner, cpu string, count int32, edits ...func(*broker.ReservationSpec)) *broker.Reservation {
	t.Helper()
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: consumer + "-shop-" + owner, Annotations: map[string]string{broker.LabelSourceNamespace: "shop", broker.LabelSourceName: owner}},
		Spec:       broker.ReservationSpec{RequesterID: consumer, PodSets: []broker.PodSet{{Name: "pods", Count: count, Requests: amounts("cpu", cpu, "memory", "2Gi")}}},
	}
	for _, edit := range edits {
		edit(&r.Spec)
	}
	expect.NoError(t, h.Create(t.Context(), r))
	return r
}

// in pins a provider.
func in(provider string) func(*broker.ReservationSpec) {
	return func(spec *broker.ReservationSpec) { spec.TargetClusterID = provider }
}

// together makes a gang of all pods.
func together(spec *broker.ReservationSpec) { spec.MinAvailable = spec.PodSets[0].Count }

// wire is a way to the page that can be cut.
type wire struct {
	address, to string
	listener    net.Listener
	conns       chan net.Conn
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	w := &wire{address: "127.0.0.1:0", to: to}
	w.mend(t)
	w.address = w.listener.Addr().String()
	t.Cleanup(w.cut)
	return w
}

// mend lets connections through.
func (w *wire) mend(t *testing.T) {
	t.Helper()
	var listener net.Listener
	expect.Eventually(t, "the address to be free", func() (bool, string) {
		var err error
		listener, err = net.Listen("tcp", w.address)
		return err == nil, fmt.Sprint(err)
	})
	w.listener, w.conns = listener, make(chan net.Conn, 1024)
	go func(conns chan net.Conn) {
		for {
			conn, err := listener.Accept()
			if err != nil {
				close(conns)
				return
			}
			there, err := net.DialTimeout("tcp", w.to, 5*time.Second)
			if err != nil {
				_ = conn.Close()
				continue
			}
			conns <- conn
			go func() { _, _ = copyAll(there, conn) }()
			go func() { _, _ = copyAll(conn, there) }()
		}
	}(w.conns)
}

// cut ends all connections, and refuses others.
func (w *wire) cut() {
	_ = w.listener.Close()
	for conn := range w.conns {
		_ = conn.Close()
	}
}

// copyAll copies until one side ends, and then ends the other.
func copyAll(to, from net.Conn) (int64, error) {
	defer to.Close()
	return io.Copy(to, from)
}
