package pods

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// unread is a queue that drops what is added to it.
type unread struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
}

func (unread) AddAfter(reconcile.Request, time.Duration) {}

// follow makes the sources of both controllers follow the pods.
func (c *crowd) follow(tb testing.TB) {
	tb.Helper()
	for _, pod := range c.pods {
		c.nodes.Pods.Set(pod)
	}
	expect.NoError(tb, c.nodes.Candidates().Start(tb.Context(), unread{}))
	expect.NoError(tb, c.nodes.EachVersionOnNodes().Start(tb.Context(), unread{}))
}

func (c *crowd) event(_, after *corev1.Pod) { c.nodes.Pods.Set(after) }
