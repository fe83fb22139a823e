package podindex

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// addedAfter is a queue that records when what is added to it is due.
type addedAfter struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	clock *testclock.FakePassiveClock
	due   map[string][]time.Time
}

func (q *addedAfter) AddAfter(request reconcile.Request, wait time.Duration) {
	q.due[request.Name] = append(q.due[request.Name], q.clock.Now().Add(wait))
}

// TestPaced: a provider is reconciled at once, then at most once in an interval, and after
// the last event.
func TestPaced(t *testing.T) {
	start := time.Unix(1000, 0)
	q := &addedAfter{clock: testclock.NewFakePassiveClock(start), due: map[string][]time.Time{}}
	index := New("")
	expect.NoError(t, index.SumsOnNodes(q.clock).Start(t.Context(), q))
	pods := 0
	changed := func(node string) {
		pods++
		index.Set(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("web-", pods)}, Spec: corev1.PodSpec{NodeName: node}})
	}
	// 1,000 events in two seconds, and one long after them.
	for range 1000 {
		changed("spillway-paris")
		changed("home")
		q.clock.SetTime(q.clock.Now().Add(2 * time.Millisecond))
	}
	q.clock.SetTime(start.Add(10 * time.Second))
	changed("spillway-paris")
	changed("spillway-berlin")
	want := map[string][]time.Time{"berlin": {start.Add(10 * time.Second)}}
	for _, after := range []time.Duration{0, 500 * time.Millisecond, time.Second, 1500 * time.Millisecond, 2 * time.Second, 10 * time.Second} {
		want["paris"] = append(want["paris"], start.Add(after))
	}
	for _, provider := range []string{"paris", "berlin"} {
		if got := slices.CompactFunc(q.due[provider], time.Time.Equal); !slices.EqualFunc(got, want[provider], time.Time.Equal) {
			t.Errorf("%s is due at %v, want %v", provider, got, want[provider])
		}
	}
	if len(q.due) != 2 {
		t.Errorf("requests for %v", q.due)
	}
}

// TestPacedAddsEachEvent: an event is added also if one before it is to be reconciled later,
// because a retry may move that to before the event.
func TestPacedAddsEachEvent(t *testing.T) {
	p := &pace{clock: testclock.NewFakePassiveClock(time.Unix(1000, 0)), due: map[reconcile.Request]time.Time{}}
	request := reconcile.Request{NamespacedName: types.NamespacedName{Name: "paris"}}
	for i, want := range []time.Duration{0, 500 * time.Millisecond, 500 * time.Millisecond} {
		if got := p.next(request); got != want {
			t.Errorf("event %d is reconciled after %s, want %s", i, got, want)
		}
	}
}

// TestPacedForgets: what had no events for long is not remembered.
func TestPacedForgets(t *testing.T) {
	p := &pace{clock: testclock.NewFakePassiveClock(time.Unix(1000, 0)), due: map[reconcile.Request]time.Time{}}
	for i := range 10 * maxPaced {
		p.next(reconcile.Request{NamespacedName: types.NamespacedName{Name: fmt.Sprint("cluster-", i)}})
		p.clock.(*testclock.FakePassiveClock).SetTime(p.clock.Now().Add(time.Millisecond))
	}
	if n := len(p.due); n > maxPaced {
		t.Errorf("%d objects are remembered", n)
	}
}
