package scenarios_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestPodsWithoutGrantStayOut creates pods that must not overflow, while a Deployment beside
// them does.
func TestPodsWithoutGrantStayOut(t *testing.T) {
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "2", "memory", "4Gi")},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "4Gi")},
	})
	mine := s.optedIn("owner")
	s.namespaceIn(s.rome, "foreign", nil)
	all := []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	foreign := map[string]*corev1.Pod{}
	for what, change := range map[string]func(*corev1.PodSpec){
		"not opted in":        nil,
		"tolerates all":       func(spec *corev1.PodSpec) { spec.Tolerations = all },
		"names the scheduler": func(spec *corev1.PodSpec) { spec.Tolerations, spec.SchedulerName = all, broker.SchedulerName },
		"would evict guests": func(spec *corev1.PodSpec) {
			spec.Tolerations, spec.PriorityClassName = all, "system-cluster-critical"
			spec.NodeSelector = map[string]string{broker.LabelNodeType: broker.NodeTypeVirtual}
		},
	} {
		foreign[what] = s.createIn("foreign", fmt.Sprintf("foreign-%d", len(foreign)), "20m", change)
	}
	expectUnbound := func() {
		t.Helper()
		for what, p := range foreign {
			var now corev1.Pod
			expect.NoError(t, s.rome.Get(t.Context(), client.ObjectKeyFromObject(p), &now))
			if now.Spec.NodeName != "" {
				t.Errorf("pod %q is bound to %s, expected none", what, now.Spec.NodeName)
			}
			if tolerates := what != "not opted in" && now.Spec.SchedulerName != broker.SchedulerName; tolerates && (now.Spec.Affinity == nil || now.Spec.Affinity.NodeAffinity == nil) {
				t.Errorf("pod %q is not kept off virtual nodes: its scheduler would try to bind it there", what)
			}
		}
	}
	// The positive control overflows three times, while the foreign pods wait for any free slot.
	expect.NoError(t, s.rome.Create(t.Context(), deploymentOf(mine, "owner", 1, "300m", nil)))
	guests := map[string]types.UID{}
	for replicas := range 3 {
		s.scale(mine, "owner", int32(replicas+1))
		_, away := s.allReady(mine, "owner", replicas+1)
		if len(away) != replicas+1 {
			t.Fatalf("the control did not overflow: %d pods on virtual nodes", len(away))
		}
		now := map[string]types.UID{}
		for _, p := range away {
			now[p.Name] = p.UID
		}
		for name, uid := range guests {
			if now[name] != uid {
				t.Errorf("guest %s was replaced", name)
			}
		}
		guests = now
		expectUnbound()
	}
	// A slot of the virtual node is free for a moment.
	for _, replicas := range []int{1, 2} {
		s.scale(mine, "owner", int32(replicas))
		s.allReady(mine, "owner", replicas)
		expectUnbound()
	}
	var reservations broker.ReservationList
	if err := s.rome.List(t.Context(), &reservations, client.InNamespace("foreign")); err != nil || len(reservations.Items) > 0 {
		t.Errorf("%d Reservations were made for pods that did not opt in (%v)", len(reservations.Items), err)
	}
}

// TestBystanders lets pods overflow beside others that must not notice: pods that never opted
// in, and an administrator who cordons a virtual node.
func TestBystanders(t *testing.T) {
	s := begin(t, nodes{
		"rome":   {group("rome", 1, "cpu", "50m", "memory", "1Gi")},
		"paris":  {group("paris", 1, "cpu", "2", "memory", "4Gi")},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "4Gi")},
	})
	ns := s.optedIn("bystanders")
	overflow := func(name string) corev1.Pod {
		t.Helper()
		expect.NoError(t, s.rome.Create(t.Context(), deploymentOf(ns, name, 1, "300m", nil)))
		_, away := s.allReady(ns, name, 1)
		if len(away) != 1 {
			t.Fatalf("the pod of %s runs at home", name)
		}
		return away[0]
	}
	first := overflow("first")

	// Pods that never opted in spread over the hosts of home.
	s.namespaceIn(s.rome, "plain", nil)
	plain := deploymentOf("plain", "plain", 3, "10m", nil)
	plain.Spec.Template.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
		MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.DoNotSchedule, LabelSelector: plain.Spec.Selector,
	}}
	expect.NoError(t, s.rome.Create(t.Context(), plain))
	if home, _ := s.allReady("plain", "plain", 3); len(home) != 3 {
		t.Errorf("%d of 3 pods that never opted in run at home", len(home))
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: first.Spec.NodeName}}
	expect.NoError(t, s.rome.Get(t.Context(), client.ObjectKeyFromObject(node), node))
	for _, key := range []string{corev1.LabelHostname, corev1.LabelTopologyZone, corev1.LabelTopologyRegion} {
		if value, domain := node.Labels[key]; domain {
			t.Errorf("the virtual node has label %s=%s", key, value)
		}
	}

	s.cordon("rome", node.Name, true)
	if second := overflow("second"); second.Spec.NodeName == node.Name {
		t.Errorf("a pod was bound to cordoned node %s", node.Name)
	}
	if err := s.rome.Get(t.Context(), client.ObjectKeyFromObject(node), node); err != nil || !node.Spec.Unschedulable {
		t.Errorf("the cordon was undone: unschedulable %t, %v", node.Spec.Unschedulable, err)
	}
	if home, away := s.allReady(ns, "first", 1); len(home) > 0 || away[0].UID != first.UID {
		t.Error("the pod on the cordoned node does not run on")
	}
	s.cordon("rome", node.Name, false) // a cordoned node is kept
}
