package reservation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientevents "k8s.io/client-go/tools/events"
	testclock "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/advertisement"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// hub is a broker without an API server: what a plan would write is applied to the
// objects in memory.
type hub struct {
	testing.TB
	*Reconciler
	clock *testclock.FakeClock
	// looks is the clock of the clusters.
	looks *looks
	// heard is when each cluster was last heard, by whichever leader.
	heard        map[string]time.Time
	reservations map[string]*broker.Reservation
	versions     int
	settings     settings.Settings
	// writes counts the statuses that were written.
	writes int
}

// receive lets the broker hear from a cluster at that time.
func (h *hub) receive(cluster string, at time.Time) {
	now := h.clock.Now()
	h.clock.SetTime(at)
	h.store.Receive(cluster, 0)
	h.clock.SetTime(now)
	h.heard[cluster] = at
}

func newHub(t testing.TB) *hub {
	h := &hub{TB: t, clock: testclock.NewFakeClock(time.Unix(1_000_000, 0)), heard: map[string]time.Time{}, reservations: map[string]*broker.Reservation{}}
	h.looks = &looks{FakeClock: h.clock, seen: func() {}}
	h.settings = settings.Of(&broker.BrokerConfigSpec{})
	h.failOver()
	return h
}

// failOver replaces the broker's process: nothing that it remembers is left.
func (h *hub) failOver() {
	before := h.Reconciler
	committer := commit.New(commit.Hub{Client: accepting{}, Namespace: "broker"}, h.clock)
	clusters := advertisement.New(advertisement.Options{Committer: committer, Clock: h.looks})
	h.Reconciler = New(clusters, &clientevents.FakeRecorder{})
	h.clusters.LastAdvertised("none") // it leads from now on
	if before != nil {
		for _, ad := range before.store.Advertisements() {
			h.store.PutAdvertisement(ad)
		}
	}
	for cluster, at := range h.heard {
		h.receive(cluster, at)
	}
	for _, r := range h.reservations {
		h.store.PutReservation(r.DeepCopy())
	}
}

func cpus(quantity string) broker.ResourceQuantities {
	return broker.FromList(expect.Resources("cpu", quantity))
}

// advertise adds a cluster with one node, or hears from it again.
func (h *hub) advertise(id, cpu string) {
	h.receive(id, h.clock.Now())
	if h.store.Advertisement(id) != nil {
		return
	}
	h.put(&broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{Name: id, UID: types.UID(id)},
		Spec: broker.ClusterAdvertisementSpec{
			ClusterID: id, Lending: broker.Lending{Enabled: true},
			Resources:   broker.AdvertisedResources{Allocatable: cpus(cpu)},
			NodeClasses: []broker.NodeClass{{Name: "std", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: cpus(cpu), Pods: 1000}}}},
		},
	})
}

func (h *hub) put(ad *broker.ClusterAdvertisement) {
	h.versions++
	ad.ResourceVersion = fmt.Sprint(h.versions)
	ledger.Settle(&ad.Spec, &ad.Status)
	h.store.PutAdvertisement(ad)
}

// ask adds a Reservation of rome for pods of one size. Each is a second younger.
func (h *hub) ask(name string, count int32, cpu string, change ...func(*broker.ReservationSpec)) {
	h.clock.Step(time.Second)
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Generation: 1, CreationTimestamp: metav1.Time{Time: h.clock.Now()},
			Labels: map[string]string{broker.LabelSourceNamespace: "shop"}},
		Spec: broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: "pods", Count: count, Requests: cpus(cpu)}}},
	}
	for _, f := range change {
		f(&r.Spec)
	}
	h.reservations[name] = r
	h.store.PutReservation(r.DeepCopy())
	h.reconcile(name)
}

// grow requests that many pods more.
func (h *hub) grow(name string, by int32) {
	h.Helper()
	h.clock.Step(time.Second)
	h.reservations[name].Spec.PodSets[0].Count += by
	h.reservations[name].Generation++
	h.reconcile(name)
}

// reconcile applies plans of a Reservation until there is nothing to do.
func (h *hub) reconcile(name string) plan.Input {
	h.Helper()
	for range 10 {
		r := h.reservations[name]
		in := h.input(r.DeepCopy(), h.settings)
		p := plan.New(in)
		h.note(in)
		if len(r.Finalizers) == 0 && in.NeedsFinalizer() {
			r.Finalizers = []string{broker.FinalizerLedger}
			continue
		}
		if write, _ := in.Outdated(p); !h.mayWrite(write, in.Now) {
			return in
		}
		before := r.DeepCopy()
		released := len(p.Grow) == 0 && !p.Empty()
		if released {
			in.Reservation.Status = plan.Recorded(in, p)
			r.Status = *in.Reservation.Status.DeepCopy()
		}
		for _, c := range p.Grow {
			h.answers.Asked(c.Cluster, r.UID, c.Capacity, in.Now)
		}
		for _, c := range p.Shrink {
			h.change(c.Cluster, func(ad *broker.ClusterAdvertisement) { ledger.Shrink(&ad.Status, r.UID, p.Attempt.Number, c.Capacity) })
		}
		for _, c := range p.Grow {
			h.change(c.Cluster, func(ad *broker.ClusterAdvertisement) {
				if _, err := ledger.Place(&ad.Spec, &ad.Status, plan.Growth(r, p.Attempt.Number, c.Capacity)); err != nil {
					h.Fatal(err)
				}
			})
		}
		if !p.Empty() {
			in.Reservation.Status.Attempt = p.Attempt
			h.readLedgers(&in, false)
			h.note(in)
		}
		r.Status = plan.Status(in, p, !p.Empty())
		if !in.NeedsFinalizer() {
			r.Finalizers = nil
		}
		if p.Empty() && apiequality.Semantic.DeepEqual(before, r) {
			return in
		}
		h.store.PutReservation(r.DeepCopy())
		h.book.Written(r.Name, r.UID, h.clock.Now())
		h.writes++
	}
	h.Fatalf("%s is written indefinitely: %+v", name, h.reservations[name].Status)
	panic("unreachable")
}

func (h *hub) change(cluster string, f func(*broker.ClusterAdvertisement)) {
	ad := h.store.Advertisement(cluster).DeepCopy()
	f(ad)
	h.put(ad)
}

// answer answers a hold as its provider, as ApplyProviderAck does.
func (h *hub) answer(cluster, name string, accepted bool) {
	h.Helper()
	h.change(cluster, func(ad *broker.ClusterAdvertisement) {
		hold := ledger.Find(&ad.Status, types.UID(name))
		if hold == nil {
			h.Fatalf("%s has no hold for %s", cluster, name)
		}
		asked := ledger.Pending(*hold.DeepCopy())
		askedAt := h.book.AskedAt(name, types.UID(name), cluster)
		if ledger.Confirm(&ad.Status, hold.ReservationUID, hold.Attempt, accepted, nil) {
			h.rememberAnswer(cluster, types.UID(name), askedAt, asked.Empty())
		}
		if accepted {
			h.answers.Accepted(cluster, asked, h.clock.Now())
		} else {
			h.answers.Refused(cluster, "rome", asked, "full", h.settings.RetryAfter, h.clock.Now())
		}
	})
	h.reconcile(name)
}

// use reports the consumer's virtual nodes as ready.
func (h *hub) use(name string) {
	h.Helper()
	for i := range h.reservations[name].Status.Allocations {
		h.reservations[name].Status.Allocations[i].VirtualNodeReady = true
	}
	h.reconcile(name)
}

// expectPods expects the promised and unconfirmed pods of a hold.
func (h *hub) expectPods(cluster, name string, promised, unconfirmed int32) {
	h.Helper()
	var gotPromised, gotUnconfirmed int32
	if ad := h.store.Advertisement(cluster); ad != nil {
		if hold := ledger.Find(&ad.Status, types.UID(name)); hold != nil {
			gotPromised = hold.Promised.Pods()
			if hold.Unconfirmed != nil {
				gotUnconfirmed = hold.Unconfirmed.Pods()
			}
		}
	}
	if gotPromised != promised || gotUnconfirmed != unconfirmed {
		h.Errorf("%s holds %d pods for %s and %d unconfirmed, want %d and %d", cluster, gotPromised, name, gotUnconfirmed, promised, unconfirmed)
	}
}

// expectCondition expects a condition's reason and a part of its message.
func (h *hub) expectCondition(name, kind, reason, part string) {
	h.Helper()
	c := meta.FindStatusCondition(h.reservations[name].Status.Conditions, kind)
	if c == nil || c.Reason != reason || !strings.Contains(c.Message, part) {
		h.Errorf("%s of %s is %+v, want %s with %q", kind, name, c, reason, part)
	}
}

// A provider that never answers costs one deadline, although it advertises all the time.
func TestNoAnswerCostsOneDeadline(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.advertise("berlin", "8") // paris has the better score
	h.ask("r", 2, "1")
	h.expectPods("paris", "r", 2, 0)
	h.clock.Step(29 * time.Second)
	h.advertise("paris", "10")
	h.advertise("berlin", "8")
	h.reconcile("r")
	h.expectPods("paris", "r", 2, 0)
	h.clock.Step(time.Second)
	h.reconcile("r")
	h.expectPods("paris", "r", 0, 2)
	h.expectPods("berlin", "r", 2, 0)

	h.ask("s", 1, "1")
	h.expectPods("paris", "s", 0, 0)
	h.expectPods("berlin", "s", 1, 0)
	// A confirmed release is no answer to a request.
	h.answer("paris", "r", true)
	h.expectPods("paris", "r", 0, 0)
	h.ask("t", 1, "1")
	h.expectPods("paris", "t", 0, 0)
	h.expectPods("berlin", "t", 1, 0)
	// An answer ends the memory.
	h.clock.Step(30 * time.Second)
	h.advertise("paris", "10")
	h.advertise("berlin", "8")
	h.ask("u", 1, "1")
	h.expectPods("paris", "u", 1, 0)
	h.answer("paris", "u", true)
	h.ask("v", 1, "1")
	h.expectPods("paris", "v", 1, 0)
}

// The only provider confirms releases and never answers a request: it is asked again after
// the pause, which doubles.
func TestConfirmedReleaseIsNoAnswer(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 1, "1")
	asked := map[int64]bool{}
	for range 60 {
		ad := h.store.Advertisement("paris")
		if hold := ledger.Find(&ad.Status, "r"); hold != nil && hold.Promised.Empty() {
			h.answer("paris", "r", true)
		} else if hold != nil {
			asked[hold.Attempt] = true
		}
		h.clock.Step(10 * time.Second)
		h.advertise("paris", "10")
		h.reconcile("r")
	}
	if len(asked) < 2 || len(asked) > 6 {
		t.Errorf("it was asked %d times in ten minutes", len(asked))
	}
}

// A pod set that is replaced by one of the same name and another shape is proven again: what
// was granted for the earlier one does not count.
func TestReplacedShapeIsProvenAgain(t *testing.T) {
	for name, reshape := range map[string]func(*broker.PodSet){
		"node selector": func(s *broker.PodSet) { s.NodeSelector = map[string]string{"zone": "b"} },
		"node affinity": func(s *broker.PodSet) {
			s.NodeAffinity = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"b"}}}}}}
		},
		"tolerations":  func(s *broker.PodSet) { s.Tolerations = []corev1.Toleration{{Key: "b"}} },
		"pod security": func(s *broker.PodSet) { s.PodSecurity = broker.PodSecurityBaseline },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			h.advertise("paris", "10")
			h.change("paris", func(ad *broker.ClusterAdvertisement) {
				ad.Spec.NodeClasses[0].Labels = map[string]string{"zone": "b"}
			})
			h.ask("r", 2, "1", func(s *broker.ReservationSpec) { s.PodSets[0].PodSecurity = broker.PodSecurityRestricted })
			h.answer("paris", "r", true)
			reshape(&h.reservations["r"].Spec.PodSets[0])
			h.reservations["r"].Generation++
			h.reconcile("r")
			hold := ledger.Find(&h.store.Advertisement("paris").Status, "r")
			if hold.Granted != nil && !hold.Granted.Empty() {
				t.Errorf("granted is %+v", hold.Granted)
			}
			if sets := hold.Promised.PodSets; len(sets) != 1 || !apiequality.Semantic.DeepEqual(sets[0], h.reservations["r"].Spec.PodSets[0]) {
				t.Errorf("promised is %+v", sets)
			}
		})
	}
}

func TestNoAnswerToGrowthKeepsTheGrant(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 2, "1")
	h.answer("paris", "r", true)
	h.reservations["r"].Spec.PodSets[0].Count = 3
	h.reconcile("r")
	h.expectPods("paris", "r", 3, 0)
	h.advertise("berlin", "8")
	h.clock.Step(31 * time.Second)
	h.reconcile("r")
	h.expectPods("paris", "r", 2, 3)
	h.expectPods("berlin", "r", 1, 0)
}

func TestLease(t *testing.T) {
	hour := func(s *broker.ReservationSpec) { s.Duration = &metav1.Duration{Duration: time.Hour} }
	month := func(s *broker.ReservationSpec) { s.Duration = &metav1.Duration{Duration: 720 * time.Hour} }
	for name, tc := range map[string]struct {
		spec     func(*broker.ReservationSpec)
		then     func(*hub)
		released bool
		reason   string
	}{
		"it ends after its duration":           {hour, func(h *hub) { h.clock.Step(time.Hour) }, true, plan.ReasonExpired},
		"not before":                           {hour, func(h *hub) { h.clock.Step(59 * time.Minute) }, false, ""},
		"use renews it":                        {hour, func(h *hub) { h.clock.Step(50 * time.Minute); h.renew("r"); h.clock.Step(50 * time.Minute) }, false, ""},
		"a renewal lasts as long as the lease": {hour, func(h *hub) { h.clock.Step(50 * time.Minute); h.renew("r"); h.clock.Step(time.Hour) }, true, plan.ReasonExpired},
		"another leader starts it again": {hour, func(h *hub) {
			h.clock.Step(50 * time.Minute)
			h.failOver()
			h.reconcile("r")
			h.clock.Step(50 * time.Minute)
		}, false, ""},
		"a leader whose clock is ahead starts it":      {hour, func(h *hub) { h.clock.Step(2 * time.Hour); h.failOver() }, false, ""},
		"a silent consumer's ends before its duration": {month, func(h *hub) { h.clock.Step(time.Hour) }, true, plan.ReasonConsumerSilent},
		"that of a consumer that advertises lasts": {month, func(h *hub) {
			h.clock.Step(50 * time.Minute)
			h.receive("rome", h.clock.Now())
			h.clock.Step(50 * time.Minute)
		}, false, ""},
		"that of a consumer that renews lasts": {month, func(h *hub) { h.clock.Step(50 * time.Minute); h.renew("r"); h.clock.Step(50 * time.Minute) }, false, ""},
		"for another leader, its silence starts again": {month, func(h *hub) {
			h.clock.Step(50 * time.Minute)
			h.failOver()
			h.reconcile("r")
			h.clock.Step(50 * time.Minute)
		}, false, ""},
		"that of a consumer that is not silent ends after its duration": {month, func(h *hub) {
			h.clock.Step(720 * time.Hour)
			h.receive("rome", h.clock.Now())
		}, true, plan.ReasonExpired},
		"a silent consumer's ends": {nil, func(h *hub) { h.clock.Step(time.Hour) }, true, plan.ReasonConsumerSilent},
		"that of a consumer that advertises stays": {nil, func(h *hub) {
			h.clock.Step(50 * time.Minute)
			h.receive("rome", h.clock.Now())
			h.clock.Step(50 * time.Minute)
		}, false, ""},
		"that of a consumer that renews stays":                   {nil, func(h *hub) { h.clock.Step(50 * time.Minute); h.renew("r"); h.clock.Step(50 * time.Minute) }, false, ""},
		"a limited one of a Reservation without a duration ends": {nil, func(h *hub) { h.limit(time.Hour); h.clock.Step(time.Hour) }, true, plan.ReasonExpired},
		"one that is limited later ends after the limit": {nil, func(h *hub) {
			h.clock.Step(50 * time.Minute)
			h.limit(10 * time.Minute)
			h.clock.Step(9 * time.Minute)
		}, false, ""},
		"use renews it, too": {nil, func(h *hub) {
			h.limit(time.Hour)
			h.clock.Step(50 * time.Minute)
			h.renew("r")
			h.clock.Step(50 * time.Minute)
		}, false, ""},
		"the advertisements of a user do not renew": {hour, func(h *hub) {
			h.clock.Step(50 * time.Minute)
			h.receive("rome", h.clock.Now())
			h.clock.Step(10 * time.Minute)
		}, true, plan.ReasonExpired},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			h.advertise("paris", "10")
			if tc.spec == nil {
				tc.spec = func(*broker.ReservationSpec) {}
			}
			h.ask("r", 2, "1", tc.spec)
			h.answer("paris", "r", true)
			tc.then(h)
			h.reconcile("r")
			if got := h.reservations["r"].Status.Phase == broker.ReservationReleased; got != tc.released {
				t.Fatalf("released is %t: %+v", got, h.reservations["r"].Status)
			}
			if tc.released {
				h.expectCondition("r", broker.ConditionReady, tc.reason, "")
				h.expectPods("paris", "r", 0, 2)
			}
		})
	}
}

// limit sets the maximum lease, which the status then has for the agent to renew.
func (h *hub) limit(most time.Duration) {
	h.Helper()
	h.settings.MaxDuration = most
	h.reconcile("r")
	if got := h.reservations["r"].Status.LeaseDuration; got == nil || got.Duration != most {
		h.Errorf("the lease is %v, want %s", got, most)
	}
}

func (h *hub) renew(name string) { h.book.Renew(name, types.UID(name), h.clock.Now()) }

// The lease and reservedAt start again when the Reservation is placed again.
func TestPlacedAgain(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 2, "1", func(s *broker.ReservationSpec) { s.Duration = &metav1.Duration{Duration: time.Hour} })
	first := h.reservations["r"].Status.ReservedAt.Time
	h.clock.Step(50 * time.Minute)
	h.reconcile("r") // paris has not answered
	if got := h.reservations["r"].Status; got.ReservedAt != nil || got.ExpiresAt != nil {
		t.Errorf("without a hold it was reserved at %s until %s", got.ReservedAt, got.ExpiresAt)
	}
	h.advertise("berlin", "10")
	h.reconcile("r")
	h.answer("berlin", "r", true)
	got := h.reservations["r"].Status
	if !got.ReservedAt.After(first) || got.ExpiresAt.Sub(got.ReservedAt.Time) != time.Hour {
		t.Errorf("reserved at %s until %s", got.ReservedAt, got.ExpiresAt)
	}
	h.clock.Step(50 * time.Minute)
	h.reconcile("r")
	h.expectPods("berlin", "r", 2, 0)
}

// A provider that works through a long queue is not given up: the deadline counts from its
// last answer, but not from answers to what it was asked much later.
func TestDeadlineOfBusyProvider(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "100")
	step := func(d time.Duration) {
		h.clock.Step(d)
		h.receive("paris", h.clock.Now())
	}
	for _, name := range []string{"first", "second", "third", "passed-over"} {
		h.ask(name, 1, "1")
	}
	for _, name := range []string{"first", "second", "third"} {
		step(20 * time.Second)
		h.reconcile(name)
		h.expectPods("paris", name, 1, 0)
		h.answer("paris", name, true)
	}
	for i := range 3 {
		name := fmt.Sprint("later-", i)
		h.ask(name, 1, "1")
		step(20 * time.Second)
		h.answer("paris", name, true)
	}
	h.reconcile("passed-over")
	h.expectPods("paris", "passed-over", 0, 1)

	h.ask("silence", 1, "1")
	step(30 * time.Second)
	h.reconcile("silence")
	h.expectPods("paris", "silence", 0, 1)
}

// An attempt that only the annotation has, and no ledger, is followed by the next one, as
// an answer to it could still arrive.
func TestFirstAttemptIsNotRepeated(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "r", Generation: 1, Annotations: map[string]string{broker.AnnotationFirstAttempt: "berlin,paris"}},
		Spec:       broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: "pods", Count: 1, Requests: cpus("1")}}},
	}
	in := h.input(r, h.settings)
	if want := []string{"berlin", "paris"}; !slices.Equal(in.Reservation.Status.Attempt.Clusters, want) {
		t.Errorf("the last attempt is %+v, want the clusters %v", in.Reservation.Status.Attempt, want)
	}
	if p := plan.New(in); p.Attempt.Number != 2 || len(p.Grow) != 1 || plan.RecordsFirst(in, p) {
		t.Errorf("the plan is attempt %d with %v", p.Attempt.Number, p.Grow)
	}
}

// The finalizer of an ended Reservation does not wait for a provider that is gone.
func TestFinalizers(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 2, "1")
	h.answer("paris", "r", true)
	h.clock.Step(time.Hour) // rome is silent, and so is paris
	h.receive("paris", h.clock.Now())
	h.reconcile("r")
	if got := h.reservations["r"]; got.Status.Phase != broker.ReservationReleased || len(got.Finalizers) == 0 {
		t.Errorf("paris has not confirmed: %s, finalizers %v", got.Status.Phase, got.Finalizers)
	}
	h.clock.Step(11 * time.Minute)
	h.reconcile("r")
	if got := h.reservations["r"].Finalizers; len(got) > 0 {
		t.Errorf("paris is gone, but the finalizers are %v", got)
	}
	h.expectPods("paris", "r", 0, 2)
}

// A large request that waits is not overtaken: 100 small ones come later.
func TestLargeRequestIsNotOvertaken(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("before", 4, "1")
	h.answer("paris", "before", true)
	h.ask("large", 1, "8")
	h.expectCondition("large", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "1 pod is waiting")
	overtook := 0
	for i := range 100 {
		name := fmt.Sprintf("small-%d", i)
		h.ask(name, 1, "100m")
		h.advertise("paris", "10")
		if len(h.reservations[name].Status.Allocations) > 0 {
			overtook++
		}
	}
	if overtook > 0 {
		t.Errorf("%d of 100 later requests passed it", overtook)
	}
	if got := h.reservations["small-9"].Status.QueuePosition; got != 11 {
		t.Errorf("the tenth small one is number %d", got)
	}
	// It may pass where the large one does not fit anyway.
	h.advertise("oslo", "4")
	h.reconcile("small-0")
	h.expectPods("oslo", "small-0", 1, 0)
	// The large one gets its turn.
	h.reservations["before"].DeletionTimestamp = &metav1.Time{Time: h.clock.Now()}
	h.reconcile("before")
	h.answer("paris", "before", true)
	h.reconcile("large")
	h.expectPods("paris", "large", 1, 0)
	h.advertise("paris", "10")
	h.reconcile("small-1")
	if got := h.reservations["small-1"].Status.Allocations; len(got) != 1 {
		t.Errorf("the small one waits although none is before it: %+v", h.reservations["small-1"].Status)
	}
}

func TestPriority(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	h.ask("old", 1, "2")
	h.ask("waiting", 1, "2")
	h.ask("urgent", 1, "900m", func(s *broker.ReservationSpec) { s.Priority = 10 })
	h.expectPods("paris", "urgent", 1, 0)
	h.ask("urgent-large", 1, "2", func(s *broker.ReservationSpec) { s.Priority = 5 })
	if got := h.reservations["urgent-large"].Status.QueuePosition; got != 1 {
		t.Errorf("the one of the highest priority is number %d", got)
	}
}

// Two gangs that each need more than a half of the capacity do not block each other.
func TestGangs(t *testing.T) {
	gang := func(s *broker.ReservationSpec) { s.MinAvailable = 6 }
	h := newHub(t)
	h.advertise("paris", "5")
	h.advertise("berlin", "5")
	h.ask("a", 6, "1", gang)
	h.expectPods("paris", "a", 1, 0)
	h.expectPods("berlin", "a", 5, 0)
	h.ask("b", 6, "1", gang)
	h.expectPods("paris", "b", 0, 0)
	h.expectPods("berlin", "b", 0, 0)
	// No pod may use what is granted before the gang is complete.
	h.answer("berlin", "a", true)
	if got := h.reservations["a"].Status.Allocations; got[0].Accepted || got[1].Accepted {
		t.Errorf("a part of the gang may be used: %+v", got)
	}
	// One provider refuses: the gang gives back all that it holds.
	h.answer("paris", "a", false)
	h.expectPods("paris", "a", 0, 0)
	h.expectPods("berlin", "a", 0, 5)
	h.expectCondition("a", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "6 pods are waiting")
	h.answer("berlin", "a", true)
	h.expectPods("berlin", "a", 0, 0)
	// What it gave back is there for both: neither keeps a part that blocks the other.
	h.advertise("oslo", "7")
	pods := func() string {
		counts := map[string]int32{}
		for _, name := range []string{"a", "b"} {
			h.reconcile(name)
			for _, allocation := range h.reservations[name].Status.Allocations {
				counts[name] += allocation.PodSets[0].Count
			}
		}
		return fmt.Sprint(counts)
	}
	pods()
	if got := pods(); got != "map[a:6 b:6]" {
		t.Errorf("the gangs have %s places", got)
	}
}

// A gang whose pods run keeps its capacity when a provider is lost.
func TestRunningGangKeepsItsCapacity(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "3")
	h.advertise("berlin", "3")
	h.ask("a", 6, "1", func(s *broker.ReservationSpec) { s.MinAvailable = 6 })
	h.answer("paris", "a", true)
	h.answer("berlin", "a", true)
	h.use("a")
	h.clock.Step(11 * time.Minute)
	h.receive("berlin", h.clock.Now())
	h.reconcile("a")
	h.expectPods("berlin", "a", 3, 0)
	h.expectPods("paris", "a", 3, 0)
}

func TestDeadline(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "2")
	h.ask("r", 3, "1", func(s *broker.ReservationSpec) { s.Deadline = &metav1.Duration{Duration: 10 * time.Minute} })
	h.ask("none", 1, "4", func(s *broker.ReservationSpec) { s.Deadline = &metav1.Duration{Duration: 10 * time.Minute} })
	h.answer("paris", "r", true)
	h.clock.Step(9 * time.Minute)
	h.reconcile("r")
	h.expectCondition("r", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "1 pod is waiting")
	h.clock.Step(time.Minute)
	h.advertise("paris", "2")
	for _, name := range []string{"r", "none"} {
		h.reconcile(name)
		h.expectCondition(name, broker.ConditionQueued, plan.ReasonDeadlineExceeded, "1 pod is not placed within the deadline of 10m0s")
		h.expectCondition(name, broker.ConditionReady, plan.ReasonDeadlineExceeded, "")
		if got := h.reservations[name].Status.QueuePosition; got != 0 {
			t.Errorf("%s is number %d in the queue", name, got)
		}
	}
	if r, none := h.reservations["r"].Status.Phase, h.reservations["none"].Status.Phase; r != broker.ReservationReserved || none != broker.ReservationFailed {
		t.Errorf("the phases are %s and %s", r, none)
	}
	// It stays so when another broker leads and capacity appears, until the spec changes.
	h.failOver()
	h.advertise("berlin", "8")
	h.reconcile("none")
	h.expectPods("berlin", "none", 0, 0)
	h.reservations["none"].Generation++
	h.reconcile("none")
	h.expectPods("berlin", "none", 1, 0)
}

// One change with 100 that wait writes few statuses: those that get something, and those
// whose figures have not been updated for long.
func TestWritesOfOneChange(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	h.ask("first", 10, "100m")
	for i := range 100 {
		h.ask(fmt.Sprintf("r%d", i), 1, "100m")
		h.advertise("paris", "1")
	}
	h.writes = 0
	for _, name := range h.retriable(h.store.Advertisement("paris")) {
		h.reconcile(name)
	}
	if h.writes > 0 {
		t.Errorf("%d writes without a change", h.writes)
	}
	h.change("paris", func(ad *broker.ClusterAdvertisement) {
		ad.Spec.Resources.Allocatable = cpus("1050m")
		ad.Spec.NodeClasses[0].FreeShapes[0].Free = cpus("1050m")
	})
	if names := h.retriable(h.store.Advertisement("paris")); len(names) > 0 {
		t.Errorf("50m more is of use to %d that need 100m", len(names))
	}
	h.change("paris", func(ad *broker.ClusterAdvertisement) {
		ad.Spec.Resources.Allocatable = cpus("1200m")
		ad.Spec.NodeClasses[0].FreeShapes[0].Free = cpus("1200m")
	})
	names := h.retriable(h.store.Advertisement("paris"))
	for _, name := range names {
		h.reconcile(name)
	}
	if len(names) == 0 || h.writes < 2 || h.writes > 12 {
		t.Errorf("%d were tried with %d writes, want one or two for each of the 2 that got capacity", len(names), h.writes)
	}
	h.expectPods("paris", "r0", 1, 0)
	h.expectPods("paris", "r1", 1, 0)
	h.expectPods("paris", "r2", 0, 0)
}

// One provider that refuses everything, 100 Reservations of one shape, 100 s.
func TestWritesOfARefusingProvider(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "100")
	refusals := 0
	var names []string
	for second := range 100 {
		name := fmt.Sprintf("r%d", second)
		h.ask(name, 1, "100m")
		names = append(names, name)
		h.advertise("paris", "100")
		for _, name := range names {
			h.reconcile(name)
			if hold := ledger.Find(&h.store.Advertisement("paris").Status, types.UID(name)); hold != nil && !ledger.Pending(*hold).Empty() {
				h.answer("paris", name, false)
				refusals++
			}
		}
	}
	// A Reservation is written when it is first seen and when it is queued.
	if refusals > 4 || h.writes > 200 {
		t.Errorf("%d refusals and %d writes of 100 Reservations in 100 s", refusals, h.writes)
	}
	h.expectCondition("r0", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "The provider refused: full. It is asked again later.")
}

// The price is what was agreed, also for the budget.
func TestPriceIsLocked(t *testing.T) {
	price := func(cpu string) func(*broker.ClusterAdvertisement) {
		return func(ad *broker.ClusterAdvertisement) { ad.Spec.Cost = &broker.Cost{CPUCost: cpu, Currency: "EUR"} }
	}
	h := newHub(t)
	h.advertise("paris", "10")
	h.change("paris", price("0.10"))
	h.ask("r", 2, "1", func(s *broker.ReservationSpec) {
		s.Budget = &broker.Budget{MaxPricePerHour: "0.45", Currency: "EUR"}
	})
	h.answer("paris", "r", true)
	h.change("paris", price("50.00"))
	h.clock.Step(time.Minute)
	h.reconcile("r")
	if got := h.reservations["r"].Status.Allocations[0].PricePerHour; got != "0.20 EUR" {
		t.Errorf("the price is %s", got)
	}
	// A growth is judged by the present price and the locked one of what is held.
	h.advertise("berlin", "10")
	h.change("berlin", price("0.20"))
	h.reservations["r"].Spec.PodSets[0].Count = 3
	h.reconcile("r")
	h.expectPods("paris", "r", 2, 0)
	h.expectPods("berlin", "r", 1, 0)
}

// TestWritesAreNoReceipt: writes of the ledger say nothing of the cluster.
func TestWritesAreNoReceipt(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "4")
	before := h.store.Advertisement("paris")
	h.clock.Step(h.settings.StaleAfter)
	after := before.DeepCopy()
	h.versions++
	after.ResourceVersion = fmt.Sprint(h.versions)
	h.advertisementChanged(before, after)
	if active, _ := h.clusters.Activity("paris", h.settings); active {
		t.Error("paris counts as active, and only its ledger was written")
	}
}

// TestTwoPartsInACluster: what a cluster has not released yet covers a growth of the same
// hold, so that it has room for more after a part. All its parts are one change of its ledger,
// which takes each attempt once.
func TestTwoPartsInACluster(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "2")
	h.ask("r", 1, "1")
	h.answer("paris", "r", true)
	h.change("paris", func(ad *broker.ClusterAdvertisement) {
		hold := ledger.Find(&ad.Status, "r")
		ledger.Shrink(&ad.Status, "r", hold.Attempt+1, broker.HeldCapacity{})
	})
	h.expectPods("paris", "r", 0, 1)
	r := h.reservations["r"]
	r.Spec.PodSets[0].Count = 3
	r.Spec.MinAvailable = 3
	if p := plan.New(h.input(r, h.settings)); p.Writes() {
		t.Errorf("of 3 pods that are of use together only, some are promised: %+v", p.Grow)
	}
	r.Spec.MinAvailable = 0
	p := plan.New(h.input(r, h.settings))
	if len(p.Grow) != 1 || p.Grow[0].Capacity.Pods() != 2 || p.Missing.Pods() != 1 {
		t.Errorf("grows by %+v, and %d pods are missing; want 2 pods in paris, and 1 missing", p.Grow, p.Missing.Pods())
	}
	h.reconcile("r")
	h.expectPods("paris", "r", 2, 1)
}

// What consumers go by of what a provider advertises is written later if not now, although the
// Reservation is not reconciled for another reason.
func TestTermsAreWrittenLater(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 1, "1")
	h.answer("paris", "r", true)
	h.use("r")
	h.reconcile("r")
	pending := func() (plan.Urgency, time.Time) {
		in := h.input(h.reservations["r"].DeepCopy(), h.settings)
		return in.Outdated(plan.New(in))
	}
	if write, until := pending(); write != plan.Nothing || !until.IsZero() {
		t.Fatalf("before a change: to write %d, until %s", write, until)
	}
	h.clock.Step(time.Minute)
	for h.figures.AllowN(h.clock.Now(), 1) { // others are written
	}
	h.change("paris", func(ad *broker.ClusterAdvertisement) { ad.Spec.Lending.PodSecurity = broker.PodSecurityRestricted })
	write, until := pending()
	if write != plan.Figures || until.Sub(h.clock.Now()) != 10*time.Second {
		t.Fatalf("to write %d, until %s, at %s", write, until, h.clock.Now())
	}
	in := h.input(h.reservations["r"].DeepCopy(), h.settings)
	if after := h.requeue(in, until).RequeueAfter; after != 10*time.Second {
		t.Errorf("requeued after %s", after)
	}
	h.clock.SetTime(until)
	h.reconcile("r")
	if got := h.reservations["r"].Status.Allocations[0].PodSecurity; got != broker.PodSecurityRestricted {
		t.Errorf("pod security is %q", got)
	}
}
