package instruction

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// unlistedRetention is how long capacity is held for a Reservation that the broker does
// not list. The broker lists a hold until this cluster has acknowledged its release: if
// it does not, the hub has lost it, and the consumer posts the Reservation again.
const unlistedRetention = 5 * time.Minute

// maxUnlisted is the maximum number of unlisted holds in an advertisement.
const maxUnlisted = 1024

// removeUnlisted deletes the instruction of a hold that the broker does not list: at
// once if it holds nothing, otherwise after unlistedRetention.
func (p *Provider) removeUnlisted(ctx context.Context, instruction *broker.ProviderInstruction) (reconcile.Result, error) {
	if held := Held(instruction); held != nil && !held.Empty() {
		now := p.clock.Now()
		since, known := p.unlisted.LoadOrStore(instruction.UID, now)
		if !known {
			log.FromContext(ctx).Info("The broker does not list a hold of this cluster; it is kept for the consumer to post its Reservation again",
				"instruction", instruction.Name, "consumer", instruction.Spec.RequesterClusterID, "held", held.Totals.String(), "keptFor", unlistedRetention.String())
		}
		if left := since.(time.Time).Add(unlistedRetention).Sub(now); left > 0 {
			return reconcile.Result{RequeueAfter: left}, nil
		}
	}
	p.unlisted.Delete(instruction.UID)
	return reconcile.Result{}, p.remove(ctx, instruction)
}

// Unlisted returns the capacity that this cluster holds for Reservations of which the
// broker does not list a hold, or a smaller one, the largest number of pods first where
// there are too many to advertise. Until the broker has listed its holds, it is all that is
// held.
func (p *Provider) Unlisted(ctx context.Context) ([]broker.UnlistedHold, error) {
	var list broker.ProviderInstructionList
	if err := p.client.List(ctx, &list, client.InNamespace(p.namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing ProviderInstructions: %w", err)
	}
	type unlisted struct {
		broker.UnlistedHold
		pods int32
	}
	var all []unlisted
	for i := range list.Items {
		instruction := &list.Items[i]
		view, listed := p.mirror.Get(instruction.Name)
		held := Held(instruction)
		if listed && held != nil && view.Hold.ReservationUID == instruction.Spec.ReservationUID {
			charged := view.Hold.Promised
			if view.Hold.Unconfirmed != nil {
				charged = capacity.Max(charged, *view.Hold.Unconfirmed)
			}
			if capacity.Sub(*held, charged).Empty() {
				continue
			}
		}
		if held != nil && !held.Empty() {
			all = append(all, unlisted{broker.UnlistedHold{
				ReservationUID: instruction.Spec.ReservationUID, ReservationName: instruction.Spec.ReservationName,
				Requester: instruction.Spec.RequesterClusterID, Held: held.Totals,
			}, held.Pods()})
		}
	}
	slices.SortFunc(all, func(a, b unlisted) int {
		return cmp.Or(cmp.Compare(b.pods, a.pods), cmp.Compare(a.ReservationName, b.ReservationName), cmp.Compare(a.ReservationUID, b.ReservationUID))
	})
	var out []broker.UnlistedHold
	for _, u := range all[:min(len(all), maxUnlisted)] {
		out = append(out, u.UnlistedHold)
	}
	return out, nil
}
