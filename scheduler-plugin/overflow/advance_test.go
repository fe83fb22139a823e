package overflow_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestReservedInAdvance runs pods on Reservations made by hand with a real scheduler.
// Nothing fits at home.
func TestReservedInAdvance(t *testing.T) {
	c := startTestCluster(t)
	controlplane.InstallCRDs(t, c.config)
	c.namespace(broker.SystemNamespace, nil)
	c.node("home", "10m", nil)
	c.virtualNode("paris")
	c.startScheduler()
	c.runRules([]rule{
		{"a pod uses a Reservation made by hand, and none is requested", usesByHand},
		{"a Reservation of the hub is used from every namespace", usesFromHub},
		{"a pod that fits none of two requests capacity", fitsNeither},
		{"a Reservation that is deleted takes no new pod", deletedByHand},
		{"a total is never exceeded", neverExceeded},
	})
}

// byHand creates a Reservation of a total, and the instruction by which the agent says
// that paris provides it.
func (c *testCluster) byHand(namespace, name, cpu string) (*broker.Reservation, *broker.ReservationInstruction) {
	c.t.Helper()
	total := broker.FromList(expect.Resources("cpu", cpu))
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Finalizers: []string{broker.FinalizerRequest}},
		Spec: broker.ReservationSpec{RequestedResources: &total}}
	c.create(r)
	return r, c.instruct(namespace+"-"+name, total, func(spec *broker.ReservationInstructionSpec) {
		spec.SourceNamespace, spec.SourceName, spec.SourceUID, spec.PricePerHour = namespace, name, r.UID, "0.20 EUR"
	})
}

func (c *testCluster) instruct(name string, total broker.ResourceQuantities, change func(*broker.ReservationInstructionSpec)) *broker.ReservationInstruction {
	c.t.Helper()
	in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: name + "-paris"}}
	in.Spec = broker.ReservationInstructionSpec{ReservationName: name, ReservationUID: "hub", TargetClusterID: "paris", RequestedResources: total}
	change(&in.Spec)
	c.create(in)
	c.carry(in)
	return in
}

// carry says that the virtual node provides what the instruction is for.
func (c *testCluster) carry(in *broker.ReservationInstruction) {
	c.t.Helper()
	in.Status = broker.ReservationInstructionStatus{Delivered: true, Carried: &broker.HeldCapacity{Totals: in.Spec.RequestedResources}}
	expect.NoError(c.t, c.Status().Update(c.t.Context(), in))
}

// remove deletes an instruction and the pods of a namespace.
func (c *testCluster) removeAll(namespace string, in ...*broker.ReservationInstruction) {
	c.t.Helper()
	for _, in := range in {
		expect.NoError(c.t, c.Delete(c.t.Context(), in))
	}
	expect.NoError(c.t, c.DeleteAllOf(c.t.Context(), &corev1.Pod{}, client.InNamespace(namespace), client.GracePeriodSeconds(0)))
	c.expectPods(namespace, "", map[string]int{})
}

// expectOnly waits until a namespace has only these Reservations.
func (c *testCluster) expectOnly(namespace string, want int) {
	c.t.Helper()
	var list broker.ReservationList
	expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(namespace)))
	if len(list.Items) != want {
		c.t.Errorf("%d Reservations, want %d", len(list.Items), want)
	}
}

func usesByHand(c *testCluster, ns string) {
	// The pod waits for capacity of its own first: the Reservation by hand wakes it.
	c.create(schedulerPod(ns, "early", "300m", tolerating("paris")))
	c.expectReservation(ns, ns, 1)
	_, in := c.byHand(ns, "warm", "600m")
	c.expectPods(ns, "early", map[string]int{paris: 1})
	c.create(schedulerPod(ns, "late", "300m", tolerating("paris")))
	c.expectPods(ns, "late", map[string]int{paris: 1})
	for _, name := range []string{"early", "late"} {
		if hold := c.getPod(ns, name).Labels[broker.LabelHold]; hold != in.Spec.ReservationName {
			c.t.Errorf("%s is charged to %q, want %q", name, hold, in.Spec.ReservationName)
		}
		c.expectEvent(ns, name, "OverflowGranted", "in paris that was reserved in advance at 0.20 EUR per hour (Reservation "+ns+"/warm)")
	}
	c.expectOnly(ns, 2)
	// The next one waits for a place, and gets that of one that ends.
	c.create(schedulerPod(ns, "third", "300m", tolerating("paris")))
	c.expectMessage(ns, "third", "no reserved capacity left for this pod (provider paris)")
	expect.NoError(c.t, c.Delete(c.t.Context(), c.getPod(ns, "early")))
	c.expectPods(ns, "third", map[string]int{paris: 1})
	c.removeAll(ns, in)
}

func usesFromHub(c *testCluster, ns string) {
	first := ns + "-first"
	c.namespace(first, optIn)
	in := c.instruct("from-hub", broker.FromList(expect.Resources("cpu", "1")), func(spec *broker.ReservationInstructionSpec) { spec.Namespaces = []string{ns, first} })
	// The scheduler watches instructions and pods separately.
	c.create(schedulerPod(first, "first", "20m", tolerating("paris")))
	c.expectPods(first, "first", map[string]int{paris: 1})
	c.removeAll(first)
	c.create(schedulerPod(ns, "named", "500m", tolerating("paris")))
	c.expectPods(ns, "named", map[string]int{paris: 1})
	c.expectEvent(ns, "named", "OverflowGranted", "in paris that was reserved in advance (Reservation from-hub)") // no price is stated
	other := ns + "-other"
	c.namespace(other, optIn)
	c.create(schedulerPod(other, "late", "500m", tolerating("paris")))
	c.expectMessage(other, "late", "no reservation for this pod (provider paris)")
	in.Spec.Namespaces = nil
	expect.NoError(c.t, c.Update(c.t.Context(), in))
	c.expectPods(other, "late", map[string]int{paris: 1})
	c.expectOnly(ns, 0)
	c.removeAll(other)
	c.removeAll(ns, in)
}

func fitsNeither(c *testCluster, ns string) {
	_, a := c.byHand(ns, "a", "1")
	_, b := c.byHand(ns, "b", "1")
	c.create(schedulerPod(ns, "both", "600m", tolerating("paris")))
	c.create(schedulerPod(ns, "second", "600m", tolerating("paris")))
	c.expectPods(ns, "", map[string]int{paris: 2})
	if one, other := c.getPod(ns, "both").Labels[broker.LabelHold], c.getPod(ns, "second").Labels[broker.LabelHold]; one == other || one == "" || other == "" {
		c.t.Errorf("charged to %q and %q, want one each", one, other)
	}
	// Its shape is not that of the others, which may have been tried before the plugin has
	// seen the instructions.
	c.create(schedulerPod(ns, "neither", "700m", tolerating("paris")))
	expect.Eventually(c.t, "a Reservation for one pod of 700m", func() (bool, string) {
		var list broker.ReservationList
		expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
		return slices.ContainsFunc(list.Items, func(r broker.Reservation) bool {
			sets := r.Spec.PodSets
			return len(sets) == 1 && sets[0].Count == 1 && sets[0].Requests.CPU.String() == "700m"
		}), fmt.Sprint(len(list.Items), " Reservations")
	})
	c.expectPods(ns, "neither", map[string]int{"": 1})
	c.removeAll(ns, a, b)
}

func deletedByHand(c *testCluster, ns string) {
	r, in := c.byHand(ns, "warm", "2")
	c.create(schedulerPod(ns, "first", "500m", tolerating("paris")))
	c.expectPods(ns, "first", map[string]int{paris: 1})
	expect.NoError(c.t, c.Delete(c.t.Context(), r)) // the finalizer keeps it
	expect.Eventually(c.t, "new pods to be refused", func() (bool, string) {
		// A pod may be scheduled before the plugin sees the deletion, not after.
		name := fmt.Sprint("probe-", time.Now().UnixNano())
		c.create(schedulerPod(ns, name, "20m", tolerating("paris")))
		c.expectTried(ns, name)
		return c.getPod(ns, name).Spec.NodeName == "", name + " is bound"
	})
	c.create(schedulerPod(ns, "later", "500m", tolerating("paris")))
	c.expectMessage(ns, "later", "no reservation for this pod (provider paris)")
	if pod := c.getPod(ns, "first"); pod.DeletionTimestamp != nil || pod.Spec.NodeName == "" {
		c.t.Error("the pod that uses it is stopped")
	}
	expect.NoError(c.t, c.Patch(c.t.Context(), r, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	c.removeAll(ns, in)
}

// expectTried waits until the scheduler has bound a pod or found no node.
func (c *testCluster) expectTried(namespace, name string) {
	c.t.Helper()
	expect.Eventually(c.t, name+" to be tried", func() (bool, string) {
		return len(c.getPod(namespace, name).Status.Conditions) > 0, "not yet"
	})
}

// neverExceeded: pods of mixed sizes come and go at once, and the total shrinks and
// grows; whatever the scheduler does, those that it has bound fit.
func neverExceeded(c *testCluster, ns string) {
	r, in := c.byHand(ns, "warm", "3")
	sizes := []string{"100m", "300m", "700m", "1", "1300m"}
	var wait sync.WaitGroup
	for i := range 4 {
		wait.Add(1)
		go func() {
			defer wait.Done()
			random := rand.New(rand.NewPCG(1, uint64(i)))
			for n := range 12 {
				pod := schedulerPod(ns, fmt.Sprint("mixed-", i, "-", n), sizes[random.IntN(len(sizes))], tolerating("paris"))
				if err := c.Create(c.t.Context(), pod); err != nil {
					c.t.Error(err)
				}
				if n%4 == 3 {
					if err := c.Delete(c.t.Context(), pod); err != nil {
						c.t.Error(err)
					}
				}
			}
		}()
	}
	used := func() (milli int64, smallestPending int64) {
		smallestPending = 1 << 40
		for node, pods := range c.pods(ns, "mixed") {
			for _, p := range pods {
				cpu := p.Spec.Containers[0].Resources.Requests.Cpu().MilliValue()
				if node == paris {
					milli += cpu
				} else {
					smallestPending = min(smallestPending, cpu)
				}
			}
		}
		return milli, smallestPending
	}
	settle := func(total int64) {
		c.t.Helper()
		expect.Eventually(c.t, "no pending pod to fit", func() (bool, string) {
			milli, pending := used()
			if milli > total {
				c.t.Fatalf("pods with %dm CPU are bound to a total of %dm", milli, total)
			}
			return milli+pending > total, fmt.Sprintf("%dm of %dm used, a pod of %dm waits", milli, total, pending)
		})
	}
	settle(3000)
	wait.Wait()
	settle(3000)
	in.Spec.RequestedResources.CPU = ptr.To(resource.MustParse("5"))
	expect.NoError(c.t, c.Update(c.t.Context(), in))
	c.carry(in)
	settle(5000)
	if n := len(c.pods(ns, "mixed")[paris]); n == 0 {
		c.t.Error("no pod was bound")
	}
	expect.NoError(c.t, c.Patch(c.t.Context(), r, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	c.removeAll(ns, in)
}
