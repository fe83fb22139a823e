package request

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// limitedShop is namespace shop with a limit of CPU, a Controller, and the
// Reservations of an API server, which the informer shows at once. Each pod requests 1
// CPU.
type limitedShop struct {
	c      *Controller
	now    *clocktesting.FakeClock
	pods   cache.Indexer
	stored cache.Indexer
	writes int
	// made is the number of pods that were created, and most what was requested at any time.
	made int
	most int32
}

func newLimitedShop(t *testing.T, cpu int) *limitedShop {
	s := &limitedShop{pods: demandtest.NewIndexer(), stored: cache.NewIndexer(cache.MetaNamespaceKeyFunc, Indexers())}
	s.c, s.now = testController(t, s.pods)
	for _, cluster := range []string{"paris", "oslo"} {
		s.c.Placements.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(cluster), Labels: map[string]string{broker.LabelProvider: cluster}}})
	}
	client, err := NewClient(&rest.Config{Host: "http://none", Transport: s})
	expect.NoError(t, err)
	s.limit(cpu)
	s.c.Recorder = &events.FakeRecorder{}
	s.c.Reservations = NewReservations(client, s.stored, s.now)
	return s
}

func (s *limitedShop) limit(cpu int) {
	limit := broker.FromList(expect.Resources("cpu", fmt.Sprint(cpu)))
	s.c.Policies = newPolicies(&broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "limit"}, Spec: broker.OverflowPolicySpec{MaxResources: &limit}})
}

// RoundTrip implements http.RoundTripper: the API server.
func (s *limitedShop) RoundTrip(request *http.Request) (*http.Response, error) {
	raw, err := io.ReadAll(request.Body)
	if err != nil {
		return nil, err
	}
	applied := &broker.Reservation{}
	if err := json.Unmarshal(raw, applied); err != nil {
		return nil, err
	}
	if applied.Spec.Retained != nil {
		return nil, errors.New("spec.retained is the agent's")
	}
	s.writes++
	if before, exists := s.get(applied.Name); exists {
		applied.UID, applied.Generation, applied.Status = before.UID, before.Generation, before.Status
	} else {
		applied.UID = types.UID(applied.Name)
	}
	applied.Generation++
	s.store(applied)
	answer, err := json.Marshal(applied)
	return &http.Response{StatusCode: http.StatusOK, Request: request, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(string(answer)))}, err
}

func (s *limitedShop) get(name string) (*broker.Reservation, bool) {
	obj, exists, _ := s.stored.GetByKey("shop/" + name)
	if !exists {
		return nil, false
	}
	return obj.(*broker.Reservation).DeepCopy(), true
}

func (s *limitedShop) store(r *broker.Reservation) {
	r.ResourceVersion = fmt.Sprint(1000 + s.writes)
	_ = s.stored.Update(r)
	var sum int32
	for _, obj := range s.stored.List() {
		sum += usage.RequestedPods(obj.(*broker.Reservation))
	}
	s.most = max(s.most, sum)
	s.c.Queue.AddReservation(s.c.Grants.Set(r))
}

// of returns the Reservation of an owner, or nil.
func (s *limitedShop) of(owner string) *broker.Reservation {
	key, _ := s.c.Keys.Get(demandtest.JobPod(owner, "any of "+owner, "1"))
	r, _ := s.get(key.Key.Name(owner))
	return r
}

// requested returns what owners request.
func (s *limitedShop) requested(owners ...string) (counts []int32) {
	for _, owner := range owners {
		if r := s.of(owner); r != nil {
			counts = append(counts, usage.RequestedPods(r))
		} else {
			counts = append(counts, 0)
		}
	}
	return counts
}

// pending adds pods of an owner that do not fit.
func (s *limitedShop) pending(owner string, n int) {
	for range n {
		pod := demandtest.JobPod(owner, fmt.Sprint(owner, "-", s.made), "1")
		s.made++
		_ = s.pods.Add(pod)
		s.c.fails(pod)
	}
}

// grant is the answer of the broker: what providers have accepted of a Reservation.
func (s *limitedShop) grant(owner string, slots map[string]int32) {
	r := s.of(owner)
	r.Status = broker.ReservationStatus{ID: "rome-" + r.Name, Phase: broker.ReservationActive, ObservedGeneration: r.Generation}
	for _, cluster := range []string{"oslo", "paris"} {
		if set := r.Spec.PodSets[0]; slots[cluster] > 0 {
			set.Count = slots[cluster]
			r.Status.Allocations = append(r.Status.Allocations, broker.Allocation{Cluster: cluster, PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true})
		}
	}
	s.writes++
	s.store(r)
	s.writes--
}

// run lets time pass, and requests what is due.
func (s *limitedShop) run(d time.Duration) {
	for end := s.now.Now().Add(d); s.now.Now().Before(end); s.now.Step(100 * time.Millisecond) {
		s.c.sync()
		for s.c.writes.slots.Len() > 0 {
			all, _ := s.c.writes.slots.Get()
			for request, ok := s.c.writes.next(all); ok; request, ok = s.c.writes.next(all) {
				if delay := s.c.reconcile(context.Background(), request); delay > 0 {
					s.c.Batcher.RequeueAfter(request.Key, delay)
				}
			}
			s.c.writes.slots.Done(all)
		}
	}
}

// running returns the pods of an owner that run at a provider, or are pending if that is empty.
func (s *limitedShop) running(owner, provider string) (pods []*corev1.Pod) {
	node := ""
	if provider != "" {
		node = broker.VirtualNodeName(provider)
	}
	for _, obj := range s.pods.List() {
		if pod := obj.(*corev1.Pod); pod.OwnerReferences[0].Name == owner && pod.Spec.NodeName == node {
			pods = append(pods, pod)
		}
	}
	return pods
}

// used is the number of an owner's pods that run.
func (s *limitedShop) used(owner string) int {
	return len(s.running(owner, "paris")) + len(s.running(owner, "oslo"))
}

// fill binds the pending pods of an owner to what is granted, and has a free place.
func (s *limitedShop) fill(owner string) {
	for _, pod := range s.running(owner, "") {
		key, _ := s.c.Keys.Get(pod)
		g := s.c.Grants.Get(key.Key)
		for _, provider := range []string{"paris", "oslo"} {
			node := broker.VirtualNodeName(provider)
			if g.SlotsAt(provider) == 0 || s.c.Placements.FreeOf(g, provider, node) <= 0 {
				continue
			}
			bound := pod.DeepCopy()
			bound.Spec.NodeName, bound.Labels = node, map[string]string{broker.LabelHold: g.Charges[provider][0].Label}
			s.c.Placements.SetPod(bound)
			_ = s.pods.Update(bound)
			s.c.Queue.Remove(pod.UID)
			break
		}
	}
}

// end ends a pod of an owner at a provider.
func (s *limitedShop) end(owner, provider string) {
	if pods := s.running(owner, provider); len(pods) > 0 {
		_ = s.pods.Delete(pods[0])
		s.c.Queue.AddFreed(s.c.Placements.RemovePod(pods[0].UID))
	}
}

// expectRequested compares what owners a and b request after some time, in which no more is
// written once it is right.
func (s *limitedShop) expectRequested(t *testing.T, when string, a, b int32) {
	t.Helper()
	s.run(20 * time.Second)
	before := s.writes
	s.run(2 * time.Minute)
	if got := s.requested("a", "b"); got[0] != a || got[1] != b || s.writes != before {
		t.Errorf("%s: a requests %d pods and b %d, want %d and %d; %d further writes", when, got[0], got[1], a, b, s.writes-before)
	}
}

// TestFirstComeFirstServed: an owner that comes later may request what the first one has left of
// the limit, and all once that is gone. What is requested stays when the limit is lowered.
func TestFirstComeFirstServed(t *testing.T) {
	s := newLimitedShop(t, 10)
	s.pending("a", 8)
	s.expectRequested(t, "a is alone", 8, 0)
	s.pending("b", 10)
	s.expectRequested(t, "b has come", 8, 2)
	s.pending("a", 4)
	s.expectRequested(t, "a wants more", 8, 2)
	key, _ := s.c.Keys.Get(demandtest.JobPod("a", "any of a", "1"))
	if pods, unasked := s.c.Grants.UnaskedBut(key.Key); pods != 8 || !unasked {
		t.Errorf("capacity counts as requested for %d pods of a, limited: %t, want 8", pods, unasked)
	}
	s.limit(5)
	s.expectRequested(t, "the limit is lowered", 8, 2)
	s.limit(10)
	for range 12 {
		s.remove("a")
	}
	_ = s.stored.Delete(s.of("a")) // as the agent does
	s.expectRequested(t, "a has gone", 0, 10)
}

// remove deletes a pending pod of an owner.
func (s *limitedShop) remove(owner string) {
	if pods := s.running(owner, ""); len(pods) > 0 {
		_ = s.pods.Delete(pods[0])
		s.c.Queue.Remove(pods[0].UID)
	}
}

// TestLimitHolds: whatever comes, is granted and ends, in any order, owners never request more
// than the limit together, nor fewer pods than run. At rest, nothing is left of the limit if one
// of them needs more. What one without any requests too much is the agent's to release.
func TestLimitHolds(t *testing.T) {
	owners, limit := []string{"a", "b", "c"}, int32(7)
	rapid.Check(t, func(rt *rapid.T) {
		s := newLimitedShop(t, int(limit))
		granted := map[string]int32{}
		check := func() {
			for i, n := range s.requested(owners...) {
				if int(n) < s.used(owners[i]) {
					rt.Fatalf("%s requests %d pods, and %d run", owners[i], n, s.used(owners[i]))
				}
			}
			if s.most > limit {
				rt.Fatalf("%d were requested, now %v, the limit is %d", s.most, s.requested(owners...), limit)
			}
		}
		for range rapid.IntRange(1, 30).Draw(rt, "steps") {
			owner := rapid.SampledFrom(owners).Draw(rt, "owner")
			switch rapid.SampledFrom([]string{"pods", "grant", "end", "pass"}).Draw(rt, "step") {
			case "pods":
				s.pending(owner, rapid.IntRange(1, 9).Draw(rt, "pods"))
			case "grant":
				if r := s.of(owner); r != nil {
					more := int32(rapid.IntRange(int(granted[owner]), int(max(granted[owner], usage.RequestedPods(r)))).Draw(rt, "granted"))
					oslo := int32(rapid.IntRange(len(s.running(owner, "oslo")), int(max(more, int32(s.used(owner))))-len(s.running(owner, "paris"))).Draw(rt, "oslo"))
					granted[owner] = more
					s.grant(owner, map[string]int32{"oslo": oslo, "paris": max(more, int32(s.used(owner))) - oslo})
				}
			case "end":
				s.end(owner, rapid.SampledFrom([]string{"oslo", "paris"}).Draw(rt, "provider"))
			}
			s.fill(owner)
			s.run(time.Duration(rapid.IntRange(0, 5000).Draw(rt, "ms")) * time.Millisecond)
			check()
			if r := s.of(owner); r != nil {
				granted[owner] = min(granted[owner], usage.RequestedPods(r))
			}
		}
		s.run(time.Minute)
		before := s.writes
		s.run(time.Minute)
		if s.writes != before {
			rt.Fatalf("%d writes at rest: %v", s.writes-before, s.requested(owners...))
		}
		check()
		counts, sum := s.requested(owners...), int32(0)
		for _, n := range counts {
			sum += n
		}
		for i, n := range counts {
			if needs := s.used(owners[i]) + len(s.running(owners[i], "")); int(n) < needs && sum < limit {
				rt.Fatalf("%s needs %d, and %v are requested, the limit is %d", owners[i], needs, counts, limit)
			}
		}
	})
}

// TestCoveredGangUnderALimit: the Reservation of a gang of two shapes requests all that it needs,
// is undecided, and uses up the limit of its namespace or does not. There is nothing to request
// further, and nothing that the limit keeps it from.
func TestCoveredGangUnderALimit(t *testing.T) {
	for name, limit := range map[string]int{"some of the limit is left": 10, "nothing is left": 1} {
		t.Run(name, func(t *testing.T) {
			s := newLimitedShop(t, limit)
			sets := []broker.PodSet{
				{Name: "leader", Count: 1, Requests: broker.FromList(expect.Resources("cpu", "600m"))},
				{Name: "workers", Count: 2, Requests: broker.FromList(expect.Resources("cpu", "200m"))},
			}
			key := demand.Key{Namespace: "shop", OwnerUID: demand.Gang{API: demand.CoschedulingGangs, PodGroup: "ring"}.UID(), Shape: demand.GangShape}
			r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: key.Name("ring"), Generation: 1, Labels: map[string]string{
				broker.LabelOwnerUID: string(key.OwnerUID), broker.LabelShape: key.Shape, broker.LabelManagedBy: broker.ManagedBySpillway}}}
			r.Spec.PodSets, r.Spec.MinAvailable = sets, 3
			s.store(r)
			owner := metav1.OwnerReference{Kind: "PodGroup", Name: "ring", UID: key.OwnerUID}
			again := s.c.reconcile(t.Context(), demand.Request{Key: key, Owner: owner, PodSets: sets, MinAvailable: 3, Pending: []types.UID{"worker"}})
			if again != 0 || s.c.Grants.IsUnasked(key) || s.writes != 0 {
				t.Errorf("repeated after %s, with %d writes, unasked %t, want none of it", again, s.writes, s.c.Grants.IsUnasked(key))
			}
		})
	}
}

// TestDeletedWhileUsed: a Reservation that is deleted while pods use it is not replaced before they
// have ended. The pods that wait for it learn that, unless it may be a moment only.
func TestDeletedWhileUsed(t *testing.T) {
	for name, tc := range map[string]struct {
		since time.Duration
		used  bool
		event bool
	}{"just now": {time.Second, true, false}, "for long": {time.Minute, true, true}, "unused": {time.Minute, false, false}} {
		t.Run(name, func(t *testing.T) {
			s := newLimitedShop(t, 10)
			recorder := events.NewFakeRecorder(10)
			s.c.Recorder = recorder
			s.pending("a", 4)
			s.run(5 * time.Second)
			s.grant("a", map[string]int32{"paris": 4})
			if tc.used {
				s.fill("a")
			}
			r := s.of("a").DeepCopy()
			r.DeletionTimestamp = &metav1.Time{Time: s.now.Now().Add(-tc.since)}
			s.store(r)
			for len(recorder.Events) > 0 {
				<-recorder.Events
			}
			s.pending("a", 1)
			s.run(5 * time.Second)
			key, _ := s.c.Keys.Get(demandtest.JobPod("a", "any of a", "1"))
			if s.c.Grants.IsUnasked(key.Key) != tc.event {
				t.Errorf("unasked: %t, want %t", !tc.event, tc.event)
			}
			said := 0
			for len(recorder.Events) > 0 {
				if e := <-recorder.Events; strings.Contains(e, "is being deleted, and") {
					if said++; !strings.Contains(e, "and 4 pods") {
						t.Errorf("event %q, want one of the 4 pods", e)
					}
				}
			}
			if said > 1 || said == 1 != tc.event {
				t.Errorf("%d events, want one: %t", said, tc.event)
			}
		})
	}
}
