package overflow_test

import (
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestRolloutRestart: a Deployment that has overflowed is restarted, as kubectl does it,
// while Kubernetes' own controllers replace its pods. It has one Reservation throughout, which
// the pods of both ReplicaSets use.
func TestRolloutRestart(t *testing.T) {
	c := startTestCluster(t)
	controlplane.InstallCRDs(t, c.config)
	const ns = "shop"
	c.namespace(ns, optIn)
	virtual := c.virtualPoolNode(ns, "10")
	c.startScheduler()
	controlplane.StartControllers(t, c.config, "deployment-controller", "replicaset-controller")

	labels := map[string]string{"app": "web"}
	pod := schedulerPod(ns, "web", "1", inPool(ns), tolerating(ns))
	web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web"}, Spec: appsv1.DeploymentSpec{
		Replicas: ptr.To[int32](3), Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod.Spec},
	}}
	c.create(web)
	var only types.UID
	// expectRolledOut acts as the agent, which grants what is requested, and as the kubelet,
	// until the pods of the latest template are the only ones, and are available.
	expectRolledOut := func(what string) {
		t.Helper()
		expect.EventuallyWithin(t, 3*time.Minute, what, func() (bool, string) {
			var list broker.ReservationList
			expect.NoError(t, c.List(t.Context(), &list, client.InNamespace(ns)))
			for i := range list.Items {
				r := &list.Items[i]
				if only == "" {
					only = r.UID
				}
				if r.UID != only || r.DeletionTimestamp != nil {
					t.Fatalf("%s is another Reservation, or is being deleted", r.Name)
				}
				if n := r.Spec.PodSets[0].Count; len(r.Status.Allocations) == 0 || r.Status.Allocations[0].PodSets[0].Count != n {
					c.setStatus(r, grantedIn(r, ns, n))
				}
			}
			c.runPods(ns, "web")
			expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(web), web))
			s, pods := web.Status, c.pods(ns, "web")
			return s.ObservedGeneration == web.Generation && s.UpdatedReplicas == 3 && s.AvailableReplicas == 3 && s.Replicas == 3 && len(pods[virtual]) == 3 && len(pods) == 1,
				fmt.Sprintf("%d Reservations, %d pods there, %d pending, %+v", len(list.Items), len(pods[virtual]), len(pods[""]), s)
		})
	}
	expectRolledOut("the Deployment to run elsewhere")
	former := c.pods(ns, "web")[virtual]
	restart := client.RawPatch(types.StrategicMergePatchType, []byte(`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":"2026-01-01T00:00:00Z"}}}}}`))
	expect.NoError(t, c.Patch(t.Context(), web, restart))
	expectRolledOut("the restart to end")
	for _, pod := range c.pods(ns, "web")[virtual] {
		for _, before := range former {
			if pod.UID == before.UID {
				t.Errorf("%s was not replaced", pod.Name)
			}
		}
	}
}
