package placeholder_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var options = placeholder.Options{Namespace: "holds", Image: "pause", Owner: metav1.OwnerReference{Kind: "Namespace", Name: "holds", UID: "n"}}

func set(count int32, pairs ...string) broker.PodSet {
	return broker.PodSet{Name: "pods", Count: count, Requests: broker.FromList(expect.Resources(pairs...))}
}

func held(uid string, sets ...broker.PodSet) placeholder.Hold {
	unused := capacity.OfPodSets(sets)
	return placeholder.Hold{UID: types.UID(uid), Name: uid, Consumer: "rome", Unused: unused}
}

func total(uid string, pairs ...string) placeholder.Hold {
	return placeholder.Hold{UID: types.UID(uid), Name: uid, Consumer: "rome", Unused: broker.HeldCapacity{Totals: broker.FromList(expect.Resources(pairs...))}}
}

// cluster applies plans.
type cluster struct {
	pods, leaving []*corev1.Pod
	fits          func([]broker.PodSet) bool
}

func (c *cluster) apply(holds ...placeholder.Hold) placeholder.Plan {
	plan := placeholder.Make(placeholder.Input{Holds: holds, Pods: c.pods, Leaving: c.leaving, Usable: func(node string) bool { return node != "lost" }, Fits: c.fits, Options: options})
	c.pods = slices.DeleteFunc(slices.Clone(c.pods), func(pod *corev1.Pod) bool { return slices.Contains(plan.Remove, pod) })
	c.pods = append(c.pods, plan.Create...)
	return plan
}

// state is that of a hold after the plan was applied.
func (c *cluster) state(hold placeholder.Hold) placeholder.State {
	return c.apply(hold).States[hold.UID]
}

func (c *cluster) bind(node string, names ...string) {
	for _, pod := range c.pods {
		if len(names) == 0 || slices.Contains(names, pod.Name) {
			pod.Spec.NodeName = node
		}
	}
}

func (c *cluster) refuse(message string) {
	for _, pod := range c.pods {
		if pod.Spec.NodeName == "" {
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message}}
		}
	}
}

func TestPlan(t *testing.T) {
	c := &cluster{}
	steps := []struct {
		name           string
		before         func()
		holds          []placeholder.Hold
		create, remove int
	}{
		{"new", nil, []placeholder.Hold{held("a", set(2, "cpu", "1"))}, 2, 0},
		{"repeated", nil, []placeholder.Hold{held("a", set(2, "cpu", "1"))}, 0, 0},
		{"grows", nil, []placeholder.Hold{held("a", set(3, "cpu", "1"))}, 1, 0},
		{"another hold", nil, []placeholder.Hold{held("a", set(3, "cpu", "1")), held("b", set(1, "cpu", "1"))}, 1, 0},
		{"another shape", nil, []placeholder.Hold{held("a", set(1, "cpu", "2")), held("b", set(1, "cpu", "1"))}, 1, 3},
		{"a node is lost", func() { c.bind("lost") }, []placeholder.Hold{held("a", set(1, "cpu", "2")), held("b", set(1, "cpu", "1"))}, 2, 2},
		{"shrinks", nil, []placeholder.Hold{held("a", set(0, "cpu", "2")), held("b", set(1, "cpu", "1"))}, 0, 1},
		{"released", nil, nil, 0, 1},
	}
	for _, s := range steps {
		if s.before != nil {
			s.before()
		}
		if plan := c.apply(s.holds...); len(plan.Create) != s.create || len(plan.Remove) != s.remove {
			t.Fatalf("%s: creates %d and removes %d, want %d and %d", s.name, len(plan.Create), len(plan.Remove), s.create, s.remove)
		}
	}
}

// A shrinking hold keeps the placeholders that have a place, but not one in the way of a
// guest.
func TestWhatIsRemovedFirst(t *testing.T) {
	c := &cluster{}
	c.apply(held("a", set(3, "cpu", "1")))
	names := []string{c.pods[0].Name, c.pods[1].Name, c.pods[2].Name}
	c.bind("n1", names[0])
	c.bind("n2", names[1])
	removed := func(count int32, expected map[string]int) (out []string) {
		for _, pod := range placeholder.Make(placeholder.Input{
			Holds: []placeholder.Hold{held("a", set(count, "cpu", "1"))}, Pods: c.pods, Expected: expected, Usable: func(string) bool { return true }, Options: options,
		}).Remove {
			out = append(out, pod.Name)
		}
		return out
	}
	if got := removed(2, nil); !slices.Equal(got, names[2:]) {
		t.Errorf("removed %v, want the one without a place", got)
	}
	if got := removed(2, map[string]int{"n1": 1}); !slices.Equal(got, names[:1]) {
		t.Errorf("removed %v, want the one on the node of the guest", got)
	}
}

func TestVerdict(t *testing.T) {
	deadlines := placeholder.Deadlines{Settle: 2 * time.Second, Timeout: 20 * time.Second}
	hold := held("a", set(3, "cpu", "500m"))
	c := &cluster{}
	c.apply(hold)
	c.bind("n1", c.pods[0].Name)
	state := c.state(hold)
	if v := state.Judge(19*time.Second, deadlines); v != placeholder.Waiting {
		t.Errorf("pending within the deadline: %v", v)
	}
	if v := state.Judge(20*time.Second, deadlines); v != placeholder.Refused || !strings.Contains(state.String(), "has not answered") {
		t.Errorf("pending after the deadline: %v, %s", v, state)
	}
	c.refuse("0/1 nodes are available: 1 Insufficient cpu.")
	state = c.state(hold)
	if v := state.Judge(time.Second, deadlines); v != placeholder.Waiting {
		t.Errorf("the scheduler may try again: %v", v)
	}
	if v := state.Judge(2*time.Second, deadlines); v != placeholder.Refused {
		t.Errorf("unschedulable: %v", v)
	}
	if got, want := state.String(), "The scheduler found a place for 1 of 3 pods of cpu 500m: 0/1 nodes are available: 1 Insufficient cpu."; got != want {
		t.Errorf("says %q, want %q", got, want)
	}
	if left := state.Without(hold.Unused); left.Pods() != 1 || left.Totals.String() != "cpu 500m" {
		t.Errorf("what remains is %+v", left)
	}
	c.bind("n1")
	if v := c.state(hold).Judge(0, deadlines); v != placeholder.Proven {
		t.Errorf("all bound: %v", v)
	}
}

// A placeholder does not tolerate or select more than the guests whose place it holds, and
// makes no autoscaler add a node.
func TestPod(t *testing.T) {
	s := set(1, "cpu", "1", "nvidia.com/gpu", "2")
	s.NodeSelector = map[string]string{"zone": "a"}
	s.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}, {Operator: corev1.TolerationOpExists}}
	pod := placeholder.Make(placeholder.Input{Holds: []placeholder.Hold{held("a", s)}, Options: options}).Create[0]
	gpus := pod.Spec.Containers[0].Resources.Limits["nvidia.com/gpu"]
	if gpus.String() != "2" || pod.Spec.NodeSelector["zone"] != "a" || len(pod.Spec.Tolerations) != 1 || pod.Spec.PriorityClassName != placeholder.PriorityClass {
		t.Errorf("unexpected spec: %+v", pod.Spec)
	}
	if pod.Spec.NodeSelector["zone"] = "b"; s.NodeSelector["zone"] != "a" {
		t.Error("the pod shares the node selector of its set")
	}
	if pod.Annotations["cluster-autoscaler.kubernetes.io/pod-scale-up-delay"] == "" || len(pod.OwnerReferences) != 1 {
		t.Errorf("unexpected metadata: %+v", pod.ObjectMeta)
	}
	if consumer, ok := placeholder.ConsumerOf(pod, "holds"); consumer != "rome" || !ok {
		t.Errorf("it is for %q, %t", consumer, ok)
	}
	if _, ok := placeholder.ConsumerOf(pod, "elsewhere"); ok {
		t.Error("a pod of another namespace is taken for a placeholder")
	}
}

// Whatever happens, after a plan there is one placeholder for each unused pod of a hold
// and no other, and another plan changes nothing.
func TestPlanProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &cluster{}
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			var holds []placeholder.Hold
			want := map[string]int{}
			for _, uid := range []string{"a", "b"} {
				var sets []broker.PodSet
				for _, cpu := range []string{"1", "2"} {
					if n := rapid.Int32Range(0, 3).Draw(t, "count"); n > 0 {
						sets = append(sets, set(n, "cpu", cpu))
						want[uid+"/"+cpu] = int(n)
					}
				}
				if len(sets) > 0 {
					holds = append(holds, held(uid, sets...))
				}
			}
			for _, pod := range c.pods {
				if pod.Spec.NodeName == "" {
					pod.Spec.NodeName = rapid.SampledFrom([]string{"", "n1", "n2"}).Draw(t, "node")
				} else if rapid.IntRange(0, 9).Draw(t, "fate") == 0 {
					pod.Spec.NodeName = "lost"
				}
			}
			c.apply(holds...)
			got, names := map[string]int{}, map[string]bool{}
			for _, pod := range c.pods {
				got[pod.Annotations[broker.LabelHold]+"/"+pod.Spec.Containers[0].Resources.Requests.Cpu().String()]++
				names[pod.Name] = true
			}
			if fmt.Sprint(got) != fmt.Sprint(want) || len(names) != len(c.pods) {
				t.Fatalf("placeholders %v, want %v", got, want)
			}
			if plan := c.apply(holds...); len(plan.Create)+len(plan.Remove) > 0 {
				t.Fatalf("repeated, it creates %d and removes %d", len(plan.Create), len(plan.Remove))
			}
		}
		if c.apply(); len(c.pods) > 0 {
			t.Fatalf("%d placeholders after the release", len(c.pods))
		}
	})
}

func TestWait(t *testing.T) {
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	state := func(missing, wanted, tried int32) placeholder.State {
		if missing == 0 {
			return placeholder.State{Pods: wanted}
		}
		return placeholder.State{Pods: wanted, Missing: []placeholder.Missing{{Set: broker.PodSet{Count: missing}, Wanted: wanted, Tried: tried}}}
	}
	wait := placeholder.NewWait()
	for _, step := range []struct {
		what                   string
		at                     time.Duration
		missing, wanted, tried int32
		later                  bool // an earlier hold waits
		want                   time.Duration
	}{
		{"it begins", 0, 400, 400, 0, false, 0},
		{"nothing happens", 10 * time.Second, 400, 400, 0, false, 10 * time.Second},
		{"a place is found", 15 * time.Second, 399, 400, 0, false, 0},
		{"one is lost", 20 * time.Second, 400, 400, 0, false, 5 * time.Second},
		{"and found, which is no progress", 25 * time.Second, 399, 400, 0, false, 10 * time.Second},
		{"an earlier hold waits", 40 * time.Second, 399, 400, 398, true, 0},
		{"and still waits", time.Minute, 399, 400, 398, true, 0},
		{"it is its turn", 65 * time.Second, 399, 400, 398, false, 5 * time.Second},
		{"the scheduler has tried all while an earlier one waits", 70 * time.Second, 399, 400, 399, true, 10 * time.Second},
		{"it grows", 80 * time.Second, 899, 900, 399, false, 0},
		{"a place is found for the growth", 90 * time.Second, 898, 900, 399, false, 0},
		{"all places are found", 100 * time.Second, 0, 900, 0, false, 0},
		{"it begins once more", 110 * time.Second, 900, 900, 0, false, 0},
	} {
		if got := wait.Observe(state(step.missing, step.wanted, step.tried), !step.later, start.Add(step.at)); got != step.want {
			t.Errorf("%s: waited %v, want %v", step.what, got, step.want)
		}
	}
}
