package overflow

import (
	"maps"
	"testing"

	"k8s.io/client-go/tools/cache"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
)

// duringGet is a cache of pods that calls f once before it is read.
type duringGet struct {
	cache.Indexer
	f func()
}

func (d *duringGet) GetByKey(key string) (obj any, exists bool, err error) {
	if f := d.f; f != nil {
		d.f = nil
		f()
	}
	return d.Indexer.GetByKey(key)
}

// TestGrantedOnceWhileBound: a pod that gets a place while the controller is about to record
// the grant has the event once, with its binding.
func TestGrantedOnceWhileBound(t *testing.T) {
	pod, recorded := demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.EventCounts{}
	p := testPlugin(OverflowArgs{}, nodeWith("paris").Node())
	pods := &duringGet{Indexer: demandtest.NewIndexer(pod)}
	c, _, _ := testController(t, p, pods)
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, request.Indexers())
	p.reservations = request.NewReservations(nil, cached, p.clock)
	c.Recorder, c.Reservations = recorded, p.reservations
	p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
	c.sync()
	r := demandtest.ReservationFor(pod, map[string]int32{"paris": 1})
	expect.NoError(t, cached.Add(r))
	p.queue.AddReservation(p.grants.Set(r))
	key, _ := p.keys.Get(pod)
	pods.f = func() {
		s := &cycleState{grants: p.grants.Get(key.Key)}
		state := scheduler.NewCycleState()
		state.Write(stateKey, s)
		if status := p.Reserve(t.Context(), state, pod, broker.VirtualNodeName("paris")); !status.IsSuccess() {
			t.Fatal(status)
		}
		if e := p.grantedTo(pod, s, "paris", r.Status.ID); e != nil {
			e.Send(recorded, pod)
		}
	}
	if c.sync(); pods.f != nil {
		t.Fatal("the pod has got no place meanwhile")
	}
	if got, want := recorded.Of(request.ReasonGranted), map[string]int{"crunch-0": 1}; !maps.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}
