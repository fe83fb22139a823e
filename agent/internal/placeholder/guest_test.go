package placeholder_test

import (
	"testing"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestPlaces(t *testing.T) {
	anywhere := func(string) bool { return true }
	one, two := set(1, "cpu", "1"), set(2, "cpu", "2")
	part := placeholder.Part{Hold: "a", Shape: placeholder.ShapeOf(two)}
	c := &cluster{}
	c.apply(held("a", one, two), held("b", set(1, "cpu", "4")))
	if _, ok := placeholder.NewPlaces(c.pods).Take(expect.Resources("cpu", "2"), part, anywhere); ok {
		t.Error("before any has a place: ok")
	}
	c.bind("n1")
	places := placeholder.NewPlaces(c.pods)
	if _, ok := places.Take(expect.Resources("cpu", "2"), part, func(string) bool { return false }); ok {
		t.Error("a place where the guest may not run")
	}
	taken := map[string]bool{}
	for i, want := range []string{"2", "2", "4", ""} {
		place, ok := places.Take(expect.Resources("cpu", "2"), part, anywhere)
		got := ""
		if ok {
			got = place.Placeholders[0].Spec.Containers[0].Resources.Requests.Cpu().String()
			if name := place.Placeholders[0].Name; place.Node != "n1" || len(place.Placeholders) != 1 || taken[name] {
				t.Errorf("guest %d: %+v", i, place)
			} else {
				taken[name] = true
			}
		}
		if got != want {
			t.Errorf("guest %d takes a place of %q CPUs, want %q: those of its shape, then one with room", i, got, want)
		}
	}
}

// A guest of a divisible total takes as many parts of one node as it needs, and only if they do
// not suffice the place of another hold.
func TestPlaceInTotal(t *testing.T) {
	c := &cluster{fits: fitsOf(4)}
	c.apply(total("a", "cpu", "4"))
	other := placeholder.Make(placeholder.Input{Holds: []placeholder.Hold{held("b", set(1, "cpu", "8"))}, Options: options}).Create
	c.bind("n1", c.pods[0].Name)
	c.bind("n2", c.pods[1].Name, c.pods[2].Name, c.pods[3].Name)
	other[0].Spec.NodeName = "n3"
	places, part := placeholder.NewPlaces(append(c.pods, other...)), placeholder.Part{Hold: "a", Divisible: true}
	place, ok := places.Take(expect.Resources("cpu", "3"), part, func(string) bool { return true })
	if !ok || place.Node != "n2" || len(place.Placeholders) != 3 {
		t.Errorf("ok %t, %+v", ok, place)
	}
	if place, ok = places.Take(expect.Resources("cpu", "1"), part, func(string) bool { return true }); !ok || place.Node != "n1" {
		t.Errorf("what is left: ok %t, %+v", ok, place)
	}
	if place, ok = places.Take(expect.Resources("cpu", "1"), part, func(string) bool { return true }); !ok || place.Node != "n3" {
		t.Errorf("the place of another hold: ok %t, %+v", ok, place)
	}
	if place, ok = places.Take(expect.Resources("cpu", "1"), part, func(string) bool { return true }); ok {
		t.Errorf("all is taken: %+v", place)
	}
}

// A guest that is larger than each promised pod takes as many places of one node as it is worth,
// those that are easier to find again first.
func TestPlacesTogether(t *testing.T) {
	small, large := set(6, "cpu", "200m", "memory", "1Gi"), set(2, "cpu", "1", "memory", "1Gi")
	smalls := placeholder.Part{Hold: "a", Shape: placeholder.ShapeOf(small)}
	larges := placeholder.Part{Hold: "a", Shape: placeholder.ShapeOf(large)}
	for name, tc := range map[string]struct {
		reason string
		// on are the numbers of small and large placeholders of each node.
		on       map[string][2]int
		requests []string
		uses     map[placeholder.Part]int32
		node     string
		taken    int
	}{
		"two of a node":          {reason: "no node but one has both", on: map[string][2]int{"n1": {1}, "n2": {2}}, requests: []string{"cpu", "300m"}, uses: map[placeholder.Part]int32{smalls: 2}, node: "n2", taken: 2},
		"each node has one":      {reason: "a pod runs on one node", on: map[string][2]int{"n1": {1}, "n2": {1}}, requests: []string{"cpu", "300m"}, uses: map[placeholder.Part]int32{smalls: 2}},
		"of two shapes":          {reason: "together they have room", on: map[string][2]int{"n1": {1, 1}}, requests: []string{"cpu", "1200m"}, uses: map[placeholder.Part]int32{smalls: 1, larges: 1}, node: "n1", taken: 2},
		"those that it is worth": {reason: "a larger one is harder to find a place for", on: map[string][2]int{"n1": {0, 2}, "n2": {6}}, requests: []string{"cpu", "1200m"}, uses: map[placeholder.Part]int32{smalls: 6}, node: "n2", taken: 6},
		"one more":               {reason: "what others left of theirs is not on this node", on: map[string][2]int{"n1": {3}}, requests: []string{"cpu", "300m"}, uses: map[placeholder.Part]int32{smalls: 1}, node: "n1", taken: 2},
		"what none holds":        {reason: "only the scheduler knows whether a node has it", on: map[string][2]int{"n1": {2}}, requests: []string{"cpu", "300m", "ephemeral-storage", "1Gi"}, uses: map[placeholder.Part]int32{smalls: 2}, node: "n1", taken: 2},
		"as much memory":         {reason: "each resource must fit", on: map[string][2]int{"n1": {3}}, requests: []string{"cpu", "200m", "memory", "2Gi"}, uses: map[placeholder.Part]int32{smalls: 2}, node: "n1", taken: 2},
		"no placeholders":        {reason: "they do not exist yet", requests: []string{"cpu", "300m"}, uses: map[placeholder.Part]int32{smalls: 2}},
	} {
		c := &cluster{}
		c.apply(held("a", small, large))
		for node, numbers := range tc.on {
			left := map[string]int{smalls.Shape: numbers[0], larges.Shape: numbers[1]}
			for _, pod := range c.pods {
				if shape := pod.Labels[broker.LabelShape]; pod.Spec.NodeName == "" && left[shape] > 0 {
					pod.Spec.NodeName = node
					left[shape]--
				}
			}
		}
		places := placeholder.NewPlaces(c.pods)
		place, ok := places.TakeTogether(expect.Resources(tc.requests...), tc.uses, func(string) bool { return true })
		if ok != (tc.taken > 0) || place.Node != tc.node || len(place.Placeholders) != tc.taken {
			t.Errorf("%s: %s: ok %t, %d of node %q, want %d of %q", name, tc.reason, ok, len(place.Placeholders), place.Node, tc.taken, tc.node)
		}
		for _, pod := range place.Placeholders {
			if pod.Spec.NodeName != tc.node {
				t.Errorf("%s: takes one of node %s", name, pod.Spec.NodeName)
			}
		}
		if again, ok := places.TakeTogether(expect.Resources("cpu", "1m"), tc.uses, func(string) bool { return true }); ok && len(place.Placeholders) > 0 && again.Placeholders[0] == place.Placeholders[0] {
			t.Errorf("%s: one is taken twice", name)
		}
	}
}
