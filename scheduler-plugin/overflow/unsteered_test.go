package overflow_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestNotSteered: pods that were created while no replica was available have one event that
// says why they stay home, from the replica that leads, within a minute after it knows that, or
// has tried a pod. Nothing changes these pods any more. Those of a namespace that opts in later
// have it then.
func TestNotSteered(t *testing.T) {
	c := startTestCluster(t)
	controlplane.InstallCRDs(t, c.config)
	c.poolNode("shop", "1")
	var leads atomic.Bool
	c.leads = leads.Load
	c.grantRoles()
	for ns, lead := range map[string]func(c *testCluster, ns string){
		"holds-the-lease": func(*testCluster, string) { leads.Store(true) },
		"tries-a-pod": func(c *testCluster, ns string) {
			c.create(schedulerPod(ns, "steered", "1", inPool("none")))
		},
	} {
		t.Run(ns, func(t *testing.T) {
			of := *c
			of.t = t
			leads.Store(false)
			of.runScheduler()
			of.namespace(ns, optIn)
			of.namespace(ns+"-later", nil)
			for _, ns := range []string{ns, ns + "-later"} {
				of.create(schedulerPod(ns, "early", "2", inPool("shop"), func(p *corev1.Pod) { p.Spec.SchedulerName = corev1.DefaultSchedulerName }))
				of.expectMessage(ns, "early", "Insufficient cpu")
				defer func() { // no scheduler tries them in the next test
					expect.NoError(t, c.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace(ns), client.GracePeriodSeconds(0)))
				}()
			}
			of.stopScheduler()
			of.runScheduler()
			defer of.stopScheduler()
			expect.Consistently(t, 2*time.Second, "a standby to record nothing", func() (bool, string) {
				n := of.notSteered(ns)
				return n == 0, fmt.Sprint(n, " events")
			})
			lead(&of, ns)
			of.expectEvent(ns, "early", "OverflowNotPossible", "its scheduler is default-scheduler", "Delete it")
			if n := of.notSteered(ns + "-later"); n > 0 {
				t.Errorf("%d events in a namespace that has not opted in", n)
			}
			of.setOverflow(ns+"-later", broker.OverflowEnabled)
			of.expectEvent(ns+"-later", "early", "OverflowNotPossible", "its scheduler is default-scheduler", "Delete it")
			expect.Consistently(t, time.Second, "one event for each pod", func() (bool, string) {
				n, later := of.notSteered(ns), of.notSteered(ns+"-later")
				return n == 1 && later == 1, fmt.Sprint(n, " and ", later, " events")
			})
		})
	}
}

// notSteered counts the events OverflowNotPossible of a namespace.
func (c *testCluster) notSteered(ns string) (n int) {
	c.t.Helper()
	var list eventsv1.EventList
	expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
	for _, e := range list.Items {
		if e.Reason == "OverflowNotPossible" {
			if n++; e.Series != nil {
				n += int(e.Series.Count)
			}
		}
	}
	return n
}
