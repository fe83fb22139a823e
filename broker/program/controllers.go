package program

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/internal/acceptance"
	"github.com/spillway-dev/spillway/broker/internal/advertisement"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/history/recorder"
	"github.com/spillway-dev/spillway/broker/internal/history/report"
	"github.com/spillway-dev/spillway/broker/internal/leadership"
	"github.com/spillway-dev/spillway/broker/internal/mailbox"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/internal/server"
	"github.com/spillway-dev/spillway/broker/internal/tenant"
	"github.com/spillway-dev/spillway/broker/undecoded"
)

// Identity authenticates the callers.
type Identity = server.Identity

// DefaultCatchUp is how long a new leader waits for its caches before it gives up.
const DefaultCatchUp = leadership.DefaultDeadline

// Parts are what the controllers and the REST interface of a broker depend on.
type Parts struct {
	// Namespace of the broker's objects.
	Namespace string
	Identity  Identity
	// Listener of the REST interface; nil if the caller serves its Handler.
	Listener net.Listener
	// CatchUp is the deadline of a new leader's caches.
	CatchUp time.Duration
	// AnyLeader makes a new leader act at once, whatever its caches have: a planted fault.
	AnyLeader bool
	Clock     clock.WithTicker
	// Workers is the number of concurrent reconciles of each controller.
	Workers int
	// Namespaces has each approved cluster get a namespace, through which its agent may use the
	// broker instead of the REST interface.
	Namespaces bool
	// History keeps what ends; nil for none.
	History *History
	// undecoded are the objects that the manager's cache cannot decode; nil for none.
	undecoded *undecoded.Objects
	Log       logr.Logger
}

// reconciler is what the REST interface reports to.
type reconciler struct {
	*reservation.Reconciler
	*advertisement.Clusters
}

// Add adds all that the broker runs to a manager, and returns the REST interface.
func Add(mgr manager.Manager, p Parts) (*server.Server, error) {
	leader, err := leadership.New(mgr, p.Namespace, p.CatchUp, p.Clock)
	if err != nil {
		return nil, fmt.Errorf("setting up the leadership: %w", err)
	}
	if p.undecoded != nil {
		p.undecoded.Observe(leader.Observe)
	}
	if !p.AnyLeader {
		mgr = leader
	}
	committer := commit.New(commit.Hub{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Namespace: p.Namespace}, p.Clock)
	clusters := advertisement.New(advertisement.Options{Committer: committer, Clock: p.Clock, Workers: p.Workers})
	emitter := events.NewRecorder(mgr.GetEventRecorder("spillway-broker"))
	reservations := reservation.New(clusters, emitter)
	var kept *report.Calls
	if p.History != nil {
		writer := recorder.New(recorder.Options{
			Database: p.History.Database, Objects: committer.Store, Retention: p.History.Retention, Clock: p.Clock,
			Events: emitter, Log: ctrl.Log.WithName("history"),
		})
		if err := mgr.Add(writer); err != nil {
			return nil, fmt.Errorf("adding the history: %w", err)
		}
		reservations.Keep(writer)
		kept = &report.Calls{Store: p.History.Database, Reference: p.History.Reference, Clock: p.Clock}
	}
	configs := &acceptance.Writer{Client: mgr.GetClient(), Namespace: p.Namespace, Clock: p.Clock}
	if err := errors.Join(reservations.SetupWithManager(mgr), clusters.SetupWithManager(mgr), configs.SetupWithManager(mgr)); err != nil {
		return nil, err
	}
	rest, err := server.New(mgr, server.Options{
		Listener: p.Listener, Namespace: p.Namespace, Identity: p.Identity, Reconciler: reconciler{reservations, clusters}, Store: committer.Store, History: kept,
		Observed: leader.Observe, Log: p.Log, Clock: p.Clock,
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the server: %w", err)
	}
	if p.Namespaces {
		err = addNamespaces(mgr, p, rest)
	}
	return rest, err
}

// addNamespaces adds the namespaces of clusters, and what serves them there.
func addNamespaces(mgr manager.Manager, p Parts, rest *server.Server) error {
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper()})
	if err != nil {
		return fmt.Errorf("creating a client of the clusters' namespaces: %w", err)
	}
	tenants := &tenant.Tenants{Client: mgr.GetClient(), Live: live, Namespace: p.Namespace}
	return errors.Join(tenants.SetupWithManager(mgr), mailbox.New(mgr, mailbox.Options{
		Handler: rest.Handler(), Clock: p.Clock, Log: p.Log.WithName("namespaces"),
		As: func(ctx context.Context, cluster string) context.Context {
			return server.As(ctx, server.Insider{Cluster: cluster, Admitted: func(ctx context.Context) error { return tenants.Admitted(ctx, cluster) }})
		},
	}))
}
