package usage

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func TestGrantCache(t *testing.T) {
	c := NewGrantCache(clock.RealClock{})
	pod := podOf("crunch", "crunch-0", "1")
	want := map[string]int32{"paris": 2, "berlin": 1}
	key := keyOfPod(pod)
	_, set := demand.ShapeOf(pod)
	set.Count = 100
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "crunch", Labels: map[string]string{broker.LabelOwnerUID: string(key.OwnerUID), broker.LabelShape: key.Shape}},
		Spec:       broker.ReservationSpec{PodSets: []broker.PodSet{set}},
		Status:     broker.ReservationStatus{ID: "rome-crunch"},
	}
	for cluster, n := range want {
		set.Count = n
		r.Status.Allocations = append(r.Status.Allocations, broker.Allocation{Cluster: cluster, PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true})
	}
	if of, changed := c.Set(r); of != key || !changed || !c.HasNamespace("shop") || c.HasNamespace("bank") {
		t.Fatal("a new Reservation is not reported, or in the wrong namespace")
	}
	if g := c.Get(key); g == nil || g.Key != key || cmp.Diff(want, g.Slots) != "" || !slices.Equal(g.Charges["paris"], []Charge{{"rome-crunch", 2}}) {
		t.Fatalf("got %+v", g)
	}
	r = r.DeepCopy()
	r.Status.Summary = "3 of 3 pods"
	if _, changed := c.Set(r); changed {
		t.Error("a change that does not concern pods is reported")
	}
	r = r.DeepCopy()
	r.Status.Allocations = nil
	r.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}
	if _, changed := c.Set(r); !changed || c.Get(key) != nil || !c.Refused(key) {
		t.Error("a refusal is not reported")
	}
	if _, changed := c.Delete(r); !changed || c.HasNamespace("shop") || c.Refused(key) {
		t.Error("a deleted Reservation is still cached")
	}
	if _, changed := c.Delete(r); changed {
		t.Error("a deletion is reported twice")
	}
}
