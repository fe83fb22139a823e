// Package instruction turns what the broker says into objects of this cluster: a
// ReservationInstruction for each provider that holds something for one of our
// Reservations, a ProviderInstruction for each hold here. Other parts of the
// agent act on these objects and write their status; the decision about a hold
// goes back to the broker from here.
//
// Objects follow the broker's last word, whoever changes or deletes them, and
// only its word makes them go: while it cannot be heard, everything stays.
package instruction

import (
	"context"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// IndexReservation finds ReservationInstructions by spec.reservationName.
const IndexReservation = "spec.reservationName"

// SetupIndex makes IndexReservation usable with the manager's client.
func SetupIndex(ctx context.Context, mgr manager.Manager) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &broker.ReservationInstruction{}, IndexReservation, func(o client.Object) []string {
		return []string{o.(*broker.ReservationInstruction).Spec.ReservationName}
	})
	if err != nil {
		return fmt.Errorf("indexing ReservationInstructions: %w", err)
	}
	return nil
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// everything is the request to look at every object that exists: after a Relist
// also those must be looked at that the broker knows nothing of.
var everything = reconcile.Request{}

// feed queues the reservations that a stream speaks of.
type feed struct {
	mu    sync.Mutex
	queue queue
}

func (f *feed) add(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if id != "" {
		f.queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: id}})
	}
}

// follow makes a source that queues by reservation ID.
func follow[View any](f *feed, mirror *transport.Mirror[View], id func(View) string) source.Source {
	return source.Func(func(_ context.Context, q queue) error {
		f.mu.Lock()
		f.queue = q
		f.mu.Unlock()
		mirror.Subscribe(func(change transport.Change[View]) {
			for _, view := range change.Views {
				f.add(id(view))
			}
			if change.Relisted {
				q.Add(everything)
			}
		})
		return nil
	})
}
