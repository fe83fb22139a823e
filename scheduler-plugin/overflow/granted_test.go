package overflow

import (
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	clientevents "k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
)

// eventCounts records events by pod and reason.
type eventCounts map[podReason]int

type podReason struct{ pod, reason string }

// Eventf implements events.EventRecorder.
func (c eventCounts) Eventf(regarding, _ runtime.Object, _, reason, _, _ string, _ ...any) {
	c[podReason{regarding.(*corev1.Pod).Name, reason}]++
}

// WithLogger implements events.EventRecorderLogger.
func (c eventCounts) WithLogger(klog.Logger) clientevents.EventRecorderLogger { return c }

// of returns the number of events of a reason by pod.
func (c eventCounts) of(reason string) map[string]int {
	byPod := map[string]int{}
	for of, n := range c {
		if of.reason == reason {
			byPod[of.pod] = n
		}
	}
	return byPod
}

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
	pod, recorded := jobPod("crunch", "crunch-0", "1"), eventCounts{}
	p := testPlugin(OverflowArgs{}, nodeWith("paris").Node())
	pods := &duringGet{Indexer: newIndexer(pod)}
	c, _, _ := testController(t, p, pods)
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, request.Indexers())
	p.reservations = request.NewReservations(nil, cached, p.clock)
	c.Recorder, c.Reservations = recorded, p.reservations
	p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
	c.sync()
	r := reservationFor(pod, map[string]int32{"paris": 1})
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
	if got, want := recorded.of(request.ReasonGranted), map[string]int{"crunch-0": 1}; !maps.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}
