package instruction

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// ackAgain is how long an answer may take to show in the broker's view before it
// is sent again.
const ackAgain = 10 * time.Second

// Provider keeps the ProviderInstructions and answers the broker.
type Provider struct {
	client    client.Client
	namespace string
	broker    transport.BrokerCommunicator
	mirror    *transport.Mirror[protocol.ProviderView]
	clock     clock.Clock
	feed      feed

	mu   sync.Mutex
	sent map[string]sentAck
}

type sentAck struct {
	ack protocol.ProviderAck
	at  time.Time
}

// NewProvider keeps instructions in namespace as the mirror says, and answers
// through the communicator.
func NewProvider(c client.Client, namespace string, communicator transport.BrokerCommunicator, mirror *transport.Mirror[protocol.ProviderView]) *Provider {
	return &Provider{
		client: c, namespace: namespace, broker: communicator, mirror: mirror,
		clock: clock.RealClock{}, sent: map[string]sentAck{},
	}
}

// SetupWithManager adds the controller.
func (p *Provider) SetupWithManager(mgr manager.Manager) error {
	return builder.ControllerManagedBy(mgr).Named("provider-instructions").
		Watches(&broker.ProviderInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: o.GetName()}}}
		})).
		WatchesRawSource(follow(&p.feed, p.mirror, func(v protocol.ProviderView) string { return v.ID })).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(p)
}

// Reconcile makes the instruction for one hold what the broker says, and tells
// the broker what was decided about it.
func (p *Provider) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request == everything {
		var all broker.ProviderInstructionList
		if err := p.client.List(ctx, &all, client.InNamespace(p.namespace)); err != nil {
			return reconcile.Result{}, fmt.Errorf("listing ProviderInstructions: %w", err)
		}
		for _, have := range all.Items {
			p.feed.add(have.Name)
		}
		return reconcile.Result{}, nil
	}
	if !p.mirror.Synced() {
		// The Relist to come queues everything again.
		return reconcile.Result{}, nil
	}
	id := request.Name
	view, wanted := p.mirror.Get(id)
	instruction := &broker.ProviderInstruction{}
	err := p.client.Get(ctx, types.NamespacedName{Namespace: p.namespace, Name: id}, instruction)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("reading ProviderInstruction %s: %w", id, err)
	}
	exists := err == nil
	if !wanted {
		p.forget(id)
		if !exists {
			return reconcile.Result{}, nil
		}
		err := p.client.Delete(ctx, instruction, client.Preconditions{UID: &instruction.UID})
		if client.IgnoreNotFound(err) != nil {
			return reconcile.Result{}, fmt.Errorf("deleting ProviderInstruction %s: %w", id, err)
		}
		return reconcile.Result{}, nil
	}
	if err := p.ensure(ctx, instruction, exists, &view); err != nil {
		if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
			return reconcile.Result{RequeueAfter: time.Second}, nil
		}
		return reconcile.Result{}, err
	}
	return p.answer(ctx, instruction, &view)
}

func (p *Provider) ensure(ctx context.Context, instruction *broker.ProviderInstruction, exists bool, view *protocol.ProviderView) error {
	promised := view.Hold.Promised
	spec := broker.ProviderInstructionSpec{
		ReservationName:    view.ID,
		ReservationUID:     view.Hold.ReservationUID,
		RequesterClusterID: view.Requester,
		RequesterPeerKey:   view.RequesterPeerKey,
		RequestedCPU:       orZero(promised.Totals.CPU),
		RequestedMemory:    orZero(promised.Totals.Memory),
		RequestedResources: promised.Totals,
		PodSets:            promised.PodSets,
		Releasing:          view.Releasing(),
		Attempt:            view.Hold.Attempt,
	}
	if !exists {
		*instruction = broker.ProviderInstruction{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: p.namespace, Name: view.ID,
				Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
			},
			Spec: spec,
		}
		if err := p.client.Create(ctx, instruction); err != nil {
			return fmt.Errorf("creating ProviderInstruction %s: %w", view.ID, err)
		}
		// What this cluster has agreed to before stays agreed to, also when
		// somebody deleted the object that said so.
		held := view.Hold.Unconfirmed
		if held == nil {
			held = view.Hold.Granted
		}
		if held == nil {
			return nil
		}
		before := instruction.DeepCopy()
		instruction.Status.Held = held.DeepCopy()
		if err := p.client.Status().Patch(ctx, instruction, client.MergeFrom(before)); err != nil {
			return fmt.Errorf("noting what is held in ProviderInstruction %s: %w", view.ID, err)
		}
		return nil
	}
	if instruction.Spec.ReservationUID != spec.ReservationUID {
		// Another Reservation of the same name: no status of the former one may
		// answer for it. The deletion enqueues it again.
		err := p.client.Delete(ctx, instruction, client.Preconditions{UID: &instruction.UID})
		return client.IgnoreNotFound(err)
	}
	if equality.Semantic.DeepEqual(instruction.Spec, spec) {
		return nil
	}
	before := instruction.DeepCopy()
	instruction.Spec = spec
	if err := p.client.Patch(ctx, instruction, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("updating ProviderInstruction %s: %w", view.ID, err)
	}
	return nil
}

// answer sends what was decided about the hold as the broker has it now, until
// the broker's view shows it.
func (p *Provider) answer(ctx context.Context, instruction *broker.ProviderInstruction, view *protocol.ProviderView) (reconcile.Result, error) {
	ack, decided := Decision(instruction)
	if !decided || ack.ReservationUID != view.Hold.ReservationUID || ack.Attempt != view.Hold.Attempt || shows(view, ack) {
		return reconcile.Result{}, nil
	}
	p.mu.Lock()
	last := p.sent[view.ID]
	p.mu.Unlock()
	now := p.clock.Now()
	if due := last.at.Add(ackAgain); last.ack == ack && now.Before(due) {
		return reconcile.Result{RequeueAfter: due.Sub(now)}, nil
	}
	if err := p.broker.Ack(ctx, view.ID, &ack, nil); err != nil {
		return reconcile.Result{}, fmt.Errorf("answering the broker about hold %s: %w", view.ID, err)
	}
	p.mu.Lock()
	p.sent[view.ID] = sentAck{ack: ack, at: now}
	p.mu.Unlock()
	return reconcile.Result{RequeueAfter: ackAgain}, nil
}

func (p *Provider) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.sent, id)
}

// Decision reads from an instruction's status what is to be answered. decided is
// false while the provider's side still works on it.
func Decision(instruction *broker.ProviderInstruction) (ack protocol.ProviderAck, decided bool) {
	enforced := meta.FindStatusCondition(instruction.Status.Conditions, broker.ConditionEnforced)
	if instruction.Status.ObservedAttempt != instruction.Spec.Attempt || enforced == nil || enforced.Status == metav1.ConditionUnknown {
		return protocol.ProviderAck{}, false
	}
	ack = protocol.ProviderAck{ReservationUID: instruction.Spec.ReservationUID, Attempt: instruction.Spec.Attempt, Accepted: instruction.Status.Enforced, Message: enforced.Message}
	if instruction.Spec.Releasing {
		ack.Accepted = enforced.Status == metav1.ConditionFalse && enforced.Reason == broker.ReasonReleased
		return ack, ack.Accepted
	}
	return ack, true
}

// shows reports whether the broker's view already reflects an answer. What is
// refused or released shows by the hold's next attempt, or its end.
func shows(view *protocol.ProviderView, ack protocol.ProviderAck) bool {
	return ack.Accepted && !view.Releasing() && view.Hold.AcceptedAttempt == ack.Attempt && view.Hold.Unconfirmed == nil
}
