package overflow_test

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
)

// staysBesideNominees: a guest of another scheduler is nominated to a node of 1 CPU, of which
// it requests 800m. Until it goes away, a smaller pod is bound there, and no pod of its size:
// neither one that waits for capacity in other clusters nor one that cannot overflow.
func staysBesideNominees(c *testCluster, ns string) {
	home := c.poolNode(ns, "1")
	for name, change := range map[string]func(*corev1.Pod){
		"overflows": func(*corev1.Pod) {},
		"stays": func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}}}
		},
	} {
		guest := schedulerPod(ns, "guest-of-"+name, "800m", func(p *corev1.Pod) {
			p.Spec.SchedulerName = "another-scheduler"
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}}
		})
		c.create(guest)
		expect.NoError(c.t, c.Status().Patch(c.t.Context(), guest, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"nominatedNodeName":%q}}`, home))))
		expect.Eventually(c.t, "the scheduler to know the nominee", func() (bool, string) {
			n := overflow.Nominees(c.plugin, home)
			return n == 1, fmt.Sprint(n)
		})
		c.create(schedulerPod(ns, name, "800m", inPool(ns), change))
		c.create(schedulerPod(ns, "small-beside-"+name, "100m", inPool(ns)))
		c.expectPods(ns, "small-beside-"+name, map[string]int{home: 1})
		c.expectMessage(ns, name, "no room left beside nominated pods of other schedulers")
		expect.Consistently(c.t, 3*time.Second, "the pod to wait", func() (bool, string) {
			node := c.getPod(ns, name).Spec.NodeName
			return node == "", "bound to " + node
		})
		expect.NoError(c.t, c.Delete(c.t.Context(), guest))
		// Before its gate would try it again in any case.
		expect.EventuallyWithin(c.t, 45*time.Second, name+" to be bound at home", func() (bool, string) {
			node := c.getPod(ns, name).Spec.NodeName
			return node == home, "bound to " + node
		})
		expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, name, "800m")))
		c.expectPods(ns, name, map[string]int{})
	}
}
