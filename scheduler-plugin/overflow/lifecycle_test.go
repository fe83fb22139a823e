package overflow_test

import (
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// victimOverflows: the more important pod stays at home, and whom it preempts overflows.
func victimOverflows(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "1"), c.virtualPoolNode(ns, "10")
	more := c.app(ns, "low", "1", 1)
	c.expectPods(ns, "low", map[string]int{home: 1})
	c.app(ns, "important", "1", 1, high)
	c.expectPods(ns, "important", map[string]int{home: 1})
	more(1) // the controller replaces the victim
	r := c.expectReservation(ns, "low", 1)
	c.setStatus(r, grantedIn(r, ns, 1))
	c.expectPods(ns, "low", map[string]int{virtual: 1})
}

// rolloutAndScale: a Deployment that is restarted, scaled up and scaled down keeps its
// Reservation.
func rolloutAndScale(c *testCluster, ns string) {
	virtual := c.virtualPoolNode(ns, "10")
	d, ofFirst := c.deployment(ns, "web")
	second := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web-2", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "Deployment", Name: d.Name, UID: d.UID, Controller: ptr.To(true)}}},
		Spec: appsv1.ReplicaSetSpec{Selector: d.Spec.Selector, Template: d.Spec.Template},
	}
	c.create(second)
	ofSecond := func(p *corev1.Pod) {
		ofFirst(p)
		p.OwnerReferences[0].Name, p.OwnerReferences[0].UID = second.Name, second.UID
	}
	pod := func(name string, of func(*corev1.Pod)) {
		c.create(schedulerPod(ns, name, "1", of, inPool(ns), tolerating(ns)))
	}
	remove := func(name string) {
		expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, name, "1")))
	}
	for i := range 2 {
		pod(fmt.Sprint("web-old-", i), ofFirst)
	}
	r := c.expectReservation(ns, "web", 2)
	c.setStatus(r, grantedIn(r, ns, 2))
	c.expectPods(ns, "web-old", map[string]int{virtual: 2})
	// A restart without surge: each new pod uses the slot of an old one.
	for i := range 2 {
		remove(fmt.Sprint("web-old-", i))
		pod(fmt.Sprint("web-new-", i), ofSecond)
		c.expectPods(ns, "web-new", map[string]int{virtual: i + 1})
	}
	pod("web-new-2", ofSecond) // scaled up
	living := c.expectReservation(ns, "web", 3)
	if living.UID != r.UID {
		c.t.Error("the Deployment has got another Reservation")
	}
	c.setStatus(living, grantedIn(living, ns, 3))
	c.expectPods(ns, "web-new", map[string]int{virtual: 3})
	remove("web-new-2") // scaled down, and the agent lowers the count
	before := living.DeepCopy()
	living.Spec.PodSets[0].Count = 2
	expect.NoError(c.t, c.Patch(c.t.Context(), living, client.MergeFrom(before)))
	expect.Consistently(c.t, 2*time.Second, "the count to stay", func() (bool, string) {
		expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKeyFromObject(r), r))
		n := r.Spec.PodSets[0].Count
		return n == 2 && r.UID == living.UID, fmt.Sprint(n, " pods")
	})
}
