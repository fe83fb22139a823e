package reservation

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// useReportInterval is the minimum time between two reports to the broker that differ in
// what pods use only.
const useReportInterval = 5 * time.Second

// hubKey is the ID of a reservation that was created in the hub; empty for others.
func hubKey(view protocol.ConsumerView) types.NamespacedName {
	if view.SourceName != "" {
		return types.NamespacedName{}
	}
	return types.NamespacedName{Name: view.ID}
}

// setupFromHub adds the controller for reservations that were created in the hub. This
// cluster has no Reservation for them: their instructions are all that there is.
func (r *Reconciler) setupFromHub(mgr manager.Manager) error {
	err := builder.ControllerManagedBy(mgr).Named("hub-reservations").
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			spec := &o.(*broker.ReservationInstruction).Spec
			if !spec.FromHub() {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: spec.ReservationName}}}
		})).
		WatchesRawSource(r.fromHub).
		Complete(reconcile.Func(r.reconcileFromHub))
	if err != nil {
		return fmt.Errorf("setting up the controller for reservations of the hub: %w", err)
	}
	return nil
}

// reconcileFromHub reports to the broker which virtual nodes provide a reservation and
// what pods use of it, and renews its lease while they do.
func (r *Reconciler) reconcileFromHub(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request == transport.ResyncAll {
		return reconcile.Result{}, nil // the source has enqueued every view
	}
	id, now := request.Name, r.Clock.Now()
	view, ok := r.Mirror.Get(id)
	if !ok || view.SourceName != "" {
		r.forgetRenewal(id)
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.reportedUse, id)
		return reconcile.Result{}, nil
	}
	instructions, err := r.instructions(ctx, id)
	if err != nil {
		return reconcile.Result{}, err
	}
	result, err := r.acknowledgeFromHub(ctx, &view, instructions, now)
	if err != nil {
		return result, err
	}
	renewed, err := r.renewLease(ctx, &view, id, view.UID, now)
	return earlier(result, renewed), err
}

// acknowledgeFromHub sends the report unless the broker's view shows it.
func (r *Reconciler) acknowledgeFromHub(ctx context.Context, view *protocol.ConsumerView, instructions []broker.ReservationInstruction, now time.Time) (reconcile.Result, error) {
	ack := protocol.RequesterAck{ReservationUID: view.UID, Attempt: view.Status.Attempt.Number, Used: used(&view.Spec, instructions), Unusable: unusable(view, instructions)}
	if known := view.Status.Used; ack.Used == nil && known != nil && known.Count > 0 {
		// The last instruction is gone: so are the pods.
		ack.Used = &broker.Use{}
		ack.Used.Summary = usedSummary(&view.Spec, ack.Used)
	}
	same := ack.Unusable == nil
	for i := range view.Status.Allocations {
		allocation := &view.Status.Allocations[i]
		// The broker keeps no virtual node for an allocation that is not accepted.
		ready := allocation.Accepted && isTrue(find(instructions, allocation), broker.ConditionVirtualNodeReady)
		if ready {
			ack.Ready = append(ack.Ready, allocation.Cluster)
		}
		same = same && ready == allocation.VirtualNodeReady
	}
	slices.Sort(ack.Ready)
	if same {
		if ack.Used == nil || equality.Semantic.DeepEqual(ack.Used, view.Status.Used) {
			return reconcile.Result{}, nil
		}
		r.mu.Lock()
		due := r.reportedUse[view.ID].Add(useReportInterval)
		r.mu.Unlock()
		if now.Before(due) {
			return reconcile.Result{RequeueAfter: due.Sub(now)}, nil
		}
	}
	if wait := r.acks.Wait(view.ID, ack, now); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	if err := r.Broker.AckRequester(ctx, view.ID, ack); err != nil {
		return reconcile.Result{}, fmt.Errorf("acknowledging reservation %s: %w", view.ID, err)
	}
	r.mu.Lock()
	r.reportedUse[view.ID] = now
	r.mu.Unlock()
	return reconcile.Result{RequeueAfter: r.acks.Sent(view.ID, ack, now)}, nil
}
