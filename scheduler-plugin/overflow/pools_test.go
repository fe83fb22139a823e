package overflow

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// byHand returns a Reservation of namespace shop that was made by hand, and the
// instruction for what paris provides of it; the virtual node is ready.
func byHand(name string, held broker.HeldCapacity, change ...func(*broker.ReservationInstruction)) (*broker.Reservation, *broker.ReservationInstruction) {
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name)}}
	in := &broker.ReservationInstruction{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: name + "-paris"},
		Spec: broker.ReservationInstructionSpec{
			ReservationName: "rome-" + name, SourceNamespace: "shop", SourceName: name, SourceUID: r.UID, TargetClusterID: "paris",
			RequestedResources: held.Totals, PodSets: held.PodSets,
		},
		Status: broker.ReservationInstructionStatus{Carried: held.DeepCopy()},
	}
	for _, c := range change {
		c(in)
	}
	return r, in
}

// fromHub makes the instruction that of a Reservation in the hub.
func fromHub(namespaces ...string) func(*broker.ReservationInstruction) {
	return func(in *broker.ReservationInstruction) {
		in.Spec.SourceNamespace, in.Spec.SourceName, in.Spec.SourceUID, in.Spec.Namespaces = "", "", "", namespaces
	}
}

func total(pairs ...string) broker.HeldCapacity {
	return broker.HeldCapacity{Totals: broker.FromList(expect.Resources(pairs...))}
}

// sets are places: count of each amount of CPU.
func sets(places map[string]int32) broker.HeldCapacity {
	var all []broker.PodSet
	for cpu, n := range places {
		all = append(all, broker.PodSet{Name: "cpu-" + cpu, Count: n, Requests: broker.FromList(expect.Resources("cpu", cpu))})
	}
	slices.SortFunc(all, func(a, b broker.PodSet) int { return slices.Compare([]byte(a.Name), []byte(b.Name)) })
	return capacity.OfPodSets(all)
}

// schedule runs the cycle of a pod on the virtual node of paris, and returns the hold
// that it is charged to.
func schedule(t testing.TB, p *Plugin, pod *corev1.Pod) (hold string, ok bool) {
	t.Helper()
	state, node := scheduler.NewCycleState(), nodeWith("paris")
	if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
		t.Fatal(status)
	}
	if !p.Filter(t.Context(), state, pod, node).IsSuccess() {
		return "", false
	}
	if status := p.Reserve(t.Context(), state, pod, node.Node().Name); !status.IsSuccess() {
		t.Fatalf("Filter admits the pod and Reserve does not: %v", status)
	}
	_, hold = p.placements.PlaceOf(pod.UID)
	return hold, true
}

// poolPlugin returns a plugin with namespaces shop and bank, which are opted in, and
// school, which is not.
func poolPlugin() *Plugin {
	p := testPlugin(OverflowArgs{}, nodeWith("paris").Node())
	namespace := func(name, value string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelOverflow: value}}}
	}
	p.namespaces = corelisters.NewNamespaceLister(demandtest.NewIndexer(namespace("shop", broker.OverflowEnabled), namespace("bank", broker.OverflowEnabled), namespace("school", "")))
	return p
}

// poolCase is a pod of Job crunch that requests 1 CPU.
type poolCase struct {
	reason string
	held   broker.HeldCapacity
	change func(*broker.Reservation, *broker.ReservationInstruction)
	pod    func(*corev1.Pod)
	want   bool
}

func TestPoolAdmits(t *testing.T) {
	instruction := func(change func(*broker.ReservationInstruction)) func(*broker.Reservation, *broker.ReservationInstruction) {
		return func(_ *broker.Reservation, in *broker.ReservationInstruction) { change(in) }
	}
	selecting := instruction(func(in *broker.ReservationInstruction) {
		in.Spec.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "batch"}}
	})
	in := func(namespace string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Namespace = namespace } }
	for name, tc := range map[string]poolCase{
		"a total":                    {reason: "room for it", held: total("cpu", "1"), want: true},
		"a smaller total":            {reason: "never beyond", held: total("cpu", "999m")},
		"another resource":           {reason: "the total has none of it", held: total("memory", "1Gi")},
		"zero of another resource":   {reason: "it needs none of it", held: total("cpu", "1"), want: true, pod: func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests[broker.ResourceGPU] = resource.Quantity{} }},
		"a place":                    {reason: "as large as the pod", held: sets(map[string]int32{"1": 1}), want: true},
		"a larger place":             {reason: "the pod fits in it", held: sets(map[string]int32{"2": 1}), want: true},
		"two smaller places":         {reason: "a place is for one pod", held: sets(map[string]int32{"500m": 2})},
		"not carried":                {reason: "the virtual node does not provide it yet", held: total("cpu", "4"), change: instruction(func(in *broker.ReservationInstruction) { in.Status.Carried = nil })},
		"carried in part":            {reason: "the node is growing", held: total("cpu", "4"), change: instruction(func(in *broker.ReservationInstruction) { *in.Status.Carried = total("cpu", "999m") })},
		"granted in part":            {reason: "it is shrinking", held: total("cpu", "4"), change: instruction(func(in *broker.ReservationInstruction) { in.Spec.RequestedResources = total("cpu", "999m").Totals })},
		"placed again":               {reason: "the provider has not accepted it yet", held: total("cpu", "4"), change: instruction(func(in *broker.ReservationInstruction) { in.Spec.Suspended = true })},
		"deleted":                    {reason: "no new pod", held: total("cpu", "4"), change: func(r *broker.Reservation, _ *broker.ReservationInstruction) { r.DeletionTimestamp = &metav1.Time{} }},
		"another namespace":          {reason: "a local one serves its own", held: total("cpu", "4"), pod: in("bank")},
		"another one of this name":   {reason: "the instruction is of a former one", held: total("cpu", "4"), change: func(r *broker.Reservation, _ *broker.ReservationInstruction) { r.UID = "other" }},
		"from the hub":               {reason: "all opted-in namespaces", held: total("cpu", "4"), change: instruction(fromHub()), pod: in("bank"), want: true},
		"from the hub, not opted in": {reason: "only opted-in ones", held: total("cpu", "4"), change: instruction(fromHub()), pod: in("school")},
		"from the hub, for another":  {reason: "it names its namespaces", held: total("cpu", "4"), change: instruction(fromHub("shop")), pod: in("bank")},
		"not selected":               {reason: "its podSelector", held: total("cpu", "4"), change: selecting},
		"selected":                   {reason: "its podSelector", held: total("cpu", "4"), change: selecting, pod: func(p *corev1.Pod) { p.Labels = map[string]string{"tier": "batch"} }, want: true},
		"a pod that cannot overflow": {reason: "it uses hostNetwork", held: total("cpu", "4"), pod: func(p *corev1.Pod) { p.Spec.HostNetwork = true }},
		"a pod that opted out":       {reason: "its label", held: total("cpu", "4"), pod: func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }},
		"a pod that selects nodes":   {reason: "a total may be on any node", held: total("cpu", "4"), pod: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"gpu": "a100"} }},
		"a pod that selects its place": {reason: "the place is on such a node", held: sets(map[string]int32{"1": 1}), want: true,
			change: instruction(func(in *broker.ReservationInstruction) {
				in.Spec.PodSets[0].NodeSelector = map[string]string{"gpu": "a100"}
				in.Status.Carried.PodSets[0].NodeSelector = in.Spec.PodSets[0].NodeSelector
			}),
			pod: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"gpu": "a100"} }},
		"a provider for pods that comply": {reason: "the pod does not comply with restricted", held: total("cpu", "4"),
			change: instruction(func(in *broker.ReservationInstruction) { in.Spec.PodSecurity = broker.PodSecurityRestricted })},
		"a provider for all pods": {reason: "every pod that overflows complies with baseline", held: total("cpu", "4"), want: true,
			change: instruction(func(in *broker.ReservationInstruction) { in.Spec.PodSecurity = broker.PodSecurityBaseline })},
		"a place with a taint": {reason: "the pod does not tolerate it", held: sets(map[string]int32{"1": 1}),
			change: instruction(func(in *broker.ReservationInstruction) {
				in.Spec.PodSets[0].Tolerations = []corev1.Toleration{{Key: "dedicated"}}
				in.Status.Carried.PodSets[0].Tolerations = in.Spec.PodSets[0].Tolerations
			})},
	} {
		t.Run(name, func(t *testing.T) {
			p, pod := poolPlugin(), demandtest.JobPod("crunch", "crunch-0", "1")
			r, in := byHand("warm", tc.held)
			if tc.change != nil {
				tc.change(r, in)
			}
			if tc.pod != nil {
				tc.pod(pod)
			}
			p.pools.SetInstruction(in)
			p.pools.SetReservation(r)
			if _, ok := schedule(t, p, pod); ok != tc.want {
				t.Errorf("%s: admitted %v, want %v", tc.reason, ok, tc.want)
			}
		})
	}
}

// TestOrderOfCapacity: a pod uses its owner's grant, then the Reservation made by hand
// that the fewest pods may use, then any other; pods in pools take no slot of the grant.
func TestOrderOfCapacity(t *testing.T) {
	p := poolPlugin()
	p.grants.Set(demandtest.ReservationFor(demandtest.JobPod("crunch", "crunch-0", "1"), map[string]int32{"paris": 1}))
	own, ownIn := byHand("warm", total("cpu", "1"))
	p.pools.SetReservation(own)
	p.pools.SetInstruction(ownIn)
	_, hub := byHand("hub", total("cpu", "1"), fromHub())
	p.pools.SetInstruction(hub)
	var holds []string
	for i := range 4 {
		hold, _ := schedule(t, p, demandtest.JobPod("crunch", fmt.Sprint("crunch-", i), "1"))
		holds = append(holds, hold)
	}
	if want := []string{"rome-crunch", "rome-warm", "rome-hub", ""}; !slices.Equal(holds, want) {
		t.Errorf("charged to %v, want %v", holds, want)
	}
	key, _ := p.keys.Get(demandtest.JobPod("crunch", "crunch-0", "1"))
	if n := p.placements.LivingOf(key.Key); n != 1 {
		t.Errorf("%d pods count for the owner's Reservation, want 1: those in pools need none", n)
	}
	// The slot of the grant is free again, the pools are not.
	p.placements.RemovePod("crunch-0")
	if hold, _ := schedule(t, p, demandtest.JobPod("crunch", "crunch-9", "1")); hold != "rome-crunch" {
		t.Errorf("charged to %q, want the grant", hold)
	}
}

// TestOrderOfVirtualNodes: the order holds across providers, too.
func TestOrderOfVirtualNodes(t *testing.T) {
	p := poolPlugin()
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	p.grants.Set(demandtest.ReservationFor(pod, map[string]int32{"own": 1}))
	for name, change := range map[string][]func(*broker.ReservationInstruction){"local": nil, "hub": {fromHub()}} {
		r, in := byHand(name, total("cpu", "1"), change...)
		in.Spec.TargetClusterID = name
		p.pools.SetReservation(r)
		p.pools.SetInstruction(in)
	}
	state := scheduler.NewCycleState()
	if _, status := p.PreFilter(t.Context(), state, pod, nil); !status.IsSuccess() {
		t.Fatal(status)
	}
	last := int64(framework.MaxScore)
	for _, provider := range []string{"own", "local", "hub", "none"} {
		score, _ := p.Score(t.Context(), state, pod, nodeWith(provider))
		if score >= last {
			t.Errorf("%s scores %d, and the one before it %d", provider, score, last)
		}
		last = score
	}
}

// TestPoolThatServesAnotherNamespaceNow: pods that use a pool count for it, although those
// of their namespace may not use it any more, also after a restart of the scheduler.
func TestPoolThatServesAnotherNamespaceNow(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		p := poolPlugin()
		_, in := byHand("hub", total("cpu", "1"), fromHub("bank"))
		p.pools.SetInstruction(in)
		pod := demandtest.JobPod("crunch", "crunch-0", "1")
		pod.Namespace = "bank"
		hold, ok := schedule(t, p, pod)
		if !ok {
			t.Fatal("a pod of its namespace is not admitted")
		}
		if restarted {
			p = poolPlugin()
			pod.Spec.NodeName, pod.Labels = broker.VirtualNodeName("paris"), map[string]string{broker.LabelHold: hold}
			p.placements.SetPod(pod)
		}
		_, in = byHand("hub", total("cpu", "1"), fromHub("shop"))
		p.pools.SetInstruction(in)
		if _, ok := schedule(t, p, demandtest.JobPod("crunch", "crunch-1", "1")); ok {
			t.Errorf("restarted %v: the pool has 1 CPU, and two pods of 1 CPU each", restarted)
		}
	}
}

// TestPoolOfUnmappedNamespace: pods of a namespace that the provider does not have use no pool
// there, and those of others do.
func TestPoolOfUnmappedNamespace(t *testing.T) {
	p := poolPlugin()
	_, in := byHand("hub", total("cpu", "4"), fromHub())
	in.Status.UnmappedNamespaces = []string{"bank"}
	p.pools.SetInstruction(in)
	pod := demandtest.JobPod("crunch", "crunch-0", "1")
	if _, ok := schedule(t, p, pod); !ok {
		t.Error("a pod of another namespace is not admitted")
	}
	pod.Namespace = "bank"
	if _, ok := schedule(t, p, pod); ok {
		t.Error("a pod of the namespace is admitted")
	}
}

// TestPoolKeepsPlacesForThoseThatSelectThem: a pod that any place admits leaves the one that another
// pod selects to that, whichever came first.
func TestPoolKeepsPlacesForThoseThatSelectThem(t *testing.T) {
	p := poolPlugin()
	one := func(name string, selector map[string]string) broker.PodSet {
		return broker.PodSet{Name: name, Count: 1, Requests: broker.FromList(expect.Resources("cpu", "1")), NodeSelector: selector}
	}
	_, in := byHand("hub", broker.HeldCapacity{PodSets: []broker.PodSet{one("any", nil), one("in-a", map[string]string{"zone": "a"})}}, fromHub())
	p.pools.SetInstruction(in)
	for i, tc := range []struct {
		selector map[string]string
		want     bool
	}{{nil, true}, {map[string]string{"zone": "a"}, true}, {nil, false}} {
		pod := demandtest.JobPod("crunch", fmt.Sprint("crunch-", i), "1")
		pod.Spec.NodeSelector = tc.selector
		if _, ok := schedule(t, p, pod); ok != tc.want {
			t.Errorf("pod %d, which selects %v, is admitted: %t, want %t", i, tc.selector, ok, tc.want)
		}
	}
}

// TestPoolsNeverExceeded: whatever the order of pods of mixed sizes, of their ends, and
// of changes of two pools, a pod is admitted if and only if it fits beside those that
// are there.
func TestPoolsNeverExceeded(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := poolPlugin()
		held := map[string]broker.HeldCapacity{}
		set := func(name string, capacity broker.HeldCapacity) {
			held["rome-"+name] = capacity
			_, in := byHand(name, capacity, fromHub())
			p.pools.SetInstruction(in)
		}
		draw := func(rt *rapid.T, places bool) broker.HeldCapacity {
			if places {
				return sets(map[string]int32{"1": rapid.Int32Range(1, 3).Draw(rt, "ones"), "2": rapid.Int32Range(1, 2).Draw(rt, "twos"), "500m": 1})
			}
			return total("cpu", fmt.Sprint(rapid.IntRange(1, 6).Draw(rt, "cpu")), "memory", "3Gi")
		}
		set("a", draw(rt, false))
		set("b", draw(rt, true))
		pods, n := map[string][]*corev1.Pod{}, 0
		rt.Repeat(map[string]func(*rapid.T){
			"schedule": func(rt *rapid.T) {
				n++
				pod := demandtest.JobPod(fmt.Sprint("job-", n%3), fmt.Sprint("pod-", n), rapid.SampledFrom([]string{"250m", "500m", "1", "1500m", "2"}).Draw(rt, "cpu"))
				pod.Namespace = rapid.SampledFrom([]string{"shop", "bank"}).Draw(rt, "namespace")
				hold, admitted := schedule(t, p, pod)
				fits := fitIn(held["rome-a"], append(slices.Clone(pods["rome-a"]), pod)) || fitIn(held["rome-b"], append(slices.Clone(pods["rome-b"]), pod))
				if admitted != fits {
					rt.Fatalf("admitted %v, fits %v", admitted, fits)
				}
				if !admitted {
					return
				}
				if pods[hold] = append(pods[hold], pod); !fitIn(held[hold], pods[hold]) {
					rt.Fatalf("%s is exceeded", hold)
				}
				bound := pod.DeepCopy()
				bound.Spec.NodeName, bound.Labels = broker.VirtualNodeName("paris"), map[string]string{broker.LabelHold: hold, broker.LabelShape: "s" + pod.Name}
				p.placements.SetPod(bound)
				bound = bound.DeepCopy()
				bound.Labels[broker.LabelHold] = "forged"
				p.placements.SetPod(bound)
			},
			"end": func(rt *rapid.T) {
				for hold, there := range pods {
					if len(there) > 0 {
						p.placements.RemovePod(there[0].UID)
						pods[hold] = there[1:]
						return
					}
				}
			},
			"resize": func(rt *rapid.T) { set("a", draw(rt, false)) },
			"resize places": func(rt *rapid.T) {
				if len(pods["rome-b"]) == 0 {
					set("b", draw(rt, true))
				}
			},
		})
	})
}

// fitIn is whether pods fit, by trying every place for every pod.
func fitIn(held broker.HeldCapacity, pods []*corev1.Pod) bool {
	cpu := func(pod *corev1.Pod) int64 { return pod.Spec.Containers[0].Resources.Requests.Cpu().MilliValue() }
	if len(held.PodSets) == 0 {
		var sum int64
		for _, pod := range pods {
			sum += cpu(pod)
		}
		return sum <= held.Totals.CPU.MilliValue()
	}
	if len(pods) == 0 {
		return true
	}
	for i := range held.PodSets {
		if set := &held.PodSets[i]; set.Count > 0 && cpu(pods[0]) <= set.Requests.CPU.MilliValue() {
			rest := held.DeepCopy()
			rest.PodSets[i].Count--
			if fitIn(*rest, pods[1:]) {
				return true
			}
		}
	}
	return false
}

// TestPoolWakes: a pool opens the gate for as many pods as it has room for, and again
// when one of them ends; not for those that may not use it.
func TestPoolWakes(t *testing.T) {
	p := poolPlugin()
	now := p.clock.(*clocktesting.FakeClock)
	later := func() { now.SetTime(now.Now().Add(time.Second)) }
	paris := nodeWith("paris").Node()
	paris.Spec.Taints = []corev1.Taint{{Key: broker.TaintOverflow, Effect: corev1.TaintEffectNoSchedule}}
	p.placements.SetNode(paris)
	p.nodes = corelisters.NewNodeLister(demandtest.NewIndexer(paris))
	later()
	tolerant := func(name, cpu string) *corev1.Pod {
		pod := demandtest.JobPod("crunch", name, cpu)
		pod.Spec.Tolerations = []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists}}
		return pod
	}
	// An older pod of their key was created before its namespace opted in.
	unsteered := demandtest.JobPod("crunch", "p0", "2")
	for _, pod := range []*corev1.Pod{unsteered, tolerant("p1", "2"), tolerant("p2", "2"), tolerant("p3", "2")} {
		key, _ := p.keys.Get(pod)
		p.gate.Close(pod, key.Key, now.Now(), time.Time{})
	}
	var woken []string
	w := &waiting.Waker{
		Gate: p.gate, Grants: p.grants, Placements: p.placements, Nodes: p.nodes, Settled: p.settled, Pools: p.pools,
		MayUse: func(pod *corev1.Pod, pool *usage.Pool) bool { return slices.Contains(p.poolsOf(pod), pool) },
		Activate: func(pods map[string]*corev1.Pod) {
			for name := range pods {
				woken = append(woken, name)
			}
		},
	}
	wake := func(want ...string) {
		t.Helper()
		woken = nil
		w.Wake(map[demand.Key]bool{}, nil, true)
		if slices.Sort(woken); !slices.Equal(woken, want) {
			t.Errorf("woken %v, want %v", woken, want)
		}
	}
	wake()
	later()
	r, in := byHand("warm", total("cpu", "5"))
	p.pools.SetReservation(r)
	p.pools.SetInstruction(in)
	wake("shop/p1", "shop/p2")
	wake()
	for _, name := range []string{"p1", "p2"} {
		if _, ok := schedule(t, p, tolerant(name, "2")); !ok {
			t.Fatalf("%s has no room", name)
		}
		p.gate.Drop(types.UID(name))
	}
	later()
	wake()
	p.placements.RemovePod("p1")
	wake("shop/p3")
}

// TestPoolsConcernFewPods: when a pool may have more room, the gate asks for one pod of each key
// whether it may use the pool, however many wait, and for those that its selector selects.
func TestPoolsConcernFewPods(t *testing.T) {
	const pools, keys, pods = 10, 5, 500
	for name, tc := range map[string]struct {
		selector *metav1.LabelSelector
		asked    int
	}{
		"all pods may use them":  {nil, pools * keys},
		"their selector is":      {&metav1.LabelSelector{MatchLabels: map[string]string{"tier": "batch"}}, pools * keys},
		"their selector is none": {&metav1.LabelSelector{MatchLabels: map[string]string{"tier": "none"}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			paris := nodeWith("paris").Node()
			p := testPlugin(OverflowArgs{}, paris)
			p.placements.SetNode(paris)
			for i := range pools {
				in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: fmt.Sprint("pool-", i)}, Spec: broker.ReservationInstructionSpec{
					ReservationName: fmt.Sprint("pool-", i), ReservationUID: "hub", TargetClusterID: "paris", RequestedResources: total("cpu", "1").Totals, PodSelector: tc.selector}}
				in.Status.Carried = ptr.To(total("cpu", "1"))
				p.pools.SetInstruction(in)
			}
			asked := 0
			w := &waiting.Waker{Gate: p.gate, Grants: p.grants, Placements: p.placements, Pools: p.pools, Nodes: p.nodes, Settled: p.settled,
				MayUse: func(pod *corev1.Pod, of *usage.Pool) bool {
					asked++
					return slices.Contains(p.poolsOf(pod), of)
				}, Activate: func(map[string]*corev1.Pod) { t.Error("a pod is woken that fits none") }}
			for i := range pods {
				pod := demandtest.JobPod(fmt.Sprint("job-", i%keys), fmt.Sprint("pod-", i), "2")
				pod.Labels = map[string]string{"tier": "batch"}
				of, _ := p.keys.Get(pod)
				p.gate.Close(pod, of.Key, p.clock.Now().Add(-time.Minute), time.Time{})
			}
			if w.Wake(nil, nil, true); asked != tc.asked {
				t.Errorf("asked %d times, want %d", asked, tc.asked)
			}
		})
	}
}
