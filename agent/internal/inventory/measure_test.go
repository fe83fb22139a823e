package inventory_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

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

// guest makes a pod one of a consumer's, for recognizer.
func guest(consumer string) podOption {
	return func(p *corev1.Pod) { p.Namespace = "guests-of-" + consumer }
}

// recognizer knows guests by their namespace and virtual nodes by a label.
var recognizer = inventory.Recognizer{
	Guest: inventory.AnyOf(
		func(*corev1.Pod, func(string) map[string]string) (string, bool) { return "", false },
		func(p *corev1.Pod, namespaceLabels func(string) map[string]string) (string, bool) {
			consumer := namespaceLabels(p.Namespace)["consumer"]
			return consumer, consumer != ""
		},
	),
	VirtualNode: func(n *corev1.Node) bool { return n.Labels["driver"] == "virtual" },
	Placeholder: func(p *corev1.Pod) (string, bool) { return "rome", p.Namespace == "holds" },
}

func cluster(nodes []*corev1.Node, pods []*corev1.Pod) *inventory.Cluster {
	return &inventory.Cluster{Nodes: nodes, Pods: pods, Recognizer: recognizer, NamespaceLabels: map[string]map[string]string{
		"guests-of-rome": {"consumer": "rome"}, "guests-of-berlin": {"consumer": "berlin"},
	}}
}

func measure(nodes []*corev1.Node, pods []*corev1.Pod, headroom corev1.ResourceList) broker.ClusterAdvertisementSpec {
	return inventory.Measure(cluster(nodes, pods), inventory.Terms{ClusterID: "paris", Headroom: headroom}, time.Unix(1000, 0), 7)
}

var two = expect.Resources("cpu", "2", "memory", "4Gi")

type shape struct {
	nodes, pods int32
	free        string
}

type measureCase struct {
	reason                 string
	nodes                  []*corev1.Node
	pods                   []*corev1.Pod
	headroom               corev1.ResourceList
	allocatable, allocated string
	shapes                 []shape
	observed               []broker.ObservedHold
}

func runMeasure(t *testing.T, cases map[string]measureCase) {
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			spec := measure(tc.nodes, tc.pods, tc.headroom)
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

func TestMeasureNodes(t *testing.T) {
	runMeasure(t, map[string]measureCase{
		"empty cluster": {
			reason: "no node is no capacity, and no crash", allocatable: "nothing", allocated: "nothing",
		},
		"one node": {
			reason: "all of it is free",
			nodes:  []*corev1.Node{node("a", two)}, allocatable: "cpu 2, memory 4Gi", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 2, memory 4Gi"}},
		},
		"equal nodes": {
			reason: "nodes with the same free capacity are one entry",
			nodes:  []*corev1.Node{node("a", two), node("b", two)}, allocatable: "cpu 4, memory 8Gi", allocated: "nothing",
			shapes: []shape{{2, 110, "cpu 2, memory 4Gi"}},
		},
		"no sums": {
			reason: "two half-used nodes are two shapes, the largest first",
			nodes:  []*corev1.Node{node("a", two), node("b", two)},
			pods:   []*corev1.Pod{pod("a", expect.Resources("cpu", "1")), pod("b", expect.Resources("cpu", "1500m", "memory", "1Gi"))}, allocatable: "cpu 4, memory 8Gi", allocated: "cpu 2500m, memory 1Gi",
			shapes: []shape{{1, 109, "cpu 1, memory 4Gi"}, {1, 109, "cpu 500m, memory 3Gi"}},
		},
		"cordoned, not ready, virtual": {
			reason: "none of them counts, nor do their pods",
			nodes: []*corev1.Node{
				node("a", two), node("b", two, cordoned), node("c", two, notReady),
				node("v1", two, labelled("type", "virtual-kubelet")), node("v2", two, labelled("driver", "virtual")), node("v3", two, labelled(broker.LabelProvider, "x")),
			},
			pods:        []*corev1.Pod{pod("b", expect.Resources("cpu", "1")), pod("c", expect.Resources("cpu", "1")), pod("v1", expect.Resources("cpu", "1")), pod("v2", expect.Resources("cpu", "1"))},
			allocatable: "cpu 2, memory 4Gi", allocated: "nothing", shapes: []shape{{1, 110, "cpu 2, memory 4Gi"}},
		},
	})
}

func TestMeasurePods(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	runMeasure(t, map[string]measureCase{
		"pods that use nothing": {
			reason:      "finished and unbound pods use no capacity",
			nodes:       []*corev1.Node{node("a", two)},
			pods:        []*corev1.Pod{pod("", expect.Resources("cpu", "1")), pod("a", expect.Resources("cpu", "1"), phase(corev1.PodSucceeded)), pod("a", expect.Resources("cpu", "1"), phase(corev1.PodFailed))},
			allocatable: "cpu 2, memory 4Gi", allocated: "nothing", shapes: []shape{{1, 110, "cpu 2, memory 4Gi"}},
		},
		"init containers, sidecars, overhead": {
			reason: "counted as the scheduler does: the largest init beside its sidecars, or all containers and sidecars; plus overhead",
			nodes:  []*corev1.Node{node("a", two)},
			pods: []*corev1.Pod{pod("a", expect.Resources("cpu", "100m"), func(p *corev1.Pod) {
				p.Spec.InitContainers = []corev1.Container{
					{RestartPolicy: &always, Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "200m")}},
					{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "500m")}},
				}
				p.Spec.Overhead = expect.Resources("cpu", "50m")
			})},
			allocatable: "cpu 2, memory 4Gi", allocated: "cpu 750m", shapes: []shape{{1, 109, "cpu 1250m, memory 4Gi"}},
		},
		"pod-level requests": {
			reason: "they replace the containers' sum",
			nodes:  []*corev1.Node{node("a", two)},
			pods: []*corev1.Pod{pod("a", expect.Resources("cpu", "100m"), func(p *corev1.Pod) {
				p.Spec.Resources = &corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1")}
			})},
			allocatable: "cpu 2, memory 4Gi", allocated: "cpu 1", shapes: []shape{{1, 109, "cpu 1, memory 4Gi"}},
		},
		"GPU and extended": {
			reason:      "every resource is counted, GPU as gpu",
			nodes:       []*corev1.Node{node("a", expect.Resources("cpu", "2", "nvidia.com/gpu", "4", "example.com/fpga", "2"))},
			pods:        []*corev1.Pod{pod("a", expect.Resources("nvidia.com/gpu", "1", "example.com/fpga", "2"))},
			allocatable: "cpu 2, example.com/fpga 2, nvidia.com/gpu 4", allocated: "example.com/fpga 2, nvidia.com/gpu 1",
			shapes: []shape{{1, 109, "cpu 2, nvidia.com/gpu 3"}},
		},
		"guests": {
			reason:      "a guest uses capacity but is not allocated",
			nodes:       []*corev1.Node{node("a", two)},
			pods:        []*corev1.Pod{pod("a", expect.Resources("cpu", "500m"), guest("rome")), pod("a", expect.Resources("cpu", "500m"), guest("rome")), pod("a", expect.Resources("memory", "1Gi"), guest("berlin")), pod("a", expect.Resources("cpu", "100m"))},
			allocatable: "cpu 2, memory 4Gi", allocated: "cpu 100m",
			shapes: []shape{{1, 106, "cpu 900m, memory 3Gi"}},
			observed: []broker.ObservedHold{
				{Requester: "berlin", Used: broker.FromList(expect.Resources("memory", "1Gi")), Pods: 1},
				{Requester: "rome", Used: broker.FromList(expect.Resources("cpu", "1")), Pods: 2},
			},
		},
		"overcommitted node": {
			reason: "free is never negative, also where allocatable shrank below what runs",
			nodes:  []*corev1.Node{node("a", expect.Resources("cpu", "1", "memory", "1Gi"))},
			pods:   []*corev1.Pod{pod("a", expect.Resources("cpu", "2"))}, allocatable: "cpu 1, memory 1Gi", allocated: "cpu 2",
			shapes: []shape{{1, 109, "memory 1Gi"}},
		},
		"full of pods": {
			reason: "a node that may run no more pods has no free shape",
			nodes:  []*corev1.Node{node("a", expect.Resources("cpu", "2", "pods", "1"))},
			pods:   []*corev1.Pod{pod("a", nil)}, allocatable: "cpu 2", allocated: "nothing",
		},
	})
}

func TestMeasureRoundsDown(t *testing.T) {
	runMeasure(t, map[string]measureCase{
		"headroom": {
			reason: "off the total, and off the largest slot",
			nodes:  []*corev1.Node{node("a", expect.Resources("cpu", "4", "memory", "4Gi")), node("b", two)}, headroom: expect.Resources("cpu", "1", "memory", "1Gi"),
			allocatable: "cpu 5, memory 7Gi", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 3, memory 3Gi"}, {1, 110, "cpu 2, memory 4Gi"}},
		},
		"headroom over several nodes": {
			reason: "what the largest node does not have, the next one gives",
			nodes:  []*corev1.Node{node("a", two), node("b", two)}, headroom: expect.Resources("cpu", "3"),
			allocatable: "cpu 1, memory 8Gi", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 1, memory 4Gi"}, {1, 110, "memory 4Gi"}},
		},
		"headroom above all": {
			reason: "never below zero",
			nodes:  []*corev1.Node{node("a", two)}, headroom: expect.Resources("cpu", "3", "nvidia.com/gpu", "1"),
			allocatable: "memory 4Gi", allocated: "nothing", shapes: []shape{{1, 110, "memory 4Gi"}},
		},
		"fractions": {
			reason: "shapes are rounded down, never up",
			nodes:  []*corev1.Node{node("a", expect.Resources("cpu", "1999900u", "memory", "1048577"))}, allocatable: "cpu 1999900u, memory 1048577", allocated: "nothing",
			shapes: []shape{{1, 110, "cpu 1999m, memory 1Mi"}},
		},
	})
}

func TestNodeClasses(t *testing.T) {
	size := expect.Resources("cpu", "2")
	spec := measure([]*corev1.Node{
		node("a", size, labelled("disk", "ssd"), labelled(corev1.LabelTopologyZone, "z1"), labelled(corev1.LabelTopologyRegion, "eu"), labelled("machine", "a")),
		node("b", size, labelled("disk", "ssd"), labelled(corev1.LabelTopologyZone, "z1"), labelled(corev1.LabelTopologyRegion, "eu"), labelled("machine", "b")),
		node("c", size, labelled("disk", "hdd"), labelled(corev1.LabelTopologyZone, "z2"), labelled(corev1.LabelTopologyRegion, "eu"), labelled("nvidia.com/gpu.product", "A100")),
		node("cp", size, tainted("node-role.kubernetes.io/control-plane", corev1.TaintEffectNoSchedule), labelled(corev1.LabelTopologyRegion, "eu"), labelled(corev1.LabelTopologyZone, "z1")),
	}, nil, nil)
	if len(spec.NodeClasses) != 3 {
		t.Fatalf("want the two alike in one class, and a class each for the other two, got %d: %+v", len(spec.NodeClasses), spec.NodeClasses)
	}
	if first := spec.NodeClasses[0]; first.FreeShapes[0].Nodes != 2 || first.Labels["machine"] != "" || first.Labels[corev1.LabelHostname] != "" || first.Labels[corev1.LabelTopologyRegion] != "eu" || first.Arch != "amd64" {
		t.Errorf("the largest class is first, without what names one node: %+v", first)
	}
	for _, c := range spec.NodeClasses {
		// One virtual node stands for all of them.
		if c.Labels["disk"]+c.Labels[corev1.LabelTopologyZone] != "" {
			t.Errorf("%s has labels of which the nodes have different values: %v", c.Name, c.Labels)
		}
	}
	var models, taints int
	for _, c := range spec.NodeClasses {
		if c.Labels["nvidia.com/gpu.product"] == "A100" {
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

// TestClassCosts: the first price for the labels of a class counts; that of the cluster is not repeated.
func TestClassCosts(t *testing.T) {
	cost := func(cpu string) broker.Cost { return broker.Cost{CPUCost: cpu, Currency: "EUR"} }
	size := expect.Resources("cpu", "2")
	nodes := []*corev1.Node{
		node("a", size, labelled("spot", "true")), node("b", size, labelled("spot", "true"), labelled("disk", "ssd")),
		node("c", size, labelled("disk", "ssd")), node("d", size, labelled("disk", "hdd")), node("e", size),
	}
	class := func(label string, price broker.Cost) inventory.ClassCost {
		selector, err := labels.Parse(label)
		expect.NoError(t, err)
		return inventory.ClassCost{Selector: selector, Cost: price}
	}
	all := cost("1")
	for name, terms := range map[string]inventory.Terms{
		"beside the cluster's price": {Cost: &all, ClassCosts: []inventory.ClassCost{class("spot=true", cost("0.2")), class("disk=ssd", cost("3")), class("disk=hdd", cost("1"))}},
		"without one":                {ClassCosts: []inventory.ClassCost{class("spot=true", cost("0.2")), class("disk=ssd", cost("3"))}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, class := range inventory.Measure(cluster(nodes, nil), terms, time.Unix(1000, 0), 7).NodeClasses {
				price := "-"
				if class.Cost != nil {
					price = class.Cost.CPUCost
				}
				got = append(got, price)
			}
			slices.Sort(got)
			if diff := cmp.Diff([]string{"-", "-", "0.2", "0.2", "3"}, got); diff != "" {
				t.Errorf("prices (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHeadroomSparesTaintedNodes(t *testing.T) {
	slots := cluster([]*corev1.Node{
		node("cp", expect.Resources("cpu", "8"), tainted("control-plane", corev1.TaintEffectNoSchedule)),
		node("w", expect.Resources("cpu", "4")),
	}, nil).Slots(expect.Resources("cpu", "1"))
	for _, s := range slots {
		if want := map[string]int64{"cp": 8000, "w": 3000}[s.Node]; s.Free["cpu"] != want {
			t.Errorf("headroom on a node that no pod tolerates is none: %s has %d free, want %d", s.Node, s.Free["cpu"], want)
		}
	}
}

func TestBounds(t *testing.T) {
	var nodes []*corev1.Node
	for i := range 400 {
		nodes = append(nodes, node(fmt.Sprintf("n%03d", i), expect.Resources("cpu", fmt.Sprintf("%dm", 1000+37*i), "memory", fmt.Sprintf("%dMi", 1024+(i*7919)%9000))))
	}
	spec := measure(nodes, nil, nil)
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
	if spec = measure(nodes, nil, nil); len(spec.NodeClasses) != 1 {
		t.Errorf("a label with a value of its own on each node makes no classes, got %d", len(spec.NodeClasses))
	}
	for i, n := range nodes {
		delete(n.Labels, "serial")
		n.Labels["x"], n.Labels["y"] = fmt.Sprint(i%20), fmt.Sprint(i/20)
	}
	if spec = measure(nodes, nil, nil); len(spec.NodeClasses) != 64 {
		t.Errorf("want no more than 64 classes, got %d", len(spec.NodeClasses))
	}
}

// TestShapesNeverExceedTruth: whatever the cluster, the shapes of a class can be
// matched one to one with nodes that have at least that much free, and all shapes
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
		spec := measure(nodes, pods, headroom)

		promised := capacity.Vector{}
		for _, c := range spec.NodeClasses {
			if len(c.FreeShapes) > 128 {
				t.Fatalf("%d shapes", len(c.FreeShapes))
			}
			for i, s := range c.FreeShapes {
				free := capacity.Ceil(s.Free.List())
				promised.Add(free, int64(s.Nodes))
				if i > 0 && capacity.Compare(capacity.Ceil(c.FreeShapes[i-1].Free.List()), free) < 0 {
					t.Fatalf("not largest first: %s before %s", c.FreeShapes[i-1].Free, s.Free)
				}
			}
		}
		// Nothing is promised beyond what the nodes have, and by pigeonhole per
		// resource: as many nodes are at least as large as shapes claim to be.
		slots := cluster(nodes, pods).Slots(headroom)
		truth, all := capacity.Vector{}, capacity.Vector{}
		for _, s := range slots {
			truth.Add(s.Free, 1)
		}
		for _, s := range cluster(nodes, pods).Slots(nil) {
			all.Add(s.Free, 1)
		}
		for name, amount := range promised {
			if amount > truth[name] {
				t.Fatalf("%s: %d promised of %d", name, amount, truth[name])
			}
		}
		if keep := headroom.Cpu().MilliValue(); keep <= all["cpu"] && truth["cpu"]+keep != all["cpu"] {
			t.Fatalf("headroom %d was not kept back: %d of %d", keep, truth["cpu"], all["cpu"])
		}
		for _, c := range spec.NodeClasses {
			for _, claim := range c.FreeShapes {
				covers := func(free capacity.Vector, pods int64) bool {
					return capacity.Ceil(claim.Free.List()).FitsIn(free) > 0 && pods >= int64(claim.Pods)
				}
				var claiming, having int32
				for _, s := range c.FreeShapes {
					if covers(capacity.Floor(s.Free.List()), int64(s.Pods)) {
						claiming += s.Nodes
					}
				}
				for _, s := range slots {
					if s.Class.Name == c.Name && covers(s.Free, s.Pods) {
						having++
					}
				}
				if claiming > having {
					t.Fatalf("%d nodes are advertised with %s, %d have it", claiming, claim.Free, having)
				}
			}
		}
	})
}

func BenchmarkMeasure1000Nodes(b *testing.B) {
	var nodes []*corev1.Node
	var pods []*corev1.Pod
	for i := range 1000 {
		name := fmt.Sprintf("n%d", i)
		nodes = append(nodes, node(name, expect.Resources("cpu", "16", "memory", "64Gi"), labelled("zone", fmt.Sprint(i%3))))
		for j := range 30 {
			pods = append(pods, pod(name, expect.Resources("cpu", fmt.Sprintf("%dm", 100+10*((i+j)%7)), "memory", "256Mi")))
		}
	}
	b.ResetTimer()
	for range b.N {
		measure(nodes, pods, expect.Resources("cpu", "4"))
	}
}

// The largest node is what it is without guests, and with the cluster's own pods.
func TestLargestNode(t *testing.T) {
	nodes := []*corev1.Node{node("a", two), node("b", expect.Resources("cpu", "3", "memory", "1Gi")), node("c", expect.Resources("cpu", "9"), labelled("disk", "ssd"))}
	spec := measure(nodes, []*corev1.Pod{
		pod("a", expect.Resources("cpu", "500m"), guest("rome")), pod("a", expect.Resources("cpu", "200m"), guest("berlin")),
		pod("b", expect.Resources("cpu", "1500m")), pod("b", expect.Resources("cpu", "500m"), guest("rome")),
	}, nil)
	var got []string
	for _, class := range spec.NodeClasses {
		got = append(got, class.LargestNode.String())
	}
	if diff := cmp.Diff([]string{"cpu 2, memory 4Gi", "cpu 9"}, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// The broker charges the hold: a placeholder is not counted besides.
func TestPlaceholdersUseNothing(t *testing.T) {
	placeholder := pod("a", expect.Resources("cpu", "1"))
	placeholder.Namespace = "holds"
	with := measure([]*corev1.Node{node("a", two)}, []*corev1.Pod{placeholder}, nil)
	without := measure([]*corev1.Node{node("a", two)}, nil, nil)
	if diff := cmp.Diff(without.NodeClasses, with.NodeClasses); diff != "" || with.Resources.Allocated.String() != "nothing" {
		t.Errorf("a placeholder is counted: allocated %s, classes (-without +with):\n%s", with.Resources.Allocated, diff)
	}
}
