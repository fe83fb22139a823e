// Package simulated builds the broker for the simulation: the production controllers and
// REST server over any manager, without a listener.
package simulated

import (
	"fmt"
	"net/http"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/spillway-dev/spillway/broker/internal/leadership"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/internal/server"
)

// Identity authenticates the callers.
type Identity = server.Identity

// workers is the number of concurrent reconciles of each controller: as many as a
// simulation has objects, since each is a goroutine.
const workers = 8

// Add adds the broker's controllers to a manager and returns its REST interface. The
// interface must not be served by a listener besides. anyLeader makes a new leader act
// at once, whatever its caches have: a planted fault.
func Add(mgr manager.Manager, namespace string, identity Identity, clock clock.WithTicker, anyLeader bool) (http.Handler, error) {
	leader, err := leadership.New(mgr, namespace, leadership.DefaultDeadline, clock)
	if err != nil {
		return nil, fmt.Errorf("setting up the leadership: %w", err)
	}
	if !anyLeader {
		mgr = leader
	}
	receipts := server.NewReceipts(clock)
	reservations := reservation.New(mgr, reservation.Options{Namespace: namespace, Freshness: receipts, Clock: clock, Workers: workers})
	if err := reservations.SetupWithManager(mgr); err != nil {
		return nil, fmt.Errorf("setting up the reservation controllers: %w", err)
	}
	rest, err := server.New(unserved{mgr}, server.Options{
		Namespace: namespace, Identity: identity, Reconciler: reservations, Receipts: receipts, Observed: leader.Observe, Log: logr.Discard(), Clock: clock,
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the server: %w", err)
	}
	rest.Synced()
	return rest.Handler(), nil
}

// unserved is a manager that does not start the server.
type unserved struct{ manager.Manager }

func (unserved) Add(manager.Runnable) error { return nil }
