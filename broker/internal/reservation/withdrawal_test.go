package reservation

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/google/go-cmp/cmp"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// withdraw lowers an accepted hold to a number of pods, as ApplyProviderAck does.
func (h *hub) withdraw(cluster, name string, remaining int32) {
	h.Helper()
	h.change(cluster, func(ad *broker.ClusterAdvertisement) {
		hold := ledger.Find(&ad.Status, types.UID(name))
		sets := hold.Promised.DeepCopy().PodSets
		sets[0].Count = remaining
		held := capacity.OfPodSets(sets)
		lost := capacity.Sub(hold.Promised, held)
		if !ledger.Withdraw(&ad.Status, hold.ReservationUID, hold.Attempt, &held, 10*time.Minute) {
			h.Fatalf("%s could not withdraw from %s: %+v", cluster, name, hold)
		}
		h.answers.Withdrawn(cluster, "rome", lost, "cordoned", h.settings.RetryAfter, h.clock.Now())
	})
	h.reconcile(name)
}

func (h *hub) expectWithdrawals(name string, want ...broker.Withdrawal) {
	h.Helper()
	if diff := cmp.Diff(want, h.reservations[name].Status.Withdrawals); diff != "" {
		h.Errorf("withdrawals of %s (-want +got)\n%s", name, diff)
	}
}

func within10m(cluster string, attempt int64) broker.Withdrawal {
	return broker.Withdrawal{Cluster: cluster, Attempt: attempt, LeaveWithin: metav1.Duration{Duration: 10 * time.Minute}}
}

// What a provider withdraws is placed elsewhere at once, and the consumer learns how long
// pods may stay. The deadline is a fact of the ledger: another broker repeats it and does
// not start it again.
func TestWithdrawalIsPlacedElsewhere(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "5")
	h.ask("r", 5, "1")
	h.answer("paris", "r", true)
	h.use("r")
	h.advertise("berlin", "5")
	h.withdraw("paris", "r", 3)
	h.expectPods("paris", "r", 3, 0)
	h.expectPods("berlin", "r", 2, 0)
	h.expectWithdrawals("r", within10m("paris", 1))

	h.clock.Step(time.Minute)
	h.failOver()
	h.receive("paris", h.clock.Now())
	h.receive("berlin", h.clock.Now())
	h.reconcile("r")
	h.expectWithdrawals("r", within10m("paris", 1))

	// A second withdrawal is another one; of what remains, nothing stays in the allocations.
	h.answer("berlin", "r", true)
	h.answer("paris", "r", true)
	attempt := ledger.Find(&h.store.Advertisement("paris").Status, "r").Attempt
	h.withdraw("paris", "r", 0)
	h.expectWithdrawals("r", within10m("paris", attempt))
	for _, a := range h.reservations["r"].Status.Allocations {
		if a.Cluster == "paris" {
			t.Errorf("nothing remains in paris: %+v", a)
		}
	}
	h.expectPods("berlin", "r", 5, 0)

	// It ends when the provider confirms that no guest is left.
	h.answer("paris", "r", true)
	h.expectWithdrawals("r")
}

// A gang whose pods run keeps what remains when a provider withdraws a part of it and no
// other has room, also while the virtual node is not ready because pods have yet to leave.
func TestRunningGangLosesAPart(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "3")
	h.advertise("berlin", "3")
	h.ask("a", 6, "1", func(s *broker.ReservationSpec) { s.MinAvailable = 6 })
	h.answer("paris", "a", true)
	h.answer("berlin", "a", true)
	h.use("a")
	h.withdraw("paris", "a", 2)
	for i := range h.reservations["a"].Status.Allocations {
		h.reservations["a"].Status.Allocations[i].VirtualNodeReady = false
	}
	h.reconcile("a")
	h.expectPods("paris", "a", 2, 0)
	h.expectPods("berlin", "a", 3, 0)
}

// One that has never been granted as a whole has no pods: it is all or nothing as before.
func TestGangThatNeverRanLosesAPart(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "3")
	h.advertise("berlin", "3")
	h.ask("a", 6, "1", func(s *broker.ReservationSpec) { s.MinAvailable = 6 })
	h.answer("paris", "a", true)
	h.withdraw("paris", "a", 2)
	h.expectWithdrawals("a")
	h.answer("berlin", "a", true)
	h.answer("paris", "a", true)
	h.reconcile("a")
	for _, a := range h.reservations["a"].Status.Allocations {
		if a.Accepted {
			t.Errorf("a part of the gang is granted: %+v", a)
		}
	}
	h.expectWithdrawals("a")
}
