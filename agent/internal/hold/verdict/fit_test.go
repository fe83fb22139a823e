package verdict_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/capacity/capacitytest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var set, pods, total = capacitytest.Set, capacitytest.Pods, capacitytest.Total

func slot(name string, free corev1.ResourceList, change ...func(*broker.NodeClass)) capacity.Slot {
	class := &broker.NodeClass{Name: "class-1", Labels: map[string]string{}}
	for _, c := range change {
		c(class)
	}
	return capacity.Slot{Class: class, Node: name, Nodes: 1, Free: capacity.Floor(free), Pods: 10}
}

func taint(key string) func(*broker.NodeClass) {
	return func(c *broker.NodeClass) {
		c.Taints = []corev1.Taint{{Key: key, Effect: corev1.TaintEffectNoSchedule}}
	}
}

// fit says why a capacity that rome wants does not fit into slots beside what berlin is promised.
func fit(slots []capacity.Slot, promised []broker.HeldCapacity, wanted broker.HeldCapacity) (message string) {
	p := newProvider(slots)
	p.add(asked("wanted", 1, wanted))
	for i, held := range promised {
		of := standing(fmt.Sprint("promised-", i), held)
		of.Spec.RequesterClusterID = "berlin"
		p.add(of)
	}
	if decisions := verdict.Decide(p.input()); !decisions[0].Open() {
		return condition(p.statuses(decisions)["wanted"]).Message
	}
	return ""
}

func TestFit(t *testing.T) {
	two := func() []capacity.Slot {
		return []capacity.Slot{slot("a", expect.Resources("cpu", "2", "memory", "4Gi")), slot("b", expect.Resources("cpu", "2", "memory", "4Gi"))}
	}
	selected := set("web", 1, expect.Resources("cpu", "1"))
	selected.NodeSelector = map[string]string{"disk": "ssd"}
	named := func(node string) broker.PodSet {
		web := set("web", 1, expect.Resources("cpu", "1"))
		web.NodeAffinity = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
			{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}
		return web
	}
	tolerant := set("web", 1, expect.Resources("cpu", "1"))
	tolerant.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	cases := map[string]struct {
		reason   string
		slots    []capacity.Slot
		promised []broker.HeldCapacity
		wanted   broker.HeldCapacity
		// rejected is a part of the rejection's message.
		rejected string
	}{
		"fits":                       {reason: "one on each node", slots: two(), wanted: pods(set("web", 2, expect.Resources("cpu", "1500m")))},
		"the sum fits, no node does": {reason: "3 cores are free, but not on one node", slots: two(), wanted: pods(set("web", 1, expect.Resources("cpu", "3"))), rejected: "0 of 1 pods"},
		"one too many":               {reason: "the message has the figures", slots: two(), wanted: pods(set("web", 3, expect.Resources("cpu", "1500m"))), rejected: `2 of 3 pods of pod set "web" fit. Insufficient cpu on one node: requested 1500m.`},
		"promised to others":         {reason: "what is promised and unused is not available", slots: two(), promised: []broker.HeldCapacity{pods(set("x", 1, expect.Resources("cpu", "2")))}, wanted: pods(set("web", 2, expect.Resources("cpu", "1500m"))), rejected: "1 of 2"},
		"promised in sum":            {reason: "a promised divisible total is not available for another", slots: two(), promised: []broker.HeldCapacity{total(expect.Resources("cpu", "3"))}, wanted: total(expect.Resources("cpu", "2")), rejected: "Insufficient cpu on the nodes without taints: requested 2."},
		"shapes beside a total":      {reason: "a pod must not use a promised total", slots: two(), promised: []broker.HeldCapacity{total(expect.Resources("cpu", "3"))}, wanted: pods(set("web", 1, expect.Resources("cpu", "2"))), rejected: "Insufficient cpu on one node: requested 2."},
		"a pod beside a total":       {reason: "a promised total leaves nodes free as far as possible", slots: two(), promised: []broker.HeldCapacity{total(expect.Resources("cpu", "2"))}, wanted: pods(set("web", 1, expect.Resources("cpu", "2")))},
		"a total":                    {reason: "it may be spread over nodes", slots: two(), wanted: total(expect.Resources("cpu", "4", "memory", "8Gi"))},
		"a total too large":          {reason: "every resource is checked", slots: two(), wanted: total(expect.Resources("cpu", "1", "nvidia.com/gpu", "1")), rejected: "Insufficient nvidia.com/gpu on the nodes without taints: requested 1"},
		"a missing resource":         {reason: "no node has it", slots: two(), wanted: pods(set("web", 1, expect.Resources("nvidia.com/gpu", "1"))), rejected: "0 of 1"},
		"large beside small":         {reason: "the large pods are placed first", slots: two(), wanted: pods(set("small", 2, expect.Resources("cpu", "500m")), set("large", 2, expect.Resources("cpu", "1500m")))},
		"taints":                     {reason: "not tolerated", slots: []capacity.Slot{slot("a", expect.Resources("cpu", "2"), taint("gpu"))}, wanted: pods(set("web", 1, expect.Resources("cpu", "1"))), rejected: "No node matches: taint gpu:NoSchedule is not tolerated."},
		"tolerated":                  {reason: "with the toleration", slots: []capacity.Slot{slot("a", expect.Resources("cpu", "2"), taint("gpu"))}, wanted: pods(tolerant)},
		"a total on tainted nodes":   {reason: "the pods that will use it may tolerate nothing", slots: []capacity.Slot{slot("a", expect.Resources("cpu", "2"), taint("gpu"))}, wanted: total(expect.Resources("cpu", "1")), rejected: "Insufficient cpu on the nodes without taints: requested 1."},
		"selector":                   {reason: "no node has the label", slots: two(), wanted: pods(selected), rejected: "No node matches: label disk=ssd is missing."},
		"selector met":               {reason: "one has", slots: append(two(), slot("c", expect.Resources("cpu", "1"), func(c *broker.NodeClass) { c.Labels["disk"] = "ssd" })), wanted: pods(selected)},
		"a node by name":             {reason: "matchFields are compared with the node's name", slots: two(), wanted: pods(named("c")), rejected: "No node matches: the node affinity does not match."},
		"a node by name, met":        {reason: "one has the name", slots: two(), wanted: pods(named("b"))},
		"pods without requests":      {reason: "they count towards the limit of the node", slots: two(), wanted: pods(set("web", 21, nil)), rejected: "20 of 21"},
		"no node":                    {reason: "an empty cluster rejects with a message", wanted: pods(set("web", 1, expect.Resources("cpu", "1"))), rejected: "No node is available."},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			message := fit(tc.slots, tc.promised, tc.wanted)
			if (message == "") != (tc.rejected == "") || !strings.Contains(message, tc.rejected) {
				t.Errorf("%s: rejected with %q, want %q", tc.reason, message, tc.rejected)
			}
		})
	}
}

func TestCovers(t *testing.T) {
	one, two := pods(set("a", 1, expect.Resources("cpu", "1"))), pods(set("a", 2, expect.Resources("cpu", "1")))
	cases := map[string]struct {
		a, b broker.HeldCapacity
		want bool
	}{
		"more pods":        {two, one, true},
		"fewer pods":       {one, two, false},
		"the same":         {one, one, true},
		"another shape":    {two, pods(set("a", 1, expect.Resources("cpu", "2"))), false},
		"nothing":          {broker.HeldCapacity{}, broker.HeldCapacity{}, true},
		"a release":        {two, broker.HeldCapacity{}, true},
		"the first":        {broker.HeldCapacity{}, one, false},
		"the first total":  {broker.HeldCapacity{}, total(expect.Resources("cpu", "1")), false},
		"a larger total":   {total(expect.Resources("cpu", "1")), total(expect.Resources("cpu", "2")), false},
		"a smaller total":  {total(expect.Resources("cpu", "2")), total(expect.Resources("cpu", "1")), true},
		"a total for pods": {total(expect.Resources("cpu", "9")), one, false},
		"pods for a total": {two, total(expect.Resources("cpu", "1")), false},
	}
	for name, tc := range cases {
		if got := verdict.Covers(tc.a, tc.b); got != tc.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

// TestAdvertisedCapacityIsAccepted: what fits the advertisement that a cluster
// makes of its nodes, as the broker packs it, also fits the nodes themselves,
// as long as no shape is rounded; and it is never more than is free.
func TestAdvertisedCapacityIsAccepted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string, most int64) corev1.ResourceList {
			return corev1.ResourceList{
				corev1.ResourceCPU:    *resource.NewMilliQuantity(rapid.Int64Range(0, most).Draw(t, label+" cpu")*500, resource.DecimalSI),
				corev1.ResourceMemory: *resource.NewQuantity(rapid.Int64Range(0, most).Draw(t, label+" memory")<<20, resource.BinarySI),
				broker.ResourceGPU:    *resource.NewQuantity(rapid.Int64Range(0, 2).Draw(t, label+" gpu")/2, resource.DecimalSI),
			}
		}
		podSet := func(label string) broker.PodSet {
			s := set(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, label), rapid.Int32Range(0, 12).Draw(t, label+" count"), draw(label, 8))
			if rapid.Bool().Draw(t, label+" selects") {
				s.NodeSelector = map[string]string{"disk": "ssd"}
			}
			if rapid.Bool().Draw(t, label+" tolerates") {
				s.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
			}
			return s
		}
		cluster := drawCluster(t, draw)
		headroom := draw("headroom", 4)
		var promised []broker.HeldCapacity
		var sets []broker.PodSet
		divisible := capacity.Vector{}
		for range rapid.IntRange(0, 3).Draw(t, "promises") {
			if rapid.Bool().Draw(t, "divisible") {
				promised = append(promised, total(draw("total", 8)))
				divisible.Add(capacity.Ceil(promised[len(promised)-1].Totals.List()), 1)
			} else {
				promised = append(promised, pods(podSet("promised")))
				sets = append(sets, promised[len(promised)-1].PodSets...)
			}
		}
		want := pods(podSet("x"), podSet("y"))
		if rapid.Bool().Draw(t, "want a total") {
			want = total(draw("want", 20))
		}
		var account *capacity.Account
		if rapid.Bool().Draw(t, "limited") {
			available := capacity.Floor(draw("available", 40))
			account = &capacity.Account{Free: available, Available: available}
		}

		spec := cluster.Measure(inventory.Terms{Headroom: headroom}, time.Time{}, 1)
		packer := capacity.NewPacker(capacity.Slots(spec.NodeClasses))
		packer.Reserve(sets, divisible)
		placed, _ := packer.Pack(want, account)
		slots := cluster.Slots(headroom)
		if message := fit(slots, promised, placed); message != "" {
			t.Fatalf("%+v fits the advertisement, but the provider rejects it: %s", placed, message)
		}
		free, limit := capacity.Vector{}, int64(0)
		for _, s := range slots {
			free.Add(s.Free, 1)
			limit += s.Pods
		}
		if used := capacity.Ceil(placed.Totals.List()); used.FitsIn(free) == 0 || int64(placed.Pods()) > limit {
			t.Fatalf("%d pods with %v are placed; %d with %v are free", placed.Pods(), used, limit, free)
		}
	})
}

// drawCluster makes nodes with and without a label and a taint, and pods on them.
func drawCluster(t *rapid.T, draw func(string, int64) corev1.ResourceList) *inventory.Tracker {
	cluster := inventory.NewTracker(inventory.Recognizer{Guest: inventory.AnyOf()})
	for i := range rapid.IntRange(0, 12).Draw(t, "nodes") {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i), Labels: map[string]string{corev1.LabelHostname: fmt.Sprintf("n%d", i)}}}
		if rapid.Bool().Draw(t, "ssd") {
			node.Labels["disk"] = "ssd"
		}
		if rapid.Bool().Draw(t, "tainted") {
			node.Spec.Taints = []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoSchedule}}
		}
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		node.Status.Allocatable = draw("node", 16)
		node.Status.Allocatable[corev1.ResourcePods] = *resource.NewQuantity(rapid.Int64Range(0, 6).Draw(t, "max pods"), resource.DecimalSI)
		cluster.Set(node)
		for j := range rapid.IntRange(0, 2).Draw(t, "pods") {
			cluster.Set(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", node.Name, j)}, Spec: corev1.PodSpec{NodeName: node.Name, Containers: []corev1.Container{
				{Resources: corev1.ResourceRequirements{Requests: draw("pod", 4)}}}}})
		}
	}
	return cluster
}
