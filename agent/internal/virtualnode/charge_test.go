package virtualnode_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/podindex"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

// consumer has Reservations that paris holds capacity for, and pods on its virtual node.
type consumer struct {
	clock        clock.PassiveClock
	reservations []*broker.Reservation // nil for one of the hub
	instructions []*broker.ReservationInstruction
	pods         []*corev1.Pod
	// gone are the owners that cannot be resolved any more.
	gone map[types.UID]bool
}

func (c *consumer) resolve(_ string, owner metav1.OwnerReference) (*metav1.OwnerReference, bool) {
	return nil, !c.gone[owner.UID]
}

// key of a pod, as the scheduler knows it.
func (c *consumer) key(pod *corev1.Pod) (demand.Key, bool) {
	key, _, _, ok := demand.KeyOf(pod, c.resolve)
	return key, ok
}

// pod returns one of an owner that requests one CPU.
func (c *consumer) pod(owner types.UID) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: fmt.Sprint("pod-", len(c.pods)), UID: types.UID(fmt.Sprint("pod-", len(c.pods))), Generation: 1,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "Batch", Name: string(owner), UID: owner, Controller: ptr.To(true)}},
	}, Spec: corev1.PodSpec{SchedulerName: broker.SchedulerName, Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1")}}}}}
}

// reserve adds a Reservation for the pods of an owner or, if that is empty, one of the hub.
func (c *consumer) reserve(id string, owner types.UID, pods int32) {
	shape, set := demand.ShapeOf(c.pod(owner))
	set.Count = pods
	in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: id, UID: types.UID(id)}}
	in.Spec = broker.ReservationInstructionSpec{ReservationName: id, TargetClusterID: "paris", PodSets: []broker.PodSet{set}}
	in.Status.Carried = &broker.HeldCapacity{PodSets: []broker.PodSet{set}}
	var r *broker.Reservation
	if owner != "" {
		r = &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: id, UID: types.UID(id), Labels: map[string]string{broker.LabelOwnerUID: string(owner), broker.LabelShape: shape}}}
		r.Spec.PodSets, r.Status.ID = []broker.PodSet{set}, id
		r.Status.Allocations = []broker.Allocation{{Cluster: "paris", PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true}}
		in.Spec.SourceNamespace, in.Spec.SourceName, in.Spec.SourceUID = "shop", id, r.UID
	} else {
		in.Spec.ReservationUID = types.UID(id)
	}
	c.reservations, c.instructions = append(c.reservations, r), append(c.instructions, in)
}

// scheduler returns what a scheduler knows that starts now.
func (c *consumer) scheduler() (*usage.GrantCache, *usage.PoolCache, *usage.Placements) {
	grants, pools, placements := usage.NewGrantCache(c.clock), usage.NewPoolCache(c.clock), usage.NewPlacements(c.clock, c.key)
	placements.Pooled, placements.Grants = pools.Has, grants.Get
	for i, in := range c.instructions {
		if r := c.reservations[i]; r != nil {
			grants.Set(r)
		}
		pools.SetInstruction(in)
	}
	for _, pod := range c.pods {
		placements.SetPod(pod)
	}
	return grants, pools, placements
}

// bind binds a pod as the plugin does: to a slot of its owner, or else to a pool. It reports
// whether there is room.
func (c *consumer) bind(pod *corev1.Pod) bool {
	grants, pools, placements := c.scheduler()
	node := broker.VirtualNodeName("paris")
	key, _ := c.key(pod)
	label := ""
	if g := grants.Get(key); g.SlotsAt("paris") > 0 && placements.FreeOf(g, "paris", node) > 0 {
		label = placements.ChargedTo(pod.Namespace, node, g.Charges["paris"])
	} else if i := slices.IndexFunc(pools.Of(pod), func(pool *usage.Pool) bool { return placements.InPool(pool, node, usage.NeedOf(pod)) }); i >= 0 {
		label = pools.Of(pod)[i].Hold
	} else {
		return false
	}
	shape, _ := demand.ShapeOf(pod)
	pod.Labels, pod.Spec.NodeName = map[string]string{broker.LabelHold: label, broker.LabelShape: shape}, node
	c.pods = append(c.pods, pod)
	return true
}

// used is how many pods use each hold, as the three see it. The scheduler counts for all holds of
// an owner together, so the first of them has its count.
func (c *consumer) used() (scheduler, agent, provider map[string]int32) {
	scheduler, agent, provider = map[string]int32{}, map[string]int32{}, map[string]int32{}
	node := broker.VirtualNodeName("paris")
	grants, _, placements := c.scheduler()
	s := virtualnode.Snapshot{Provider: "paris"}
	var promises []charge.Promise
	for i, in := range c.instructions {
		s.Grants = append(s.Grants, virtualnode.Grant{Instruction: in, Reservation: c.reservations[i], Limit: -1})
		promises = append(promises, charge.Promise{Name: in.Spec.ReservationName, Held: broker.HeldCapacity{PodSets: in.Spec.PodSets}})
		if c.reservations[i] == nil {
			scheduler[in.Name] = placements.UsersOf("shop", node, in.Name)
			continue
		}
		key, _ := demand.KeyOfReservation(c.reservations[i])
		if g := grants.Get(key); g.Charges["paris"][0].Label == in.Name {
			scheduler[in.Name] = placements.UsedOf(key, node, g.Charges["paris"])
		}
	}
	index := podindex.New(broker.SchedulerName)
	var guests []charge.Guest
	for _, pod := range c.pods {
		index.Set(pod)
		guests = append(guests, charge.Guest{Requests: inventory.Requests(pod), Label: pod.Labels[broker.LabelHold]})
	}
	s.Count(index, c.resolve)
	for i, unused := range charge.Unused(promises, guests) {
		in := c.instructions[i]
		agent[in.Name], provider[in.Name] = s.Grants[i].Bound.Count, (&broker.HeldCapacity{PodSets: in.Spec.PodSets}).Pods()-unused.Pods()
	}
	return scheduler, agent, provider
}

// TestAllCountTheSame: of the same pods and holds, the scheduler, the consumer's agent and the
// provider's agent count the same pods for each hold, also when owners of pods are gone, pods have
// other owners, or a Reservation has been replaced.
func TestAllCountTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &consumer{clock: clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), gone: map[types.UID]bool{}}
		owner := rapid.SampledFrom([]types.UID{"web", "db", "batch"})
		first := map[types.UID]string{}
		for i := range rapid.IntRange(1, 5).Draw(t, "holds") {
			id, of := fmt.Sprint("r", i), rapid.SampledFrom([]types.UID{"", "web", "web", "db"}).Draw(t, "for")
			c.reserve(id, of, rapid.Int32Range(1, 4).Draw(t, "pods"))
			if first[of] == "" {
				first[of] = id
			}
		}
		for range rapid.IntRange(0, 12).Draw(t, "pods") {
			c.bind(c.pod(owner.Draw(t, "owner")))
		}
		for i, pod := range c.pods {
			if rapid.IntRange(0, 3).Draw(t, "adopted") == 0 {
				// By an owner without a Reservation.
				c.pods[i] = pod.DeepCopy()
				c.pods[i].OwnerReferences[0].UID = "another"
			}
		}
		c.gone[owner.Draw(t, "gone")] = rapid.Bool().Draw(t, "is gone")
		scheduler, agent, provider := c.used()
		for id, n := range agent {
			if n != provider[id] {
				t.Fatalf("%d pods use %s as the consumer's agent sees it, and %d as the provider's does", n, id, provider[id])
			}
		}
		byOwner := map[string]int32{}
		for i, in := range c.instructions {
			name := in.Name
			if r := c.reservations[i]; r != nil {
				name = first[types.UID(r.Labels[broker.LabelOwnerUID])]
			}
			byOwner[name] += agent[in.Name]
		}
		for id, n := range byOwner {
			if n != scheduler[id] {
				t.Fatalf("%d pods use %s as the consumer's agent sees it, and %d as the scheduler does", n, id, scheduler[id])
			}
		}
		c.checkReplaced(t)
	})
}

// checkReplaced gives a Reservation another ID: its pods have a label that names none, and use it by
// their key. What the provider counts for it is still what they use together.
func (c *consumer) checkReplaced(t *rapid.T) {
	i := slices.IndexFunc(c.reservations, func(r *broker.Reservation) bool { return r != nil && r.Labels[broker.LabelOwnerUID] == "db" })
	if i < 0 || c.gone["db"] {
		return
	}
	r, in := c.reservations[i].DeepCopy(), c.instructions[i].DeepCopy()
	r.Name, r.Status.ID, in.Name, in.Spec.ReservationName, in.Spec.SourceName = "new", "new", "new", "new", "new"
	c.reservations[i], c.instructions[i] = r, in
	scheduler, agent, provider := c.used()
	key, _ := demand.KeyOfReservation(r)
	grants, _, _ := c.scheduler()
	want, counted := int32(0), int32(0)
	for _, part := range grants.Get(key).Charges["paris"] {
		want, counted = want+agent[part.Label], counted+scheduler[part.Label]
	}
	var together int32
	for _, n := range provider {
		together += n
	}
	if want != counted || together != int32(len(c.pods)) {
		t.Fatalf("%d pods use the replaced Reservation as the agent sees it, and %d as the scheduler does; the provider counts %d of %d pods", want, counted, together, len(c.pods))
	}
}
