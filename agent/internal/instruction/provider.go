package instruction

import (
	"cmp"
	"context"
	"encoding/json"
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

// Broker receives the decisions about holds.
type Broker interface {
	// AckProvider reports the decision about the hold of a reservation.
	AckProvider(ctx context.Context, id string, ack protocol.ProviderAck) error
}

// Provider reconciles the ProviderInstruction of each hold at this cluster and
// acknowledges what was decided about it.
type Provider struct {
	client    client.Client
	namespace string
	broker    Broker
	mirror    *transport.Mirror[protocol.ProviderView]
	source    *transport.Source[protocol.ProviderView]
	clock     clock.PassiveClock
	acks      transport.Resend[protocol.ProviderAck]
	// unlisted has the time.Time since when an instruction of a UID holds capacity that
	// the broker does not list.
	unlisted sync.Map
	// deleted has, by name, the UID of the instruction that was deleted last. The cache
	// may show it for a while, with a decision that is void.
	deleted  sync.Map
	outdated outdated
}

// NewProvider returns a Provider that keeps the instructions in namespace equal to
// the views in mirror.
func NewProvider(c client.Client, namespace string, b Broker, mirror *transport.Mirror[protocol.ProviderView], clk clock.PassiveClock) *Provider {
	p := &Provider{client: c, namespace: namespace, broker: b, mirror: mirror, clock: clk}
	p.source = &transport.Source[protocol.ProviderView]{
		Mirror: mirror, Key: func(v protocol.ProviderView) types.NamespacedName { return types.NamespacedName{Name: v.ID} },
		Relisted: p.acks.Reset,
	}
	return p
}

// Source enqueues the holds of which the broker's view has changed.
func (p *Provider) Source() *transport.Source[protocol.ProviderView] { return p.source }

// SetupWithManager adds the controller.
func (p *Provider) SetupWithManager(mgr manager.Manager) error {
	return builder.ControllerManagedBy(mgr).Named("provider-instructions").
		Watches(&broker.ProviderInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: o.GetName()}}}
		})).
		WatchesRawSource(p.source).
		WithOptions(controller.Options{MaxConcurrentReconciles: workers}).
		Complete(p)
}

// Reconcile creates, updates or deletes the instruction for one hold, of which the
// request's name is the reservation's ID, and acknowledges the decision about it.
func (p *Provider) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if request == transport.ResyncAll {
		return reconcile.Result{}, p.enqueueAll(ctx)
	}
	if !p.mirror.Synced() {
		// The first Relist enqueues every hold.
		return reconcile.Result{}, nil
	}
	id := request.Name
	existing := &broker.ProviderInstruction{}
	err := p.client.Get(ctx, types.NamespacedName{Namespace: p.namespace, Name: id}, existing)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("reading ProviderInstruction %s: %w", id, err)
	}
	if err != nil {
		existing = nil
	}
	if p.isDeleted(id, existing) {
		return reconcile.Result{RequeueAfter: time.Second}, nil
	}
	view, held := p.mirror.Get(id)
	switch {
	case !held && existing == nil:
		return reconcile.Result{}, nil
	case !held:
		return p.removeUnlisted(ctx, existing)
	}
	if existing != nil {
		p.unlisted.Delete(existing.UID)
	}
	if wait := p.outdated.wait(existing, &view, p.clock.Now()); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	instruction, err := p.ensure(ctx, existing, &view)
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		// The cache is behind.
		return reconcile.Result{RequeueAfter: time.Second}, nil
	}
	if err != nil || instruction == nil {
		return reconcile.Result{}, err
	}
	return p.acknowledge(ctx, instruction, &view)
}

func (p *Provider) enqueueAll(ctx context.Context) error {
	var list broker.ProviderInstructionList
	if err := p.client.List(ctx, &list, client.InNamespace(p.namespace)); err != nil {
		return fmt.Errorf("listing ProviderInstructions: %w", err)
	}
	for i := range list.Items {
		p.source.Enqueue(types.NamespacedName{Name: list.Items[i].Name})
	}
	return nil
}

// ensure creates or updates the instruction for a hold and returns it. An
// instruction of another Reservation with the same name is deleted, so that its
// status does not count for this one, and nil is returned; its deletion enqueues
// the hold again.
func (p *Provider) ensure(ctx context.Context, existing *broker.ProviderInstruction, view *protocol.ProviderView) (*broker.ProviderInstruction, error) {
	spec := providerInstructionSpec(view)
	if existing == nil {
		created := &broker.ProviderInstruction{ObjectMeta: objectMeta(p.namespace, view.ID), Spec: spec}
		if err := annotateHeld(created, &view.Hold); err != nil {
			return nil, err
		}
		if err := p.client.Create(ctx, created); err != nil {
			return nil, fmt.Errorf("creating ProviderInstruction %s: %w", view.ID, err)
		}
		return created, nil
	}
	if existing.Spec.ReservationUID != spec.ReservationUID {
		return nil, p.remove(ctx, existing)
	}
	if existing.Spec.Attempt == spec.Attempt {
		// The broker does not say it any more once the attempt is accepted: the instruction stays
		// as it was decided on.
		spec.AnswerWithin = existing.Spec.AnswerWithin
	}
	if equality.Semantic.DeepEqual(existing.Spec, spec) {
		return existing, nil
	}
	changed := existing.DeepCopy()
	changed.Spec = spec
	if err := p.client.Patch(ctx, changed, client.MergeFromWithOptions(existing, client.MergeFromWithOptimisticLock{})); err != nil {
		return nil, fmt.Errorf("updating ProviderInstruction %s: %w", view.ID, err)
	}
	return changed, nil
}

// remove deletes an instruction and remembers that.
func (p *Provider) remove(ctx context.Context, instruction *broker.ProviderInstruction) error {
	err := remove(ctx, p.client, instruction)
	if err == nil {
		p.deleted.Store(instruction.Name, instruction.UID)
		p.outdated.removed(instruction, p.clock.Now())
	}
	return err
}

// isDeleted reports whether the instruction of a name, nil if the cache has none, is one
// that was deleted.
func (p *Provider) isDeleted(name string, instruction *broker.ProviderInstruction) bool {
	uid, known := p.deleted.Load(name)
	if !known {
		return false
	}
	if instruction == nil || instruction.UID != uid {
		p.deleted.Delete(name)
		return false
	}
	return true
}

func providerInstructionSpec(view *protocol.ProviderView) broker.ProviderInstructionSpec {
	promised := view.Hold.Promised
	return broker.ProviderInstructionSpec{
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
		AnswerWithin:       view.AnswerWithin,
	}
}

// acknowledge reports the decision about the hold's current attempt until the
// broker's view shows it.
func (p *Provider) acknowledge(ctx context.Context, instruction *broker.ProviderInstruction, view *protocol.ProviderView) (reconcile.Result, error) {
	ack, decided := Decision(instruction)
	if !decided || ack.ReservationUID != view.Hold.ReservationUID || ack.Attempt != view.Hold.Attempt || acknowledged(view, ack) {
		return reconcile.Result{}, nil
	}
	now := p.clock.Now()
	if wait := p.acks.Wait(view.ID, ack, now); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	sent := ack
	if by := instruction.Status.LeaveBy; by != nil && !ack.Accepted {
		// What is left of the time, so that a message that was late does not prolong it.
		sent.LeaveWithin = &metav1.Duration{Duration: max(by.Sub(now).Round(time.Second), 0)}
	}
	if err := p.broker.AckProvider(ctx, view.ID, sent); err != nil {
		return reconcile.Result{}, fmt.Errorf("acknowledging hold %s: %w", view.ID, err)
	}
	return reconcile.Result{RequeueAfter: p.acks.Sent(view.ID, ack, now)}, nil
}

// Decision returns the acknowledgement that an instruction's status amounts to;
// decided is false until there is a decision about the current attempt and content.
func Decision(instruction *broker.ProviderInstruction) (ack protocol.ProviderAck, decided bool) {
	spec, status := &instruction.Spec, &instruction.Status
	enforced := meta.FindStatusCondition(status.Conditions, broker.ConditionEnforced)
	if status.ObservedAttempt != spec.Attempt || status.ObservedGeneration != instruction.Generation || enforced == nil ||
		enforced.ObservedGeneration != status.ObservedGeneration || enforced.Status == metav1.ConditionUnknown {
		return protocol.ProviderAck{}, false
	}
	ack = protocol.ProviderAck{ReservationUID: spec.ReservationUID, Attempt: spec.Attempt, Accepted: status.Enforced, Message: enforced.Message}
	if !ack.Accepted {
		ack.Held = status.Held
	}
	if spec.Releasing {
		ack.Accepted = enforced.Status == metav1.ConditionFalse && enforced.Reason == broker.ReasonReleased
		return ack, ack.Accepted
	}
	return ack, true
}

// acknowledged reports whether the broker's view already shows an
// acknowledgement. A refusal or release shows as the next attempt or the end of
// the hold.
func acknowledged(view *protocol.ProviderView, ack protocol.ProviderAck) bool {
	return ack.Accepted && !view.Releasing() && view.Hold.AcceptedAttempt == ack.Attempt && view.Hold.Unconfirmed == nil
}

// annotationHeld is what this cluster held for a hold when its instruction was
// created again, as JSON.
const annotationHeld = broker.Group + "/held"

// annotateHeld records on a new instruction what this cluster already holds
// according to the broker, so that a decision about it is never made without:
// status cannot be written in the request that creates an object, and a later
// write may fail or come after the decision. Of a hold that is to be released, nothing is
// held without an instruction but what guests use: the view may be of a broker that has not
// heard yet that it was released.
func annotateHeld(instruction *broker.ProviderInstruction, hold *broker.Hold) error {
	if hold.Promised.Empty() {
		return nil
	}
	held := cmp.Or(hold.Unconfirmed, hold.Granted)
	if held == nil {
		return nil
	}
	text, err := json.Marshal(held)
	if err != nil {
		return fmt.Errorf("encoding what is held for %s: %w", instruction.Name, err)
	}
	instruction.Annotations = map[string]string{annotationHeld: string(text)}
	return nil
}

// Held returns the capacity that is set aside for an instruction, nil if none:
// status.held or, until a status is written, what was held before the instruction
// was created.
func Held(instruction *broker.ProviderInstruction) *broker.HeldCapacity {
	if instruction.Status.ObservedGeneration > 0 {
		return instruction.Status.Held
	}
	var held broker.HeldCapacity
	if text := instruction.Annotations[annotationHeld]; text == "" || json.Unmarshal([]byte(text), &held) != nil {
		return nil
	}
	return &held
}
