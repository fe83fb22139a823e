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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history/report"
	"github.com/spillway-dev/spillway/broker/internal/server/limits"
	"github.com/spillway-dev/spillway/broker/internal/server/relay"
	"github.com/spillway-dev/spillway/broker/internal/server/stream"
	"github.com/spillway-dev/spillway/broker/internal/server/views"
	"github.com/spillway-dev/spillway/broker/internal/store"
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
	// Beat applies an advertisement with the content that is stored. It reports false, and does
	// nothing, if the advertisement must be stored instead.
	Beat(cluster string, beat protocol.Beat) (known bool)
	ApplyProviderAck(ctx context.Context, cluster, name string, ack protocol.ProviderAck) error
	ApplyRequesterAck(ctx context.Context, requester, name string, ack protocol.RequesterAck) error
	Renew(requester, name string, uid types.UID) error
	Explain(requester, name string) ([]broker.ClusterRejection, error)
}

// Identity authenticates clusters. Refusals are or wrap *protocol.Error.
type Identity interface {
	TLSConfig() *tls.Config
	// Certified returns the cluster ID and the key's fingerprint in a verified client
	// certificate, which may be revoked. It reads nothing.
	Certified(ctx context.Context, state *tls.ConnectionState) (clusterID, fingerprint string, err error)
	Join(ctx context.Context, request protocol.JoinRequest) (protocol.JoinResponse, error)
	Authenticate(ctx context.Context, state *tls.ConnectionState) (clusterID string, err error)
}

// Options of a Server. All fields except Listener, History, Clock and Observed are required.
type Options struct {
	// Listener without TLS, nil if the caller of New serves Handler. The server closes it.
	Listener net.Listener
	// Namespace of the broker's objects.
	Namespace  string
	Identity   Identity
	Reconciler Reconciler
	// Store has the objects that are read.
	Store *store.Store
	// History answers calls about what has ended; nil if none is kept.
	History *report.Calls
	Log     logr.Logger
	// Clock defaults to the real one.
	Clock clock.WithTicker
	// Observed, if set, is called for each event, after the store and the server have it.
	Observed func(object client.Object, deleted bool)
}

// Server is the REST interface, a manager.Runnable. All replicas listen; those that are
// not the leader refuse most calls.
type Server struct {
	Options
	// client writes to the API server. Its reads may lag behind, those of live do not.
	client client.Client
	live   client.Reader
	// elected is closed once this replica is the leader and may act as it.
	elected <-chan struct{}
	// synced is true once the store has the content of the caches.
	synced atomic.Bool
	// stopping is closed to end the streams.
	stopping chan struct{}

	views       views.Views
	broadcaster *stream.Broadcaster
	mailboxes   *relay.Mailboxes
	// callers limits by key, because a revoked key must not exhaust the limit of the
	// cluster's new one. listers, writers and advertisers limit by cluster, joiners by
	// address.
	callers, listers, writers, advertisers, joiners *limits.Rates
	inProgress, listsInProgress                     limits.InProgress
	connections                                     *limits.Connections
}

// New returns a server that uses the manager's clients, and adds it to the manager if it has a
// Listener. Without one, the caller calls Synced.
func New(mgr manager.Manager, options Options) (*Server, error) {
	s := newServer(mgr.GetClient(), mgr.GetAPIReader(), mgr.Elected(), options)
	if err := s.Store.Watch(mgr.GetCache(), s.Namespace, s.observe); err != nil {
		return nil, err
	}
	if s.Listener == nil {
		return s, nil
	}
	return s, mgr.Add(s)
}

func newServer(client client.Client, live client.Reader, elected <-chan struct{}, options Options) *Server {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	options.Identity = insiders{options.Identity}
	s := &Server{
		Options:     options,
		client:      client,
		live:        live,
		elected:     elected,
		stopping:    make(chan struct{}),
		views:       views.Views{Store: options.Store},
		broadcaster: stream.NewBroadcaster(),
		mailboxes:   relay.NewMailboxes(options.Clock),
		callers:     limits.NewRates(options.Clock, limits.Always(100, 200)),
		listers:     limits.NewRates(options.Clock, limits.Always(5, 100)),
		connections: limits.NewConnections(options.Clock),
		advertisers: limits.NewRates(options.Clock, limits.Always(2, 20)),
		joiners:     limits.NewRates(options.Clock, limits.Always(5, 10)),
	}
	s.writers = limits.NewRates(options.Clock, func() (float64, int) {
		settings := s.Store.Settings()
		return float64(settings.WritesPerSecond), settings.WriteBurst
	})
	return s
}

// observe wakes the streams whose views an event of the watch may have changed: the versions
// of an object before and after it, nil for none. The store has the event already.
func (s *Server) observe(before, after client.Object) {
	object, deleted := after, after == nil
	if deleted {
		object = before
	}
	switch object.(type) {
	case *broker.Reservation:
		was, now := as[broker.Reservation](before), as[broker.Reservation](after)
		countReservation(was, -1)
		countReservation(now, 1)
		s.auditPhase(was, now)
		s.notify(views.OfReservation(was, now))
	case *broker.ClusterAdvertisement:
		s.notify(s.views.OfAdvertisement(as[broker.ClusterAdvertisement](before), as[broker.ClusterAdvertisement](after)))
	case *broker.ClusterRegistration:
		clusterCertificateExpiry.DeleteLabelValues(object.GetName())
		if now := as[broker.ClusterRegistration](after); now != nil && now.Status.NotAfter != nil {
			clusterCertificateExpiry.WithLabelValues(now.Name).Set(float64(now.Status.NotAfter.Unix()))
		}
	}
	if s.Observed != nil {
		s.Observed(object, deleted)
	}
}

// as is an object of a known kind, nil for none.
func as[T any](object client.Object) *T {
	typed, _ := any(object).(*T)
	return typed
}

// notify wakes the streams of those whose views may have changed.
func (s *Server) notify(changed views.Changes) {
	for of, ids := range changed {
		s.broadcaster.Notify(of.Cluster, of.Role, ids...)
	}
}

// Synced states that the store has all objects that existed at first: without it, most calls are
// refused.
func (s *Server) Synced() { s.synced.Store(true) }

// NeedLeaderElection is false: all replicas listen.
func (s *Server) NeedLeaderElection() bool { return false }

// Start serves until ctx ends. The manager calls it once its caches are synced.
func (s *Server) Start(ctx context.Context) error {
	if !s.Store.WaitSynced(ctx) {
		return nil
	}
	s.Synced()
	go s.mailboxes.Run(ctx)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	server := &http.Server{
		Handler:           s.Handler(),
		TLSConfig:         s.Identity.TLSConfig(),
		Protocols:         &protocols,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ConnState:         s.connections.Changed,
		ConnContext:       limits.WithConnection,
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
