package charts_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestUpgradeOfPriority: the priority of guests and placeholders is that of the values. An
// upgrade to another one, which the API server would refuse, says what to do, and does it.
func TestUpgradeOfPriority(t *testing.T) {
	config := controlplane.Start(t)
	admin, access := as(t, config, ""), kubeconfig(t, config)
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("liqo")}))
	run := func(command string, values ...string) error {
		_, err := helm(t, append([]string{command, "spillway-agent", "agent", access, "--create-namespace"}, set(append(slices.Clone(needed), values...))...)...)
		return err
	}
	values := func(want int32) {
		t.Helper()
		for _, name := range []string{"spillway-guest", "spillway-hold"} {
			class := &schedulingv1.PriorityClass{}
			expect.NoError(t, admin.Get(t.Context(), client.ObjectKey{Name: name}, class))
			if class.Value != want || *class.PreemptionPolicy != corev1.PreemptNever {
				t.Errorf("PriorityClass %s has value %d and preempts: %s", name, class.Value, *class.PreemptionPolicy)
			}
		}
	}
	expect.NoError(t, run("install"))
	expect.NoError(t, run("upgrade"))
	values(0)
	if err := run("upgrade", "lend.priority=1000000"); err == nil || !strings.Contains(err.Error(), "which is immutable: run kubectl delete priorityclass spillway-guest spillway-hold") {
		t.Errorf("want a refusal that says what to do, got %v", err)
	}
	values(0)
	for _, name := range []string{"spillway-guest", "spillway-hold"} {
		expect.NoError(t, admin.Delete(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: named(name)}))
	}
	expect.NoError(t, run("upgrade", "lend.priority=1000000"))
	values(1000000)
	expect.NoError(t, run("upgrade", "lend.priority=1000000"))
	for _, value := range []string{"-1", "1.5", "2000000000"} {
		if _, err := template(t, "agent", append(slices.Clone(needed), "lend.priority="+value)); err == nil {
			t.Errorf("lend.priority=%s is accepted", value)
		}
	}
}
