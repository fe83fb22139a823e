package program

import (
	"fmt"
	"net"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/spillway-dev/spillway/broker/internal/leadership"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/internal/server"
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
	// Workers is the number of concurrent reconciles of each controller; 0 for the default.
	Workers int
	// Specs are shared with the manager's cache, and undecoded are the objects that it cannot
	// decode; nil for none.
	Specs     *reservation.Specs
	undecoded *undecoded.Objects
	Log       logr.Logger
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
	receipts := server.NewReceipts(p.Clock)
	reservations := reservation.New(mgr, reservation.Options{Namespace: p.Namespace, Freshness: receipts, Clock: p.Clock, Workers: p.Workers, Specs: p.Specs})
	if err := reservations.SetupWithManager(mgr); err != nil {
		return nil, fmt.Errorf("setting up the reservation controllers: %w", err)
	}
	rest, err := server.New(mgr, server.Options{
		Listener: p.Listener, Namespace: p.Namespace, Identity: p.Identity, Reconciler: reservations, Receipts: receipts,
		Observed: leader.Observe, Log: p.Log, Clock: p.Clock,
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the server: %w", err)
	}
	return rest, nil
}
