package hold_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestPriorityOfGuests: pending local pods of a lower priority than guests take nothing, those
// of the same only what is not promised yet, and only those of a higher one its place.
func TestPriorityOfGuests(t *testing.T) {
	e := startWith(t, controlplane.Start(t), func(o *hold.Options) { o.Priority = 1000 })
	expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "home"}}))
	expect.NoError(t, e.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "home"}}))
	for name, value := range map[string]int32{"low": 999, "ordinary": 1000, "important": 1001} {
		expect.NoError(t, e.Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}))
	}
	pending := func(class, cpu string) {
		t.Helper()
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: class, Namespace: "home"}, Spec: corev1.PodSpec{
			PriorityClassName: class, Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}},
		}}
		expect.NoError(t, e.Create(t.Context(), pod))
		expect.Eventually(t, "the pod in the agent's cache", func() (bool, string) {
			return e.cached.Get(t.Context(), client.ObjectKeyFromObject(pod), &corev1.Pod{}) == nil, ""
		})
	}
	e.node("a", expect.Resources("cpu", "3500m", "memory", "8Gi")) // 500m are the headroom
	pending("low", "1")
	e.hold("r1", "rome", 1, pods(set("pods", 3, expect.Resources("cpu", "1"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", 3)
	pending("ordinary", "1")
	pending("important", "2")
	e.lowered("r1", 1, 1, "1 of 3 pods")
}
