package histories

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// maxStanding is how many Reservations a consumer has at once.
const maxStanding = 3

// standing is a Reservation of which all that was requested is granted.
type standing struct {
	source     types.UID
	view       protocol.ConsumerView
	provider   string
	generation int64
	pods       int32
}

// counts are the operations of all consumers: how many have ended, and how many of them
// have changed what is granted.
type counts struct{ ended, effective atomic.Int64 }

// work makes one operation for each that budget allows.
func (c *consumer) work(ctx context.Context, budget <-chan struct{}, providers []string, rng *rand.Rand, n *counts) error {
	var all []*standing
	for range budget {
		before := len(all)
		at := 0
		if before > 0 {
			at = rng.IntN(before)
		}
		effective, err := true, error(nil)
		switch choice := rng.IntN(10); {
		case before == 0 || choice < 4 && before < maxStanding:
			var s *standing
			if s, err = c.request(ctx, providers[rng.IntN(len(providers))], int32(1+rng.IntN(3))); s != nil {
				all = append(all, s)
			}
			effective = s != nil
		case choice < 6:
			effective, err = c.resize(ctx, all[at], all[at].pods+1)
		case choice < 8 && all[at].pods > 1:
			effective, err = c.resize(ctx, all[at], all[at].pods-1)
		default:
			err = c.release(ctx, all[at])
			all = slices.Delete(all, at, at+1)
		}
		if err == nil && len(all) > 0 {
			err = c.read(ctx, all[rng.IntN(len(all))])
		}
		if err != nil {
			return err
		}
		n.ended.Add(1)
		if effective {
			n.effective.Add(1)
		}
	}
	for _, s := range all {
		if err := c.release(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// put sends the wanted state of a Reservation until the broker has it.
func (c *consumer) put(ctx context.Context, s *standing, pods int32) error {
	s.generation++
	return retry(ctx, func(ctx context.Context) error {
		_, err := c.client.PutReservation(ctx, protocol.ReservationRequest{
			SourceUID: s.source, SourceNamespace: "shop", SourceName: string(s.source), SourceGeneration: s.generation,
			Spec: broker.ReservationSpec{
				TargetClusterID: s.provider,
				PodSets:         []broker.PodSet{{Name: "pods", Count: pods, Requests: broker.ResourceQuantities{CPU: resource.NewQuantity(1, resource.DecimalSI)}}},
			},
		})
		return err
	})
}

// settled waits until all pods of the last request are granted, or until the broker
// says that they must wait.
func (c *consumer) settled(ctx context.Context, s *standing, pods int32) (ok bool, err error) {
	s.view, err = c.await(ctx, s.source, fmt.Sprintf("granted %d pods by generation %d, or queued", pods, s.generation), func(view *protocol.ConsumerView, known bool) bool {
		return known && view.SourceGeneration == s.generation && (grantedPods(view) == pods || waits(view))
	})
	return grantedPods(&s.view) == pods && !waits(&s.view), err
}

// grantedPods are the pods that the providers have accepted.
func grantedPods(view *protocol.ConsumerView) (pods int32) {
	for i := range view.Status.Allocations {
		if allocation := &view.Status.Allocations[i]; allocation.Accepted {
			pods += broker.HeldCapacity{PodSets: allocation.PodSets}.Pods()
		}
	}
	return pods
}

func waits(view *protocol.ConsumerView) bool {
	return meta.IsStatusConditionTrue(view.Status.Conditions, broker.ConditionQueued)
}

// request creates a Reservation. One that must wait is deleted again, and nil returned.
func (c *consumer) request(ctx context.Context, provider string, pods int32) (*standing, error) {
	s := &standing{source: types.UID(uuid.NewUUID()), provider: provider}
	c.own(s.source, true)
	call := c.record.now()
	if err := c.put(ctx, s, pods); err != nil {
		return nil, err
	}
	ok, err := c.settled(ctx, s, pods)
	switch {
	case err != nil:
		return nil, err
	case !ok:
		return nil, c.remove(ctx, s)
	}
	s.pods = pods
	c.record.add(call, step{kind: granted, provider: provider, uid: s.view.UID, pods: pods})
	return s, nil
}

// resize changes the pods of a Reservation. A growth that must wait is taken back, which
// leaves what was granted before.
func (c *consumer) resize(ctx context.Context, s *standing, pods int32) (effective bool, err error) {
	call := c.record.now()
	if err := c.put(ctx, s, pods); err != nil {
		return false, err
	}
	ok, err := c.settled(ctx, s, pods)
	if err != nil {
		return false, err
	}
	if ok {
		s.pods = pods
		c.record.add(call, step{kind: granted, provider: s.provider, uid: s.view.UID, pods: pods})
		return true, nil
	}
	if err := c.put(ctx, s, s.pods); err != nil {
		return false, err
	}
	s.view, err = c.await(ctx, s.source, "as before its growth", func(view *protocol.ConsumerView, known bool) bool {
		return known && view.SourceGeneration == s.generation && grantedPods(view) == s.pods && !waits(view)
	})
	return false, err
}

// release deletes a Reservation and waits until nothing is held for it.
func (c *consumer) release(ctx context.Context, s *standing) error {
	call := c.record.now()
	if err := c.remove(ctx, s); err != nil {
		return err
	}
	c.record.add(call, step{kind: granted, provider: s.provider, uid: s.view.UID})
	return nil
}

func (c *consumer) remove(ctx context.Context, s *standing) error {
	if err := retry(ctx, func(ctx context.Context) error { return c.client.DeleteReservation(ctx, s.view.ID) }); err != nil {
		return err
	}
	_, err := c.await(ctx, s.source, "gone", func(_ *protocol.ConsumerView, known bool) bool { return !known })
	c.own(s.source, false)
	return err
}

// read records what the broker says about a Reservation.
func (c *consumer) read(ctx context.Context, s *standing) error {
	var call int64
	var view protocol.ConsumerView
	err := retry(ctx, func(ctx context.Context) (err error) {
		call = c.record.now()
		view, err = c.client.ConsumerReservation(ctx, s.view.ID)
		return err
	})
	if err == nil {
		c.record.add(call, step{kind: reads, provider: s.provider, uid: s.view.UID, pods: grantedPods(&view)})
	}
	return err
}
