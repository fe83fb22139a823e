package inventory_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// forNode makes a pod one that a DaemonSet made for a node.
func forNode(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{name}}}}},
		}}}
	}
}

// free is the CPU that nodes a and b have free, as a Tracker and a Cluster see it, and how
// many pods of the cluster wait for a node.
func free(t *testing.T, nodes []*corev1.Node, pods []*corev1.Pod) (cpu map[string]int64, waiting int) {
	t.Helper()
	tracker := inventory.NewTracker(recognizer)
	cluster := &inventory.Cluster{Nodes: nodes, Pods: pods, Recognizer: recognizer}
	for _, n := range nodes {
		tracker.Set(n)
	}
	for _, p := range pods {
		tracker.Set(p)
	}
	cpu = map[string]int64{}
	for _, slot := range tracker.Slots(nil) {
		cpu[slot.Node] = slot.Free["cpu"] / 1000
	}
	for _, slot := range cluster.Slots(nil) {
		if slot.Free["cpu"]/1000 != cpu[slot.Node] {
			t.Errorf("node %s: the Cluster has %d free, the Tracker %d", slot.Node, slot.Free["cpu"]/1000, cpu[slot.Node])
		}
	}
	if n := len(cluster.Pending(0)); n != len(tracker.Pending(0)) {
		t.Errorf("%d pods are pending in the Cluster, %d in the Tracker", n, len(tracker.Pending(0)))
	}
	return cpu, len(tracker.Pending(0))
}

// What the provider's scheduler will see when a guest comes, before it is granted.
func TestPodsThatTakeNodes(t *testing.T) {
	for name, c := range map[string]struct {
		pod     *corev1.Pod
		a, b    int64
		waiting int
	}{
		"none":                                 {a: 2, b: 2},
		"a pod that waits":                     {pod: pod("", expect.Resources("cpu", "1")), a: 2, b: 2, waiting: 1},
		"a DaemonSet's pod on its node":        {pod: pod("a", expect.Resources("cpu", "1")), a: 1, b: 2},
		"a DaemonSet's pod before it is bound": {pod: pod("", expect.Resources("cpu", "1"), forNode("a")), a: 1, b: 2},
		"for a node that does not exist":       {pod: pod("", expect.Resources("cpu", "1"), forNode("c")), a: 2, b: 2},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := []*corev1.Node{node("a", two), node("b", two)}
			var pods []*corev1.Pod
			if c.pod != nil {
				pods = append(pods, c.pod)
			}
			cpu, waiting := free(t, nodes, pods)
			if cpu["a"] != c.a || cpu["b"] != c.b || waiting != c.waiting {
				t.Errorf("free: %v, waiting: %d; want a %d, b %d, waiting %d", cpu, waiting, c.a, c.b, c.waiting)
			}
			// The advertisement offers no more than that.
			var offered int64
			for _, class := range inventory.Measure(&inventory.Cluster{Nodes: nodes, Pods: pods, Recognizer: recognizer}, inventory.Terms{ClusterID: "paris"}, time.Unix(1, 0), 1).NodeClasses {
				for _, shape := range class.FreeShapes {
					if shape.Free.CPU != nil {
						offered += int64(shape.Nodes) * shape.Free.CPU.Value()
					}
				}
			}
			if offered != c.a+c.b {
				t.Errorf("%d cores are offered, want %d", offered, c.a+c.b)
			}
		})
	}
}
