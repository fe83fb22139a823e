package hold_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

const holds = placeholder.DefaultNamespace

// startPlaces starts an API server, Kubernetes' own scheduler and an agent that holds
// with placeholders, or without. The nodes have no kubelet.
func startPlaces(t *testing.T, placeholders bool) *env {
	t.Helper()
	restConfig := controlplane.Start(t)
	controlplane.StartScheduler(t, restConfig)
	e := startWith(t, restConfig, func(o *hold.Options) {
		o.Headroom, o.Clock, o.ProofTimeout, o.Debounce = nil, nil, 45*time.Second, 50*time.Millisecond
		o.GuestNamespaces = fake.GuestNamespaces{Of: func(consumer string) []string {
			return map[string][]string{"rome": {"guests-of-rome"}}[consumer]
		}, Trial: namespace}
		if placeholders {
			o.Placeholders = placeholder.Options{Namespace: holds, Image: placeholder.DefaultImage}
			o.Recognizer.Placeholder = func(pod *corev1.Pod) (string, bool) { return placeholder.ConsumerOf(pod, holds) }
		}
	})
	e.priorityClasses(placeholder.PriorityClass, guest.PriorityClass)
	e.awaitScheduler()
	for name, labels := range map[string]map[string]string{holds: {}, "guests-of-rome": {broker.LabelGuestsOf: "rome"}, namespace: nil} {
		if labels != nil {
			expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}))
		}
		expect.NoError(t, client.IgnoreAlreadyExists(e.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: name}})))
	}
	return e
}

// tries is a namespace for what a test waits with.
const tries = "tries"

// priorityClasses creates PriorityClasses, and waits until the API server admits pods with them.
func (e *env) priorityClasses(names ...string) {
	e.Helper()
	expect.NoError(e, e.Create(e.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tries}}))
	expect.NoError(e, e.Create(e.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: tries}}))
	for _, name := range names {
		expect.NoError(e, e.Create(e.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, PreemptionPolicy: ptr.To(corev1.PreemptNever)}))
		expect.Eventually(e, "pods of priority class "+name+" to be admitted", func() (bool, string) {
			err := e.Create(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: tries}, Spec: corev1.PodSpec{
				PriorityClassName: name, Containers: []corev1.Container{{Name: "c", Image: "i"}},
			}}, client.DryRunAll)
			return err == nil, fmt.Sprint(err)
		})
	}
}

// awaitScheduler waits until the scheduler has tried a pod: a proof has a deadline. The
// namespace of priorityClasses must exist, and no node.
func (e *env) awaitScheduler() {
	e.Helper()
	e.pod(tries, "p", "1000", func(*corev1.PodSpec) {})
	pod := &corev1.Pod{}
	expect.Eventually(e, "the scheduler to try a pod", func() (bool, string) {
		err := e.Get(e.Context(), client.ObjectKey{Namespace: tries, Name: "p"}, pod)
		return err == nil && len(pod.Status.Conditions) > 0, fmt.Sprint(pod.Status, err)
	})
	expect.NoError(e, e.Delete(e.Context(), pod))
}

// amd64 makes a node one that runs guests.
func (e *env) amd64(name string, allocatable corev1.ResourceList) {
	e.Helper()
	e.node(name, allocatable)
	n := &corev1.Node{}
	expect.NoError(e, e.Get(e.Context(), client.ObjectKey{Name: name}, n))
	n.Labels = map[string]string{corev1.LabelArchStable: guest.Arch, corev1.LabelOSStable: guest.OS, corev1.LabelHostname: name}
	expect.NoError(e, e.Update(e.Context(), n))
	e.knownNode(n)
}

// pod creates a pod that the scheduler is to place.
func (e *env) pod(namespace, name, cpu string, change func(*corev1.PodSpec)) {
	e.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false), TerminationGracePeriodSeconds: ptr.To[int64](0),
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}},
		},
	}
	change(&pod.Spec)
	expect.NoError(e, e.Create(e.Context(), pod))
}

// bound returns how many pods of a namespace have a node, and how many there are.
func (e *env) bound(namespace string) (bound, all int) {
	e.Helper()
	var list corev1.PodList
	expect.NoError(e, e.List(e.Context(), &list, client.InNamespace(namespace)))
	for _, pod := range list.Items {
		if pod.Spec.NodeName != "" {
			bound++
		}
	}
	return bound, len(list.Items)
}

// eventuallyBound waits until a namespace has a number of pods, and all have a node.
func (e *env) eventuallyBound(namespace string, want int) {
	e.Helper()
	expect.Eventually(e, fmt.Sprintf("%d pods of %s to have a node", want, namespace), func() (bool, string) {
		bound, all := e.bound(namespace)
		return bound == want && all == want, fmt.Sprintf("%d of %d", bound, all)
	})
}

func TestPlaceholders(t *testing.T) {
	e := startPlaces(t, true)
	e.amd64("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	for _, step := range []struct {
		name string
		run  func(*env)
	}{
		{"all bound is the proof", placesAreProven},
		{"guests that end give their place back", guestsGivePlacesBack},
		{"shrinking removes placeholders", shrinkRemovesPlaceholders},
		{"the scheduler refuses", schedulerRefuses},
		{"the API server refuses", admissionRefuses},
		{"release leaves none", releaseLeavesNone},
		{"totals are held in parts", totalsAreParts},
		{"what loses its places is lowered", lostPlacesAreGivenUp},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			in := *e
			in.T = t
			step.run(&in)
		}) {
			return
		}
	}
}

func placesAreProven(e *env) {
	e.hold("r1", "rome", 1, pods(set("pods", 3, expect.Resources("cpu", "500m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "Holding 3 pods of cpu 500m for consumer rome.", 3)
	e.eventuallyBound(holds, 3)
	in, _ := e.get("r1")
	proven := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionProven)
	if proven == nil || proven.Status != metav1.ConditionTrue || proven.Message != "The scheduler has found a place for all of 3 placeholders." {
		e.Errorf("condition Proven is %+v", proven)
	}
	// What is held is not available besides: one more of 500m fits, no two.
	e.hold("b1", "berlin", 1, pods(set("pods", 2, expect.Resources("cpu", "500m"))))
	e.decided("b1", 1, verdict.ReasonInsufficientCapacity, "1 of 2 pods", 0)
	e.eventuallyBound(holds, 3)
}

// A guest takes the place of a placeholder also if it did not wait for it.
func guestsGivePlacesBack(e *env) {
	e.pod(namespace, "local", "500m", func(*corev1.PodSpec) {})
	e.eventuallyBound(namespace, 1)
	e.pod("guests-of-rome", "g1", "500m", func(s *corev1.PodSpec) { s.PriorityClassName = guest.PriorityClass })
	e.eventuallyBound("guests-of-rome", 1)
	e.eventuallyBound(holds, 2)
	expect.NoError(e, e.Delete(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "g1", Namespace: "guests-of-rome"}}))
	e.eventuallyBound(holds, 3)
}

func shrinkRemovesPlaceholders(e *env) {
	e.hold("r1", "rome", 2, pods(set("pods", 1, expect.Resources("cpu", "500m"))))
	e.decided("r1", 2, verdict.ReasonAccepted, "1 pods", 1)
	e.eventuallyBound(holds, 1)
}

// What accounting does not see, the scheduler does: a local pod that wants no other pod
// beside it. Its own words are the answer, and what was held stays.
func schedulerRefuses(e *env) {
	e.pod(namespace, "unsociable", "100m", func(s *corev1.PodSpec) {
		s.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
			TopologyKey: corev1.LabelHostname, NamespaceSelector: &metav1.LabelSelector{},
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{broker.LabelRequester: "berlin"}},
		}}}}
	})
	e.eventuallyBound(namespace, 2)
	before := len(e.provider.Calls("EnsureGrant"))
	e.hold("b1", "berlin", 2, pods(set("pods", 1, expect.Resources("cpu", "500m"))))
	e.decided("b1", 2, verdict.ReasonInsufficientCapacity, "The scheduler found a place for 0 of 1 pods of cpu 500m: 0/1 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules", 0)
	e.eventuallyBound(holds, 1)
	// Nor may the consumer have used it meanwhile.
	for _, call := range e.provider.Calls("EnsureGrant")[before:] {
		if call.Cluster == "berlin" && call.Capacity.Pods > 0 {
			e.Errorf("berlin is granted what the scheduler has not proven: %+v", call.Capacity)
		}
	}
	in, _ := e.get("r1")
	if !in.Status.Enforced || in.Status.Held.Pods() != 1 {
		e.Errorf("the other hold is changed: %+v", in.Status)
	}
}

// A pod that the cluster does not admit is not promised: neither as a placeholder nor, where
// it will run, as a guest.
func admissionRefuses(e *env) {
	e.slow.on.Store(true)
	defer e.slow.on.Store(false)
	for i, tc := range []struct{ namespace, reason string }{{holds, verdict.ReasonInsufficientCapacity}, {"guests-of-rome", verdict.ReasonGuestNotAdmitted}} {
		lift := e.limited(tc.namespace)
		e.hold("r2", "rome", int64(i+1), pods(set("pods", 1, expect.Resources("cpu", "1m"))))
		e.decided("r2", int64(i+1), tc.reason, "minimum cpu usage per Container is 10m", 0)
		e.eventuallyBound(holds, 1)
		lift()
	}
}

func releaseLeavesNone(e *env) {
	e.hold("r1", "rome", 3, broker.HeldCapacity{})
	e.decided("r1", 3, broker.ReasonReleased, "", 0)
	e.eventuallyBound(holds, 0)
	e.hold("r3", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "200m"))))
	e.decided("r3", 1, verdict.ReasonAccepted, "", 1)
	// As when the hold ended while the agent was away.
	expect.NoError(e, e.DeleteAllOf(e.Context(), &broker.ProviderInstruction{}, client.InNamespace(namespace)))
	e.reconciler.Enqueue("rome")
	e.eventuallyBound(holds, 0)
}

func totalsAreParts(e *env) {
	e.amd64("b", expect.Resources("cpu", "1", "memory", "8Gi"))
	e.hold("t1", "rome", 1, total(expect.Resources("cpu", "2")))
	expect.Eventually(e, "the total to be held", func() (bool, string) {
		in, c := e.get("t1")
		return c.Reason == verdict.ReasonAccepted, fmt.Sprint(in.Status)
	})
	// Of 1400m and 1000m, no node has room for 2 CPUs.
	e.eventuallyBound(holds, 2)
}

// A node that takes no pods any more: the placeholders leave it, and what finds no other place
// is no longer held.
func lostPlacesAreGivenUp(e *env) {
	e.hold("t1", "rome", 2, broker.HeldCapacity{})
	e.decided("t1", 2, broker.ReasonReleased, "", 0)
	e.hold("r4", "rome", 1, pods(set("pods", 3, expect.Resources("cpu", "500m"))))
	e.decided("r4", 1, verdict.ReasonAccepted, "", 3)
	e.slow.on.Store(true)
	b := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}}
	expect.NoError(e, e.Patch(e.Context(), b, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`))))
	e.decided("r4", 1, verdict.ReasonCapacityLost, "Holding only 2 pods of cpu 500m", 2)
	e.eventuallyBound(holds, 2)
}

// handOvers is how many guests take a held place in each of the two tests.
const handOvers = 5

// compete lets guests of a hold arrive while twice as many pods of the same shape, of
// this cluster, wait for a place. It returns how many guests got one. proven is what
// condition Proven says of the hold.
func compete(t *testing.T, e *env, proven string, change func(*corev1.PodSpec)) int {
	t.Helper()
	e.amd64("a", expect.Resources("cpu", fmt.Sprintf("%dm", handOvers*400), "memory", "8Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", handOvers, expect.Resources("cpu", "400m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", handOvers)
	in, _ := e.get("r1")
	if c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionProven); c == nil || c.Reason != proven {
		t.Errorf("condition Proven is %+v, want %s", c, proven)
	}
	for i := range handOvers {
		e.pod(namespace, fmt.Sprintf("early-%d", i), "400m", func(*corev1.PodSpec) {})
	}
	expect.Eventually(t, "the scheduler to have tried the pods of this cluster", func() (bool, string) {
		var list corev1.PodList
		expect.NoError(t, e.List(t.Context(), &list, client.InNamespace(namespace)))
		tried := 0
		for _, pod := range list.Items {
			if len(pod.Status.Conditions) > 0 {
				tried++
			}
		}
		return tried == handOvers, fmt.Sprint(tried)
	})
	for i := range handOvers {
		e.pod("guests-of-rome", fmt.Sprintf("g%d", i), "400m", change)
		e.pod(namespace, fmt.Sprintf("late-%d", i), "400m", func(*corev1.PodSpec) {})
	}
	expect.Eventually(t, "all places to be taken", func() (bool, string) {
		guests, _ := e.bound("guests-of-rome")
		local, _ := e.bound(namespace)
		return guests+local == handOvers, fmt.Sprintf("%d guests, %d local pods", guests, local)
	})
	guests, _ := e.bound("guests-of-rome")
	return guests
}

// No pod of this cluster takes a place that is held for a guest.
func TestHandOver(t *testing.T) {
	e := startPlaces(t, true)
	got := compete(t, e, verdict.ReasonPlacesFound, func(s *corev1.PodSpec) {
		s.PriorityClassName = guest.PriorityClass
		s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	})
	if got != handOvers {
		t.Errorf("%d of %d guests got the place that is held for them", got, handOvers)
	}
	e.eventuallyBound(holds, 0)
}

// Without placeholders the places are taken before the guests come.
func TestWithoutPlaceholders(t *testing.T) {
	e := startPlaces(t, false)
	if got := compete(t, e, verdict.ReasonNotProven, func(s *corev1.PodSpec) { s.PriorityClassName = guest.PriorityClass }); got == handOvers {
		t.Error("no place was taken by another pod: the test with placeholders shows nothing")
	}
}

// A guest that is larger than each promised pod, such as admission may make it, waits although a
// node has room, and an event says so. It runs once a place for it is promised.
func TestLargerGuestWaits(t *testing.T) {
	e := startPlaces(t, true)
	e.amd64("a", expect.Resources("cpu", "3", "memory", "8Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", 4, expect.Resources("cpu", "500m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", 4)
	e.pod("guests-of-rome", "larger", "900m", func(s *corev1.PodSpec) {
		s.PriorityClassName = guest.PriorityClass
		s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	})
	expect.Eventually(t, "an event that there is no place", func() (bool, string) {
		var list eventsv1.EventList
		expect.NoError(t, e.List(t.Context(), &list, client.InNamespace("guests-of-rome")))
		for _, event := range list.Items {
			if event.Reason == hold.ReasonNoPlace && event.Regarding.Name == "larger" {
				return strings.HasPrefix(event.Note, "No place that is kept for consumer rome has room for cpu 900m"), event.Note
			}
		}
		return false, fmt.Sprint(len(list.Items), " events")
	})
	if bound, _ := e.bound("guests-of-rome"); bound != 0 {
		t.Error("it has a node")
	}
	e.eventuallyBound(holds, 4)
	e.hold("r2", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "900m"))))
	e.decided("r2", 1, verdict.ReasonAccepted, "", 1)
	e.eventuallyBound("guests-of-rome", 1)
	e.eventuallyBound(holds, 4)
}
