package hold_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

const namespace = "default"

type world struct {
	*testing.T
	client.Client
	lender     *fake.Provider
	reconciler *hold.Reconciler
	clock      *clocktesting.FakePassiveClock
}

func TestMain(m *testing.M) {
	ctrl.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	m.Run()
}

func start(t *testing.T) *world {
	t.Helper()
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{ByObject: inventory.CacheByObject()},
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, lender: fake.NewProvider(), clock: clocktesting.NewFakePassiveClock(time.Now())}
	w.reconciler = hold.New(w.lender, hold.Options{
		Namespace: namespace, Lending: broker.Lending{Enabled: true, Consumers: []string{"rome", "berlin"}},
		Headroom: list("cpu", "500m"), PeeringIdleTime: time.Hour, Clock: w.clock,
	})
	if err := w.reconciler.SetupWithManager(mgr); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(t.Context()) }()
	t.Cleanup(func() { <-stopped })
	if w.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) eventually(what string, ok func() (bool, string)) {
	w.Helper()
	var last string
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		done, state := ok()
		if done {
			return
		}
		last = state
	}
	w.Fatalf("never so: %s; last: %s", what, last)
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) node(name string, allocatable corev1.ResourceList) {
	w.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	w.must(w.Create(w.Context(), n))
	// Admission taints new nodes, and nobody here takes that away.
	n.Spec.Taints = nil
	w.must(w.Update(w.Context(), n))
	allocatable[corev1.ResourcePods] = resource.MustParse("110")
	n.Status = corev1.NodeStatus{Capacity: allocatable, Allocatable: allocatable, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	w.must(w.Status().Update(w.Context(), n))
}

// hold makes or changes an instruction; no sets release it.
func (w *world) hold(name, consumer string, generation int64, capacity broker.HeldCapacity) {
	w.Helper()
	in := &broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	err := w.Get(w.Context(), client.ObjectKeyFromObject(in), in)
	in.Spec = broker.ProviderInstructionSpec{
		ReservationName: name, RequesterClusterID: consumer, RequestedResources: capacity.Totals, PodSets: capacity.PodSets,
		Releasing: capacity.Empty(), Attempt: generation,
	}
	if err == nil {
		w.must(w.Update(w.Context(), in))
	} else {
		w.must(w.Create(w.Context(), in))
	}
}

// answered waits for the final answer to a generation.
func (w *world) answered(name string, generation int64, reason, message string) broker.ProviderInstructionStatus {
	w.Helper()
	in := &broker.ProviderInstruction{}
	w.eventually(fmt.Sprintf("%s generation %d is %s", name, generation, reason), func() (bool, string) {
		w.must(w.Get(w.Context(), client.ObjectKey{Namespace: namespace, Name: name}, in))
		c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced)
		return in.Status.ObservedAttempt == generation && c != nil && c.Reason == reason, fmt.Sprintf("%+v", in.Status)
	})
	if c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced); !strings.Contains(c.Message, message) || c.ObservedGeneration != generation {
		w.Errorf("the answer is %q of generation %d, want %q", c.Message, c.ObservedGeneration, message)
	}
	return in.Status
}

func (w *world) granted(consumer, resources string, pods int32) {
	w.Helper()
	if pods > 0 {
		pods += peering.DaemonSetPodsAllowance
	}
	w.eventually(consumer+" is granted "+resources, func() (bool, string) {
		g := w.lender.Granted(consumer)
		return broker.FromList(g.Resources).String() == resources && g.Pods == pods, fmt.Sprintf("%s, %d pods", broker.FromList(g.Resources), g.Pods)
	})
}

// guest makes a running pod as Liqo makes it of a ShadowPod.
func (w *world) guest(name, consumer, node string, requests corev1.ResourceList) *corev1.Pod {
	w.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-" + consumer, Labels: map[string]string{"liqo.io/remote-cluster-id": consumer}}}
	w.must(client.IgnoreAlreadyExists(w.Create(w.Context(), ns)))
	sum := sha256.Sum256([]byte(consumer))
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: ns.Name, Labels: map[string]string{"liqo.io/creator-user": fmt.Sprintf("spillway-here-%x", sum[:6])},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "offloading.liqo.io/v1beta1", Kind: "ShadowPod", Name: name, UID: "u", Controller: ptr.To(true)}},
		},
		Spec: corev1.PodSpec{
			NodeName: node, AutomountServiceAccountToken: ptr.To(false), TerminationGracePeriodSeconds: ptr.To[int64](0),
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: requests}}},
		},
	}
	w.must(w.Create(w.Context(), pod))
	return pod
}

func TestProvide(t *testing.T) {
	w := start(t)
	half := list("cpu", "500m", "memory", "64Mi")
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "shop-rome"}}
	w.must(w.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-rome", Labels: map[string]string{"liqo.io/remote-cluster-id": "rome"}}}))
	w.must(w.Create(t.Context(), sa))
	w.node("a", list("cpu", "2500m", "memory", "8Gi"))

	// The grant is there before the answer.
	w.lender.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	w.hold("r1", "rome", 1, pods(set("pods", 2, half)))
	w.eventually("the grant is asked for", func() (bool, string) { return len(w.lender.Calls("EnsureGrant")) > 0, "" })
	in := &broker.ProviderInstruction{}
	w.eventually("it says what it waits for", func() (bool, string) {
		w.must(w.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "r1"}, in))
		c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced)
		return c != nil && c.Reason == hold.ReasonGranting, fmt.Sprint(in.Status)
	})
	if in.Status.Enforced || in.Status.ObservedAttempt != 0 {
		t.Fatalf("enforced is reported before the grant is there: %+v", in.Status)
	}
	w.lender.Free("EnsureGrant")
	if status := w.answered("r1", 1, hold.ReasonSetAside, "2 pods of cpu 500m, memory 64Mi set aside for cluster rome"); !status.Enforced || status.Held.Pods() != 2 {
		t.Errorf("want it enforced: %+v", status)
	}
	w.granted("rome", "cpu 1, memory 128Mi", 2)

	// What rome was promised and does not use is not there for berlin: of 2500m,
	// 500m is headroom and 1 rome's.
	w.hold("b1", "berlin", 5, pods(set("pods", 3, half)))
	if status := w.answered("b1", 5, hold.ReasonNoRoom, "2 of 3 pods"); status.Enforced || status.Held != nil {
		t.Errorf("want it refused: %+v", status)
	}
	w.granted("berlin", "nothing", 0)
	w.hold("b1", "berlin", 6, pods(set("pods", 2, half)))
	w.answered("b1", 6, hold.ReasonSetAside, "2 pods")

	// A growth that is refused leaves what was held.
	w.hold("r1", "rome", 2, pods(set("pods", 3, half)))
	if status := w.answered("r1", 2, hold.ReasonNoRoom, "2 of 3 pods"); status.Enforced || status.Held.Pods() != 2 {
		t.Errorf("want the former hold kept: %+v", status)
	}
	w.granted("rome", "cpu 1, memory 128Mi", 2)
	w.hold("r1", "rome", 3, pods(set("pods", 2, half)))
	w.answered("r1", 3, hold.ReasonSetAside, "2 pods")

	// Guests that use the promise are not counted twice.
	g1, g2 := w.guest("g1", "rome", "a", half), w.guest("g2", "rome", "a", half)
	w.hold("b1", "berlin", 7, broker.HeldCapacity{})
	w.answered("b1", 7, broker.ReasonReleased, "")
	w.hold("b1", "berlin", 8, pods(set("pods", 2, half)))
	w.answered("b1", 8, hold.ReasonSetAside, "")

	// A shrink is confirmed when the guests fit in what remains, and no earlier;
	// the grant is lowered at once.
	w.hold("r1", "rome", 4, pods(set("pods", 1, half)))
	w.granted("rome", "cpu 500m, memory 64Mi", 1)
	w.eventually("it says who is still there", func() (bool, string) {
		w.must(w.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "r1"}, in))
		c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced)
		return c.Reason == hold.ReasonGuestsStill && strings.Contains(c.Message, "2 pods with cpu 1"), fmt.Sprint(in.Status)
	})
	if in.Status.ObservedAttempt == 4 || in.Status.Held.Pods() != 2 {
		t.Errorf("the shrink is confirmed with guests above it: %+v", in.Status)
	}
	w.must(w.Delete(t.Context(), g1))
	if status := w.answered("r1", 4, hold.ReasonSetAside, "1 pods"); !status.Enforced || status.Held.Pods() != 1 {
		t.Errorf("want the smaller hold: %+v", status)
	}

	// A release is reported when the last guest has finished; one that merely
	// still exists does not matter.
	w.hold("r1", "rome", 5, broker.HeldCapacity{})
	w.granted("rome", "nothing", 0)
	g2.Status.Phase = corev1.PodSucceeded
	w.must(w.Status().Update(t.Context(), g2))
	if status := w.answered("r1", 5, broker.ReasonReleased, "nothing is set aside"); status.Enforced || status.Held != nil {
		t.Errorf("want it released: %+v", status)
	}

	// Totals are sums.
	w.hold("r2", "rome", 1, total(list("cpu", "1500m")))
	w.answered("r2", 1, hold.ReasonNoRoom, "cpu 1500m of divisible totals would be promised, cpu 1 is free")
	w.hold("r2", "rome", 2, total(list("cpu", "1")))
	w.answered("r2", 2, hold.ReasonSetAside, "cpu 1 set aside")

	// The lender's terms are kept even if the broker forgot them.
	w.hold("o1", "oslo", 1, pods(set("pods", 1, list("cpu", "1m"))))
	w.answered("o1", 1, hold.ReasonNotLending, "does not lend to oslo")

	// A consumer without an instruction loses its grant at once, and what it
	// left behind after long.
	w.must(w.DeleteAllOf(t.Context(), &broker.ProviderInstruction{}, client.InNamespace(namespace)))
	w.eventually("rome's grant is gone", func() (bool, string) {
		g := w.lender.Granted("rome")
		return len(g.Resources) == 0 && g.Pods == 0, fmt.Sprint(g)
	})
	if calls := w.lender.Calls("Teardown"); len(calls) > 0 {
		t.Fatalf("torn down at once: %v", calls)
	}
	w.clock.SetTime(w.clock.Now().Add(2*time.Hour + 6*time.Minute))
	w.reconciler.Enqueue("rome")
	w.eventually("rome's remains are removed", func() (bool, string) { return len(w.lender.Calls("Teardown")) > 0, "" })
}
