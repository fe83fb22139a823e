package hold_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func list(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

func set(name string, count int32, requests corev1.ResourceList) broker.PodSet {
	return broker.PodSet{Name: name, Count: count, Requests: broker.FromList(requests)}
}

func pods(sets ...broker.PodSet) broker.HeldCapacity {
	var total corev1.ResourceList
	for _, s := range sets {
		total = broker.AddTo(total, broker.Times(s.Requests.List(), s.Count))
	}
	return broker.HeldCapacity{PodSets: sets, Totals: broker.FromList(total)}
}

func total(amounts corev1.ResourceList) broker.HeldCapacity {
	return broker.HeldCapacity{Totals: broker.FromList(amounts)}
}

func slot(name string, free corev1.ResourceList, change ...func(*corev1.Node)) inventory.Slot {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	for _, c := range change {
		c(n)
	}
	return inventory.Slot{Node: n, Free: free, Pods: 10}
}

func taint(key string) func(*corev1.Node) {
	return func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: key, Effect: corev1.TaintEffectNoSchedule}}
	}
}

func TestFit(t *testing.T) {
	two := func() []inventory.Slot {
		return []inventory.Slot{slot("a", list("cpu", "2", "memory", "4Gi")), slot("b", list("cpu", "2", "memory", "4Gi"))}
	}
	selected := set("web", 1, list("cpu", "1"))
	selected.NodeSelector = map[string]string{"disk": "ssd"}
	tolerant := set("web", 1, list("cpu", "1"))
	tolerant.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	cases := map[string]struct {
		reason   string
		slots    []inventory.Slot
		promised []broker.HeldCapacity
		wanted   broker.HeldCapacity
		// no is a part of the message of a refusal.
		no string
	}{
		"fits":                       {reason: "one on each", slots: two(), wanted: pods(set("web", 2, list("cpu", "1500m")))},
		"the sum fits, no node does": {reason: "3 cores are free, but nowhere together", slots: two(), wanted: pods(set("web", 1, list("cpu", "3"))), no: "0 of 1 pods"},
		"one too many":               {reason: "the answer has the figures", slots: two(), wanted: pods(set("web", 3, list("cpu", "1500m"))), no: "2 of 3 pods of cpu 1500m fit; the largest room left on 2 nodes is cpu 500m"},
		"promised to others":         {reason: "what is promised and unused is not there", slots: two(), promised: []broker.HeldCapacity{pods(set("x", 1, list("cpu", "2")))}, wanted: pods(set("web", 2, list("cpu", "1500m"))), no: "1 of 2"},
		"promised in sum":            {reason: "a divisible promise leaves no room for a total beside it", slots: two(), promised: []broker.HeldCapacity{total(list("cpu", "3"))}, wanted: total(list("cpu", "2")), no: "cpu 5 of divisible totals would be promised, cpu 4 is free"},
		"shapes beside a total":      {reason: "a shape may not eat into a promised total", slots: two(), promised: []broker.HeldCapacity{total(list("cpu", "3"))}, wanted: pods(set("web", 1, list("cpu", "2"))), no: "cpu 3 of divisible totals would be promised, cpu 2 is free"},
		"a total":                    {reason: "may be spread over nodes", slots: two(), wanted: total(list("cpu", "4", "memory", "8Gi"))},
		"a total too large":          {reason: "every resource is checked", slots: two(), wanted: total(list("cpu", "1", "nvidia.com/gpu", "1")), no: "nvidia.com/gpu 1"},
		"a missing resource":         {reason: "no node has it", slots: two(), wanted: pods(set("web", 1, list("nvidia.com/gpu", "1"))), no: "0 of 1"},
		"large beside small":         {reason: "the large ones are placed first", slots: two(), wanted: pods(set("small", 2, list("cpu", "500m")), set("large", 2, list("cpu", "1500m")))},
		"taints":                     {reason: "not tolerated", slots: []inventory.Slot{slot("a", list("cpu", "2"), taint("gpu"))}, wanted: pods(set("web", 1, list("cpu", "1"))), no: "none of 1 nodes matches"},
		"tolerated":                  {reason: "with the toleration", slots: []inventory.Slot{slot("a", list("cpu", "2"), taint("gpu"))}, wanted: pods(tolerant)},
		"a total on tainted nodes":   {reason: "nobody said that its pods tolerate anything", slots: []inventory.Slot{slot("a", list("cpu", "2"), taint("gpu"))}, wanted: total(list("cpu", "1")), no: "is free"},
		"selector":                   {reason: "no node has the label", slots: two(), wanted: pods(selected), no: "none of 2 nodes matches"},
		"selector met":               {reason: "one has", slots: append(two(), slot("c", list("cpu", "1"), func(n *corev1.Node) { n.Labels["disk"] = "ssd" })), wanted: pods(selected)},
		"pods for nothing":           {reason: "each takes a place even if it asks for nothing", slots: two(), wanted: pods(set("web", 21, nil)), no: "20 of 21"},
		"no node":                    {reason: "an empty cluster says no, not nothing", wanted: pods(set("web", 1, list("cpu", "1"))), no: "none of 0 nodes"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			answer := hold.Fit(tc.slots, tc.promised, tc.wanted)
			if answer.Fits != (tc.no == "") || !strings.Contains(answer.Message, tc.no) {
				t.Errorf("%s: got %v %q, want %q", tc.reason, answer.Fits, answer.Message, tc.no)
			}
		})
	}
}

func TestUnused(t *testing.T) {
	cases := map[string]struct {
		reason string
		held   []broker.HeldCapacity
		guests []corev1.ResourceList
		want   string
	}{
		"none runs":      {reason: "all is unused", held: []broker.HeldCapacity{pods(set("a", 2, list("cpu", "1")))}, want: "2 pods, cpu 2"},
		"one runs":       {reason: "matched by its requests", held: []broker.HeldCapacity{pods(set("a", 2, list("cpu", "1")))}, guests: []corev1.ResourceList{list("cpu", "1000m")}, want: "1 pods, cpu 1"},
		"the right one":  {reason: "an exact match goes before one that is merely large enough", held: []broker.HeldCapacity{pods(set("a", 1, list("cpu", "2"))), pods(set("b", 1, list("cpu", "1")))}, guests: []corev1.ResourceList{list("cpu", "2")}, want: "0 pods, nothing; 1 pods, cpu 1"},
		"a smaller one":  {reason: "it takes the smallest place that holds it", held: []broker.HeldCapacity{pods(set("a", 1, list("cpu", "4")), set("b", 1, list("cpu", "2")))}, guests: []corev1.ResourceList{list("cpu", "1")}, want: "1 pods, cpu 4"},
		"a total":        {reason: "used up by whom no place is for", held: []broker.HeldCapacity{total(list("cpu", "4", "memory", "1Gi"))}, guests: []corev1.ResourceList{list("cpu", "1"), list("cpu", "1")}, want: "0 pods, cpu 2, memory 1Gi"},
		"more than held": {reason: "never below nothing", held: []broker.HeldCapacity{total(list("cpu", "1"))}, guests: []corev1.ResourceList{list("cpu", "3")}, want: "0 pods, nothing"},
		"two totals":     {reason: "what the first covers is not taken from the second", held: []broker.HeldCapacity{total(list("cpu", "1")), total(list("cpu", "2"))}, guests: []corev1.ResourceList{list("cpu", "2")}, want: "0 pods, nothing; 0 pods, cpu 1"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, u := range hold.Unused(tc.held, tc.guests) {
				got = append(got, fmt.Sprintf("%d pods, %s", u.Pods(), u.Totals))
			}
			if strings.Join(got, "; ") != tc.want {
				t.Errorf("%s: got %q, want %q", tc.reason, strings.Join(got, "; "), tc.want)
			}
		})
	}
}

func TestCovers(t *testing.T) {
	one, two := pods(set("a", 1, list("cpu", "1"))), pods(set("a", 2, list("cpu", "1")))
	cases := map[string]struct {
		a, b broker.HeldCapacity
		want bool
	}{
		"more pods":        {two, one, true},
		"fewer pods":       {one, two, false},
		"the same":         {one, one, true},
		"another shape":    {two, pods(set("a", 1, list("cpu", "2"))), false},
		"nothing":          {broker.HeldCapacity{}, broker.HeldCapacity{}, true},
		"a release":        {two, broker.HeldCapacity{}, true},
		"the first":        {broker.HeldCapacity{}, one, false},
		"the first total":  {broker.HeldCapacity{}, total(list("cpu", "1")), false},
		"a larger total":   {total(list("cpu", "1")), total(list("cpu", "2")), false},
		"a smaller total":  {total(list("cpu", "2")), total(list("cpu", "1")), true},
		"a total for pods": {total(list("cpu", "9")), one, false},
		"pods for a total": {two, total(list("cpu", "1")), false},
	}
	for name, tc := range cases {
		if got := hold.Covers(tc.a, tc.b); got != tc.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

// TestFitIsTrue: whatever is said to fit can be placed: no slot is used beyond
// its room, and the promised pods that had room have it still.
func TestFitIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string, most int64) corev1.ResourceList {
			return corev1.ResourceList{
				corev1.ResourceCPU:    *resource.NewMilliQuantity(rapid.Int64Range(0, most).Draw(t, label+" cpu"), resource.DecimalSI),
				corev1.ResourceMemory: *resource.NewQuantity(rapid.Int64Range(0, most).Draw(t, label+" memory")<<20, resource.BinarySI),
			}
		}
		var slots []inventory.Slot
		var all corev1.ResourceList
		var places int32
		for i := range rapid.IntRange(0, 8).Draw(t, "slots") {
			s := slot(fmt.Sprint(i), draw("slot", 8000))
			slots = append(slots, s)
			all = broker.AddTo(all, s.Free)
			places += s.Pods
		}
		var promised []broker.HeldCapacity
		for i := range rapid.IntRange(0, 3).Draw(t, "promises") {
			if rapid.Bool().Draw(t, "divisible") {
				promised = append(promised, total(draw("total", 4000)))
			} else {
				promised = append(promised, pods(set(fmt.Sprint(i), rapid.Int32Range(0, 3).Draw(t, "count"), draw("pod", 4000))))
			}
		}
		wanted := pods(set("w", rapid.Int32Range(1, 12).Draw(t, "wanted"), draw("want", 4000)))
		answer := hold.Fit(slots, promised, wanted)
		left := corev1.ResourceList{}
		var leftPlaces int32
		for _, s := range slots {
			for name, amount := range s.Free {
				if amount.Sign() < 0 {
					t.Fatalf("%s of slot %s went to %s", name, s.Node.Name, amount.String())
				}
			}
			if s.Pods < 0 {
				t.Fatalf("slot %s has %d places left", s.Node.Name, s.Pods)
			}
			left = broker.AddTo(left, s.Free)
			leftPlaces += s.Pods
		}
		if !answer.Fits {
			return
		}
		if places-leftPlaces < wanted.Pods() {
			t.Fatalf("%d pods fit in %d places", wanted.Pods(), places-leftPlaces)
		}
		used := broker.AddTo(broker.AddTo(nil, wanted.Totals.List()), left)
		for name, amount := range used {
			if have := all[name]; amount.Cmp(have) > 0 {
				t.Fatalf("%s: %s of %s", name, amount.String(), have.String())
			}
		}
	})
}
