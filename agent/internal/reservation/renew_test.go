package reservation

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestRenewalInterval(t *testing.T) {
	for duration, want := range map[time.Duration]time.Duration{
		0: 0, time.Second: time.Second, 3 * time.Minute: time.Minute, time.Hour: maxRenewalInterval,
	} {
		if got := renewalInterval(&metav1.Duration{Duration: duration}); got != want {
			t.Errorf("%s: %s, want %s", duration, got, want)
		}
	}
	if got := renewalInterval(nil); got != 0 {
		t.Errorf("a Reservation without a duration is renewed every %s", got)
	}
}

// TestRenew: a lease is renewed in each third of its duration while pods use the
// capacity, however often the Reservation is reconciled.
func TestRenew(t *testing.T) {
	b := transporttest.New("rome")
	clock := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	inUse, known := true, false
	r := New(nil, nil, nil, func(uid types.UID) (bool, bool) { return inUse && uid == "local", known }, Options{
		ClusterID: "rome", Broker: b, Clock: clock, Mirror: transport.NewConsumerMirror(b),
	})
	local := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{UID: "local"}}
	view := &protocol.ConsumerView{UID: "hub", Status: broker.ReservationStatus{LeaseDuration: &metav1.Duration{Duration: 3 * time.Minute}, Allocations: []broker.Allocation{{Cluster: "paris"}}}}
	step := func(what string, after time.Duration, calls int) {
		t.Helper()
		clock.SetTime(clock.Now().Add(after))
		result, err := r.renew(t.Context(), &state{id: "r", local: local, view: view, now: clock.Now()})
		expect.NoError(t, err)
		if got := len(b.Calls("Renew", "r")); got != calls || result.RequeueAfter > time.Minute || result.RequeueAfter == 0 {
			t.Fatalf("%s: %d calls, next after %s, want %d calls", what, got, result.RequeueAfter, calls)
		}
	}
	step("nothing is known after a restart", 0, 0)
	known = true
	step("used", useUnknownRetryAfter, 1)
	step("reconciled again", 30*time.Second, 1)
	step("the next third", 30*time.Second, 2)
	inUse = false
	step("unused", time.Minute, 2)
	inUse = true
	step("used again within the third", 10*time.Second, 2)
	step("the third after", 50*time.Second, 3)
	if uid := b.Calls("Renew", "r")[0].Argument; uid != types.UID("hub") {
		t.Errorf("renewed %v", uid)
	}

	// The broker limits the lease: it is renewed in each third of that, also if a longer one was requested.
	local.Spec.Duration, view.Status.LeaseDuration = &metav1.Duration{Duration: time.Hour}, &metav1.Duration{Duration: time.Minute}
	step("the broker has limited the lease", 20*time.Second, 4)
	step("reconciled again", 10*time.Second, 4)
	step("the next third of it", 10*time.Second, 5)

	// Nothing is renewed that holds nothing.
	view.Status.Allocations = nil
	clock.SetTime(clock.Now().Add(time.Hour))
	result, err := r.renew(t.Context(), &state{id: "r", local: local, view: view, now: clock.Now()})
	if expect.NoError(t, err); result.RequeueAfter != 0 || len(b.Calls("Renew", "r")) != 5 {
		t.Errorf("a Reservation without an allocation is renewed")
	}
}
