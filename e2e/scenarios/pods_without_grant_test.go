//go:build e2e

package scenarios

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestPodsWithoutGrantStayOut creates pods that must not overflow, while a
// Deployment beside them does.
func TestPodsWithoutGrantStayOut(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	feature := features.New("pods without a grant").Assess("only pods with a grant are bound to the virtual node", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		mine := namespace(ctx, t, "scenario-owner", true)
		other := namespace(ctx, t, "scenario-foreign", false)
		fill(ctx, t, rome, rome.ControlPlane(), "1m")

		tolerateAll := []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		foreign := map[string]*corev1.Pod{
			"not opted in":                     {},
			"tolerates tolerateAll":            {Spec: corev1.PodSpec{Tolerations: tolerateAll}},
			"names spillway-scheduler as well": {Spec: corev1.PodSpec{Tolerations: tolerateAll, SchedulerName: broker.SchedulerName}},
			"would evict guests": {Spec: corev1.PodSpec{Tolerations: tolerateAll, PriorityClassName: "system-cluster-critical",
				NodeSelector: map[string]string{"type": "virtual-kubelet"}}},
		}
		i := 0
		for _, p := range foreign {
			spec := podSpec(requests("cpu", "20m", "memory", "4Mi"), "serve")
			spec.Tolerations, spec.SchedulerName = p.Spec.Tolerations, p.Spec.SchedulerName
			spec.PriorityClassName, spec.NodeSelector = p.Spec.PriorityClassName, p.Spec.NodeSelector
			*p = corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "foreign-" + string(rune('a'+i))}, Spec: spec}
			i++
			if err := rome.Create(ctx, p); err != nil {
				t.Fatal(err)
			}
		}
		expectUnbound := func() {
			t.Helper()
			for what, p := range foreign {
				var now corev1.Pod
				if err := rome.Get(ctx, client.ObjectKeyFromObject(p), &now); err != nil {
					t.Fatal(err)
				}
				if now.Spec.NodeName != "" {
					t.Errorf("pod %q is bound to %s, expected none", what, now.Spec.NodeName)
				}
				if tolerates := what != "not opted in" && now.Spec.SchedulerName != broker.SchedulerName; tolerates && (now.Spec.Affinity == nil || now.Spec.Affinity.NodeAffinity == nil) {
					t.Errorf("pod %q is not kept off virtual nodes: its scheduler would try to bind it there", what)
				}
			}
		}
		if err := rome.Create(ctx, deployment(mine, "owner", 1, requests("cpu", "300m", "memory", "32Mi"))); err != nil {
			t.Fatal(err)
		}
		// The positive control overflows three times, while the foreign pods wait
		// for any free slot.
		guests := map[string]types.UID{}
		for replicas := range int32(3) {
			scale(ctx, t, mine, "owner", replicas+1)
			if _, away := allReady(ctx, t, mine, "owner", int(replicas+1), 2*time.Minute); len(away) != int(replicas+1) {
				t.Fatalf("the control did not overflow: %d pods on virtual nodes", len(away))
			}
			all, err := podsOf(ctx, mine, "owner")
			if err != nil {
				t.Fatal(err)
			}
			now := map[string]types.UID{}
			for _, p := range all {
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
		scale(ctx, t, mine, "owner", 1)
		allReady(ctx, t, mine, "owner", 1, time.Minute)
		expectUnbound()
		scale(ctx, t, mine, "owner", 2)
		allReady(ctx, t, mine, "owner", 2, 2*time.Minute)
		expectUnbound()
		var reservations broker.ReservationList
		if err := rome.List(ctx, &reservations, client.InNamespace(other)); err != nil || len(reservations.Items) > 0 {
			t.Errorf("%d reservations were made for pods that did not opt in (%v)", len(reservations.Items), err)
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
