package request

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"
	clientevents "k8s.io/client-go/tools/events"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// TestRequestedLater: one pod of a request has its event at once, the others have one each at the
// next look if they still wait.
func TestRequestedLater(t *testing.T) {
	all := map[string]int{"crunch-0": 1, "crunch-1": 1, "crunch-2": 1}
	for name, tc := range map[string]struct {
		reason string
		// slots are granted, and gone are bound or deleted after half of the time.
		slots int32
		gone  []string
		// deleted: it is being deleted when the time is over, and then created again.
		deleted     bool
		first, then map[string]int
	}{
		"no grant":            {reason: "they wait", first: map[string]int{"crunch-0": 1}, then: all},
		"granted":             {reason: "they are about to be bound", slots: 3, first: map[string]int{"crunch-0": 1}, then: map[string]int{"crunch-0": 1}},
		"granted in part":     {reason: "one still waits", slots: 2, gone: []string{"crunch-1"}, first: map[string]int{"crunch-0": 1}, then: map[string]int{"crunch-0": 1, "crunch-2": 1}},
		"bound":               {reason: "they wait no more", gone: []string{"crunch-1", "crunch-2"}, first: map[string]int{"crunch-0": 1}, then: map[string]int{"crunch-0": 1}},
		"deleted for a while": {reason: "they wait", deleted: true, first: map[string]int{"crunch-0": 1}, then: all},
	} {
		t.Run(name, func(t *testing.T) {
			pods, recorded := demandtest.NewIndexer(), demandtest.EventCounts{}
			c, now := testController(t, pods)
			c.Recorder = recorded
			pod := demandtest.JobPod("crunch", "crunch-0", "1")
			for pod := range all {
				pod := demandtest.JobPod("crunch", pod, "1")
				expect.NoError(t, pods.Add(pod))
				c.fails(pod)
			}
			c.sync()
			key, _ := c.Keys.Get(pod)
			request := c.writes.requests[key.Key]
			setReservation := func(slots int32) *broker.Reservation {
				r := demandtest.ReservationFor(pod, map[string]int32{"paris": slots})
				r.Name, r.Spec.PodSets = request.Key.Name(request.Owner.Name), request.PodSets
				expect.NoError(t, c.Reservations.cache.Update(r))
				return r
			}
			r := setReservation(0)
			c.recordRequested(request, r)
			now.Step(waiting.LookPeriod / 2)
			setReservation(tc.slots)
			for _, name := range tc.gone {
				bound := demandtest.JobPod("crunch", name, "1")
				bound.Spec.NodeName = broker.VirtualNodeName("paris")
				expect.NoError(t, pods.Update(bound))
				c.Queue.Remove(bound.UID)
			}
			c.sync()
			if got := recorded.Of(reasonRequested); !maps.Equal(got, tc.first) {
				t.Errorf("events at first: %v, want %v", got, tc.first)
			}
			if tc.deleted {
				expect.NoError(t, c.Reservations.cache.Delete(r))
			}
			for range 3 {
				now.Step(waiting.LookPeriod)
				c.sync()
				setReservation(tc.slots)
			}
			if got := recorded.Of(reasonRequested); !maps.Equal(got, tc.then) {
				t.Errorf("events then: %v, want %v, because %s", got, tc.then, tc.reason)
			}
		})
	}
}

// TestNotSteeredOnce: a pod that waits for the cluster's own scheduler has one event of that in an
// hour, once its namespace has opted in and this replica leads, in whatever order it learns that.
func TestNotSteeredOnce(t *testing.T) {
	early := func(change ...func(*corev1.Pod)) *corev1.Pod {
		pod := demandtest.JobPod("crunch", "early", "1")
		pod.Spec.SchedulerName = corev1.DefaultSchedulerName
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
		for _, c := range change {
			c(pod)
		}
		return pod
	}
	bound := func(p *corev1.Pod) { p.Spec.NodeName = "home" }
	optedOut := func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }
	untried := func(p *corev1.Pod) { p.Status.Conditions = nil }
	const add, update, remove, lead, optIn, optOut = "add", "update", "remove", "lead", "opt in", "opt out"
	type step struct {
		do   string
		pod  *corev1.Pod
		want int
	}
	const anHour = "an hour passes"
	for name, steps := range map[string][]step{
		"a standby that leads later":            {{optIn, nil, 0}, {add, early(), 0}, {lead, nil, 1}, {update, early(), 1}},
		"a namespace that opts in later":        {{lead, nil, 0}, {add, early(), 0}, {optIn, nil, 1}, {optOut, nil, 1}, {optIn, nil, 1}},
		"an hour later, while it waits":         {{optIn, nil, 0}, {lead, nil, 0}, {add, early(), 1}, {anHour, nil, 2}, {update, early(), 2}},
		"an hour later, when it is bound":       {{optIn, nil, 0}, {lead, nil, 0}, {add, early(), 1}, {update, early(bound), 1}, {anHour, nil, 1}},
		"both, the namespace first":             {{add, early(), 0}, {optIn, nil, 0}, {lead, nil, 1}},
		"both, the namespace last":              {{add, early(), 0}, {lead, nil, 0}, {optIn, nil, 1}},
		"a namespace that opts out before that": {{optIn, nil, 0}, {add, early(), 0}, {optOut, nil, 0}, {lead, nil, 0}, {optIn, nil, 1}},
		"a pod that is found unschedulable":     {{optIn, nil, 0}, {lead, nil, 0}, {add, early(untried), 0}, {update, early(), 1}, {update, early(), 1}},
		"a pod that opts in later":              {{optIn, nil, 0}, {lead, nil, 0}, {add, early(optedOut), 0}, {update, early(), 1}},
		"a pod that opts out and in again":      {{optIn, nil, 0}, {add, early(), 0}, {update, early(optedOut), 0}, {lead, nil, 0}, {update, early(), 1}},
		"a pod that is bound before that":       {{optIn, nil, 0}, {add, early(), 0}, {update, early(bound), 0}, {lead, nil, 0}},
		"a pod that is deleted before that":     {{optIn, nil, 0}, {add, early(), 0}, {remove, early(), 0}, {lead, nil, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			pods, recorded := demandtest.NewIndexer(), demandtest.EventCounts{}
			c, now := testController(t, pods)
			leads := false
			c.Namespaces, c.Recorder, c.Active = namespacesWith(broker.OverflowDisabled), recorded, func() bool { return leads }
			for i, s := range steps {
				switch s.do {
				case add, update:
					expect.NoError(t, pods.Update(s.pod))
				case remove:
					expect.NoError(t, pods.Delete(s.pod))
				case anHour:
					now.Step(waiting.RepeatAfter)
				case optIn, optOut:
					c.Namespaces = namespacesWith(map[string]string{optIn: broker.OverflowEnabled, optOut: broker.OverflowDisabled}[s.do])
				case lead:
					leads = true
				}
				if at := c.nextSync(); at.After(now.Now().Add(waiting.LookPeriod)) {
					t.Errorf("step %d: the controller wakes at %s, want within %s", i+1, at, waiting.LookPeriod)
				}
				now.Step(waiting.LookPeriod)
				c.sync()
				if got := recorded.Of("OverflowNotPossible")["early"]; got != s.want {
					t.Errorf("step %d (%s): %d events, want %d", i+1, s.do, got, s.want)
				}
			}
			expect.NoError(t, pods.Delete(early()))
			now.Step(waiting.LookPeriod)
			if c.sync(); len(c.unsteered) > 0 {
				t.Errorf("the pod is kept: %+v", c.unsteered)
			}
		})
	}
}

// TestRequestedOfGrowth: when pods arrive later, one that has no event yet has that of their
// request at once.
func TestRequestedOfGrowth(t *testing.T) {
	pods, recorded := demandtest.NewIndexer(), demandtest.EventCounts{}
	c, now := testController(t, pods)
	c.Recorder = recorded
	for i, want := range []map[string]int{
		{"crunch-0": 1},
		{"crunch-0": 1, "crunch-1": 1},
		{"crunch-0": 1, "crunch-1": 1, "crunch-2": 1},
	} {
		for j := range 2 {
			pod := demandtest.JobPod("crunch", fmt.Sprint("crunch-", 2*i+j), "1")
			expect.NoError(t, pods.Add(pod))
			c.fails(pod)
		}
		c.sync()
		key, _ := c.Keys.Get(demandtest.JobPod("crunch", "crunch-0", "1"))
		request := c.writes.requests[key.Key]
		r := demandtest.ReservationFor(demandtest.JobPod("crunch", "crunch-0", "1"), nil)
		r.Spec.PodSets = request.PodSets
		c.recordRequested(request, r)
		if got := recorded.Of(reasonRequested); !maps.Equal(got, want) {
			t.Errorf("events after request %d: %v, want %v", i+1, got, want)
		}
		now.Step(time.Second)
	}
}

// TestCappedOnce: pods that arrive one by one under a limit do not make an event on all others
// each time, but a changed limit does.
func TestCappedOnce(t *testing.T) {
	pending, name := waiting.NewPendingPods(), types.NamespacedName{Namespace: "shop", Name: "web-0"}
	now := time.Unix(1000, 0)
	pending.Add("web-0", name, now)
	for _, tc := range []struct {
		pods, allowed int32
		short         corev1.ResourceName
		want          bool
	}{{4, 2, "cpu", true}, {5, 2, "cpu", false}, {6, 3, "cpu", true}, {6, 3, "memory", true}, {7, 3, "memory", false}} {
		request := demand.Request{Key: demand.Key{Namespace: "shop"}, PodSets: []broker.PodSet{{Count: tc.pods}}}
		now = now.Add(waiting.LookPeriod)
		e := capped("team-a", request, tc.allowed, tc.short, nil)
		if recorded := pending.Announce("web-0", waiting.Event{Reason: e.reason, Key: e.key}, now, nil); recorded != tc.want {
			t.Errorf("%d of %d pods for %s: recorded %t, want %t", tc.allowed, tc.pods, tc.short, recorded, tc.want)
		}
	}
}

// sinkOfNotes sends the texts of the events that are created.
type sinkOfNotes struct {
	clientevents.EventSink
	notes chan string
}

func (s sinkOfNotes) Create(_ context.Context, e *eventsv1.Event) (*eventsv1.Event, error) {
	s.notes <- e.Note
	return e, nil
}

func (s sinkOfNotes) Patch(_ context.Context, e *eventsv1.Event, _ []byte) (*eventsv1.Event, error) {
	return e, nil
}

// TestNoTextIsLost: events of one reason with different keys are not aggregated to one, with
// and without a Reservation. It may be the same version of it.
func TestNoTextIsLost(t *testing.T) {
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	request := demand.Request{Key: demand.Key{Namespace: "shop"}, PodSets: []broker.PodSet{{Count: 4}}}
	for name, r := range map[string]*broker.Reservation{"no Reservation": nil, "a Reservation": demandtest.ReservationFor(pod, nil)} {
		t.Run(name, func(t *testing.T) {
			sink := sinkOfNotes{notes: make(chan string, 10)}
			broadcaster := clientevents.NewBroadcaster(sink)
			defer broadcaster.Shutdown()
			expect.NoError(t, broadcaster.StartRecordingToSinkWithContext(t.Context()))
			recorder := broadcaster.NewRecorder(clientgoscheme.Scheme, "test")
			missing := map[string]bool{}
			for allowed := range int32(3) {
				e := capped("team-a", request, allowed, "cpu", r)
				missing[e.message] = true
				e.Send(recorder, pod)
			}
			for deadline := time.After(time.Minute); len(missing) > 0; {
				select {
				case note := <-sink.notes:
					delete(missing, note)
				case <-deadline:
					t.Fatalf("no event has the texts %q", slices.Collect(maps.Keys(missing)))
				}
			}
		})
	}
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

// TestRequestedAfterALostPlace: a pod that gets a place at any moment while the controller is
// about to record that it waits, and then loses it, has the event when it is looked at again.
func TestRequestedAfterALostPlace(t *testing.T) {
	for reads := range 5 {
		t.Run(fmt.Sprint("after ", reads, " reads of the pod"), func(t *testing.T) {
			pod, recorded := demandtest.JobPod("crunch", "crunch-0", "1"), demandtest.EventCounts{}
			pods := &duringGet{Indexer: demandtest.NewIndexer(pod)}
			c, now := testController(t, pods)
			c.Recorder = recorded
			c.fails(pod)
			c.sync()
			key, _ := c.Keys.Get(pod)
			request := c.writes.requests[key.Key]
			r := demandtest.ReservationFor(pod, nil)
			r.Name, r.Spec.PodSets = request.Key.Name(request.Owner.Name), request.PodSets
			expect.NoError(t, c.Reservations.cache.Add(r))

			var placeAfter func(reads int) func()
			placeAfter = func(reads int) func() {
				return func() {
					if reads == 0 {
						c.Placements.Assume(pod, broker.VirtualNodeName("paris"), "")
					} else {
						pods.f = placeAfter(reads - 1)
					}
				}
			}
			pods.f = placeAfter(reads)
			now.Step(waiting.LookPeriod)
			c.look()
			pods.f = nil
			c.Placements.Forget(pod.UID)
			now.Step(waiting.LookPeriod)
			c.look()
			if got, want := recorded.Of(reasonRequested), map[string]int{"crunch-0": 1}; !maps.Equal(got, want) {
				t.Errorf("events %v, want %v", got, want)
			}
		})
	}
}

// TestRejections: clusters of which the broker only says that they do not lend are counted
// for themselves.
func TestRejections(t *testing.T) {
	paris := broker.ClusterRejection{Cluster: "paris", Reason: "NoFit", Message: "Full."}
	count := func(reason string, n int32) broker.RejectionCount {
		return broker.RejectionCount{Reason: reason, Count: n}
	}
	for name, tc := range map[string]struct {
		decision  *broker.Decision
		key, text string
	}{
		"no decision": {},
		"none named":  {decision: &broker.Decision{RejectionCounts: []broker.RejectionCount{count("ConsumerNotAdmitted", 2)}}},
		"some counted": {
			&broker.Decision{Rejections: []broker.ClusterRejection{paris}, RejectionCounts: []broker.RejectionCount{count("ConsumerNotAdmitted", 2), count("OverBudget", 3)}},
			"paris=NoFit", "paris: Full; 3 other clusters were rejected; 2 clusters do not offer capacity to rome (their values lend.enabled and lend.consumers).",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := &broker.Reservation{Spec: broker.ReservationSpec{RequesterID: "rome"}, Status: broker.ReservationStatus{Decision: tc.decision}}
			if key, text := rejections(r); key != tc.key || text != tc.text {
				t.Errorf("got %q, %q", key, text)
			}
		})
	}
}

// TestWaitsForGrant: a pod has OverflowRequested if it waits for what providers grant, and for
// nothing else.
func TestWaitsForGrant(t *testing.T) {
	for name, tc := range map[string]struct {
		slots  int32
		change func(*broker.Reservation)
		// refused: more is not requested, but for these pods.
		refused bool
		but     int32
		want    bool
	}{
		"nothing is granted":       {want: true},
		"all is granted":           {slots: 100},
		"it is another owner's":    {change: func(r *broker.Reservation) { r.Labels[broker.LabelOwnerUID] = "another" }},
		"it is being deleted":      {change: func(r *broker.Reservation) { r.DeletionTimestamp = &metav1.Time{} }},
		"it has failed":            {change: func(r *broker.Reservation) { r.Status.Phase = broker.ReservationFailed }},
		"more of it is refused":    {refused: true},
		"more of it is over a cap": {refused: true, but: 100, want: true},
	} {
		c, _ := testController(t, demandtest.NewIndexer())
		pod := demandtest.JobPod("crunch", "crunch-0", "1")
		r := demandtest.ReservationFor(pod, map[string]int32{"paris": tc.slots})
		if tc.change != nil {
			tc.change(r)
		}
		key, _ := c.Keys.KeyOf(pod)
		c.Grants.SetUnasked(key, tc.refused, tc.but)
		if got := c.waitsForGrant(key, r); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}

// TestLateEvents: what changes each second is an event of a pod once a minute, and the last of it
// is one although nothing else happens; it is repeated after an hour.
func TestLateEvents(t *testing.T) {
	pods, recorded := demandtest.NewIndexer(), demandtest.EventCounts{}
	c, now := testController(t, pods)
	c.Recorder = recorded
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	expect.NoError(t, pods.Add(pod))
	c.fails(pod)
	c.sync()
	key, _ := c.Keys.Get(pod)
	queue := func(reason string) {
		r := demandtest.ReservationFor(pod, nil)
		r.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}
		r.Status.Decision = &broker.Decision{Rejections: []broker.ClusterRejection{{Cluster: "paris", Reason: reason}}}
		expect.NoError(t, c.Reservations.cache.Update(r))
		c.recordStatus(key.Key, pod.UID)
	}
	expectEvents := func(when string, want int) {
		t.Helper()
		if got := recorded.Of("OverflowQueued")[pod.Name]; got != want {
			t.Errorf("%s: %d events, want %d", when, got, want)
		}
	}
	for i := range 10 {
		queue(fmt.Sprint("Reason", i))
		now.Step(time.Second)
		c.sync()
	}
	expectEvents("ten changes", 1)
	for range 60 {
		if at := c.nextSync(); at.After(now.Now().Add(waiting.LookPeriod)) {
			t.Errorf("the controller looks again at %s, want within %s", at, waiting.LookPeriod)
		}
		now.Step(waiting.LookPeriod)
		c.sync()
	}
	expectEvents("no further change within the hour", 2)
	for range 3 {
		now.Step(waiting.LookPeriod)
		c.sync()
	}
	expectEvents("no further change for an hour", 3)
}
