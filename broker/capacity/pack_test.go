package capacity_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func set(name string, count int32, requests ...string) broker.PodSet {
	return broker.PodSet{Name: name, Count: count, Requests: broker.FromList(expect.Resources(requests...))}
}

func slot(class string, nodes, pods int64, free ...string) capacity.Slot {
	return capacity.Slot{Class: &broker.NodeClass{Name: class}, Nodes: nodes, Free: capacity.Floor(expect.Resources(free...)), Pods: pods}
}

func TestRounding(t *testing.T) {
	amount := expect.Resources("cpu", "1999900u", "memory", "1")
	if got := capacity.Floor(amount); got["cpu"] != 1999 {
		t.Errorf("free capacity is rounded down, got %v", got)
	}
	if got := capacity.Ceil(amount); got["cpu"] != 2000 {
		t.Errorf("requests are rounded up, got %v", got)
	}
	if got := capacity.Ceil(expect.Resources("memory", "9Ei")); got["memory"] <= 0 {
		t.Errorf("a huge amount must not overflow, got %v", got)
	}
}

// TestAdd: sums end at the largest amounts, and what is below zero stays below.
// A room of which more is in use than there is has none, however small the pod.
func TestFitsInOvercommitted(t *testing.T) {
	for free, want := range map[int64]int64{-4000: 0, -1: 0, 999: 0, 1000: 1, 4100: 4} {
		if n := (capacity.Vector{"cpu": 1000}).FitsIn(capacity.Vector{"cpu": free}); n != want {
			t.Errorf("%d times in %d, want %d", n, free, want)
		}
	}
}

func TestAdd(t *testing.T) {
	const most = math.MaxInt64
	for _, tc := range []struct{ have, amount, n, want int64 }{
		{5, 3, 2, 11}, {5, 3, -1, 2}, {1, 3, -1, -2}, {-5, 1, -1, -6}, {-5, 1, 1, -4}, {-5, 10, 2, 15},
		{most, 1, 1, most}, {most - 1, 1, 1, most}, {1, most, 2, most}, {-5, most, 1, most - 5}, {-5, most, -1, -most}, {most, most, -1, 0}, {-most, 1, -1, -most}, {7, 0, -3, 7},
	} {
		v := capacity.Vector{"cpu": tc.have}
		if v.Add(capacity.Vector{"cpu": tc.amount}, tc.n); v["cpu"] != tc.want {
			t.Errorf("%d and %d times %d: got %d, want %d", tc.have, tc.n, tc.amount, v["cpu"], tc.want)
		}
	}
}

func TestKinds(t *testing.T) {
	amounts := capacity.Ceil(expect.Resources("memory", "1", "ephemeral-storage", "1", "cpu", "1", "nvidia.com/gpu", "1", "a.example/x", "1"))
	want := []corev1.ResourceName{"nvidia.com/gpu", "cpu", "memory", "a.example/x", "ephemeral-storage"}
	if diff := cmp.Diff(want, amounts.Kinds()); diff != "" {
		t.Errorf("kinds (-want +got)\n%s", diff)
	}
}

func TestPack(t *testing.T) {
	large := broker.HeldCapacity{PodSets: []broker.PodSet{set("large", 1, "cpu", "4")}}
	cases := map[string]struct {
		reason string
		slots  []capacity.Slot
		sets   []broker.PodSet
		total  []string
		want   broker.HeldCapacity
		placed int32
	}{
		"best fit":      {"a small pod goes to the fullest node, so that the large one fits", []capacity.Slot{slot("a", 1, 9, "cpu", "4"), slot("b", 1, 9, "cpu", "1")}, []broker.PodSet{set("small", 1, "cpu", "1")}, nil, large, 1},
		"GPU is spared": {"a pod without a GPU goes to a node without", []capacity.Slot{slot("a", 1, 9, "cpu", "2", "nvidia.com/gpu", "1"), slot("b", 1, 9, "cpu", "8")}, []broker.PodSet{set("small", 2, "cpu", "1")}, nil, broker.HeldCapacity{PodSets: []broker.PodSet{set("gpu", 1, "cpu", "1", "nvidia.com/gpu", "1")}}, 1},
		"total":         {"a divisible total uses the fullest nodes first", []capacity.Slot{slot("a", 1, 9, "cpu", "4"), slot("b", 3, 9, "cpu", "1")}, nil, []string{"cpu", "3"}, large, 1},
		"full of pods":  {"a node that runs its maximum number of pods has no divisible capacity", []capacity.Slot{slot("a", 1, 1, "cpu", "4")}, []broker.PodSet{set("small", 1, "cpu", "1")}, nil, broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", "1"))}, 0},
		"class order":   {"ties are broken by class, whatever the order of the slots", []capacity.Slot{slot("b", 1, 9, "cpu", "4"), slot("a", 1, 9, "cpu", "4")}, []broker.PodSet{set("small", 1, "cpu", "1")}, nil, broker.HeldCapacity{PodSets: []broker.PodSet{set("large", 2, "cpu", "4")}}, 1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := capacity.NewPacker(tc.slots)
			p.Reserve(tc.sets, capacity.Ceil(expect.Resources(tc.total...)))
			placed, rejection := p.Pack(tc.want, nil)
			if placed.Pods() != tc.placed || (rejection == nil) != (!placed.Empty() && placed.Pods() == tc.want.Pods()) {
				t.Errorf("%s: placed %d pods, want %d; rejection %v", tc.reason, placed.Pods(), tc.placed, rejection)
			}
		})
	}
}

// TestPackerProperties: equal nodes as one slot or as several give the same
// result, in any order of the slots; no more is used than is free; and what is
// missing afterwards is exactly what was placed.
// A rejection becomes part of a status, and each node may differ from the pods in
// another way.
// A guest is an amd64 pod, whether or not its pod says so, and tolerates what providers
// admit.
func TestNodesThatRunNoGuest(t *testing.T) {
	want := broker.HeldCapacity{PodSets: []broker.PodSet{set("web", 1, "cpu", "1")}}
	everything := *want.DeepCopy()
	everything.PodSets[0].Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	control := corev1.Taint{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}
	for name, c := range map[string]struct {
		class broker.NodeClass
		want  broker.HeldCapacity
		fits  bool
	}{
		"amd64":                             {broker.NodeClass{Arch: "amd64"}, want, true},
		"arm64":                             {broker.NodeClass{Arch: "arm64"}, want, false},
		"arm64 by label":                    {broker.NodeClass{Labels: map[string]string{corev1.LabelArchStable: "arm64"}}, want, false},
		"Windows":                           {broker.NodeClass{Labels: map[string]string{corev1.LabelOSStable: "windows"}}, want, false},
		"a control plane, tolerated by all": {broker.NodeClass{Taints: []corev1.Taint{control}}, everything, false},
	} {
		t.Run(name, func(t *testing.T) {
			packer := capacity.NewPacker([]capacity.Slot{{Class: &c.class, Nodes: 1, Free: capacity.Floor(expect.Resources("cpu", "4")), Pods: 9}})
			if placed, rejection := packer.Pack(c.want, nil); (rejection == nil) != c.fits {
				t.Errorf("placed %v, rejection %v", placed, rejection)
			}
		})
	}
}

func TestRejectionIsBounded(t *testing.T) {
	var slots []capacity.Slot
	for i := range 2000 {
		s := slot("a", 1, 9, "cpu", "4")
		s.Class.Taints = []corev1.Taint{{Key: "tenant", Value: fmt.Sprintf("t%04d", i), Effect: corev1.TaintEffectNoSchedule}}
		slots = append(slots, s)
	}
	_, rejection := capacity.NewPacker(slots).Pack(broker.HeldCapacity{PodSets: []broker.PodSet{set("web", 1, "cpu", "1")}}, nil)
	const want = `0 of 1 pods of pod set "web" fit. No node matches: taint tenant=t0000:NoSchedule is not tolerated, ` +
		`taint tenant=t0001:NoSchedule is not tolerated, taint tenant=t0002:NoSchedule is not tolerated, and 1997 other reasons.`
	if rejection == nil || rejection.Reason != capacity.ReasonNoMatchingNodes || rejection.Message != want {
		t.Errorf("got %.500v, want %s", rejection, want)
	}
}

func TestPackerProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string, most int64) corev1.ResourceList {
			return corev1.ResourceList{
				corev1.ResourceCPU:    *resource.NewMilliQuantity(rapid.Int64Range(0, most).Draw(t, label+" cpu"), resource.DecimalSI),
				corev1.ResourceMemory: *resource.NewQuantity(rapid.Int64Range(0, most).Draw(t, label+" memory"), resource.BinarySI),
			}
		}
		classes := []*broker.NodeClass{
			{Name: "tainted", Taints: []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoSchedule}}}, {Name: "open"},
		}
		var grouped, single []capacity.Slot
		for range rapid.IntRange(0, 6).Draw(t, "slots") {
			s := capacity.Slot{
				Class: rapid.SampledFrom(classes).Draw(t, "class"), Nodes: rapid.Int64Range(1, 4).Draw(t, "nodes"),
				Free: capacity.Floor(draw("free", 20)), Pods: rapid.Int64Range(0, 5).Draw(t, "pods"),
			}
			grouped = append(grouped, s)
			one := s
			one.Nodes = 1
			single = append(single, slices.Repeat([]capacity.Slot{one}, int(s.Nodes))...)
		}
		single = rapid.Permutation(single).Draw(t, "order")
		one, many := capacity.NewPacker(grouped), capacity.NewPacker(single)
		used, before := capacity.Vector{}, sum(one)
		for i := range rapid.IntRange(0, 4).Draw(t, "steps") {
			step := broker.PodSet{Name: fmt.Sprint(i), Requests: broker.FromList(draw("request", 12))}
			if rapid.Bool().Draw(t, "tolerates") {
				step.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
			}
			count := rapid.Int64Range(0, 9).Draw(t, "count")
			a, b := one.Place(step, count), many.Place(step, count)
			if a != b || a > count {
				t.Fatalf("%d of %d pods fit, %d with single nodes", a, count, b)
			}
			used.Add(capacity.Ceil(step.Requests.List()), a)
			total := capacity.Ceil(draw("total", 9))
			one.Reserve(nil, total)
			many.Reserve(nil, total)
			if diff := cmp.Diff(nodes(one), nodes(many)); diff != "" {
				t.Fatalf("single nodes are used otherwise (-grouped +single)\n%s", diff)
			}
			used.Add(total, 1)
		}
		for _, s := range one.Slots() {
			if s.Free["cpu"] < 0 || s.Free["memory"] < 0 || s.Pods < 0 {
				t.Fatalf("more is used than is free: %+v", s)
			}
		}
		for name, amount := range sum(one) {
			// Totals are taken as far as they are there.
			if left := before[name] - amount; left < 0 || left > used[name] {
				t.Fatalf("%s: %d of %d is left, %d used", name, amount, before[name], used[name])
			}
		}
	})
}

func nodes(p *capacity.Packer) []string {
	var out []string
	for _, s := range p.Slots() {
		out = append(out, slices.Repeat([]string{fmt.Sprint(s.Class.Name, s.Free["cpu"], s.Free["memory"], s.Pods)}, int(s.Nodes))...)
	}
	slices.Sort(out)
	return out
}

func sum(p *capacity.Packer) capacity.Vector {
	out := capacity.Vector{}
	for _, s := range p.Slots() {
		out.Add(s.Free, s.Nodes)
	}
	return out
}
