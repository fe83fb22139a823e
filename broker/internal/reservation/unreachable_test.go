package reservation

import (
	"slices"
	"testing"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/plan"
)

// cutOff has rome report the providers that it cannot connect to. It returns the
// Reservations that are reconciled for that.
func (h *hub) cutOff(providers ...string) (enqueued []string) {
	h.Helper()
	before := h.store.Advertisement("rome")
	after := before.DeepCopy()
	after.Spec.Unreachable = providers
	after.Generation++
	h.put(after)
	return h.advertisementChanged(before, after)
}

// lose has rome report that its virtual nodes for a Reservation are not ready, and the
// provider that guests of rome run there.
func (h *hub) lose(provider, name string, guests int32) {
	h.Helper()
	for i := range h.reservations[name].Status.Allocations {
		h.reservations[name].Status.Allocations[i].VirtualNodeReady = false
	}
	h.change(provider, func(ad *broker.ClusterAdvertisement) {
		ad.Spec.ObservedHolds = []broker.ObservedHold{{Requester: "rome", Pods: guests}, {Requester: "oslo", Pods: 7}}
	})
}

// hear hears from all clusters after a time.
func (h *hub) hear(after time.Duration) {
	h.clock.Step(after)
	for _, ad := range h.store.Advertisements() {
		h.advertise(ad.Name, "")
	}
}

// heldInParis is a hub with a hold of 2 pods that paris has accepted.
func heldInParis(t *testing.T) *hub {
	h := newHub(t)
	h.advertise("rome", "0")
	h.advertise("paris", "10")
	h.ask("r", 2, "1")
	h.answer("paris", "r", true)
	h.expectPods("paris", "r", 2, 0)
	return h
}

// A hold at a provider to which the consumer cannot connect is placed elsewhere, and
// released once it is replaced.
func TestUnreachableProviderIsReplaced(t *testing.T) {
	h := heldInParis(t)
	if enqueued := h.cutOff("paris"); !slices.Contains(enqueued, "r") {
		t.Errorf("reconciled: %v, want r", enqueued)
	}
	h.reconcile("r")
	h.expectPods("paris", "r", 2, 0)
	h.expectCondition("r", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "paris: Cluster rome cannot connect to its API server")
	h.advertise("berlin", "10")
	h.reconcile("r")
	h.expectPods("paris", "r", 2, 0)
	h.expectPods("berlin", "r", 2, 0)
	h.answer("berlin", "r", true)
	h.expectPods("berlin", "r", 2, 0)
	h.expectPods("paris", "r", 0, 2)
	h.answer("paris", "r", true)
	h.expectPods("paris", "r", 0, 0)
	if got := decided(h.reservations["r"], "paris"); got != decide.ReasonUnreachable {
		t.Errorf("paris is rejected because of %q", got)
	}
}

// A Reservation whose provider is cut off waits in the queue for what it holds there: capacity
// that appears elsewhere is tried at once.
func TestUnreachableProviderIsReplacedOnceThereIsRoom(t *testing.T) {
	h := heldInParis(t)
	h.cutOff("paris")
	h.reconcile("r")
	h.reconcile("r") // it sees its new status
	h.advertise("berlin", "10")
	if enqueued := h.advertisementChanged(nil, h.store.Advertisement("berlin")); !slices.Contains(enqueued, "r") {
		t.Errorf("reconciled: %v, want r", enqueued)
	}
	h.reconcile("r")
	h.expectPods("berlin", "r", 2, 0)
	h.answer("berlin", "r", true)
	h.expectPods("paris", "r", 0, 2)
	h.reconcile("r")
	if n := len(h.waiting()); n > 0 {
		t.Errorf("%d Reservations wait", n)
	}
}

// A gang whose guests run at a provider that is cut off, and which fits nowhere else, keeps
// its capacity.
func TestUnreachableGangKeepsItsCapacity(t *testing.T) {
	h := newHub(t)
	h.advertise("rome", "0")
	h.advertise("paris", "6")
	h.ask("a", 6, "1", func(s *broker.ReservationSpec) { s.MinAvailable = 6 })
	h.answer("paris", "a", true)
	h.use("a")
	h.cutOff("paris")
	h.lose("paris", "a", 6)
	h.hear(11 * time.Minute)
	h.reconcile("a")
	h.expectPods("paris", "a", 6, 0)
	// Without guests there it gives back what it holds.
	h.lose("paris", "a", 0)
	h.reconcile("a")
	h.expectPods("paris", "a", 0, 6)
}

func decided(r *broker.Reservation, cluster string) (reason string) {
	if r.Status.Decision == nil {
		return ""
	}
	for _, rejection := range r.Status.Decision.Rejections {
		if rejection.Cluster == cluster {
			return rejection.Reason
		}
	}
	return ""
}

// Guests that a consumer has lost sight of keep their place for as long as those of a
// provider that is silent: with another broker, from its start.
func TestUnreachableGuestsKeepTheirPlace(t *testing.T) {
	h := heldInParis(t)
	h.advertise("berlin", "10")
	h.use("r")
	h.cutOff("paris")
	h.reconcile("r")
	h.expectPods("berlin", "r", 0, 0) // its virtual node is ready

	h.lose("paris", "r", 2)
	h.hear(9 * time.Minute)
	if in := h.reconcile("r"); h.requeue(in, time.Time{}).RequeueAfter != time.Minute {
		t.Errorf("reconciled after %s, want a minute", h.requeue(in, time.Time{}).RequeueAfter)
	}
	h.expectPods("berlin", "r", 0, 0)
	h.cutOff()
	h.hear(2 * time.Minute)
	h.reconcile("r")
	h.expectPods("berlin", "r", 0, 0) // reachable again
	h.cutOff("paris")
	h.hear(9 * time.Minute)
	h.reconcile("r")
	h.expectPods("berlin", "r", 0, 0)
	h.failOver()
	for _, ad := range h.store.Advertisements() {
		h.advertisementChanged(nil, ad)
	}
	h.hear(9 * time.Minute)
	h.reconcile("r")
	h.expectPods("berlin", "r", 0, 0)
	h.hear(time.Minute)
	h.reconcile("r")
	h.expectPods("berlin", "r", 2, 0)
	h.answer("berlin", "r", true)
	h.expectPods("paris", "r", 0, 2)
}

// What a consumer reported is not known to be true once it is silent itself. What becomes
// reachable again before it is replaced, stays.
func TestUnreachableNoMore(t *testing.T) {
	h := heldInParis(t)
	h.advertise("berlin", "10")
	h.cutOff("paris")
	rome := h.heard["rome"]
	h.hear(11 * time.Minute)
	h.receive("rome", rome)
	h.reconcile("r")
	h.expectPods("berlin", "r", 0, 0)

	h.hear(time.Minute)
	h.reconcile("r")
	h.expectPods("berlin", "r", 2, 0)
	h.cutOff()
	h.reconcile("r")
	h.expectPods("berlin", "r", 0, 2)
	h.expectPods("paris", "r", 2, 0)
}
