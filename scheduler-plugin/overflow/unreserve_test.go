package overflow

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/cache"
	framework "k8s.io/kube-scheduler/framework"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// noneWaits is the handle of a scheduler in which no pod waits in Permit.
type noneWaits struct{ framework.Handle }

func (noneWaits) IterateOverWaitingPods(func(framework.WaitingPod)) {}

// TestUnreservedMember: a pod of a gang that gives up its place in another cluster is woken
// for it again, whenever the controller looks at what has become free.
func TestUnreservedMember(t *testing.T) {
	paris := nodeWith("paris").Node()
	p := testPlugin(OverflowArgs{}, paris)
	p.handle = noneWaits{}
	p.placements.setNode(paris)
	informer := func(objects ...any) *gangInformer {
		i := &gangInformer{SharedIndexInformer: cache.NewSharedIndexInformer(&cache.ListWatch{}, &unstructured.Unstructured{}, 0, cache.Indexers{})}
		for _, obj := range objects {
			expect.NoError(t, i.GetIndexer().Add(obj))
		}
		return i
	}
	p.gangs = &gangs{workloads: informer(), podGroups: informer(&unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"namespace": "shop", "name": "ring"}, "spec": map[string]any{"minMember": int64(2)}}})}
	pod := jobPod("crunch", "crunch-0", "1")
	pod.Labels = map[string]string{demand.LabelPodGroup: "ring"}
	pod.Spec.Tolerations = []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists}}
	pods := newIndexer(pod)
	p.gangs.pods = pods
	key, _ := p.keys.get(pod)
	set := key.set
	set.Count = 1
	r := reservationFor(pod, nil)
	r.Labels[broker.LabelShape], r.Spec.PodSets = demand.GangShape, []broker.PodSet{set}
	r.Status.Allocations = []broker.Allocation{{Cluster: "paris", PodSets: r.Spec.PodSets, Accepted: true, VirtualNodeReady: true}}
	p.grants.set(r)
	woken := 0
	w := &waker{gate: p.gate, grants: p.grants, placements: p.placements, nodes: p.nodes, settled: p.settled, pools: p.pools,
		activate: func(pods map[string]*corev1.Pod) { woken += len(pods) }}
	wake := func() { w.wake(map[demand.Key]bool{key.key: true}, nil, false) }

	p.gate.close(pod, key.key, p.clock.Now(), time.Time{})
	wake()
	p.placements.assume(pod, paris.Name, "rome-gang")
	p.gate.assumed(pod.UID)
	if wake(); woken != 1 {
		t.Fatalf("woken %d times for one slot", woken)
	}
	// The controller looks as soon as the queue has something, which is when this is called.
	p.queue.isVirtual = func(string) bool {
		wake()
		return true
	}
	p.Unreserve(t.Context(), nil, pod, paris.Name)
	if woken != 2 {
		t.Errorf("woken %d times, want once more for the place that it gave up", woken)
	}
	// A pod that was deleted while it had a place would be woken for those of others.
	expect.NoError(t, pods.Delete(pod))
	p.gate.drop(pod.UID)
	p.placements.assume(pod, paris.Name, "rome-gang")
	p.Unreserve(t.Context(), nil, pod, paris.Name)
	if n := p.gate.len(); n != 0 {
		t.Errorf("%d deleted pods wait", n)
	}
}
