package pods

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestWaitForHandOver: while the provider hands places over, the other guests wait for
// theirs; when it does not, they stop waiting, and none waits for ever.
func TestWaitForHandOver(t *testing.T) {
	clock := testclock.NewFakeClock(time.Unix(1000, 0))
	h := &Handler{Options: Options{Clock: clock}, states: map[types.UID]*podState{}}
	sync := func(name string, gated bool) (left time.Duration, opened bool) {
		guest := &corev1.Pod{}
		if gated {
			guest.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
		}
		desired := guest.DeepCopy()
		left = h.waitForHandOver(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(name)}}, guest, desired)
		return left, len(desired.Spec.SchedulingGates) < len(guest.Spec.SchedulingGates)
	}
	for _, tc := range []struct {
		name, guest string
		after       time.Duration
		gated       bool
		left        time.Duration
		opened      bool
	}{
		{"a guest waits", "a", 0, true, handOverTimeout, false},
		{"another one", "b", 2 * time.Second, true, handOverTimeout, false},
		{"and another", "c", 0, true, handOverTimeout, false},
		{"a place is handed over to it", "c", 2 * time.Second, false, 0, false},
		{"the others wait for longer", "a", time.Second, true, handOverTimeout - time.Second, false},
		{"what was handed over counts once", "c", time.Second, false, 0, false},
		{"as before", "a", time.Second, true, handOverTimeout - 3*time.Second, false},
		{"nothing is handed over", "a", handOverTimeout, true, 0, true},
		{"its own gate says nothing of the provider", "a", 0, false, 0, false},
		{"so the next one does not wait either", "b", 0, true, 0, true},
		{"a guest without a gate", "d", 0, false, 0, false},
		{"one that comes later", "e", 0, true, handOverTimeout, false},
	} {
		clock.Step(tc.after)
		if left, opened := sync(tc.guest, tc.gated); left != tc.left || opened != tc.opened {
			t.Errorf("%s: guest %s waits for %s (gate removed: %t), want %s (%t)", tc.name, tc.guest, left, opened, tc.left, tc.opened)
		}
	}
	waited := time.Duration(0)
	for opened := false; !opened; waited += time.Second {
		if waited > maxHandOver {
			t.Fatalf("a guest has waited for %s while all others got a place", waited)
		}
		_, opened = sync("e", true)
		next := "next-" + waited.String()
		sync(next, true)
		sync(next, false)
		clock.Step(time.Second)
	}
	if waited < maxHandOver/2 {
		t.Errorf("it waited for %s only", waited)
	}
}
