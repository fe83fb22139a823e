package virtualnode_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	m.Run()
}

const (
	instructions = "default"
	shop         = "shop"
	grace        = 1500 * time.Millisecond
	idle         = 4 * time.Second
)

// world is a consumer's cluster without a scheduler, a broker or a provider: the
// test is all three.
type world struct {
	*testing.T
	client.Client
	driver *fake.Driver
	// set owns the pods.
	set *appsv1.ReplicaSet
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
		Controller: crconfig.Controller{SkipNameValidation: ptr.To(true)},
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, driver: fake.NewDriver()}
	if w.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	w.driver.Changed = func(clusterID string, capacity *peering.Capacity) error {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(clusterID)}}
		if capacity == nil {
			return client.IgnoreNotFound(w.Client.Delete(t.Context(), node))
		}
		if err := client.IgnoreAlreadyExists(w.Client.Create(t.Context(), node)); err != nil {
			return err
		}
		if err := w.Client.Get(t.Context(), client.ObjectKeyFromObject(node), node); err != nil {
			return err
		}
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		return w.Client.Status().Update(t.Context(), node)
	}
	reconciler := virtualnode.New(w.driver, virtualnode.Options{
		InstructionNamespace: instructions, ReleaseGrace: grace, PeeringIdleTime: idle, FinishedPodRetention: 2 * time.Second,
		Deadline: 2 * time.Second, RescueAfter: 8 * time.Second, Settle: 200 * time.Millisecond, ProviderLostAfter: time.Second,
	})
	if err := reconciler.SetupWithManager(mgr); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(t.Context()) }()
	t.Cleanup(func() { <-stopped })

	w.must(w.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: shop, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}}))
	w.must(w.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: shop}}))
	labels := map[string]string{"app": "web"}
	w.set = &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: shop},
		Spec: appsv1.ReplicaSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}},
		},
	}
	w.must(w.Create(t.Context(), w.set))
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
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

func (w *world) pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	w.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: shop, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: w.set.Name, UID: w.set.UID, Controller: ptr.To(true)},
		}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](0), AutomountServiceAccountToken: ptr.To(false),
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: list("cpu", "300m", "memory", "64Mi")}}},
		},
	}
	for _, c := range change {
		c(p)
	}
	w.must(w.Create(w.Context(), p))
	return p
}

func (w *world) bind(pod *corev1.Pod, cluster string) {
	w.Helper()
	w.must(w.SubResource("binding").Create(w.Context(), pod, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace},
		Target:     corev1.ObjectReference{Kind: "Node", Name: broker.VirtualNodeName(cluster)},
	}))
}

// phase has a bound pod look as if the provider had begun with it.
func (w *world) phase(pod *corev1.Pod, phase corev1.PodPhase) {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(pod), pod))
	before := pod.DeepCopy()
	pod.Status.Phase, pod.Status.StartTime = phase, ptr.To(metav1.Now())
	w.must(w.Status().Patch(w.Context(), pod, client.MergeFrom(before)))
}

// reservation writes what the plugin writes for the pods of a set.
func (w *world) reservation(like *corev1.Pod, count int32) *broker.Reservation {
	w.Helper()
	shape, set := demand.ShapeOf(like)
	set.Count = count
	key := demand.Key{Namespace: shop, OwnerUID: w.set.UID, Shape: shape}
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: shop, Name: key.Name(w.set.Name), Finalizers: []string{broker.FinalizerRequest},
			Labels: map[string]string{broker.LabelOwnerUID: string(key.OwnerUID), broker.LabelShape: shape, broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{set}},
	}
	w.must(w.Create(w.Context(), r))
	return r
}

func (w *world) change(r *broker.Reservation, change func(*broker.Reservation)) {
	w.Helper()
	w.eventually("the reservation is changed", func() (bool, string) {
		w.must(w.Get(w.Context(), client.ObjectKeyFromObject(r), r))
		before := r.DeepCopy()
		change(r)
		if err := w.Patch(w.Context(), r, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return false, err.Error()
		}
		return true, ""
	})
}

// usable says in the Reservation's status what the agent would once the
// instruction is carried.
func (w *world) usable(r *broker.Reservation, cluster string, count int32) {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(r), r))
	set := *r.Spec.PodSets[0].DeepCopy()
	set.Count = count
	r.Status.ID = id(r)
	r.Status.Allocations = []broker.Allocation{{Cluster: cluster, PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true}}
	w.must(w.Status().Update(w.Context(), r))
}

func id(r *broker.Reservation) string { return "rome-" + string(r.UID) }

func (w *world) instruct(r *broker.Reservation, cluster string, generation int64, count int32) {
	w.Helper()
	set := *r.Spec.PodSets[0].DeepCopy()
	set.Count = count
	in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: instructions, Name: id(r) + "-" + cluster}}
	w.eventually("the instruction is written", func() (bool, string) {
		err := w.Get(w.Context(), client.ObjectKeyFromObject(in), in)
		in.Spec = broker.ReservationInstructionSpec{
			ReservationName: id(r), SourceNamespace: r.Namespace, SourceName: r.Name, TargetClusterID: cluster, PeerKey: "key",
			RequestedResources: broker.FromList(broker.Times(set.Requests.List(), count)), PodSets: []broker.PodSet{set}, Attempt: generation,
		}
		if err != nil {
			err = w.Create(w.Context(), in)
		} else {
			err = w.Update(w.Context(), in)
		}
		return err == nil, fmt.Sprint(err)
	})
}

func (w *world) condition(r *broker.Reservation, cluster, kind string) metav1.Condition {
	w.Helper()
	in := &broker.ReservationInstruction{}
	w.must(w.Get(w.Context(), client.ObjectKey{Namespace: instructions, Name: id(r) + "-" + cluster}, in))
	return ptr.Deref(meta.FindStatusCondition(in.Status.Conditions, kind), metav1.Condition{})
}

func (w *world) says(r *broker.Reservation, cluster, kind string, status metav1.ConditionStatus, generation int64, message string) {
	w.Helper()
	w.eventually(fmt.Sprintf("%s is %s at generation %d, %q", kind, status, generation, message), func() (bool, string) {
		c := w.condition(r, cluster, kind)
		return c.Status == status && c.ObservedGeneration == generation && strings.Contains(c.Message, message), fmt.Sprintf("%+v", c)
	})
}

// carries waits until the driver was last told to carry this much.
func (w *world) carries(cluster, want string) {
	w.Helper()
	w.eventually(cluster+" carries "+want, func() (bool, string) {
		var last string
		for _, c := range w.driver.Calls("EnsureCapacity") {
			if c.Cluster == cluster {
				last = fmt.Sprintf("%s, %d pods, %v", broker.FromList(c.Capacity.Resources), c.Capacity.Pods, c.Capacity.Namespaces)
			}
		}
		return last == want, last
	})
}

func (w *world) tolerating(pods ...*corev1.Pod) (names []string) {
	w.Helper()
	for _, p := range pods {
		w.must(w.Get(w.Context(), client.ObjectKeyFromObject(p), p))
		if slices.ContainsFunc(p.Spec.Tolerations, func(t corev1.Toleration) bool {
			return t.Key == broker.TaintOverflow && t.Operator == corev1.TolerationOpEqual && t.Value == "paris" && t.Effect == corev1.TaintEffectNoSchedule
		}) && slices.ContainsFunc(p.Spec.Tolerations, func(t corev1.Toleration) bool { return t.Key == w.driver.Tolerations("paris")[0].Key }) {
			names = append(names, p.Name)
		}
	}
	return names
}

func TestConsume(t *testing.T) {
	w := start(t)
	optedOut := w.pod("a-out", func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} })
	w1, w2, w3 := w.pod("w1"), w.pod("w2"), w.pod("w3")
	r := w.reservation(w1, 3)

	// Cold: what is waited for is said, and after the deadline also that it is late.
	w.driver.Hold("EnsurePeering", peering.Waiting("OfferPending", "waiting for the offer of paris"))
	w.instruct(r, "paris", 1, 3)
	w.says(r, "paris", broker.ConditionPeered, metav1.ConditionFalse, 1, "waiting for the offer of paris")
	w.says(r, "paris", broker.ConditionReady, metav1.ConditionFalse, 1, "not ready after")
	if calls := w.driver.Calls("EnsureCapacity"); len(calls) > 0 {
		t.Fatalf("a node without a link: %v", calls)
	}
	w.driver.FailNext("EnsureCapacity", errors.New("the API server is tired"))
	w.driver.Free("EnsurePeering")
	w.says(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "node spillway-paris carries cpu 900m, memory 192Mi")
	w.says(r, "paris", broker.ConditionReady, metav1.ConditionTrue, 1, "")
	w.carries("paris", "cpu 900m, memory 192Mi, 3 pods, [shop]")

	// No pod may go there before the Reservation says so; then as many as there
	// are places, none that opted out.
	if names := w.tolerating(w1, w2, w3, optedOut); len(names) > 0 {
		t.Fatalf("%v tolerate a node that is not theirs yet", names)
	}
	w.usable(r, "paris", 2)
	w.eventually("two pods may go", func() (bool, string) {
		names := w.tolerating(w1, w2, w3, optedOut)
		return len(names) == 2 && !slices.Contains(names, optedOut.Name), fmt.Sprint(names)
	})
	w.usable(r, "paris", 3)
	w.eventually("all three may go", func() (bool, string) {
		names := w.tolerating(w1, w2, w3, optedOut)
		return len(names) == 3, fmt.Sprint(names)
	})
	extra := w.pod("w4")
	for _, p := range []*corev1.Pod{w1, w2, w3} {
		w.bind(p, "paris")
		w.phase(p, corev1.PodRunning)
	}
	w.eventually("overflowed pods go first", func() (bool, string) {
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(w1), w1))
		return w1.Annotations["controller.kubernetes.io/pod-deletion-cost"] == "-100", fmt.Sprint(w1.Annotations)
	})
	if names := w.tolerating(extra); len(names) > 0 {
		t.Errorf("a fourth pod may go to three places")
	}

	// A DaemonSet's pod gets a place of its own and counts for nothing.
	daemon := w.pod("daemon", func(p *corev1.Pod) {
		p.Namespace = "default"
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "d", UID: "d", Controller: ptr.To(true)}}
		p.Spec.NodeName = broker.VirtualNodeName("paris")
	})
	w.carries("paris", "cpu 900m, memory 192Mi, 4 pods, [shop]")
	w.must(w.Delete(t.Context(), daemon))
	w.carries("paris", "cpu 900m, memory 192Mi, 3 pods, [shop]")

	// What is not needed for the grace is given back: the node first, then the
	// count. What runs elsewhere by then was asked for, and so is kept.
	w.must(w.Delete(t.Context(), extra))
	w.must(w.Delete(t.Context(), w3))
	w.carries("paris", "cpu 600m, memory 128Mi, 2 pods, [shop]")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(r), r))
	if n := r.Spec.PodSets[0].Count; n != 3 {
		t.Errorf("the count was lowered to %d before the node was seen to shrink", n)
	}
	w.eventually("the count is lowered", func() (bool, string) {
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(r), r))
		return r.Spec.PodSets[0].Count == 2 && r.Annotations[broker.AnnotationKeep] == `{"paris":2}`, fmt.Sprintf("%d %v", r.Spec.PodSets[0].Count, r.Annotations)
	})
	w.instruct(r, "paris", 2, 2)
	w.says(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 2, "cpu 600m")

	// More is needed again: a later instruction is in force in full.
	w5, w6 := w.pod("w5"), w.pod("w6")
	w.change(r, func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 4 })
	w.instruct(r, "paris", 3, 4)
	w.says(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 3, "cpu 1200m")
	w.carries("paris", "cpu 1200m, memory 256Mi, 4 pods, [shop]")
	w.must(w.Delete(t.Context(), w5))
	w.must(w.Delete(t.Context(), w6))
	w.carries("paris", "cpu 600m, memory 128Mi, 2 pods, [shop]")

	// Deleted by its owner: what runs is let finish, and said so.
	w.must(w.Delete(t.Context(), r))
	w.says(r, "paris", broker.ConditionRequesterReleased, metav1.ConditionFalse, 3, "2 pods still run in paris: shop/w1, shop/w2")
	w.must(w.Delete(t.Context(), w2))
	w.says(r, "paris", broker.ConditionRequesterReleased, metav1.ConditionFalse, 3, "1 pods still run")
	w.carries("paris", "cpu 300m, memory 64Mi, 1 pods, [shop]")
	w.phase(w1, corev1.PodSucceeded)
	w.says(r, "paris", broker.ConditionRequesterReleased, metav1.ConditionTrue, 3, "no pod")
	w.carries("paris", "nothing, 0 pods, [shop]")

	// No grant: parked, and torn down when it has been idle for long.
	w.must(w.Delete(t.Context(), &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: instructions, Name: id(r) + "-paris"}}))
	if calls := w.driver.Calls("Teardown"); len(calls) > 0 {
		t.Fatalf("torn down at once: %v", calls)
	}
	w.eventually("the idle link is removed", func() (bool, string) {
		return len(w.driver.Calls("Teardown")) > 0, fmt.Sprint(w.driver.Calls(""))
	})
	w.change(r, func(r *broker.Reservation) { r.Finalizers = nil })
}

// TestNothingIsNeeded: a Reservation that nobody needs is deleted, also one that
// got no further than asking.
func TestNothingIsNeeded(t *testing.T) {
	w := start(t)
	p := w.pod("p")
	r := w.reservation(p, 1)
	granted := w.pod("q", func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = list("cpu", "1")
	})
	other := w.reservation(granted, 2)
	byHand := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "by-hand"}, Spec: broker.ReservationSpec{PodSets: podSet(1, list("cpu", "1"))}}
	w.must(w.Create(t.Context(), byHand))
	w.instruct(other, "paris", 1, 2)
	w.says(other, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "")
	w.must(w.Delete(t.Context(), p))
	w.must(w.Delete(t.Context(), granted))
	for _, r := range []*broker.Reservation{r, other} {
		w.eventually("it is deleted", func() (bool, string) {
			w.must(w.Get(t.Context(), client.ObjectKeyFromObject(r), r))
			return r.DeletionTimestamp != nil, fmt.Sprint(r.Spec)
		})
	}
	w.says(other, "paris", broker.ConditionRequesterReleased, metav1.ConditionTrue, 1, "")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(byHand), byHand))
	if byHand.DeletionTimestamp != nil {
		t.Error("a Reservation that a person wrote was deleted")
	}
}

// TestRescue: a pod that the provider refuses is given back to the scheduler.
func TestRescue(t *testing.T) {
	w := start(t)
	refused := w.pod("refused")
	bare := w.pod("bare", func(p *corev1.Pod) { p.OwnerReferences = nil })
	running := w.pod("running")
	backedOff := w.pod("backed-off")
	daemon := w.pod("daemon", func(p *corev1.Pod) {
		p.OwnerReferences[0].Kind = "DaemonSet"
	})
	for _, p := range []*corev1.Pod{refused, bare, running, backedOff, daemon} {
		w.bind(p, "paris")
	}
	w.phase(running, corev1.PodRunning)
	w.phase(backedOff, corev1.PodPending)
	before := backedOff.DeepCopy()
	backedOff.Status.Reason = "OffloadingBackOff"
	w.must(w.Status().Patch(t.Context(), backedOff, client.MergeFrom(before)))
	gone := func(p *corev1.Pod) bool {
		return client.IgnoreNotFound(w.Get(t.Context(), client.ObjectKeyFromObject(p), &corev1.Pod{})) == nil &&
			w.Get(t.Context(), client.ObjectKeyFromObject(p), &corev1.Pod{}) != nil
	}
	w.eventually("both are evicted", func() (bool, string) { return gone(refused) && gone(backedOff), "" })
	w.eventually("people are told of the bare one", func() (bool, string) {
		var all corev1.EventList
		w.must(w.List(t.Context(), &all, client.InNamespace(shop)))
		return slices.ContainsFunc(all.Items, func(e corev1.Event) bool {
			return e.Reason == "StuckInOverflow" && e.InvolvedObject.UID == types.UID(bare.UID)
		}), fmt.Sprint(len(all.Items))
	})
	for _, p := range []*corev1.Pod{bare, running, daemon} {
		if gone(p) {
			t.Errorf("%s is gone", p.Name)
		}
	}
}

// TestLostProvider: pods that are to end at a provider that is out of reach are
// not waited for, but for those whose name must not be in use twice.
func TestLostProvider(t *testing.T) {
	w := start(t)
	slow := func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](3600) }
	of := func(kind string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.OwnerReferences[0].Kind = kind }
	}
	lost, named, kept := w.pod("lost", slow), w.pod("named", slow, of("StatefulSet")), w.pod("kept", slow)
	reached := w.pod("reached", slow)
	for _, p := range []*corev1.Pod{lost, named, kept} {
		w.bind(p, "paris")
		w.phase(p, corev1.PodRunning)
	}
	w.bind(reached, "berlin")
	w.phase(reached, corev1.PodRunning)
	for cluster, ready := range map[string]corev1.ConditionStatus{"paris": corev1.ConditionUnknown, "berlin": corev1.ConditionTrue} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(cluster)}}
		w.must(w.Create(t.Context(), node))
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready, LastTransitionTime: metav1.Now()}}
		w.must(w.Status().Update(t.Context(), node))
	}
	for _, p := range []*corev1.Pod{reached, named, lost} {
		w.must(w.Delete(t.Context(), p))
	}
	w.eventually("the lost one is given up", func() (bool, string) {
		return apierrors.IsNotFound(w.Get(t.Context(), client.ObjectKeyFromObject(lost), &corev1.Pod{})), ""
	})
	w.eventually("people are told", func() (bool, string) {
		var all corev1.EventList
		w.must(w.List(t.Context(), &all, client.InNamespace(shop)))
		return slices.ContainsFunc(all.Items, func(e corev1.Event) bool {
			return e.Reason == "LostWithProvider" && e.InvolvedObject.UID == lost.UID
		}), fmt.Sprint(len(all.Items))
	})
	for _, p := range []*corev1.Pod{named, kept, reached} {
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(p), p))
	}
}

// TestAdopted: a link that nothing speaks of is found, and ends when it has been
// idle.
func TestAdopted(t *testing.T) {
	w := start(t)
	if _, err := w.driver.EnsurePeering(t.Context(), peering.Peer{ClusterID: "oslo"}); err != nil {
		t.Fatal(err)
	}
	// Any event of the provider has the links looked at; the regular look comes
	// twice a minute.
	w.must(w.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName("oslo")}}))
	w.eventually("it is torn down", func() (bool, string) {
		return len(w.driver.Calls("Teardown")) > 0, fmt.Sprint(w.driver.Calls(""))
	})
}
