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
	// callTimeout bounds reading, doing and answering one call, streams apart.
	callTimeout = 30 * time.Second
	// shutdownGrace is what calls under way get when the broker stops.
	shutdownGrace = 10 * time.Second
)

// Core is what the broker does with what the agents say. All methods may be
// repeated; an apierrors.IsNotFound error means that there is no such thing, or
// not of that cluster's.
type Core interface {
	StoreAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error
	ApplyProviderAck(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error
	ApplyRequesterAck(ctx context.Context, requester, name string, ack protocol.RequesterAck) error
}

// Identity tells who is who. Refusals are *protocol.Error.
type Identity interface {
	TLSConfig() *tls.Config
	Join(ctx context.Context, request protocol.JoinRequest) (protocol.JoinResponse, error)
	Authenticate(ctx context.Context, state *tls.ConnectionState) (clusterID string, err error)
	Known(ctx context.Context, clusterID string) (bool, error)
}

// Options of a Server. All fields but Clock are needed.
type Options struct {
	// Listener to serve on, without TLS. The server closes it.
	Listener net.Listener
	// Namespace of the broker's objects.
	Namespace string
	Identity  Identity
	Core      Core
	// Receipts that advertisements are noted in.
	Receipts *Receipts
	Log      logr.Logger
	// Clock is the real one where nil.
	Clock clock.PassiveClock
}

// Server is the HTTPS interface, a manager.Runnable. It listens on every
// replica, but only the one that leads does more than say that it does not.
type Server struct {
	Options
	client  client.Client
	live    client.Reader
	elected <-chan struct{}
	// synced is set once the manager's caches are.
	synced atomic.Bool
	// stopping ends the streams.
	stopping chan struct{}

	hub       *hub
	mail      *mailboxes
	callers   *limiters
	joiners   *limiters
	heartbeat time.Duration
}

// New makes a server that uses the manager's clients and adds it to the manager.
func New(mgr manager.Manager, options Options) (*Server, error) {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	s := &Server{
		Options:   options,
		client:    mgr.GetClient(),
		live:      mgr.GetAPIReader(),
		elected:   mgr.Elected(),
		stopping:  make(chan struct{}),
		hub:       newHub(),
		mail:      newMailboxes(options.Clock),
		callers:   newLimiters(options.Clock, 100, 200),
		joiners:   newLimiters(options.Clock, 5, 10),
		heartbeat: protocol.HeartbeatSeconds * time.Second,
	}
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &broker.Reservation{}, requesterField, requesterOf); err != nil {
		return nil, fmt.Errorf("indexing Reservations by requester: %w", err)
	}
	if err := s.hub.follow(mgr.GetCache()); err != nil {
		return nil, err
	}
	return s, mgr.Add(s)
}

// NeedLeaderElection is false: a replica that does not lead answers, too.
func (s *Server) NeedLeaderElection() bool { return false }

// Start serves until ctx ends. The manager calls it when its caches are synced.
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
		// Deadlines for bodies and answers are set by call and by write, so that
		// streams may last.
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
		s.Log.Info("Calls were cut off by the shutdown", "reason", err.Error())
		return server.Close()
	}
	return nil
}

// Ready is nil on the replica that leads, once its caches are synced. It is a
// healthz.Checker.
func (s *Server) Ready(*http.Request) error {
	select {
	case <-s.elected:
	default:
		return errors.New("this replica does not lead")
	}
	if !s.synced.Load() {
		return errors.New("the caches are not synced yet")
	}
	return nil
}

// connectionLog takes what net/http says about single connections: broken
// handshakes, mostly, which an operator acts on only when looking for them.
type connectionLog struct{ log logr.Logger }

func (c connectionLog) Write(line []byte) (int, error) {
	c.log.V(1).Info("Connection", "message", strings.TrimSpace(string(line)))
	return len(line), nil
}
