package overflow

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func TestGrantCache(t *testing.T) {
	c := newGrantCache(clock.RealClock{})
	pod := jobPod("crunch", "crunch-0", "1")
	r := reservationFor(pod, map[string]int32{"paris": 2, "berlin": 1})
	key, changed := c.set(r)
	if !changed || !c.hasNamespace("shop") || c.hasNamespace("bank") {
		t.Fatal("a new Reservation is not reported, or in the wrong namespace")
	}
	want := map[string]int32{"paris": 2, "berlin": 1}
	if g := c.get(key); g == nil || g.key != key || cmp.Diff(want, g.slots) != "" || !slices.Equal(g.charges["paris"], []charge{{"rome-crunch", 2}}) {
		t.Fatalf("got %+v", g)
	}
	r = r.DeepCopy()
	r.Status.Summary = "3 of 3 pods"
	if _, changed := c.set(r); changed {
		t.Error("a change that does not concern pods is reported")
	}
	r = r.DeepCopy()
	r.Status.Allocations = nil
	r.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}
	if _, changed := c.set(r); !changed || c.get(key) != nil || !c.refused(key) {
		t.Error("a refusal is not reported")
	}
	if _, changed := c.delete(r); !changed || c.hasNamespace("shop") || c.refused(key) {
		t.Error("a deleted Reservation is still cached")
	}
	if _, changed := c.delete(r); changed {
		t.Error("a deletion is reported twice")
	}
}
