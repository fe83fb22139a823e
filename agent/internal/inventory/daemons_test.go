package inventory_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// ofDaemonSet makes a pod one of a DaemonSet.
func ofDaemonSet(name string) podOption {
	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: name, UID: types.UID(name), Controller: ptr.To(true)}}
	}
}

// daemonSet runs a pod on each node that requests CPU, and has replaced those of other templates.
func daemonSet(name, cpu string, change ...func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
	set := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "home", Name: name, UID: types.UID(name), Generation: 1},
		Status:     appsv1.DaemonSetStatus{ObservedGeneration: 1, DesiredNumberScheduled: 2, UpdatedNumberScheduled: 2},
	}
	set.Spec.Template.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}}
	for _, change := range change {
		change(set)
	}
	return set
}

// anyDaemonSet is another version of a DaemonSet, nil if there is none yet.
func anyDaemonSet(t *rapid.T, name string, before *appsv1.DaemonSet) *appsv1.DaemonSet {
	set := daemonSet(name, rapid.SampledFrom([]string{"0", "200m", "1"}).Draw(t, "daemon's request"))
	if before != nil {
		set.Generation = before.Generation + 1
	}
	set.Status.ObservedGeneration = set.Generation
	set.Status.UpdatedNumberScheduled = rapid.Int32Range(1, 2).Draw(t, "updated")
	if rapid.Bool().Draw(t, "tolerates") {
		set.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}
	if rapid.Bool().Draw(t, "selects") {
		set.Spec.Template.Spec.NodeSelector = map[string]string{"pool": "x"}
	}
	if before != nil && rapid.Bool().Draw(t, "only the status") {
		status := set.Status
		set = before.DeepCopy()
		set.Status.UpdatedNumberScheduled = status.UpdatedNumberScheduled
	}
	return set
}

// What pods of DaemonSets will use is not free: they come to each node for which they are.
func TestDaemonSetsPodsToCome(t *testing.T) {
	selecting := func(pool string) func(*appsv1.DaemonSet) {
		return func(s *appsv1.DaemonSet) { s.Spec.Template.Spec.NodeSelector = map[string]string{"pool": pool} }
	}
	tolerating := func(s *appsv1.DaemonSet) {
		s.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	}
	updating := func(s *appsv1.DaemonSet) { s.Status.UpdatedNumberScheduled = 1 }
	on := func(node, cpu string, options ...podOption) *corev1.Pod {
		return pod(node, expect.Resources("cpu", cpu), append(options, ofDaemonSet("d"))...)
	}
	// Node b has a taint, and is in another pool.
	for name, c := range map[string]struct {
		set  *appsv1.DaemonSet
		pod  *corev1.Pod
		a, b int64
	}{
		"none":                     {a: 2, b: 2},
		"a new one":                {set: daemonSet("d", "1"), a: 1, b: 2},
		"that tolerates the taint": {set: daemonSet("d", "1", tolerating), a: 1, b: 1},
		"of another pool":          {set: daemonSet("d", "1", selecting("y")), a: 2, b: 2},
		"of this pool":             {set: daemonSet("d", "1", selecting("x")), a: 1, b: 2},
		"for a node by its name":   {set: daemonSet("d", "1", tolerating, func(s *appsv1.DaemonSet) { s.Spec.Template.Spec.NodeName = "b" }), a: 2, b: 1},
		"that is being deleted":    {set: daemonSet("d", "1", func(s *appsv1.DaemonSet) { s.DeletionTimestamp = ptr.To(metav1.Now()) }), a: 2, b: 2},
		"limited only": {set: daemonSet("d", "0", func(s *appsv1.DaemonSet) {
			s.Spec.Template.Spec.Containers[0].Resources = corev1.ResourceRequirements{Limits: expect.Resources("cpu", "1")}
		}), a: 1, b: 2},
		"its pod runs":                {set: daemonSet("d", "1"), pod: on("a", "1"), a: 1, b: 2},
		"its pod waits":               {set: daemonSet("d", "1"), pod: on("", "1", forNode("a")), a: 1, b: 2},
		"its pod has failed":          {set: daemonSet("d", "1"), pod: on("a", "1", phase(corev1.PodFailed)), a: 1, b: 2},
		"the pod of another one runs": {set: daemonSet("d", "1"), pod: pod("a", expect.Resources("cpu", "1"), ofDaemonSet("e")), a: 0, b: 2},
		"admitted with less":          {set: daemonSet("d", "2"), pod: on("a", "1"), a: 1, b: 2},
		"about to request more":       {set: daemonSet("d", "2", updating), pod: on("a", "1"), a: 0, b: 2},
		"about to request less":       {set: daemonSet("d", "1", updating), pod: on("a", "2"), a: 0, b: 2},
		"replaced by hand":            {set: daemonSet("d", "2", updating, func(s *appsv1.DaemonSet) { s.Spec.UpdateStrategy.Type = appsv1.OnDeleteDaemonSetStrategyType }), pod: on("a", "1"), a: 1, b: 2},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := []*corev1.Node{node("a", two, labelled("pool", "x")), node("b", two, labelled("pool", "y"), tainted("gpu", corev1.TaintEffectNoSchedule))}
			var pods []*corev1.Pod
			if c.pod != nil {
				pods = append(pods, c.pod)
			}
			var sets []*appsv1.DaemonSet
			if c.set != nil {
				object, err := inventory.TrimDaemonSet(c.set)
				expect.NoError(t, err)
				sets = append(sets, object.(*appsv1.DaemonSet))
			}
			if cpu, _ := free(t, nodes, pods, sets...); cpu["a"] != c.a || cpu["b"] != c.b {
				t.Errorf("free: %v, want a %d, b %d", cpu, c.a, c.b)
			}
		})
	}
}

// Each change is seen, although what DaemonSets will use of a node is computed only after it.
func TestDaemonSetsPodsToComeChange(t *testing.T) {
	tracker := inventory.NewTracker(recognizer)
	inPool := func(pool string, options ...nodeOption) *corev1.Node {
		return node("a", two, append(options, labelled("pool", pool))...)
	}
	set := func(change ...func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
		return daemonSet("d", "1", append(change, func(s *appsv1.DaemonSet) { s.Spec.Template.Spec.NodeSelector = map[string]string{"pool": "x"} })...)
	}
	running := pod("a", expect.Resources("cpu", "500m"), ofDaemonSet("d"))
	for _, step := range []struct {
		what   string
		change func()
		want   int64
	}{
		{"a node", func() { tracker.Set(inPool("x")) }, 2000},
		{"a DaemonSet", func() { tracker.Set(set()) }, 1000},
		{"the node in another pool", func() { tracker.Set(inPool("y")) }, 2000},
		{"the node back in the pool", func() { tracker.Set(inPool("x")) }, 1000},
		{"a taint", func() { tracker.Set(inPool("x", tainted("gpu", corev1.TaintEffectNoSchedule))) }, 2000},
		{"no taint", func() { tracker.Set(inPool("x")) }, 1000},
		{"its pod, admitted with less", func() { tracker.Set(running) }, 1500},
		{"an update of the DaemonSet", func() { tracker.Set(set(func(s *appsv1.DaemonSet) { s.Status.UpdatedNumberScheduled = 1 })) }, 1000},
		{"the end of the update", func() { tracker.Set(set()) }, 1500},
		{"no pod", func() { tracker.Delete(running) }, 1000},
		{"another template", func() {
			tracker.Set(set(func(s *appsv1.DaemonSet) {
				s.Generation, s.Status.ObservedGeneration = 2, 2
				s.Spec.Template.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", "2")
			}))
		}, 0},
		{"no DaemonSet", func() { tracker.Delete(set()) }, 2000},
	} {
		step.change()
		if free := tracker.Slots(nil)[0].Free["cpu"]; free != step.want {
			t.Errorf("after %s, %d is free, want %d", step.what, free, step.want)
		}
	}
}
