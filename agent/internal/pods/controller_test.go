package pods_test

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/pods"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode/virtualnodetest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	controlplane.Main(m)
}

func start(t *testing.T) *virtualnodetest.Cluster {
	t.Helper()
	c, _ := startWith(t, func(client.Reader, *peering.Capacity) {})
	return c
}

// startWith calls changing before a virtual node changes, with its capacity from then on. It
// returns what keeps the nodes.
func startWith(t *testing.T, changing func(client.Reader, *peering.Capacity)) (c *virtualnodetest.Cluster, nodes *virtualnode.Reconciler) {
	t.Helper()
	return startNamed(t, broker.SchedulerName, changing)
}

// startNamed is startWith in a cluster where Spillway's scheduler has a name.
func startNamed(t *testing.T, scheduler string, changing func(client.Reader, *peering.Capacity)) (c *virtualnodetest.Cluster, nodes *virtualnode.Reconciler) {
	t.Helper()
	c = virtualnodetest.Start(t, func(mgr ctrl.Manager, driver *fake.Driver) error {
		change := driver.Changed
		driver.Changed = func(provider string, capacity *peering.Capacity) error {
			changing(mgr.GetAPIReader(), capacity)
			return change(provider, capacity)
		}
		nodes = virtualnode.New(mgr.GetClient(), mgr.GetAPIReader(), events.NewRecorder(mgr.GetEventRecorder("spillway-agent")), driver, virtualnode.Options{
			InstructionNamespace: virtualnodetest.InstructionNamespace, SchedulerName: scheduler, PeeringIdleTime: time.Hour, FinishedPodRetention: time.Hour,
			ReadyTimeout: 2 * time.Second, ShrinkDelay: 500 * time.Millisecond,
		})
		if err := nodes.SetupWithManager(mgr); err != nil {
			return err
		}
		return pods.New(nodes, driver, pods.Options{
			ReleaseGrace: 1500 * time.Millisecond, StartTimeout: 8 * time.Second, ProviderLostAfter: time.Second,
		}).SetupWithManager(mgr)
	})
	return c, nodes
}

// admitted returns the names of the pods that tolerate the virtual node of paris, by
// both Spillway's and the driver's toleration.
func admitted(c *virtualnodetest.Cluster, all ...*corev1.Pod) (names []string) {
	c.Helper()
	required := append([]corev1.Toleration{
		{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: "paris", Effect: corev1.TaintEffectNoSchedule},
	}, c.Driver.Tolerations("paris")...)
	for _, p := range all {
		c.Refresh(p)
		if !slices.ContainsFunc(required, func(t corev1.Toleration) bool { return !slices.Contains(p.Spec.Tolerations, t) }) {
			names = append(names, p.Name)
		}
	}
	return names
}

// TestAdmitAndRelease: as many pods are admitted as the Reservation has usable
// capacity, and capacity that is not needed is released, the virtual node first.
func TestAdmitAndRelease(t *testing.T) {
	// The count of the Reservation when its virtual node first carried a number of pods.
	var counts sync.Map
	c, _ := startWith(t, func(live client.Reader, capacity *peering.Capacity) {
		var all broker.ReservationList
		if err := live.List(t.Context(), &all); capacity != nil && err == nil && len(all.Items) == 1 {
			counts.LoadOrStore(capacity.Pods, all.Items[0].Spec.PodSets[0].Count)
		}
	})
	optedOut := c.Pod("a-out", func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} })
	w1, w2, w3 := c.Pod("w1"), c.Pod("w2"), c.Pod("w3")
	all := []*corev1.Pod{w1, w2, w3, optedOut}
	r := c.Reservation(w1, 3)
	c.Instruct(r, "paris", 1, 3)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "")

	// No pod may go there before the Reservation says so; then as many as there are
	// slots, none that opted out.
	if names := admitted(c, all...); len(names) > 0 {
		t.Fatalf("%v tolerate a virtual node before it may be used", names)
	}
	c.SetUsable(r, "paris", 2)
	expect.Eventually(t, "two pods to be admitted", func() (bool, string) {
		names := admitted(c, all...)
		return len(names) == 2 && !slices.Contains(names, optedOut.Name), fmt.Sprint(names)
	})
	c.SetUsable(r, "paris", 3)
	expect.Eventually(t, "all three to be admitted", func() (bool, string) {
		names := admitted(c, all...)
		return len(names) == 3 && !slices.Contains(names, optedOut.Name), fmt.Sprint(names)
	})
	extra := c.Pod("w4")
	for _, p := range []*corev1.Pod{w1, w2, w3} {
		c.Bind(p, "paris")
		c.SetPhase(p, corev1.PodRunning)
	}
	if names := admitted(c, extra); len(names) > 0 {
		t.Error("a fourth pod is admitted to three slots")
	}

	// The virtual node shrinks before the count is lowered.
	c.Remove(extra)
	c.Remove(w3)
	c.ExpectCapacity("paris", "cpu 600m, memory 128Mi, 2 pods, [shop]")
	if n, _ := counts.Load(int32(2)); n != int32(3) {
		t.Errorf("the count was %v before the virtual node shrank, want 3", n)
	}
	expect.Eventually(t, "the count to be lowered", func() (bool, string) {
		c.Refresh(r)
		return r.Spec.PodSets[0].Count == 2 && slices.Equal(r.Spec.Retained, []broker.RetainedPods{{Cluster: "paris", Count: 2, Attempt: 1}}), fmt.Sprintf("%+v", r.Spec)
	})
	c.Instruct(r, "paris", 2, 2)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 2, "cpu 600m")

	// More is needed again: a later instruction is in force in full, until the need
	// is gone.
	w5, w6 := c.Pod("w5"), c.Pod("w6")
	c.UpdateReservation(r, func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 4 })
	c.Instruct(r, "paris", 3, 4)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 3, "cpu 1200m")
	c.ExpectCapacity("paris", "cpu 1200m, memory 256Mi, 4 pods, [shop]")
	c.Remove(w5)
	c.Remove(w6)
	c.ExpectCapacity("paris", "cpu 600m, memory 128Mi, 2 pods, [shop]")
}

// TestPodsThatDoNotOverflow: pods with the owner and shape of a Reservation that never get a
// virtual node are not admitted to one, nor do they keep its capacity: those of another
// scheduler, which may not bind them there, and those that can run in no other cluster.
func TestPodsThatDoNotOverflow(t *testing.T) {
	const another = "another-scheduler"
	for scheduler, other := range map[string]string{
		broker.SchedulerName:        corev1.DefaultSchedulerName,
		corev1.DefaultSchedulerName: another,
	} {
		t.Run(scheduler, func(t *testing.T) {
			c, _ := startNamed(t, scheduler, func(client.Reader, *peering.Capacity) {})
			of := func(scheduler string) func(*corev1.Pod) {
				return func(p *corev1.Pod) { p.Spec.SchedulerName = scheduler }
			}
			// They are older: they would be admitted first.
			foreign := c.Pod("a-foreign", of(other))
			mounting := c.Pod("b-mounting", of(scheduler), func(p *corev1.Pod) {
				p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: "nas", Path: "/"}}}}
			})
			own := c.Pod("c-own", of(scheduler))
			r := c.Reservation(own, 2)
			c.Instruct(r, "paris", 1, 2)
			c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "")
			c.SetUsable(r, "paris", 2)
			expect.Eventually(t, "only the other pod to be admitted", func() (bool, string) {
				names := admitted(c, foreign, mounting, own)
				return slices.Equal(names, []string{own.Name}), fmt.Sprint(names)
			})
			expect.Eventually(t, "the count to be lowered to one pod", func() (bool, string) {
				c.Refresh(r)
				return r.Spec.PodSets[0].Count == 1, fmt.Sprintf("%+v", r.Spec)
			})
			c.Bind(own, "paris")
			c.SetPhase(own, corev1.PodRunning)
			c.Remove(own)
			expect.Eventually(t, "the Reservation to be deleted", func() (bool, string) {
				c.Refresh(r)
				return r.DeletionTimestamp != nil, fmt.Sprintf("%+v", r.Spec)
			})
			if names := admitted(c, foreign, mounting); len(names) > 0 {
				t.Errorf("%v tolerate a virtual node that they never get", names)
			}
		})
	}
}

// TestUnneededReservation: a Reservation that no pod needs is deleted, with and
// without a grant, and one that a person wrote is kept.
func TestUnneededReservation(t *testing.T) {
	c := start(t)
	p := c.Pod("p")
	pending := c.Reservation(p, 1)
	q := c.Pod("q", func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", "1") })
	granted := c.Reservation(q, 2)
	byHand := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: virtualnodetest.Namespace, Name: "by-hand"},
		Spec:       broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 1, Requests: broker.FromList(expect.Resources("cpu", "1"))}}},
	}
	c.Make(byHand)
	c.Instruct(granted, "paris", 1, 2)
	c.ExpectCondition(granted, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "")
	c.Remove(p)
	c.Remove(q)
	for _, r := range []*broker.Reservation{pending, granted} {
		expect.Eventually(t, "it to be deleted", func() (bool, string) {
			c.Refresh(r)
			return r.DeletionTimestamp != nil, fmt.Sprintf("%+v", r.Spec)
		})
	}
	c.ExpectCondition(granted, "paris", broker.ConditionRequesterReleased, metav1.ConditionTrue, 1, "")
	c.Refresh(byHand)
	if byHand.DeletionTimestamp != nil {
		t.Error("a Reservation that a person wrote was deleted")
	}
}

func expectGone(c *virtualnodetest.Cluster, pod *corev1.Pod) {
	c.Helper()
	expect.Eventually(c, "pod "+pod.Name+" to be gone", func() (bool, string) { return !c.Exists(pod), "" })
}

// TestEvictNotStarted: a pod that the provider does not start is evicted, so that
// its replacement is scheduled again.
func TestEvictNotStarted(t *testing.T) {
	c := start(t)
	// A node of this cluster with the name of a virtual one.
	c.Make(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName("worker")}})
	real := c.Pod("real")
	c.Bind(real, "worker")
	notStarted := c.Pod("not-started", func(p *corev1.Pod) {
		p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "words"}}}}
	})
	bare := c.Pod("bare", func(p *corev1.Pod) { p.OwnerReferences = nil })
	running := c.Pod("running")
	refused := c.Pod("refused")
	daemon := c.Pod("daemon", func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "DaemonSet" })
	for _, p := range []*corev1.Pod{notStarted, bare, running, refused, daemon} {
		c.Bind(p, "paris")
	}
	c.SetPhase(running, corev1.PodRunning)
	c.SetPhase(refused, corev1.PodPending)
	before := refused.DeepCopy()
	refused.Status.Reason = fake.ReasonRefused
	expect.NoError(t, c.Status().Patch(t.Context(), refused, client.MergeFrom(before)))

	for _, p := range []*corev1.Pod{notStarted, refused} {
		expectGone(c, p)
		c.ExpectEvent(p, "EvictedFromVirtualNode")
	}
	c.ExpectEvent(bare, "PodNotStarted")
	if calls := c.Driver.Calls("Carry"); len(calls) != 1 || string(calls[0].Message) != "words" {
		t.Errorf("the driver has carried %v, want what the pod refers to, once", calls)
	}
	for _, p := range []*corev1.Pod{bare, running, daemon, real} {
		if !c.Exists(p) {
			t.Errorf("%s is gone", p.Name)
		}
	}
}

// TestForceDelete: pods that are deleted while their provider is unreachable are
// removed without its confirmation, except those of StatefulSets.
func TestForceDelete(t *testing.T) {
	c := start(t)
	slow := func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](3600) }
	lost, kept := c.Pod("lost", slow), c.Pod("kept", slow)
	named := c.Pod("named", slow, func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "StatefulSet" })
	reachable := c.Pod("reachable", slow)
	// On a node of this cluster, which has the name of a virtual one.
	real := c.Pod("real", slow)
	for p, provider := range map[*corev1.Pod]string{lost: "paris", named: "paris", kept: "paris", reachable: "berlin", real: "worker"} {
		c.Bind(p, provider)
		c.SetPhase(p, corev1.PodRunning)
	}
	for provider, ready := range map[string]corev1.ConditionStatus{"paris": corev1.ConditionUnknown, "berlin": corev1.ConditionTrue, "worker": corev1.ConditionUnknown} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(provider)}}
		if provider != "worker" {
			node.Labels = map[string]string{broker.LabelProvider: provider}
		}
		c.Make(node)
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready, LastTransitionTime: metav1.Now()}}
		expect.NoError(t, c.Status().Update(t.Context(), node))
	}
	for _, p := range []*corev1.Pod{real, reachable, named, lost} {
		c.Remove(p)
	}
	expectGone(c, lost)
	c.ExpectEvent(lost, "ForceDeleted")
	for _, p := range []*corev1.Pod{named, kept, reachable, real} {
		if !c.Exists(p) {
			t.Errorf("%s is gone", p.Name)
		}
	}
}

// TestPodsOnReservedCapacity: pods that use a Reservation made by hand need nothing of
// their owner's own, which shrinks.
func TestPodsOnReservedCapacity(t *testing.T) {
	c := start(t)
	c.InstructFromHub("from-hub", "paris", expect.Resources("cpu", "1", "memory", "1Gi"))
	pooled := c.Pod("pooled", func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelHold: "from-hub"} })
	own := c.Pod("own")
	r := c.Reservation(own, 2)
	c.Instruct(r, "paris", 1, 2)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "")
	c.SetUsable(r, "paris", 2)
	for _, p := range []*corev1.Pod{pooled, own} {
		c.Bind(p, "paris")
		c.SetPhase(p, corev1.PodRunning)
	}
	expect.Eventually(t, "the count to be lowered", func() (bool, string) {
		c.Refresh(r)
		return r.Spec.PodSets[0].Count == 1, fmt.Sprintf("%+v", r.Spec)
	})
	c.ExpectCapacity("paris", "cpu 1300m, memory 1088Mi, 111 pods, [shop]")
}

// gangReservation makes the Reservation of a gang, for as many pods of each shape.
func gangReservation(c *virtualnodetest.Cluster, count int32, members ...*corev1.Pod) *broker.Reservation {
	c.Helper()
	key, owner, _, _ := demand.KeyOf(members[0], nil)
	key = key.OfReservation()
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: virtualnodetest.Namespace, Name: key.Name(owner.Name), Finalizers: []string{broker.FinalizerRequest},
			Labels: map[string]string{broker.LabelOwnerUID: string(key.OwnerUID), broker.LabelShape: key.Shape, broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Spec: broker.ReservationSpec{MinAvailable: count * int32(len(members))},
	}
	for _, member := range members {
		_, _, set, _ := demand.KeyOf(member, nil)
		set.Count = count
		r.Spec.PodSets = append(r.Spec.PodSets, set)
	}
	c.Make(r)
	return r
}

// TestGangOfShapes: pods of all shapes of a gang use its one Reservation, which keeps its
// capacity while any of them needs it. Pods that come back with other requests do not.
func TestGangOfShapes(t *testing.T) {
	c := start(t)
	group := "ring"
	member := func(name, cpu string) *corev1.Pod {
		return c.Pod(name, func(p *corev1.Pod) {
			p.Labels = map[string]string{broker.LabelPodGroup: group}
			p.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", cpu)
		})
	}
	leaders, workers := []*corev1.Pod{member("leader-0", "500m"), member("leader-1", "500m")}, []*corev1.Pod{member("worker-0", "200m"), member("worker-1", "200m")}
	r := gangReservation(c, 2, leaders[0], workers[0])
	c.InstructSets(r, "paris", 1, r.Spec.PodSets...)
	c.ExpectCondition(r, "paris", broker.ConditionVirtualNodeReady, metav1.ConditionTrue, 1, "cpu 1400m")
	for _, pod := range append(workers, leaders...) {
		c.Bind(pod, "paris")
		c.SetPhase(pod, corev1.PodRunning)
	}
	c.Remove(leaders[0])
	c.Remove(leaders[1])
	// One that has come back with other requests, of which capacity is to be added.
	group = "star"
	leader, worker := member("star-leader", "500m"), member("star-worker", "200m")
	star := gangReservation(c, 1, leader, worker)
	group = "ring"
	member("leader-again", "400m")
	expect.Consistently(t, 3*time.Second, "the capacity to be kept", func() (bool, string) {
		c.Refresh(r)
		c.Refresh(star)
		return r.DeletionTimestamp == nil && virtualnode.PodsOf(r.Spec.PodSets) == 4 && star.DeletionTimestamp == nil, fmt.Sprintf("%+v", r.Spec)
	})
	c.ExpectCapacity("paris", "cpu 1400m, 4 pods, [shop]")
	c.Remove(workers[0])
	c.Remove(workers[1])
	c.Remove(worker)
	group = "star"
	member("star-again", "100m")
	expect.Eventually(t, "the Reservations to be deleted", func() (bool, string) {
		c.Refresh(r)
		c.Refresh(star)
		return r.DeletionTimestamp != nil && star.DeletionTimestamp != nil, fmt.Sprintf("%+v, %+v", r.Spec, star.Spec)
	})
}
