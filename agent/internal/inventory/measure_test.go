package inventory_test

import (
	"crypto/sha256"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// list makes a resource list of names and amounts.
func list(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

type nodeOption func(*corev1.Node)

func node(name string, allocatable corev1.ResourceList, options ...nodeOption) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelArchStable: "amd64"}},
		Status: corev1.NodeStatus{
			Capacity: allocatable, Allocatable: allocatable.DeepCopy(),
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	if _, ok := n.Status.Allocatable[corev1.ResourcePods]; !ok {
		n.Status.Allocatable[corev1.ResourcePods] = resource.MustParse("110")
	}
	for _, o := range options {
		o(n)
	}
	return n
}

func cordoned(n *corev1.Node) { n.Spec.Unschedulable = true }
func notReady(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse }
func labelled(key, value string) nodeOption {
	return func(n *corev1.Node) { n.Labels[key] = value }
}
func tainted(key string, effect corev1.TaintEffect) nodeOption {
	return func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: effect})
	}
}

type podOption func(*corev1.Pod)

func pod(on string, requests corev1.ResourceList, options ...podOption) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "home"},
		Spec:       corev1.PodSpec{NodeName: on, Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: requests}}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, o := range options {
		o(p)
	}
	return p
}

func phase(phase corev1.PodPhase) podOption { return func(p *corev1.Pod) { p.Status.Phase = phase } }

// guest is a pod as Liqo makes it of a consumer's ShadowPod.
func guest(consumer string) podOption {
	return func(p *corev1.Pod) {
		sum := sha256.Sum256([]byte(consumer))
		p.Namespace = "shop-" + consumer
		p.Labels = map[string]string{"liqo.io/creator-user": fmt.Sprintf("spillway-paris-%x", sum[:6])}
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "offloading.liqo.io/v1beta1", Kind: "ShadowPod", Name: p.Name, Controller: ptr.To(true)}}
	}
}

// namespaces of consumers rome and berlin.
func namespaceLabels(name string) map[string]string {
	for _, consumer := range []string{"rome", "berlin"} {
		if name == "shop-"+consumer {
			return map[string]string{"liqo.io/remote-cluster-id": consumer}
		}
		if name == broker.GuestNamespace(consumer) {
			return map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelGuestsOf: consumer}
		}
	}
	// Somebody's who would like to be taken for a guest's.
	if name == "sly" || name == broker.GuestNamespace("sly") {
		return map[string]string{broker.LabelGuestsOf: "sly"}
	}
	if name == "moved" {
		return map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelGuestsOf: "rome"}
	}
	return nil
}

// directGuest is a pod as spillway-virtual-node makes it for a consumer.
func directGuest(consumer string) podOption {
	return func(p *corev1.Pod) { p.Namespace = broker.GuestNamespace(consumer) }
}

func measure(nodes []*corev1.Node, pods []*corev1.Pod, headroom corev1.ResourceList) broker.ClusterAdvertisementSpec {
	return inventory.Measure(inventory.Measurement{
		Terms: inventory.Terms{ClusterID: "paris", Headroom: headroom},
		Nodes: nodes, Pods: pods,
		GuestOf: func(p *corev1.Pod) (string, bool) { return inventory.GuestOf(p, namespaceLabels) },
		Now:     time.Unix(1000, 0), Sequence: 7,
	})
}

func TestMeasure(t *testing.T) {
	two := list("cpu", "2", "memory", "4Gi")
	always := corev1.ContainerRestartPolicyAlways
	type shape struct {
		nodes, pods int32
		free        string
	}
	cases := map[string]struct {
		reason                 string
		nodes                  []*corev1.Node
		pods                   []*corev1.Pod
		headroom               corev1.ResourceList
		holds                  map[string][]string
		allocatable, allocated string
		shapes                 []shape
		observed               []broker.ObservedHold
	}{
		"empty cluster": {
			reason: "no node is no capacity, and no crash", allocatable: "nothing", allocated: "nothing",
		},
		"one node": {
			reason: "all of it is free",
			nodes:  []*corev1.Node{node("a", two)}, allocatable: "cpu 2, memory 4Gi", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 2, memory 4Gi"}},
		},
		"equal nodes": {
			reason: "nodes with the same room are one entry",
			nodes:  []*corev1.Node{node("a", two), node("b", two)}, allocatable: "cpu 4, memory 8Gi", allocated: "nothing",
			shapes: []shape{{2, 110, "cpu 2, memory 4Gi"}},
		},
		"no sums": {
			reason: "two half-used nodes are two halves, largest first",
			nodes:  []*corev1.Node{node("a", two), node("b", two)},
			pods:   []*corev1.Pod{pod("a", list("cpu", "1")), pod("b", list("cpu", "1500m", "memory", "1Gi"))}, allocatable: "cpu 4, memory 8Gi", allocated: "cpu 2500m, memory 1Gi",
			shapes: []shape{{1, 109, "cpu 1, memory 4Gi"}, {1, 109, "cpu 500m, memory 3Gi"}},
		},
		"cordoned, not ready, virtual": {
			reason: "none of them counts, nor do their pods",
			nodes: []*corev1.Node{
				node("a", two), node("b", two, cordoned), node("c", two, notReady),
				node("v1", two, labelled("type", "virtual-kubelet")), node("v2", two, labelled("liqo.io/type", "virtual-node")), node("v3", two, labelled(broker.LabelProvider, "x")),
			},
			pods:        []*corev1.Pod{pod("b", list("cpu", "1")), pod("c", list("cpu", "1")), pod("v1", list("cpu", "1")), pod("v2", list("cpu", "1"))},
			allocatable: "cpu 2, memory 4Gi", allocated: "nothing", shapes: []shape{{1, 110, "cpu 2, memory 4Gi"}},
		},
		"pods that use nothing": {
			reason:      "the finished and the unbound take no room",
			nodes:       []*corev1.Node{node("a", two)},
			pods:        []*corev1.Pod{pod("", list("cpu", "1")), pod("a", list("cpu", "1"), phase(corev1.PodSucceeded)), pod("a", list("cpu", "1"), phase(corev1.PodFailed))},
			allocatable: "cpu 2, memory 4Gi", allocated: "nothing", shapes: []shape{{1, 110, "cpu 2, memory 4Gi"}},
		},
		"init containers, sidecars, overhead": {
			reason: "counted as the scheduler does: the largest init beside its sidecars, or all containers and sidecars; plus overhead",
			nodes:  []*corev1.Node{node("a", two)},
			pods: []*corev1.Pod{pod("a", list("cpu", "100m"), func(p *corev1.Pod) {
				p.Spec.InitContainers = []corev1.Container{
					{RestartPolicy: &always, Resources: corev1.ResourceRequirements{Requests: list("cpu", "200m")}},
					{Resources: corev1.ResourceRequirements{Requests: list("cpu", "500m")}},
				}
				p.Spec.Overhead = list("cpu", "50m")
			})},
			allocatable: "cpu 2, memory 4Gi", allocated: "cpu 750m", shapes: []shape{{1, 109, "cpu 1250m, memory 4Gi"}},
		},
		"pod-level requests": {
			reason: "they replace the containers' sum",
			nodes:  []*corev1.Node{node("a", two)},
			pods: []*corev1.Pod{pod("a", list("cpu", "100m"), func(p *corev1.Pod) {
				p.Spec.Resources = &corev1.ResourceRequirements{Requests: list("cpu", "1")}
			})},
			allocatable: "cpu 2, memory 4Gi", allocated: "cpu 1", shapes: []shape{{1, 109, "cpu 1, memory 4Gi"}},
		},
		"GPU and extended": {
			reason:      "every resource is counted, GPU as gpu",
			nodes:       []*corev1.Node{node("a", list("cpu", "2", "nvidia.com/gpu", "4", "example.com/fpga", "2"))},
			pods:        []*corev1.Pod{pod("a", list("nvidia.com/gpu", "1", "example.com/fpga", "2"))},
			allocatable: "cpu 2, example.com/fpga 2, nvidia.com/gpu 4", allocated: "example.com/fpga 2, nvidia.com/gpu 1",
			shapes: []shape{{1, 109, "cpu 2, nvidia.com/gpu 3"}},
		},
		"direct guests": {
			reason:      "they count as any guest does",
			nodes:       []*corev1.Node{node("a", two)},
			pods:        []*corev1.Pod{pod("a", list("cpu", "500m"), directGuest("rome")), pod("a", list("cpu", "100m"))},
			holds:       map[string][]string{"rome": {"r1"}},
			allocatable: "cpu 2, memory 4Gi", allocated: "cpu 100m",
			shapes:   []shape{{1, 108, "cpu 1400m, memory 4Gi"}},
			observed: []broker.ObservedHold{{Requester: "rome", Used: broker.FromList(list("cpu", "500m")), Pods: 1}},
		},
		"guests": {
			reason:      "a guest takes room but is not the cluster's own use; consumers with a hold and no guest are listed too",
			nodes:       []*corev1.Node{node("a", two)},
			pods:        []*corev1.Pod{pod("a", list("cpu", "500m"), guest("rome")), pod("a", list("cpu", "500m"), guest("rome")), pod("a", list("cpu", "100m"))},
			holds:       map[string][]string{"rome": {"r2", "r1"}, "berlin": {"b1"}},
			allocatable: "cpu 2, memory 4Gi", allocated: "cpu 100m",
			shapes: []shape{{1, 107, "cpu 900m, memory 4Gi"}},
			observed: []broker.ObservedHold{
				{Requester: "berlin", Holds: []string{"b1"}},
				{Requester: "rome", Used: broker.FromList(list("cpu", "1")), Pods: 2},
			},
		},
		"overcommitted node": {
			reason: "free is never negative, also where allocatable shrank below what runs",
			nodes:  []*corev1.Node{node("a", list("cpu", "1", "memory", "1Gi"))},
			pods:   []*corev1.Pod{pod("a", list("cpu", "2"))}, allocatable: "cpu 1, memory 1Gi", allocated: "cpu 2",
			shapes: []shape{{1, 109, "memory 1Gi"}},
		},
		"full of pods": {
			reason: "a node that takes no more pods is no room at all",
			nodes:  []*corev1.Node{node("a", list("cpu", "2", "pods", "1"))},
			pods:   []*corev1.Pod{pod("a", nil)}, allocatable: "cpu 2", allocated: "nothing",
		},
		"headroom": {
			reason: "off the total, and off the largest slot",
			nodes:  []*corev1.Node{node("a", list("cpu", "4", "memory", "4Gi")), node("b", two)}, headroom: list("cpu", "1", "memory", "1Gi"),
			allocatable: "cpu 5, memory 7Gi", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 3, memory 3Gi"}, {1, 110, "cpu 2, memory 4Gi"}},
		},
		"headroom over several nodes": {
			reason: "what the largest cannot give the next one does",
			nodes:  []*corev1.Node{node("a", two), node("b", two)}, headroom: list("cpu", "3"),
			allocatable: "cpu 1, memory 8Gi", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 1, memory 4Gi"}, {1, 110, "memory 4Gi"}},
		},
		"headroom above all": {
			reason: "never below zero",
			nodes:  []*corev1.Node{node("a", two)}, headroom: list("cpu", "3", "nvidia.com/gpu", "1"),
			allocatable: "memory 4Gi", allocated: "nothing", shapes: []shape{{1, 110, "memory 4Gi"}},
		},
		"fractions": {
			reason: "shapes are rounded down, never up",
			nodes:  []*corev1.Node{node("a", list("cpu", "1999900u", "memory", "1048577"))}, allocatable: "cpu 1999900u, memory 1048577", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 1999m, memory 1Mi"}},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			spec := measure(tc.nodes, tc.pods, tc.headroom, tc.holds)
			if got := spec.Resources.Allocatable.String(); got != tc.allocatable {
				t.Errorf("%s: allocatable is %s, want %s", tc.reason, got, tc.allocatable)
			}
			if got := spec.Resources.Allocated.String(); got != tc.allocated {
				t.Errorf("%s: allocated is %s, want %s", tc.reason, got, tc.allocated)
			}
			var shapes []shape
			for _, c := range spec.NodeClasses {
				for _, s := range c.FreeShapes {
					shapes = append(shapes, shape{s.Nodes, s.Pods, s.Free.String()})
				}
			}
			if diff := cmp.Diff(tc.shapes, shapes, cmp.AllowUnexported(shape{})); diff != "" {
				t.Errorf("%s: shapes (-want +got):\n%s", tc.reason, diff)
			}
			if diff := cmp.Diff(tc.observed, spec.ObservedHolds); diff != "" {
				t.Errorf("%s: observed holds (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

func TestNodeClasses(t *testing.T) {
	size := list("cpu", "2")
	spec := measure([]*corev1.Node{
		node("a", size, labelled("disk", "ssd"), labelled(corev1.LabelTopologyZone, "z1"), labelled(corev1.LabelTopologyRegion, "eu"), labelled("machine", "a")),
		node("b", size, labelled("disk", "ssd"), labelled(corev1.LabelTopologyZone, "z1"), labelled(corev1.LabelTopologyRegion, "eu"), labelled("machine", "b")),
		node("c", size, labelled("disk", "hdd"), labelled(corev1.LabelTopologyZone, "z2"), labelled(corev1.LabelTopologyRegion, "eu"), labelled("nvidia.com/gpu.product", "A100")),
		node("cp", size, tainted("node-role.kubernetes.io/control-plane", corev1.TaintEffectNoSchedule), labelled(corev1.LabelTopologyRegion, "eu"), labelled(corev1.LabelTopologyZone, "z1")),
	}, nil, nil, nil)
	if len(spec.NodeClasses) != 3 {
		t.Fatalf("want the two alike in one class, and a class each for the other two, got %d: %+v", len(spec.NodeClasses), spec.NodeClasses)
	}
	if first := spec.NodeClasses[0]; first.FreeShapes[0].Nodes != 2 || first.Labels["machine"] != "" || first.Labels[corev1.LabelHostname] != "" || first.Labels["disk"] != "ssd" || first.Arch != "amd64" {
		t.Errorf("the largest class is first, without what names one node: %+v", first)
	}
	var models, taints int
	for _, c := range spec.NodeClasses {
		if c.GPUModel == "A100" {
			models++
		}
		taints += len(c.Taints)
	}
	if models != 1 || taints != 1 {
		t.Errorf("want one GPU model and one tainted class: %+v", spec.NodeClasses)
	}
	if spec.Region != "eu" || spec.Zone != "" {
		t.Errorf("region and zone are what all nodes agree on, got %q and %q", spec.Region, spec.Zone)
	}
}

func TestHeadroomSparesTaintedNodes(t *testing.T) {
	slots := inventory.Slots([]*corev1.Node{
		node("cp", list("cpu", "8"), tainted("control-plane", corev1.TaintEffectNoSchedule)),
		node("w", list("cpu", "4")),
	}, nil, list("cpu", "1"))
	for _, s := range slots {
		if want := map[string]string{"cp": "8", "w": "3"}[s.Node.Name]; s.Free.Cpu().String() != want {
			t.Errorf("headroom on a node that nobody may use is none: %s has %s free, want %s", s.Node.Name, s.Free.Cpu(), want)
		}
	}
}

func TestBounds(t *testing.T) {
	var nodes []*corev1.Node
	for i := range 400 {
		nodes = append(nodes, node(fmt.Sprintf("n%03d", i), list("cpu", fmt.Sprintf("%dm", 1000+37*i), "memory", fmt.Sprintf("%dMi", 1024+(i*7919)%9000))))
	}
	spec := measure(nodes, nil, nil, nil)
	if n := len(spec.NodeClasses[0].FreeShapes); n > 128 || n < 16 {
		t.Errorf("a class has %d shapes, want at most 128, and not a few only", n)
	}
	var counted int32
	for _, s := range spec.NodeClasses[0].FreeShapes {
		counted += s.Nodes
	}
	if counted < 200 {
		t.Errorf("only %d of 400 nodes are in the histogram", counted)
	}

	for i, n := range nodes {
		n.Labels["serial"] = fmt.Sprintf("s%d", i)
	}
	if spec = measure(nodes, nil, nil, nil); len(spec.NodeClasses) != 1 {
		t.Errorf("a label with a value of its own on each node makes no classes, got %d", len(spec.NodeClasses))
	}
	for i, n := range nodes {
		delete(n.Labels, "serial")
		n.Labels["x"], n.Labels["y"] = fmt.Sprint(i%20), fmt.Sprint(i/20)
	}
	if spec = measure(nodes, nil, nil, nil); len(spec.NodeClasses) != 64 {
		t.Errorf("want no more than 64 classes, got %d", len(spec.NodeClasses))
	}
}

// TestShapesNeverExceedTruth: whatever the cluster, the shapes of a class can be
// matched one to one with nodes that have at least that room, and all shapes
// together leave the headroom.
func TestShapesNeverExceedTruth(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var nodes []*corev1.Node
		var pods []*corev1.Pod
		for i := range rapid.IntRange(0, 300).Draw(t, "nodes") {
			name := fmt.Sprintf("n%d", i)
			options := []nodeOption{labelled("class", fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "class")))}
			if rapid.IntRange(0, 9).Draw(t, "cordoned") == 0 {
				options = append(options, cordoned)
			}
			nodes = append(nodes, node(name, corev1.ResourceList{
				corev1.ResourceCPU:    *resource.NewMilliQuantity(rapid.Int64Range(0, 64000).Draw(t, "cpu"), resource.DecimalSI),
				corev1.ResourceMemory: *resource.NewQuantity(rapid.Int64Range(0, 1<<38).Draw(t, "memory"), resource.BinarySI),
				broker.ResourceGPU:    *resource.NewQuantity(rapid.Int64Range(0, 3).Draw(t, "gpu"), resource.DecimalSI),
			}, options...))
			for range rapid.IntRange(0, 2).Draw(t, "pods") {
				pods = append(pods, pod(name, corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(rapid.Int64Range(0, 9000).Draw(t, "used"), resource.DecimalSI)}))
			}
		}
		headroom := corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(rapid.Int64Range(0, 90000).Draw(t, "headroom"), resource.DecimalSI)}
		spec := measure(nodes, pods, headroom, nil)

		promised := corev1.ResourceList{}
		for _, c := range spec.NodeClasses {
			if len(c.FreeShapes) > 128 {
				t.Fatalf("%d shapes", len(c.FreeShapes))
			}
			for i, s := range c.FreeShapes {
				broker.AddTo(promised, broker.Times(s.Free.List(), s.Nodes))
				if i > 0 {
					if a, b := c.FreeShapes[i-1].Free.List()[corev1.ResourceCPU], s.Free.List()[corev1.ResourceCPU]; a.Cmp(b) < 0 {
						t.Fatalf("not largest first: %s before %s", a.String(), b.String())
					}
				}
			}
		}
		// Nothing is promised beyond what the slots have, and by pigeonhole per
		// resource: as many slots are at least as large as shapes claim to be.
		slots := inventory.Slots(nodes, pods, headroom)
		truth, raw := corev1.ResourceList{}, corev1.ResourceList{}
		for _, s := range slots {
			broker.AddTo(truth, s.Free)
		}
		for _, s := range inventory.Slots(nodes, pods, nil) {
			broker.AddTo(raw, s.Free)
		}
		for name, amount := range promised {
			if have := truth[name]; amount.Cmp(have) > 0 {
				t.Fatalf("%s: %s promised, %s there", name, amount.String(), have.String())
			}
		}
		keep, all, left := headroom[corev1.ResourceCPU], raw[corev1.ResourceCPU], truth[corev1.ResourceCPU]
		left.Add(keep)
		if keep.Cmp(all) <= 0 && left.Cmp(all) != 0 {
			t.Fatalf("headroom %s was not kept back: %s of %s", keep.String(), left.String(), all.String())
		}
		for _, c := range spec.NodeClasses {
			for _, claim := range c.FreeShapes {
				var claiming, having int32
				for _, s := range c.FreeShapes {
					if covers(s.Free.List(), claim.Free.List()) && s.Pods >= claim.Pods {
						claiming += s.Nodes
					}
				}
				for _, s := range slots {
					if s.Node.Labels["class"] == c.Labels["class"] && covers(s.Free, claim.Free.List()) && s.Pods >= claim.Pods {
						having++
					}
				}
				if claiming > having {
					t.Fatalf("%d nodes are said to have %s, %d do", claiming, claim.Free, having)
				}
			}
		}
	})
}

func covers(have, need corev1.ResourceList) bool {
	for name, amount := range need {
		if got := have[name]; got.Cmp(amount) < 0 {
			return false
		}
	}
	return true
}

func TestGuestOf(t *testing.T) {
	cases := map[string]struct {
		reason string
		change podOption
		want   string
	}{
		"a guest":                      {reason: "as Liqo makes it", want: "rome"},
		"no ShadowPod above it":        {reason: "labels alone prove nothing", change: func(p *corev1.Pod) { p.OwnerReferences = nil }},
		"another controller":           {reason: "not made by Liqo", change: func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "ReplicaSet" }},
		"another group's ShadowPod":    {reason: "not Liqo's", change: func(p *corev1.Pod) { p.OwnerReferences[0].APIVersion = "example.com/v1" }},
		"a namespace of nobody":        {reason: "not made for a consumer", change: func(p *corev1.Pod) { p.Namespace = "home" }},
		"another consumer's namespace": {reason: "creator and namespace must agree", change: func(p *corev1.Pod) { p.Namespace = "shop-berlin" }},
		"no creator":                   {reason: "Liqo's admission did not see it", change: func(p *corev1.Pod) { p.Labels = nil }},
		"what else the consumer wrote": {reason: "its own labels do not count", change: func(p *corev1.Pod) {
			p.Labels[broker.LabelRequester] = "berlin"
			p.Labels["offloading.liqo.io/origin"] = "berlin"
		}, want: "rome"},
		"a direct guest": {reason: "the namespace is its consumer's", change: func(p *corev1.Pod) {
			*p = *pod("a", nil, directGuest("berlin"))
		}, want: "berlin"},
		"a direct guest's own words": {reason: "only the namespace counts", change: func(p *corev1.Pod) {
			*p = *pod("a", nil, directGuest("berlin"))
			p.Labels = map[string]string{broker.LabelGuestsOf: "rome", broker.LabelRequester: "rome"}
		}, want: "berlin"},
		"a namespace that is labelled by somebody": {reason: "Spillway did not make it", change: func(p *corev1.Pod) {
			*p = *pod("a", nil, directGuest("sly"))
		}},
		"a namespace of another name": {reason: "not the one for that consumer", change: func(p *corev1.Pod) {
			*p = *pod("a", nil)
			p.Namespace = "moved"
		}},
		"a hash that is only a part of": {reason: "the whole hash must stand at the end", change: func(p *corev1.Pod) { p.Labels["liqo.io/creator-user"] += "0" }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := pod("a", nil, guest("rome"))
			if tc.change != nil {
				tc.change(p)
			}
			if got, ok := inventory.GuestOf(p, namespaceLabels); got != tc.want || ok != (tc.want != "") {
				t.Errorf("%s: got %q %v, want %q", tc.reason, got, ok, tc.want)
			}
		})
	}
}

func TestNextBeat(t *testing.T) {
	const interval = 30 * time.Second
	start := time.Unix(1_700_000_000, 0)
	offsets := map[time.Duration]bool{}
	for _, id := range []string{"rome", "paris", "berlin", "oslo"} {
		first := advertise.NextBeat(start, interval, id)
		if wait := first.Sub(start); wait <= 0 || wait > interval {
			t.Errorf("%s waits %s", id, wait)
		}
		if second := advertise.NextBeat(first, interval, id); second.Sub(first) != interval {
			t.Errorf("%s beats after %s", id, second.Sub(first))
		}
		offset := first.Sub(first.Truncate(interval))
		if offset >= interval/10 {
			t.Errorf("%s is %s off the beat", id, offset)
		}
		offsets[offset] = true
	}
	if len(offsets) < 3 {
		t.Errorf("clusters speak at once: %v", offsets)
	}
}

func BenchmarkMeasure1000Nodes(b *testing.B) {
	var nodes []*corev1.Node
	var pods []*corev1.Pod
	for i := range 1000 {
		name := fmt.Sprintf("n%d", i)
		nodes = append(nodes, node(name, list("cpu", "16", "memory", "64Gi"), labelled("zone", fmt.Sprint(i%3))))
		for j := range 30 {
			pods = append(pods, pod(name, list("cpu", fmt.Sprintf("%dm", 100+10*((i+j)%7)), "memory", "256Mi")))
		}
	}
	b.ResetTimer()
	for range b.N {
		measure(nodes, pods, list("cpu", "4"), nil)
	}
}
