package inventory_test

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTrackerEqualsRecount: after any changes, a Tracker gives what counting all
// objects again does.
func TestTrackerEqualsRecount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tracker := inventory.NewTracker(recognizer)
		nodes, pods, namespaces := map[string]*corev1.Node{}, map[types.NamespacedName]*corev1.Pod{}, map[string]map[string]string{}
		compare := func() {
			same(t, tracker, &inventory.Cluster{Nodes: sortedByName(nodes), Pods: sortedByName(pods), NamespaceLabels: namespaces, Recognizer: recognizer})
		}
		for range rapid.IntRange(1, 40).Draw(t, "changes") {
			if rapid.IntRange(0, 3).Draw(t, "compared meanwhile") == 0 {
				compare()
			}
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			switch rapid.IntRange(0, 9).Draw(t, "change") {
			case 0:
				tracker.Delete(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
				delete(nodes, name)
			case 1, 2:
				n := node(name, expect.Resources("cpu", rapid.SampledFrom([]string{"0", "2", "4"}).Draw(t, "cpu"), "memory", "4Gi"))
				if rapid.Bool().Draw(t, "cordoned") {
					cordoned(n)
				}
				if rapid.Bool().Draw(t, "not ready") {
					notReady(n)
				}
				if rapid.Bool().Draw(t, "tainted") {
					tainted("gpu", corev1.TaintEffectNoSchedule)(n)
				}
				n.Labels["pool"] = rapid.SampledFrom([]string{"x", "y"}).Draw(t, "pool")
				nodes[name] = n
				tracker.Set(n)
			case 3:
				namespace := rapid.SampledFrom([]string{"guests-of-rome", "home"}).Draw(t, "namespace")
				labels := map[string]string{"consumer": rapid.SampledFrom([]string{"", "rome", "berlin"}).Draw(t, "consumer")}
				namespaces[namespace] = labels
				tracker.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: labels}})
			case 4, 5:
				key := types.NamespacedName{Namespace: rapid.SampledFrom([]string{"guests-of-rome", "home", "holds"}).Draw(t, "of"), Name: name}
				tracker.Delete(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: name}})
				delete(pods, key)
			default:
				p := pod(rapid.SampledFrom([]string{"", "a", "b", "x"}).Draw(t, "on"), expect.Resources("cpu", rapid.SampledFrom([]string{"0", "300m", "1"}).Draw(t, "request")))
				p.Name, p.Namespace = name, rapid.SampledFrom([]string{"guests-of-rome", "home", "holds"}).Draw(t, "in")
				p.Status.Phase = rapid.SampledFrom([]corev1.PodPhase{corev1.PodRunning, corev1.PodRunning, corev1.PodSucceeded}).Draw(t, "phase")
				p.Spec.Priority = ptr.To(rapid.Int32Range(-1, 1).Draw(t, "priority"))
				pods[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}] = p
				tracker.Set(p)
			}
		}
		compare()
	})
}

func sortedByName[K comparable, O metav1.Object](objects map[K]O) []O {
	var out []O
	for _, o := range objects {
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b O) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	})
	return out
}

func same(t *rapid.T, tracker *inventory.Tracker, cluster *inventory.Cluster) {
	t.Helper()
	headroom := expect.Resources("cpu", "500m")
	compare := func(what string, got, want any) {
		if !equality.Semantic.DeepEqual(got, want) {
			t.Fatalf("%s: the Tracker has\n%+v\nwant\n%+v", what, got, want)
		}
	}
	terms := inventory.Terms{ClusterID: "paris", Headroom: headroom}
	compare("advertisement", tracker.Measure(terms, time.Unix(1, 0), 1), inventory.Measure(cluster, terms, time.Unix(1, 0), 1))
	compare("guests", tracker.Guests(), cluster.Guests())
	compare("pending", tracker.Pending(0), cluster.Pending(0))
	compare("places", tracker.Places("rome"), cluster.Places("rome"))
	describe := func(slots []capacity.Slot) (out []string) {
		for _, s := range slots {
			out = append(out, fmt.Sprint(s.Class.Name, s.Node, s.Free, s.Pods))
		}
		return out
	}
	compare("slots", describe(tracker.Slots(headroom)), describe(cluster.Slots(headroom)))
}

// TestRequestsOfNothing: an amount of zero is the same as none.
func TestRequestsOfNothing(t *testing.T) {
	got := inventory.Requests(pod("a", expect.Resources("cpu", "500m", "memory", "0", "nvidia.com/gpu", "0m")))
	if cpu := got.Cpu(); len(got) != 1 || cpu.String() != "500m" {
		t.Errorf("got %v", got)
	}
}

// TestResize: a pod that is being resized uses the larger of what it has and what it
// requests.
func TestResize(t *testing.T) {
	container := func(allocated, actual string) podOption {
		return func(p *corev1.Pod) {
			p.Spec.Containers[0].Name = "c"
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{
				Name: "c", AllocatedResources: expect.Resources("cpu", allocated), Resources: &corev1.ResourceRequirements{Requests: expect.Resources("cpu", actual)},
			}}
		}
	}
	// As kubelets of 1.36 and later report of every pod.
	ofPod := func(allocated, actual string) podOption {
		return func(p *corev1.Pod) {
			p.Status.AllocatedResources = expect.Resources("cpu", allocated)
			p.Status.Resources = &corev1.ResourceRequirements{Requests: expect.Resources("cpu", actual), Limits: expect.Resources("cpu", "8")}
		}
	}
	requestsOfPod := func(p *corev1.Pod) {
		p.Spec.Resources = &corev1.ResourceRequirements{Requests: p.Spec.Containers[0].Resources.Requests}
		p.Spec.Containers[0].Resources.Requests = nil
	}
	infeasible := func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodResizePending, Status: corev1.ConditionTrue, Reason: corev1.PodReasonInfeasible}}
	}
	for name, tc := range map[string]struct {
		requests string
		status   []podOption
		want     string
		kept     bool // what the kubelet reports of the pod as a whole
	}{
		"while a container has more":           {"500m", []podOption{container("1", "1500m")}, "cpu 1500m", false},
		"of a container, refused":              {"1000", []podOption{container("500m", "500m"), infeasible}, "cpu 500m", false},
		"while the pod has more":               {"500m", []podOption{requestsOfPod, ofPod("1", "1500m")}, "cpu 1500m", true},
		"of the pod, refused":                  {"1000", []podOption{requestsOfPod, ofPod("500m", "500m"), infeasible}, "cpu 500m", true},
		"while the sum of the containers does": {"500m", []podOption{container("1", "1500m"), ofPod("1", "1500m")}, "cpu 1500m", false},
		"none, as far as a cgroup says":        {"500m", []podOption{container("500m", "500m"), ofPod("500m", "488m")}, "cpu 500m", false},
	} {
		object, err := inventory.TrimPod(pod("a", expect.Resources("cpu", tc.requests), tc.status...))
		expect.NoError(t, err)
		trimmed := object.(*corev1.Pod)
		if got := measure([]*corev1.Node{node("a", two)}, []*corev1.Pod{trimmed}, nil).Resources.Allocated.String(); got != tc.want {
			t.Errorf("a resize %s: allocated is %s, want %s", name, got, tc.want)
		}
		if kept := trimmed.Status.Resources != nil && trimmed.Status.AllocatedResources != nil; kept != tc.kept {
			t.Errorf("a resize %s: the resources of the pod are kept: %t, want %t", name, kept, tc.kept)
		}
	}
}

// TestPlaceChanged: who is called about a place sees it, and nothing is reported that
// concerns none.
func TestPlaceChanged(t *testing.T) {
	tracker := inventory.NewTracker(recognizer)
	tracker.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "guests-of-rome", Labels: map[string]string{"consumer": "rome"}}})
	var seen []string
	tracker.PlaceChanged = func(consumer string) {
		places := tracker.Places(consumer)
		for _, pod := range append(places.Guests, places.Placeholders...) {
			seen = append(seen, fmt.Sprintf("%s on %q %v", pod.Name, pod.Spec.NodeName, pod.Status.Conditions))
		}
		if len(seen) == 0 {
			seen = append(seen, "none of "+consumer)
		}
	}
	for _, namespace := range []string{"guests-of-rome", "holds"} {
		p := pod("", expect.Resources("cpu", "1"))
		p.Name, p.Namespace, p.Labels = "p", namespace, map[string]string{"consumer": "rome"}
		for _, step := range []struct {
			what   string
			change func(*corev1.Pod)
			want   string
		}{
			{"created", func(*corev1.Pod) {}, `[p on "" []]`},
			{"annotated", func(p *corev1.Pod) { p.Annotations = map[string]string{"a": "b"} }, "[]"},
			{"bound", func(p *corev1.Pod) { p.Spec.NodeName = "a" }, `[p on "a" []]`},
			{"running", func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning }, "[]"},
			{"deleted", nil, "[none of rome]"},
		} {
			seen = nil
			if step.change == nil {
				tracker.Delete(p)
			} else {
				p = p.DeepCopy()
				step.change(p)
				tracker.Set(p)
			}
			if got := fmt.Sprint(seen); got != step.want {
				t.Errorf("%s in %s: seen %s, want %s", step.what, namespace, got, step.want)
			}
		}
	}
	seen = nil
	local := pod("a", expect.Resources("cpu", "1"))
	tracker.Set(local)
	tracker.Delete(local)
	if len(seen) > 0 {
		t.Errorf("a pod of this cluster: seen %v", seen)
	}
}
