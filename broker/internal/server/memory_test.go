package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// configName is the name of the BrokerConfig that is used.
const configName = "default"

// memory is a server without listener, API server and certificates: a caller is named by
// the common name of its certificate.
type memory struct {
	*Server
	callers *callers
	agents  *agents
	// objects are the last versions that were observed.
	objects map[string]client.Object
}

func newMemory(t testing.TB, log logr.Logger) *memory {
	t.Helper()
	return newMemoryAt(log, nil)
}

// newMemoryAt is newMemory with a clock, nil for the real one.
func newMemoryAt(log logr.Logger, at clock.WithTicker) *memory {
	elected := make(chan struct{})
	close(elected)
	m := &memory{callers: &callers{}, agents: &agents{}, objects: map[string]client.Object{}}
	if at == nil {
		at = clock.RealClock{}
	}
	m.Server = newServer(nil, nil, elected, Options{Namespace: namespace, Identity: m.callers, Reconciler: m.agents, Store: store.New(at), Log: log, Clock: at})
	m.Synced()
	return m
}

// Observe is an event of the watch.
func (m *memory) Observe(object client.Object, deleted bool) {
	key := fmt.Sprintf("%T %s", object, object.GetName())
	before, after := m.objects[key], object
	if deleted {
		before, after = object, nil
	}
	m.objects[key] = after
	m.Store.Note(object, deleted)
	m.Server.observe(before, after)
}

func (m *memory) request(method, path, body, caller string) *http.Request {
	request := httptest.NewRequest(method, path, strings.NewReader(body))
	request.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Subject: pkix.Name{CommonName: caller}}}}
	return request
}

func (m *memory) call(method, path, body, caller string) answer {
	return m.serveRequest(m.request(method, path, body, caller))
}

func (m *memory) serveRequest(request *http.Request) answer {
	recorder := httptest.NewRecorder()
	m.Handler().ServeHTTP(recorder, request)
	return answer{status: recorder.Code, body: recorder.Body.Bytes(), header: recorder.Header()}
}

// open opens a stream, and returns its events until the test ends.
func (m *memory) open(t testing.TB, caller string, role protocol.Role) chan protocol.Event {
	t.Helper()
	reader, writer := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	path := protocol.PathReservations + "?watch=true&role=" + string(role)
	if role == "" {
		path = protocol.PathRelay + "?watch=true"
	}
	ended.Go(func() {
		m.Handler().ServeHTTP(&pipeWriter{header: http.Header{}, PipeWriter: writer}, m.request(http.MethodGet, path, "", caller).WithContext(ctx))
		_ = writer.Close()
	})
	events := make(chan protocol.Event, 1024)
	ended.Go(func() {
		for decoder := json.NewDecoder(reader); ; {
			var event protocol.Event
			if decoder.Decode(&event) != nil {
				return
			}
			events <- event
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = reader.Close()
		ended.Wait()
	})
	return events
}

// pipeWriter is a response in memory that is read while it is written.
type pipeWriter struct {
	header http.Header
	*io.PipeWriter
}

func (p *pipeWriter) Header() http.Header { return p.header }
func (p *pipeWriter) WriteHeader(int)     {}
func (p *pipeWriter) FlushError() error   { return nil }

// callers is an Identity that counts its reads.
type callers struct {
	mutex   sync.Mutex
	reads   int
	revoked bool
}

func (c *callers) TLSConfig() *tls.Config { return nil }

func (c *callers) Join(context.Context, protocol.JoinRequest) (protocol.JoinResponse, error) {
	return protocol.JoinResponse{}, refuse(protocol.CodeUnauthorized, "no")
}

func (c *callers) Certified(_ context.Context, state *tls.ConnectionState) (string, string, error) {
	name := state.PeerCertificates[0].Subject.CommonName
	return name, "key of " + name, nil
}

func (c *callers) Authenticate(_ context.Context, state *tls.ConnectionState) (string, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.reads++
	if c.revoked {
		return "", refuse(protocol.CodeUnauthorized, "revoked")
	}
	return state.PeerCertificates[0].Subject.CommonName, nil
}

// agents is a Reconciler that records what it receives.
type agents struct {
	mutex    sync.Mutex
	stored   []broker.ClusterAdvertisementSpec
	acks     []protocol.ProviderAck
	renewals []types.UID
	// beats are of any content but that of unknown.
	beats   []protocol.Beat
	unknown string
	// gates are closed to let the calls of a cluster end.
	gates map[string]chan struct{}
}

// wait waits for the gate of a cluster, if there is one.
func (a *agents) wait(ctx context.Context, cluster string) error {
	a.mutex.Lock()
	gate := a.gates[cluster]
	a.mutex.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (a *agents) StoreAdvertisement(_ context.Context, spec broker.ClusterAdvertisementSpec) error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.stored = append(a.stored, spec)
	return nil
}

func (a *agents) Beat(_ string, beat protocol.Beat) (known bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.beats = append(a.beats, beat)
	return beat.Digest != a.unknown
}

func (a *agents) ApplyProviderAck(ctx context.Context, cluster, _ string, ack protocol.ProviderAck) error {
	if err := a.wait(ctx, cluster); err != nil {
		return err
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.acks = append(a.acks, ack)
	return nil
}

func (a *agents) ApplyRequesterAck(context.Context, string, string, protocol.RequesterAck) error {
	return nil
}

func (a *agents) Renew(_, _ string, uid types.UID) error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.renewals = append(a.renewals, uid)
	return nil
}

// stored returns a Reservation of rome, placed in the providers.
func stored(name string, providers ...string) *broker.Reservation {
	request := newRequest(name)
	request.SourceUID = "4c6a0c5e-6f0d-4c2f-9a38-8f6a2a0d1c11"
	reservation := newReservation(namespace, "rome", request)
	reservation.Spec.RequesterID, reservation.Name, reservation.UID = "rome", name, types.UID("uid-"+name)
	for _, provider := range providers {
		reservation.Status.Attempt.Clusters = append(reservation.Status.Attempt.Clusters, provider)
		reservation.Status.Allocations = append(reservation.Status.Allocations, broker.Allocation{Cluster: provider, PodSets: reservation.Spec.PodSets})
	}
	return reservation
}

// advertised returns the advertisement of a cluster with holds for Reservations of rome.
func advertised(cluster string, holds ...*broker.Reservation) *broker.ClusterAdvertisement {
	advertisement := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: cluster, UID: types.UID(cluster)}, Spec: newAdvertisement(cluster)}
	for _, reservation := range holds {
		advertisement.Status.Holds = append(advertisement.Status.Holds, broker.Hold{
			ReservationUID: reservation.UID, ReservationName: reservation.Name, Requester: "rome", Attempt: 1,
			Promised: broker.HeldCapacity{PodSets: reservation.Spec.PodSets},
		})
	}
	return advertisement
}

func many(n int, providers ...string) []*broker.Reservation {
	reservations := make([]*broker.Reservation, n)
	for i := range reservations {
		reservations[i] = stored(fmt.Sprintf("r-%04d", i), providers...)
	}
	return reservations
}

// next is the next event that is not a Heartbeat.
func next(t testing.TB, events chan protocol.Event) protocol.Event {
	t.Helper()
	var got protocol.Event
	expect.Eventually(t, "an event", func() (bool, string) {
		select {
		case got = <-events:
			return got.Type != protocol.EventHeartbeat, "Heartbeat"
		default:
			return false, "none"
		}
	})
	return got
}
