package overflow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	clientevents "k8s.io/client-go/tools/events"
	"k8s.io/component-base/metrics/legacyregistry"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// bindsAll returns a client of an API server that binds each pod, once before returns. Its
// context ends with the request.
func bindsAll(t *testing.T, before func(context.Context)) kubernetes.Interface {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // its context ends with the connection only after that
		before(r.Context())
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Success"}`)
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	expect.NoError(t, err)
	return client
}

// TestParallelBindings counts the bindings that an API server, which answers none of them
// yet, has received.
func TestParallelBindings(t *testing.T) {
	var pending, most atomic.Int64
	answer := make(chan struct{})
	client := bindsAll(t, func(ctx context.Context) {
		n := pending.Add(1)
		defer pending.Add(-1)
		for seen := most.Load(); n > seen && !most.CompareAndSwap(seen, n); seen = most.Load() {
		}
		select {
		case <-answer:
		case <-ctx.Done():
		}
	})

	b := newBinder()
	b.times = bindingTimes{turn: time.Hour, deadline: time.Hour}
	pod := func(i int) *corev1.Binding {
		return &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprintf("web-%d", i)}}
	}
	var binding sync.WaitGroup
	for i := range 3 * parallelBindings {
		binding.Go(func() {
			if err := b.bind(t.Context(), client, pod(i)); err != nil {
				t.Errorf("binding pod %d: %v", i, err)
			}
		})
	}
	expect.Eventually(t, "bindings are in progress", func() (bool, string) {
		n := pending.Load()
		return n >= parallelBindings, fmt.Sprintf("%d of %d", n, parallelBindings)
	})
	// One that waits for its turn gives up when its context ends.
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := b.bind(ctx, client, pod(-1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a binding without time for its turn: %v", err)
	}
	close(answer)
	binding.Wait()
	if n := most.Load(); n != parallelBindings {
		t.Errorf("%d bindings were in progress at once, want %d", n, parallelBindings)
	}
}

// TestAttemptsOfAll: the attempts of a pod that is bound with its first one, for a grant that
// another pod has left, are counted, and those of a pod that has waited once.
func TestAttemptsOfAll(t *testing.T) {
	client := bindsAll(t, func(context.Context) {})
	for name, tc := range map[string]struct {
		// failed is the number of cycles in which the pod has not fit.
		failed             int
		observed, attempts float64
	}{
		"first attempt": {observed: 1, attempts: 1},
		"waited":        {failed: 2, observed: 1, attempts: 3},
	} {
		t.Run(name, func(t *testing.T) {
			paris, pod := nodeWith("paris").Node(), demandtest.JobPod("crunch", "crunch-0", "1")
			p := testPlugin(OverflowArgs{}, paris)
			p.handle, p.binder = binds{client: client}, newBinder()
			p.reservations = noReservations(p.clock)
			c, _, _ := testController(t, p, demandtest.NewIndexer(pod))
			observed, attempts := observedAttempts(t)
			for range tc.failed {
				p.PostFilter(t.Context(), scheduler.NewCycleState(), pod, nil)
			}
			p.grants.Set(demandtest.ReservationFor(pod, map[string]int32{"paris": 1}))
			state := scheduler.NewCycleState()
			if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
				t.Fatal(status)
			}
			for _, status := range []*framework.Status{p.Reserve(t.Context(), state, pod, paris.Name), p.Bind(t.Context(), state, pod, paris.Name)} {
				if !status.IsSuccess() {
					t.Fatal(status)
				}
			}
			bound := pod.DeepCopy()
			bound.Spec.NodeName = paris.Name
			c.Pods = corelisters.NewPodLister(demandtest.NewIndexer(bound))
			p.queue.Remove(pod.UID) // as its informer does
			c.sync()
			nowObserved, nowAttempts := observedAttempts(t)
			if nowObserved -= observed; nowObserved != tc.observed || nowAttempts-attempts != tc.attempts {
				t.Errorf("%g pods with %g attempts are counted, want %g with %g", nowObserved, nowAttempts-attempts, tc.observed, tc.attempts)
			}
		})
	}
}

// observedAttempts returns how many pods overflow_pod_attempts has counted, and the sum.
func observedAttempts(t *testing.T) (pods, attempts float64) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	expect.NoError(t, err)
	for _, family := range families {
		if family.GetName() == "overflow_pod_attempts" {
			histogram := family.Metric[0].GetHistogram()
			return float64(histogram.GetSampleCount()), histogram.GetSampleSum()
		}
	}
	t.Fatal("overflow_pod_attempts is not registered")
	return 0, 0
}

// binds is the handle of a scheduler whose API server counts bindings.
type binds struct {
	noneWaits
	client kubernetes.Interface
}

func (b binds) ClientSet() kubernetes.Interface                 { return b.client }
func (b binds) EventRecorder() clientevents.EventRecorderLogger { return demandtest.EventCounts{} }

// TestWithdrawnGrant: a pod that has got a place is not bound if the grant is gone by then, as
// when it has waited for the other pods of its gang.
func TestWithdrawnGrant(t *testing.T) {
	var bound atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		bound.Add(1)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Success"}`)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	expect.NoError(t, err)
	pod, other := demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.JobPod("crunch", "crunch-1", "1")
	granted := func(slots int32) *broker.Reservation {
		return demandtest.ReservationFor(pod, map[string]int32{"paris": slots})
	}
	for name, tc := range map[string]struct {
		reason string
		change func(*Plugin)
		bound  int64
	}{
		"unchanged": {reason: "both have a slot", change: func(*Plugin) {}, bound: 2},
		"grown":     {reason: "both have a slot", change: func(p *Plugin) { p.grants.Set(granted(5)) }, bound: 2},
		"lowered":   {reason: "one slot is left", change: func(p *Plugin) { p.grants.Set(granted(1)) }, bound: 1},
		"withdrawn": {reason: "the provider has no capacity for them", change: func(p *Plugin) { p.grants.Set(granted(0)) }},
		"deleted":   {reason: "its capacity is released", change: func(p *Plugin) { p.grants.Delete(granted(2)) }},
		"deleted and created again": {reason: "the pods would be charged to the former hold", change: func(p *Plugin) {
			r := granted(2)
			r.Status.ID = "rome-other"
			p.grants.Set(r)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			bound.Store(0)
			paris := nodeWith("paris").Node()
			p := testPlugin(OverflowArgs{}, paris)
			p.handle, p.binder = binds{client: client}, newBinder()
			p.reservations = noReservations(p.clock)
			p.grants.Set(granted(2))
			states := map[*corev1.Pod]framework.CycleState{}
			for _, pod := range []*corev1.Pod{pod, other} {
				state := scheduler.NewCycleState()
				if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
					t.Fatal(status)
				}
				if status := p.Reserve(t.Context(), state, pod, paris.Name); !status.IsSuccess() {
					t.Fatal(status)
				}
				states[pod] = state
			}
			tc.change(p)
			for pod, state := range states {
				if status := p.Bind(t.Context(), state, pod, paris.Name); !status.IsSuccess() {
					p.Unreserve(t.Context(), state, pod, paris.Name)
				}
			}
			if n := bound.Load(); n != tc.bound {
				t.Errorf("%d pods are bound, want %d, because %s", n, tc.bound, tc.reason)
			}
		})
	}
}

// TestDroppedLabel: an API server that drops the labels of a binding is reported, once a minute.
func TestDroppedLabel(t *testing.T) {
	hold := map[string]string{broker.LabelHold: "rome-crunch"}
	for name, tc := range map[string]struct {
		charged  string
		labels   map[string]string
		reported bool
	}{
		"dropped":             {"rome-crunch", nil, true},
		"kept":                {"rome-crunch", hold, false},
		"a pod at home":       {"", nil, false},
		"of a former process": {"", hold, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, pod := testPlugin(OverflowArgs{}, nodeWith("paris").Node()), demandtest.JobPod("crunch", "crunch-0", "1")
			p.handle = profileHandle{}
			handler := p.podHandler(func() bool { return false }, waiting.NewUntriedPods(p.clock))
			handler.OnAdd(pod, false)
			if tc.charged != "" {
				p.placements.Assume(pod, broker.VirtualNodeName("paris"), tc.charged)
			}
			bound := pod.DeepCopy()
			bound.Spec.NodeName, bound.Labels = broker.VirtualNodeName("paris"), tc.labels
			handler.OnUpdate(pod, bound)
			now := p.clock.(*clocktesting.FakeClock)
			first := p.unlabelled.Load()
			if (first != 0) != tc.reported {
				t.Errorf("reported at %d", first)
			}
			now.SetTime(now.Now().Add(time.Second))
			if handler.OnUpdate(bound, bound); p.unlabelled.Load() != first {
				t.Error("reported a second later")
			}
		})
	}
}
