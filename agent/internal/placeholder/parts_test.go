package placeholder_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// fitsOf says that n or more pods fit, and fewer, which are larger, do not.
func fitsOf(n int32) func([]broker.PodSet) bool {
	return func(sets []broker.PodSet) bool {
		pods := int32(0)
		for _, set := range sets {
			pods += set.Count
		}
		return pods >= n
	}
}

func requests(pod *corev1.Pod) broker.ResourceQuantities {
	return broker.FromList(pod.Spec.Containers[0].Resources.Requests)
}

// sizes are what placeholders request, sorted.
func sizes(pods []*corev1.Pod) string {
	var out []string
	for _, pod := range pods {
		out = append(out, requests(pod).String())
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

// sum is what placeholders request together, without what is zero.
func sum(pods []*corev1.Pod) capacity.Vector {
	out := capacity.Vector{}
	for _, pod := range pods {
		out.Add(capacity.Ceil(requests(pod).List()), 1)
	}
	return out
}

// A total is held exactly, in as few parts as fit; those that exist are kept.
func TestParts(t *testing.T) {
	c := &cluster{}
	steps := []struct {
		name           string
		before         func()
		total          []string
		create, remove int
		want           string
	}{
		{"one part", nil, []string{"cpu", "1", "memory", "128Mi"}, 1, 0, "cpu 1, memory 128Mi"},
		{"repeated", nil, []string{"cpu", "1", "memory", "128Mi"}, 0, 0, "cpu 1, memory 128Mi"},
		{"grows", nil, []string{"cpu", "1300m", "memory", "128Mi"}, 1, 0, "cpu 1, memory 128Mi; cpu 300m"},
		{"grows by another resource", nil, []string{"cpu", "1300m", "memory", "128Mi", "nvidia.com/gpu", "3"}, 1, 0, "cpu 1, memory 128Mi; cpu 300m; nvidia.com/gpu 3"},
		{"shrinks", nil, []string{"cpu", "1200m", "memory", "128Mi"}, 1, 2, "cpu 1, memory 128Mi; cpu 200m"},
		{"the larger part is used", nil, []string{"cpu", "300m", "memory", "28Mi"}, 1, 1, "cpu 100m, memory 28Mi; cpu 200m"},
		{"a node is lost", func() { c.bind("lost") }, []string{"cpu", "300m", "memory", "28Mi"}, 1, 2, "cpu 300m, memory 28Mi"},
		{"released", nil, nil, 0, 1, ""},
		{"a larger one fits no node", func() { c.fits = fitsOf(4) }, []string{"cpu", "4", "memory", "8Gi"}, 4, 0, "cpu 1, memory 2Gi; cpu 1, memory 2Gi; cpu 1, memory 2Gi; cpu 1, memory 2Gi"},
		{"what is left of it", func() { c.fits = nil }, []string{"cpu", "2500m", "memory", "7Gi"}, 1, 2, "cpu 1, memory 2Gi; cpu 1, memory 2Gi; cpu 500m, memory 3Gi"},
		{"released once more", nil, nil, 0, 3, ""},
		{"odd devices", func() { c.fits = fitsOf(2) }, []string{"cpu", "4", "nvidia.com/gpu", "5"}, 2, 0, "cpu 2, nvidia.com/gpu 2; cpu 2, nvidia.com/gpu 3"},
		{"nothing of them", nil, nil, 0, 2, ""},
		{"fewer devices than parts", func() { c.fits = fitsOf(3) }, []string{"cpu", "6", "nvidia.com/gpu", "1"}, 3, 0, "cpu 2; cpu 2; cpu 2, nvidia.com/gpu 1"},
		{"what fits nowhere waits alone", func() { c.fits = fitsOf(1000) }, []string{"cpu", "7", "nvidia.com/gpu", "1"}, 1, 0, "cpu 1; cpu 2; cpu 2; cpu 2, nvidia.com/gpu 1"},
	}
	for _, s := range steps {
		if s.before != nil {
			s.before()
		}
		plan := c.apply(total("a", s.total...))
		if got := sizes(c.pods); len(plan.Create) != s.create || len(plan.Remove) != s.remove || got != s.want {
			t.Fatalf("%s: creates %d and removes %d, want %d and %d; holds %s, want %s", s.name, len(plan.Create), len(plan.Remove), s.create, s.remove, got, s.want)
		}
	}
}

// A part that guests are about to take is there until they have taken it: what they leave of it
// is held only then.
func TestPartThatLeaves(t *testing.T) {
	c := &cluster{}
	c.apply(total("a", "cpu", "1"))
	c.bind("n1")
	c.pods, c.leaving = nil, c.pods
	plan := c.apply(total("a", "cpu", "1300m"))
	if len(plan.Remove) > 0 || sizes(plan.Create) != "cpu 300m" {
		t.Errorf("beside the part that is taken: removes %s, creates %s", sizes(plan.Remove), sizes(plan.Create))
	}
	if state := plan.States["a"]; state.Pods != 2 || len(state.Missing) != 1 || state.Missing[0].Set.Count != 1 {
		t.Errorf("the part has a place, the new one has none yet: %+v", state)
	}
	c.leaving = nil
	if plan = c.apply(total("a", "cpu", "400m")); len(plan.Remove) > 0 || sizes(plan.Create) != "cpu 100m" {
		t.Errorf("a guest has left 100m of it: removes %s, creates %s", sizes(plan.Remove), sizes(plan.Create))
	}
	c.leaving = c.pods
	c.pods = nil
	if plan = c.apply(total("a", "cpu", "100m")); len(plan.Create)+len(plan.Remove) > 0 {
		t.Errorf("more is taken than the total still has: creates %s, removes %s", sizes(plan.Create), sizes(plan.Remove))
	}
}

// Of what is too much, a part in the way of a guest is removed first, then one without a place.
func TestPartsThatAreRemovedFirst(t *testing.T) {
	c := &cluster{fits: fitsOf(3)}
	c.apply(total("a", "cpu", "3"))
	pods := c.pods
	c.bind("n1", pods[0].Name)
	c.bind("n2", pods[1].Name)
	for _, tc := range []struct {
		cpu      string
		expected map[string]int
		keep     int
	}{{"2", nil, 2}, {"1", map[string]int{"n1": 1}, 1}, {"1", map[string]int{"n2": 1}, 0}} {
		plan := placeholder.Make(placeholder.Input{Holds: []placeholder.Hold{total("a", "cpu", tc.cpu)}, Pods: pods, Expected: tc.expected, Usable: func(string) bool { return true }, Options: options})
		removed := func(i int) bool { return slices.Contains(plan.Remove, pods[i]) }
		if tc.keep == 2 && (removed(0) || removed(1) || !removed(2)) || tc.keep < 2 && (removed(tc.keep) || len(plan.Remove) != 2) {
			t.Errorf("%+v: removes %d: %t, %t, %t", tc, len(plan.Remove), removed(0), removed(1), removed(2))
		}
	}
}

// Only what has no place is lost.
func TestLossOfAPart(t *testing.T) {
	c := &cluster{}
	hold := total("a", "cpu", "1", "memory", "128Mi")
	c.apply(hold)
	c.bind("n1")
	hold = total("a", "cpu", "1300m", "memory", "128Mi")
	state := c.state(hold)
	if deadlines := (placeholder.Deadlines{Settle: time.Second, Timeout: time.Minute}); state.Judge(0, deadlines) != placeholder.Waiting || state.Judge(time.Minute, deadlines) != placeholder.Refused {
		t.Errorf("proven without a place for all: %+v", state)
	}
	if left := state.Without(hold.Unused); left.Totals.String() != "cpu 1, memory 128Mi" {
		t.Errorf("what remains is %s", left.Totals)
	}
}

// A part counts as what it was made for, also if admission makes it request more.
func TestPartThatAdmissionChanges(t *testing.T) {
	c := &cluster{}
	hold := total("a", "cpu", "10m", "nvidia.com/gpu", "1")
	c.apply(hold)
	for name, amount := range map[corev1.ResourceName]string{corev1.ResourceCPU: "50m", corev1.ResourceMemory: "52Mi"} {
		c.pods[0].Spec.Containers[0].Resources.Requests[name] = resource.MustParse(amount)
	}
	if plan := c.apply(hold); len(plan.Create)+len(plan.Remove) > 0 {
		t.Errorf("creates %s, removes %s", sizes(plan.Create), sizes(plan.Remove))
	}
}

// A placeholder for a pod is no part of a total.
func TestPlaceholderThatIsNoPart(t *testing.T) {
	c := &cluster{}
	inZone := set(1, "cpu", "1")
	inZone.NodeSelector = map[string]string{"zone": "a"}
	c.apply(held("a", inZone))
	if plan := c.apply(total("a", "cpu", "1")); len(plan.Remove) != 1 || sizes(plan.Create) != "cpu 1" {
		t.Errorf("of what was no part: removes %s, creates %s", sizes(plan.Remove), sizes(plan.Create))
	}
}

// Guests that use a little each leave many small parts: they are replaced by larger ones.
func TestManyParts(t *testing.T) {
	c := &cluster{}
	most := 0
	for cpu := range 300 {
		hold := total("a", "cpu", fmt.Sprintf("%dm", 100+cpu))
		c.apply(hold)
		c.bind("n1")
		most = max(most, len(c.pods))
	}
	if most > 64 || sum(c.pods)[corev1.ResourceCPU] != 399 {
		t.Errorf("up to %d placeholders, at last of %v", most, sum(c.pods))
	}
}

// Whatever happens, the parts of totals request together what is unused of them; a plan that is
// repeated changes nothing; growth removes nothing; a guest that takes parts changes
// no others, and there is never more than the total.
func TestPartsProperties(t *testing.T) {
	amounts := func(t *rapid.T, largest capacity.Vector) capacity.Vector {
		out := capacity.Vector{}
		for _, name := range slices.Sorted(maps.Keys(largest)) {
			unit := placeholder.Unit(name)
			if n := rapid.Int64Range(0, largest[name]/unit).Draw(t, string(name)); n > 0 {
				out[name] = n * unit
			}
		}
		return out
	}
	hold := func(uid string, unused capacity.Vector) placeholder.Hold {
		h := total(uid)
		h.Unused.Totals = broker.FromList(unused.List())
		return h
	}
	largest := capacity.Ceil(expect.Resources("cpu", "8", "memory", "16Gi", "nvidia.com/gpu", "7", "example.com/fpga", "2"))
	rapid.Check(t, func(t *rapid.T) {
		c := &cluster{}
		if n := rapid.Int32Range(0, 9).Draw(t, "fits from"); n > 0 {
			c.fits = fitsOf(n)
		}
		check := func(unused capacity.Vector) {
			t.Helper()
			if got := sum(c.pods); !maps.Equal(got, unused) {
				t.Fatalf("holds %v (%s) of %v", got, sizes(c.pods), unused)
			}
			if len(c.pods) > 64 {
				t.Fatalf("%d placeholders", len(c.pods))
			}
			if plan := c.apply(hold("a", unused)); len(plan.Create)+len(plan.Remove) > 0 {
				t.Fatalf("repeated, it creates %s and removes %s", sizes(plan.Create), sizes(plan.Remove))
			}
			names := map[string]bool{}
			for _, pod := range c.pods {
				names[pod.Name] = true
			}
			if len(names) != len(c.pods) {
				t.Fatalf("%d names of %d placeholders", len(names), len(c.pods))
			}
		}
		unused := capacity.Vector{}
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			for _, pod := range c.pods {
				if pod.Spec.NodeName == "" && rapid.Bool().Draw(t, "bound") {
					pod.Spec.NodeName = rapid.SampledFrom([]string{"n1", "n2"}).Draw(t, "node")
				}
			}
			switch rapid.SampledFrom([]string{"changes", "grows", "loses", "guest"}).Draw(t, "step") {
			case "changes":
				unused = amounts(t, largest)
				c.apply(hold("a", unused))
			case "grows":
				unused.Add(amounts(t, largest), 1)
				few := len(c.pods) < 32
				if plan := c.apply(hold("a", unused)); few && len(plan.Remove) > 0 {
					t.Fatalf("growth removes %s", sizes(plan.Remove))
				}
			case "loses":
				for _, pod := range c.pods {
					if rapid.Bool().Draw(t, "lost") {
						pod.Spec.NodeName = "lost"
					}
				}
				c.apply(hold("a", unused))
			case "guest":
				pods := c.pods
				c.pods, c.leaving = nil, nil
				for _, pod := range pods {
					if rapid.IntRange(0, 3).Draw(t, "taken") == 0 {
						c.leaving = append(c.leaving, pod)
					} else {
						c.pods = append(c.pods, pod)
					}
				}
				if plan := c.apply(hold("a", unused)); len(plan.Create)+len(plan.Remove) > 0 {
					t.Fatalf("while %s are taken, it creates %s and removes %s", sizes(c.leaving), sizes(plan.Create), sizes(plan.Remove))
				}
				left := unused.Minus(amounts(t, sum(c.leaving)), 1)
				maps.DeleteFunc(left, func(_ corev1.ResourceName, amount int64) bool { return amount == 0 })
				unused, c.leaving = left, nil
				few := len(c.pods) < 32
				if plan := c.apply(hold("a", unused)); few && len(plan.Remove) > 0 || c.fits == nil && few && len(plan.Create) > 1 {
					t.Fatalf("a guest makes it create %s and remove %s", sizes(plan.Create), sizes(plan.Remove))
				}
			}
			check(unused)
		}
		if c.apply(); len(c.pods) > 0 {
			t.Fatalf("%d placeholders after the release", len(c.pods))
		}
	})
}

// A part that does not say what it holds is replaced once: it has the key of the part that takes
// its place.
func TestPartThatSaysNothing(t *testing.T) {
	c := &cluster{}
	hold := total("a", "cpu", "4")
	c.apply(hold)
	delete(c.pods[0].Annotations, placeholder.AnnotationPart)
	c.pods[0].Spec.Containers[0].Resources.Requests[corev1.ResourceMemory] = resource.MustParse("52Mi")
	if plan := c.apply(hold); len(plan.Remove) != 1 || sizes(plan.Create) != "cpu 4" {
		t.Fatalf("removes %s, creates %s", sizes(plan.Remove), sizes(plan.Create))
	}
	if plan := c.apply(hold); len(plan.Create)+len(plan.Remove) > 0 {
		t.Errorf("once more: removes %s, creates %s", sizes(plan.Remove), sizes(plan.Create))
	}
}

// nodesOf says that parts fit nodes with so much CPU each, largest first.
func nodesOf(n int, cpu int64) func([]broker.PodSet) bool {
	return func(sets []broker.PodSet) bool {
		free := slices.Repeat([]int64{cpu}, n)
		for _, set := range capacity.Decreasing(sets) {
			for range set.Count {
				at := slices.IndexFunc(free, func(free int64) bool { return free >= set.Requests.CPU.MilliValue() })
				if at < 0 {
					return false
				}
				free[at] -= set.Requests.CPU.MilliValue()
			}
		}
		return true
	}
}

// A total may be all that equal nodes have.
func TestPartsFillNodes(t *testing.T) {
	for n := 1; n <= 64; n *= 2 {
		c := &cluster{fits: nodesOf(n, 4000)}
		if c.apply(total("a", "cpu", fmt.Sprint(4*n))); len(c.pods) != n {
			t.Errorf("%d nodes are filled by %d parts", n, len(c.pods))
		}
	}
}

// The parts of another total have their places.
func TestPartsBesideOthers(t *testing.T) {
	c := &cluster{fits: nodesOf(1, 8000)}
	first := total("a", "cpu", "8")
	c.apply(first)
	nodes := nodesOf(2, 4000)
	// One node of 8 CPUs, and two of 4.
	c.fits = func(sets []broker.PodSet) bool {
		var rest []broker.PodSet
		large := false
		for _, set := range sets {
			if !large && set.Requests.CPU.Value() == 8 {
				large = true
				set.Count--
			}
			rest = append(rest, set)
		}
		return large && nodes(rest)
	}
	if plan := c.apply(first, total("b", "cpu", "8")); len(plan.Remove) > 0 || sizes(plan.Create) != "cpu 4; cpu 4" {
		t.Errorf("removes %s, creates %s", sizes(plan.Remove), sizes(plan.Create))
	}
}

// Huge pages are not divided.
func TestPartsOfHugePages(t *testing.T) {
	c := &cluster{fits: fitsOf(3)}
	c.apply(total("a", "cpu", "3", "hugepages-2Mi", "1Gi"))
	for _, pod := range c.pods {
		pages := pod.Spec.Containers[0].Resources.Requests["hugepages-2Mi"]
		if pages.Value()%(2<<20) != 0 {
			t.Errorf("a part of %s", pages.String())
		}
	}
	if len(c.pods) != 3 || sum(c.pods)["hugepages-2Mi"] != 1000<<30 {
		t.Errorf("%d parts of %v", len(c.pods), sum(c.pods))
	}
}
