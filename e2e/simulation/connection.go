package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/simulation/stepwise"
)

// errDisconnected is the result of a call that reaches no broker.
var errDisconnected = errors.New("the broker cannot be reached")

// streamTimeout is how long a stream may be silent before the agent opens another one.
const streamTimeout = 3 * protocol.HeartbeatSeconds * time.Second

// missPeriod is how long a cluster that has no registration is refused without another read
// of the API server.
const missPeriod = 5 * time.Second

// identity authenticates a call by the server name of its connection, which request sets,
// and the cluster's registration, as production does: in the cache or, if it is not there, in
// the API server.
type identity struct {
	cached, live client.Reader

	mu     sync.Mutex
	missed map[string]time.Time
}

func (*identity) TLSConfig() *tls.Config { return nil }

func (*identity) Join(context.Context, protocol.JoinRequest) (protocol.JoinResponse, error) {
	return protocol.JoinResponse{}, errors.New("clusters do not join in the simulation")
}

func (i *identity) Authenticate(ctx context.Context, state *tls.ConnectionState) (string, error) {
	id := state.ServerName
	known, err := registered(ctx, i.cached, id)
	if !known && err == nil && !i.recentlyMissed(id) {
		known, err = registered(ctx, i.live, id)
	}
	if err != nil || known {
		return id, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.missed[id] = time.Now()
	return "", &protocol.Error{Code: protocol.CodeUnauthorized, Message: id + " is not registered"}
}

func (i *identity) recentlyMissed(id string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	at, missed := i.missed[id]
	return missed && time.Since(at) < missPeriod
}

// registered reports whether a cluster has a registration that is not being deleted.
func registered(ctx context.Context, reader client.Reader, id string) (bool, error) {
	var registration broker.ClusterRegistration
	err := reader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: id}, &registration)
	return err == nil && registration.DeletionTimestamp.IsZero(), client.IgnoreNotFound(err)
}

func (*identity) Certified(_ context.Context, state *tls.ConnectionState) (clusterID, fingerprint string, err error) {
	return state.ServerName, state.ServerName, nil
}

// message is a request that an agent has sent.
type message struct {
	caller, method, target string
	body                   []byte
}

// connection is how one agent process reaches the brokers.
type connection struct {
	world   *world
	cluster *cluster
	program *stepwise.Program
}

// call sends a request and decodes the response. The scheduler may lose either.
func (c *connection) call(ctx context.Context, method, target string, body, into any) error {
	var encoded []byte
	if body != nil {
		var err error
		if encoded, err = json.Marshal(body); err != nil {
			return err
		}
	}
	what := method + " " + target
	if request, ok := body.(protocol.ReservationRequest); ok {
		// The paths of the others differ; calls of one name would be in order of arrival.
		what += " for " + request.SourceNamespace + "/" + request.SourceName
	}
	outcome := c.world.gate.Enter(c.program, what, true)
	if outcome == stepwise.Refuse || ctx.Err() != nil {
		return fmt.Errorf("%s %s: %w", method, target, stepwise.ErrUnavailable)
	}
	m := message{caller: c.cluster.id, method: method, target: target, body: encoded}
	c.world.remember(m)
	response, err := c.world.deliver(m)
	if err != nil {
		return err
	}
	if outcome == stepwise.LoseReply {
		return fmt.Errorf("reply to %s %s: %w", method, target, stepwise.ErrUnavailable)
	}
	if response.status/100 != 2 {
		refusal := &protocol.Error{}
		if err := json.Unmarshal(response.body.Bytes(), refusal); err != nil {
			return err
		}
		return refusal
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(response.body.Bytes(), into)
}

// deliver hands a message to a leading broker.
func (w *world) deliver(m message) (*response, error) {
	b := w.reachable(m.caller)
	if b == nil {
		return nil, errDisconnected
	}
	if hook := w.plant.request; hook != nil {
		m = hook(w, m)
	}
	m = w.refusing(m)
	r := &response{header: http.Header{}, status: http.StatusOK}
	lives, handler := b.program.Context(), b.handler
	handler.ServeHTTP(r, request(lives, m))
	if lives.Err() != nil {
		return nil, errDisconnected
	}
	return r, nil
}

func request(ctx context.Context, m message) *http.Request {
	target, err := url.Parse(m.target)
	if err != nil {
		panic(err)
	}
	r := &http.Request{Method: m.method, URL: target, Header: http.Header{}, Body: body{bytes.NewReader(m.body)}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, TLS: &tls.ConnectionState{ServerName: m.caller}}
	if m.body != nil {
		r.ContentLength = int64(len(m.body))
		r.Header.Set("Content-Type", "application/json")
	}
	r.Header.Set(protocol.HeaderVersion, protocol.Version)
	return r.WithContext(ctx)
}

type body struct{ *bytes.Reader }

func (body) Close() error { return nil }

// response is a response in memory.
type response struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *response) Header() http.Header              { return r.header }
func (r *response) WriteHeader(status int)           { r.status = status }
func (r *response) Write(data []byte) (int, error)   { return r.body.Write(data) }
func (r *response) SetReadDeadline(time.Time) error  { return nil }
func (r *response) SetWriteDeadline(time.Time) error { return nil }

// PublishAdvertisement implements transport.BrokerCommunicator.
func (c *connection) PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	var response protocol.AdvertisementResponse
	err := c.call(ctx, http.MethodPost, protocol.PathAdvertisements, spec, &response)
	if err == nil && response.Sequence > spec.Sequence {
		return &protocol.OutdatedError{Latest: response.Sequence}
	}
	return err
}

// Beat implements transport.BrokerCommunicator.
func (c *connection) Beat(ctx context.Context, beat protocol.Beat) (known bool, err error) {
	var response protocol.BeatResponse
	err = c.call(ctx, http.MethodPost, protocol.PathBeat, beat, &response)
	return response.Known, err
}

// PutReservation implements transport.BrokerCommunicator.
func (c *connection) PutReservation(ctx context.Context, request protocol.ReservationRequest) (view protocol.ConsumerView, err error) {
	err = c.call(ctx, http.MethodPost, protocol.PathReservations, request, &view)
	return view, err
}

// DeleteReservation implements transport.BrokerCommunicator.
func (c *connection) DeleteReservation(ctx context.Context, id string) error {
	err := c.call(ctx, http.MethodDelete, protocol.PathReservations+"/"+id, nil, nil)
	if protocol.HasCode(err, protocol.CodeNotFound) {
		return nil
	}
	return err
}

// AckProvider implements transport.BrokerCommunicator.
func (c *connection) AckProvider(ctx context.Context, id string, ack protocol.ProviderAck) error {
	return c.call(ctx, http.MethodPost, protocol.PathReservations+"/"+id+"/ack?role=provider", ack, nil)
}

// AckRequester implements transport.BrokerCommunicator.
func (c *connection) AckRequester(ctx context.Context, id string, ack protocol.RequesterAck) error {
	return c.call(ctx, http.MethodPost, protocol.PathReservations+"/"+id+"/ack?role=requester", ack, nil)
}

// Renew implements transport.BrokerCommunicator.
func (c *connection) Renew(ctx context.Context, id string, uid types.UID) error {
	return c.call(ctx, http.MethodPost, protocol.PathReservations+"/"+id+"/renew?role=requester", protocol.Renewal{ReservationUID: uid}, nil)
}

// Relay implements transport.BrokerCommunicator. The driver of the simulation sends no messages.
func (c *connection) Relay(ctx context.Context, message protocol.RelayMessage) error {
	return c.call(ctx, http.MethodPost, protocol.PathRelay, message, nil)
}

// stream is an open watch stream. The broker writes lines, the scheduler delivers them.
type stream struct {
	cluster *cluster
	program *stepwise.Program
	name    string
	cancel  context.CancelFunc
	closed  <-chan struct{}
	events  chan protocol.Event
	loses   func(protocol.Event) bool
	tells   func(*protocol.Event)

	mu     sync.Mutex
	header http.Header
	status int
	buffer bytes.Buffer
	lines  [][]byte
	// heard is when the last line, or heartbeat, was received.
	heard time.Time
}

// Watch implements transport.BrokerCommunicator.
func (c *connection) Watch(ctx context.Context, role protocol.Role, handle func(protocol.Event)) {
	for ctx.Err() == nil {
		outcome := c.world.gate.Enter(c.program, "open stream "+string(role), false)
		b := c.world.reachable(c.cluster.id)
		if outcome == stepwise.Proceed && b != nil && ctx.Err() == nil && c.follow(ctx, b, role, handle) {
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// follow reads one stream to its end, and reports whether the broker has served it.
func (c *connection) follow(ctx context.Context, b *brokerProcess, role protocol.Role, handle func(protocol.Event)) (served bool) {
	serving, cancel := context.WithCancel(b.program.Context())
	handler := b.handler
	s := &stream{
		cluster: c.cluster, program: c.program, name: c.program.Name + " stream " + string(role),
		cancel: cancel, closed: serving.Done(), events: make(chan protocol.Event, 1), header: http.Header{}, heard: time.Now(), loses: c.world.plant.loses,
	}
	if tells := c.world.plant.tells; tells != nil {
		s.tells = func(event *protocol.Event) { tells(c.world, event) }
	}
	c.world.openStream(s)
	defer c.world.closeStream(s)
	go func() {
		defer cancel()
		target := protocol.PathReservations + "?role=" + string(role) + "&watch=true"
		handler.ServeHTTP(s, request(serving, message{caller: c.cluster.id, method: http.MethodGet, target: target}))
	}()
	for {
		select {
		case event := <-s.events:
			handle(event)
		case <-s.closed:
			return !s.refused()
		case <-ctx.Done():
			return true
		}
	}
}

// Header implements http.ResponseWriter.
func (s *stream) Header() http.Header { return s.header }

// WriteHeader implements http.ResponseWriter.
func (s *stream) WriteHeader(status int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = status
}

// Write implements http.ResponseWriter.
func (s *stream) Write(data []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status != 0 && s.status/100 != 2 {
		s.cancel()
		return len(data), nil
	}
	s.buffer.Write(data)
	for {
		line, err := s.buffer.ReadBytes('\n')
		if err != nil {
			s.buffer.Write(line)
			return len(data), nil
		}
		if bytes.Contains(line[:min(len(line), 40)], []byte(protocol.EventHeartbeat)) {
			if !s.cluster.cut {
				s.heard = time.Now()
			}
			continue
		}
		s.lines = append(s.lines, line)
	}
}

// refused reports whether the broker has responded with an error.
func (s *stream) refused() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status != 0 && s.status/100 != 2
}

// FlushError implements what http.ResponseController needs.
func (s *stream) FlushError() error { return nil }

// SetReadDeadline implements what http.ResponseController needs.
func (s *stream) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline implements what http.ResponseController needs.
func (s *stream) SetWriteDeadline(time.Time) error { return nil }

// step is the delivery of the next line; nil if there is none.
func (s *stream) step() *stepwise.Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.lines) == 0 || s.cluster.cut || len(s.events) > 0 {
		return nil
	}
	return &stepwise.Step{Name: s.name, Do: func() {
		s.mu.Lock()
		line := s.lines[0]
		s.lines = s.lines[1:]
		s.heard = time.Now()
		s.mu.Unlock()
		var event protocol.Event
		if err := json.Unmarshal(line, &event); err != nil {
			panic(fmt.Sprintf("%s: %v in %s", s.name, err, line))
		}
		if s.tells != nil {
			s.tells(&event)
		}
		if lost := s.loses; lost == nil || !lost(event) {
			s.events <- event
		}
	}}
}

// late reports whether the agent has heard nothing for too long.
func (s *stream) late() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.heard) > streamTimeout
}

func (m message) String() string {
	return strings.TrimSpace(m.caller + " " + m.method + " " + m.target)
}
