package instruction

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// ReservationInstructionName returns the name of the instruction for one provider
// of a reservation. It has a hash if it is too long, or if the names alone do not tell
// where the cluster ID begins: those of Reservations in the hub are anything.
func ReservationInstructionName(reservationID, cluster string) string {
	const maxLength = 253
	name := reservationID + "-" + cluster
	if len(name) <= maxLength && !strings.Contains(cluster, "-") {
		return name
	}
	sum := sha256.Sum256([]byte(reservationID + "/" + cluster))
	return strings.TrimRight(name[:min(len(name), maxLength-17)], "-.") + "-" + hex.EncodeToString(sum[:8])
}

// Matches reports whether an instruction is for the provider and the amount of an
// allocation.
func Matches(instruction *broker.ReservationInstruction, allocation *broker.Allocation) bool {
	return instruction.Spec.TargetClusterID == allocation.Cluster &&
		equality.Semantic.DeepEqual(instruction.Spec.RequestedResources, allocation.Resources) &&
		equality.Semantic.DeepEqual(instruction.Spec.PodSets, allocation.PodSets)
}

// Consumer reconciles the ReservationInstructions of each reservation.
type Consumer struct {
	client    client.Client
	namespace string
	mirror    *transport.Mirror[protocol.ConsumerView]
	source    *transport.Source[protocol.ConsumerView]
	clock     clock.PassiveClock
}

// NewConsumer returns a Consumer that keeps the instructions in namespace equal to
// the views in mirror.
func NewConsumer(c client.Client, namespace string, mirror *transport.Mirror[protocol.ConsumerView], clk clock.PassiveClock) *Consumer {
	return &Consumer{client: c, namespace: namespace, mirror: mirror, clock: clk, source: &transport.Source[protocol.ConsumerView]{
		Mirror: mirror, Key: func(v protocol.ConsumerView) types.NamespacedName { return types.NamespacedName{Name: v.ID} },
	}}
}

// Source enqueues the reservations of which the broker's view has changed.
func (c *Consumer) Source() *transport.Source[protocol.ConsumerView] { return c.source }

// SetupWithManager adds the controller. SetupIndex must be called before.
func (c *Consumer) SetupWithManager(mgr manager.Manager) error {
	return builder.ControllerManagedBy(mgr).Named("reservation-instructions").
		Watches(&broker.ReservationInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			if id := o.(*broker.ReservationInstruction).Spec.ReservationName; id != "" {
				return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: id}}}
			}
			return nil
		})).
		WatchesRawSource(c.source).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers}).
		Complete(c)
}

// Reconcile creates, updates and deletes the instructions of one reservation, of
// which the request's name is the ID.
func (c *Consumer) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request == transport.ResyncAll {
		return reconcile.Result{}, c.enqueueAll(ctx)
	}
	if !c.mirror.Synced() {
		// The first Relist enqueues every reservation.
		return reconcile.Result{}, nil
	}
	id := request.Name
	var list broker.ReservationInstructionList
	if err := c.client.List(ctx, &list, client.InNamespace(c.namespace), client.MatchingFields{IndexReservation: id}); err != nil {
		return reconcile.Result{}, fmt.Errorf("listing the ReservationInstructions of %s: %w", id, err)
	}
	obsolete := map[string]*broker.ReservationInstruction{}
	for i := range list.Items {
		obsolete[list.Items[i].Name] = &list.Items[i]
	}
	var errs []error
	view, ok := c.mirror.Get(id)
	if ok {
		for i := range view.Status.Allocations {
			allocation := &view.Status.Allocations[i]
			name := ReservationInstructionName(id, allocation.Cluster)
			existing := obsolete[name]
			if existing != nil && existing.Spec.ReservationUID != view.UID {
				// It is of an earlier Reservation of this name: neither its amount nor its
				// status counts for this one. Its deletion enqueues the reservation again.
				continue
			}
			delete(obsolete, name)
			if !allocation.Accepted {
				// The first instruction is created when the provider has accepted. An earlier
				// one stays for the pods that use it, and for no other: the provider may
				// already have released what it was for. If it has withdrawn all of it, the
				// allocation is new: its pods must leave.
				switch w := withdrawalFrom(&view, allocation.Cluster); {
				case existing != nil && w != nil:
					errs = append(errs, c.keepNothing(ctx, existing, &view, w))
				case existing != nil:
					errs = append(errs, c.mark(ctx, existing, func(spec *broker.ReservationInstructionSpec) *bool { return &spec.Suspended }))
				}
				continue
			}
			errs = append(errs, c.ensure(ctx, name, existing, &view, allocation))
		}
		errs = append(errs, c.keepWithdrawn(ctx, &view, obsolete))
	}
	// In a fixed order, so that a run can be repeated.
	for _, name := range slices.Sorted(maps.Keys(obsolete)) {
		if in := obsolete[name]; ok && in.Spec.FromHub() && in.Spec.ReservationUID == view.UID && !meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionRequesterReleased) {
			// There is no local Reservation that shows how many pods still use it.
			errs = append(errs, c.mark(ctx, in, func(spec *broker.ReservationInstructionSpec) *bool { return &spec.Releasing }))
			continue
		}
		errs = append(errs, remove(ctx, c.client, obsolete[name]))
	}
	return reconcile.Result{}, errors.Join(errs...)
}

// keepWithdrawn keeps the instructions, among those that are not needed otherwise, of
// providers that have withdrawn all that they had granted, until the pods there have
// left. Nothing remains of their grant. Those that it keeps are not obsolete.
func (c *Consumer) keepWithdrawn(ctx context.Context, view *protocol.ConsumerView, obsolete map[string]*broker.ReservationInstruction) error {
	if view.Status.Phase == broker.ReservationReleased {
		return nil
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(obsolete)) {
		in := obsolete[name]
		w := withdrawalFrom(view, in.Spec.TargetClusterID)
		if in.Spec.ReservationUID != view.UID || in.Spec.Releasing || w == nil && (in.Spec.Withdrawal == nil || in.Spec.Withdrawal.Attempt <= in.Status.LeftAttempt) {
			continue
		}
		delete(obsolete, name)
		if w != nil {
			errs = append(errs, c.keepNothing(ctx, in, view, w))
		}
	}
	return errors.Join(errs...)
}

// keepNothing makes an instruction one of a grant of which nothing remains.
func (c *Consumer) keepNothing(ctx context.Context, in *broker.ReservationInstruction, view *protocol.ConsumerView, w *broker.Withdrawal) error {
	return c.ensure(ctx, in.Name, in, view, &broker.Allocation{Cluster: w.Cluster, NodeLabels: in.Spec.NodeLabels, PodSecurity: in.Spec.PodSecurity, Endpoint: in.Spec.Endpoint})
}

// withdrawalFrom is the last withdrawal of a provider; nil if there is none.
func withdrawalFrom(view *protocol.ConsumerView, cluster string) *broker.Withdrawal {
	i := slices.IndexFunc(view.Status.Withdrawals, func(w broker.Withdrawal) bool { return w.Cluster == cluster })
	if i < 0 {
		return nil
	}
	return &view.Status.Withdrawals[i]
}

// withdrawalOf is what an instruction says of a provider's withdrawals. The time begins
// when this cluster first learns of one, and never again for the same: neither when the
// agent restarts nor when another broker leads.
func (c *Consumer) withdrawalOf(view *protocol.ConsumerView, cluster string, existing *broker.ReservationInstruction) *broker.GrantWithdrawal {
	var before *broker.GrantWithdrawal
	if existing != nil {
		before = existing.Spec.Withdrawal
	}
	w := withdrawalFrom(view, cluster)
	if w == nil || before != nil && before.Attempt >= w.Attempt {
		return before
	}
	return &broker.GrantWithdrawal{Attempt: w.Attempt, LeaveBy: metav1.NewTime(c.clock.Now().Add(w.LeaveWithin.Duration).Truncate(time.Second))}
}

func (c *Consumer) enqueueAll(ctx context.Context) error {
	var list broker.ReservationInstructionList
	if err := c.client.List(ctx, &list, client.InNamespace(c.namespace)); err != nil {
		return fmt.Errorf("listing ReservationInstructions: %w", err)
	}
	for i := range list.Items {
		c.source.Enqueue(types.NamespacedName{Name: list.Items[i].Spec.ReservationName})
	}
	return nil
}

// mark sets a field of an instruction's spec that keeps new pods from using the grant.
func (c *Consumer) mark(ctx context.Context, in *broker.ReservationInstruction, field func(*broker.ReservationInstructionSpec) *bool) error {
	changed := in.DeepCopy()
	mark := field(&changed.Spec)
	if *mark {
		return nil
	}
	*mark = true
	if err := c.client.Patch(ctx, changed, client.MergeFromWithOptions(in, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("closing ReservationInstruction %s to new pods: %w", in.Name, err)
	}
	return nil
}

// ensure creates or updates the instruction for one allocation.
func (c *Consumer) ensure(ctx context.Context, name string, existing *broker.ReservationInstruction, view *protocol.ConsumerView, allocation *broker.Allocation) error {
	spec := reservationInstructionSpec(view, allocation)
	spec.Withdrawal = c.withdrawalOf(view, allocation.Cluster, existing)
	if existing == nil {
		created := &broker.ReservationInstruction{ObjectMeta: objectMeta(c.namespace, name), Spec: spec}
		if err := c.client.Create(ctx, created); err != nil {
			return fmt.Errorf("creating ReservationInstruction %s: %w", name, err)
		}
		return nil
	}
	// The reservation's attempts also count changes at other providers. The
	// instruction's attempt changes with its own amount only; otherwise every change
	// at another provider would close a virtual node that provides its full grant.
	if Matches(existing, allocation) {
		spec.Attempt = existing.Spec.Attempt
	} else {
		spec.Attempt = max(spec.Attempt, existing.Spec.Attempt+1)
	}
	spec.PeerKey = cmp.Or(spec.PeerKey, existing.Spec.PeerKey)
	if equality.Semantic.DeepEqual(existing.Spec, spec) {
		return nil
	}
	changed := existing.DeepCopy()
	changed.Spec = spec
	if err := c.client.Patch(ctx, changed, client.MergeFromWithOptions(existing, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("updating ReservationInstruction %s: %w", name, err)
	}
	return nil
}

func reservationInstructionSpec(view *protocol.ConsumerView, allocation *broker.Allocation) broker.ReservationInstructionSpec {
	namespaces := view.Spec.Namespaces
	if view.SourceName != "" {
		namespaces = nil // it serves its own
	}
	return broker.ReservationInstructionSpec{
		ReservationName:    view.ID,
		ReservationUID:     view.UID,
		SourceNamespace:    view.SourceNamespace,
		SourceName:         view.SourceName,
		SourceUID:          view.SourceUID,
		PodSelector:        view.Spec.PodSelector,
		Namespaces:         namespaces,
		TargetClusterID:    allocation.Cluster,
		RequestedCPU:       orZero(allocation.Resources.CPU),
		RequestedMemory:    orZero(allocation.Resources.Memory),
		RequestedResources: allocation.Resources,
		PodSets:            allocation.PodSets,
		NodeLabels:         allocation.NodeLabels,
		PodSecurity:        allocation.PodSecurity,
		Endpoint:           allocation.Endpoint,
		PeerKey:            view.PeerKeys[allocation.Cluster],
		PricePerHour:       allocation.PricePerHour,
		Message:            view.Status.Summary,
		ExpiresAt:          view.Status.ExpiresAt,
		Attempt:            view.Status.Attempt.Number,
	}
}
