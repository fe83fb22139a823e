package podindex

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// counted is a queue that counts what is added to it.
type counted struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	added *int
}

func (q counted) AddAfter(reconcile.Request, time.Duration) { *q.added++ }

// barePod is one of many alike, half of which are on a virtual node.
func barePod(i int, version string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint("pod-", i), UID: types.UID(fmt.Sprint(i)), Generation: 1, ResourceVersion: version},
		Spec:       corev1.PodSpec{SchedulerName: broker.SchedulerName, Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1")}}}},
	}
	if i%2 == 0 {
		pod.Spec.NodeName = broker.VirtualNodeName("paris")
	}
	return pod
}

// TestPodEventConcernsNoOther: an event of a pod looks at no other pod, and costs as much
// with ten times as many of them.
func TestPodEventConcernsNoOther(t *testing.T) {
	allocations := map[int]float64{}
	for _, pods := range []int{1000, 10000} {
		index, added := New(broker.SchedulerName), 0
		for i := range pods {
			index.Set(barePod(i, "1"))
		}
		for _, s := range []source.Source{index.Reservations(clock.RealClock{}, func(context.Context) demand.Resolve { return nil }), index.VersionsOnNodes(clock.RealClock{}), index.SumsOnNodes(clock.RealClock{})} {
			expect.NoError(t, s.Start(t.Context(), counted{added: &added}))
		}
		// The pods of the events wait, and run on the virtual node.
		own := map[types.NamespacedName]bool{}
		for i := range 2 {
			own[types.NamespacedName{Namespace: "shop", Name: fmt.Sprint("pod-", i)}] = true
		}
		for name, p := range index.pods {
			if !own[name] {
				p.pod = nil
			}
		}
		for _, g := range index.groups {
			g.member = nil
		}
		added = 0
		event := func() {
			for i := range 2 {
				ended := barePod(i, "2")
				ended.Status.Phase = corev1.PodSucceeded
				index.Set(ended)
				index.Set(barePod(i, "3"))
				index.Delete(types.NamespacedName{Namespace: "shop", Name: ended.Name})
				index.Set(barePod(i, "4"))
			}
		}
		event()
		if added == 0 {
			t.Error("the events enqueue nothing")
		}
		// What else runs in this process may allocate meanwhile.
		least := testing.AllocsPerRun(100, event)
		for range 9 {
			least = min(least, testing.AllocsPerRun(100, event))
		}
		allocations[pods] = least
	}
	if few, many := allocations[1000], allocations[10000]; many > few+few/10 {
		t.Errorf("%.0f allocations with 1,000 pods, and %.0f with 10,000", few, many)
	}
}
