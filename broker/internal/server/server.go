package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// callTimeout is the timeout of a call, from reading to responding. Streams have none.
	callTimeout = 30 * time.Second
	// shutdownGrace is the time that calls have to finish when the broker stops.
	shutdownGrace = 10 * time.Second
)

// Reconciler applies the agents' reports. All methods are idempotent. An error that is
// apierrors.IsNotFound means that the object does not exist, or belongs to another
// cluster.
type Reconciler interface {
	StoreAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error
	ApplyProviderAck(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error
	ApplyRequesterAck(ctx context.Context, requester, name string, ack protocol.RequesterAck) error
}

// Identity authenticates clusters. Refusals are or wrap *protocol.Error.
type Identity interface {
	TLSConfig() *tls.Config
	Join(ctx context.Context, request protocol.JoinRequest) (protocol.JoinResponse, error)
	Authenticate(ctx context.Context, state *tls.ConnectionState) (clusterID string, err error)
	Known(ctx context.Context, clusterID string) (bool, error)
}

// Options of a Server. All fields except Clock are required.
type Options struct {
	// Listener without TLS. The server closes it.
	Listener net.Listener
	// Namespace of the broker's objects.
	Namespace  string
	Identity   Identity
	Reconciler Reconciler
	// Receipts records the received advertisements.
	Receipts *Receipts
	Log      logr.Logger
	// Clock defaults to the real one.
	Clock clock.PassiveClock
}

// Server is the REST interface, a manager.Runnable. All replicas listen; those that are
// not the leader refuse most calls.
type Server struct {
	Options
	client  client.Client
	live    client.Reader
	elected <-chan struct{}
	// synced is true once the manager's caches are synced.
	synced atomic.Bool
	// stopping is closed to end the streams.
	stopping chan struct{}

	broadcaster *broadcaster
	mailboxes   *mailboxes
	callers     *limiters
	joiners     *limiters
	heartbeat   time.Duration
}

// New returns a server that uses the manager's clients, and adds it to the manager.
func New(mgr manager.Manager, options Options) (*Server, error) {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	s := &Server{
		Options:     options,
		client:      mgr.GetClient(),
		live:        mgr.GetAPIReader(),
		elected:     mgr.Elected(),
		stopping:    make(chan struct{}),
		broadcaster: newBroadcaster(),
		mailboxes:   newMailboxes(options.Clock),
		callers:     newLimiters(options.Clock, 100, 200),
		joiners:     newLimiters(options.Clock, 5, 10),
		heartbeat:   protocol.HeartbeatSeconds * time.Second,
	}
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &broker.Reservation{}, requesterField, requesterOf); err != nil {
		return nil, fmt.Errorf("indexing Reservations by requester: %w", err)
	}
	if err := s.broadcaster.watch(mgr.GetCache()); err != nil {
		return nil, err
	}
	return s, mgr.Add(s)
}

// NeedLeaderElection is false: all replicas listen.
func (s *Server) NeedLeaderElection() bool { return false }

// Start serves until ctx ends. The manager calls it once its caches are synced.
func (s *Server) Start(ctx context.Context) error {
	s.synced.Store(true)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	server := &http.Server{
		Handler:           s.handler(),
		TLSConfig:         s.Identity.TLSConfig(),
		Protocols:         &protocols,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		// There are no timeouts for streams: each call and each write to a stream sets a
		// deadline of its own.
		ErrorLog: log.New(connectionLog{s.Log}, "", 0),
	}
	served := make(chan error, 1)
	go func() { served <- server.ServeTLS(s.Listener, "", "") }()
	s.Log.Info("Serving", "address", s.Listener.Addr().String())
	select {
	case err := <-served:
		return fmt.Errorf("serving: %w", err)
	case <-ctx.Done():
	}
	close(s.stopping)
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		s.Log.Info("Shutdown interrupted calls", "reason", err.Error())
		return server.Close()
	}
	return nil
}

// Ready returns nil on the leader once its caches are synced. It is a healthz.Checker.
func (s *Server) Ready(*http.Request) error {
	select {
	case <-s.elected:
	default:
		return errors.New("this replica is not the leader")
	}
	if !s.synced.Load() {
		return errors.New("the caches are not synced yet")
	}
	return nil
}

// connectionLog logs the errors of connections in net/http, mostly failed handshakes,
// with low priority.
type connectionLog struct{ log logr.Logger }

func (c connectionLog) Write(line []byte) (int, error) {
	c.log.V(1).Info("Connection error", "message", strings.TrimSpace(string(line)))
	return len(line), nil
}
