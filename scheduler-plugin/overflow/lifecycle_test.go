package overflow_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// expectGranted waits until each of some pods has an event of what was granted, and expects
// that none has several.
func (c *testCluster) expectGranted(ns, reservation string, pods []*corev1.Pod) {
	c.t.Helper()
	for _, p := range pods {
		c.expectEvent(ns, p.Name, "OverflowGranted", "in "+ns+" at 0.20 EUR per hour", reservation)
	}
	expect.Consistently(c.t, time.Second, "one event for each pod", func() (bool, string) {
		var list eventsv1.EventList
		expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
		granted := map[string]int{}
		for _, e := range list.Items {
			if e.Reason == "OverflowGranted" {
				granted[e.Regarding.Name]++
				if e.Series != nil {
					granted[e.Regarding.Name] += int(e.Series.Count)
				}
			}
		}
		for _, n := range granted {
			if n != 1 {
				return false, fmt.Sprint(granted)
			}
		}
		return true, ""
	})
}

// grantedOnce: every overflowed pod says what was granted, also if it was bound when it was
// tried first: as a replacement, or as one of many that were requested with the first.
func grantedOnce(c *testCluster, ns string) {
	virtual := c.virtualPoolNode(ns, "50")
	more := c.app(ns, "web", "1", 3)
	r := c.expectReservation(ns, "web", 3)
	c.setStatus(r, grantedIn(r, ns, 3))
	c.expectPods(ns, "web", map[string]int{virtual: 3})
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "web-0", "1")))
	more(1)
	c.expectPods(ns, "web", map[string]int{virtual: 3})
	c.expectGranted(ns, r.Name, c.pods(ns, "web")[virtual])
	more(30)
	r = c.expectReservation(ns, "web", 33)
	c.setStatus(r, grantedIn(r, ns, 33))
	c.expectPods(ns, "web", map[string]int{virtual: 33})
	c.expectGranted(ns, r.Name, c.pods(ns, "web")[virtual])
}

// requestedOnce: of the pods that are requested together, one says so at once. The others do
// only if they still wait 10 s later, so that those whose grant comes before that have an
// event less.
func requestedOnce(c *testCluster, ns string) {
	const crowd = 12
	virtual := c.virtualPoolNode(ns, "50")
	c.app(ns, "web", "1", crowd)
	c.app(ns, "job", "1", crowd)
	web, job := c.expectReservation(ns, "web", crowd), c.expectReservation(ns, "job", crowd)
	expect.Consistently(c.t, 5*time.Second, "the pods to wait, as long as a peering takes", func() (bool, string) {
		pods := len(c.pods(ns, "web")[""])
		return pods == crowd, fmt.Sprint(pods, " pods wait")
	})
	c.setStatus(web, grantedIn(web, ns, crowd))
	c.expectPods(ns, "web", map[string]int{virtual: crowd})
	c.expectGranted(ns, web.Name, c.pods(ns, "web")[virtual])
	for i := range crowd {
		c.expectEvent(ns, fmt.Sprint("job-", i), "OverflowRequested", "pods of Deployment job", job.Name)
	}
	c.expectEvent(ns, "", "OverflowRequested", "pods of Deployment web", web.Name)
	for _, r := range []*broker.Reservation{web, job} {
		expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKeyFromObject(r), r))
		// On a slow machine, there may be several requests, and the grant may be too late for
		// those that follow 10 s after the first.
		if early := c.requestedWithin(ns, r, 9*time.Second); early > int(r.Generation) {
			c.t.Errorf("%d pods have an event of the %d requests of Reservation %s at once", early, r.Generation, r.Name)
		}
	}
}

// requestedWithin counts the events OverflowRequested of a Reservation that are less than
// some time later than the first one.
func (c *testCluster) requestedWithin(ns string, r *broker.Reservation, some time.Duration) (n int) {
	c.t.Helper()
	var list eventsv1.EventList
	expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
	var times []time.Time
	for _, e := range list.Items {
		if e.Reason == "OverflowRequested" && e.Related != nil && e.Related.UID == r.UID {
			times = append(times, e.EventTime.Time)
		}
	}
	first := slices.MinFunc(times, time.Time.Compare)
	for _, at := range times {
		if at.Sub(first) < some {
			n++
		}
	}
	return n
}

// TestRestartedScheduler: the next replica binds the pods that the former one has requested
// capacity for, and their events say what was granted.
func TestRestartedScheduler(t *testing.T) {
	c := startTestCluster(t)
	controlplane.InstallCRDs(t, c.config)
	c.namespace("shop", optIn)
	virtual := c.virtualPoolNode("shop", "10")
	c.startScheduler()
	c.app("shop", "web", "1", 3)
	r := c.expectReservation("shop", "web", 3)
	c.stopScheduler()
	c.setStatus(r, grantedIn(r, "shop", 3))
	c.runScheduler()
	c.expectPods("shop", "web", map[string]int{virtual: 3})
	c.expectGranted("shop", r.Name, c.pods("shop", "web")[virtual])
}

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
	// The more important pod was tried before the victim's replacement was created.
	var list broker.ReservationList
	expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
	for _, other := range list.Items {
		if other.Name != r.Name {
			c.t.Errorf("capacity is requested in Reservation %s, although preemption has made room", other.Name)
		}
	}
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
