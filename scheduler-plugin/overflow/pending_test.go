package overflow

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// TestUntriedPodsCounted: the count equals that of all pods looked at one by one, while pods
// come and go, and keys become known or change.
func TestUntriedPodsCounted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u, pods, shapes := newUntriedPods(clock.RealClock{}), map[types.UID]*corev1.Pod{}, map[types.UID]string{}
		keyOf := func(pod *corev1.Pod) (demand.Key, bool) {
			shape, known := shapes[pod.UID]
			return demand.Key{Namespace: pod.Namespace, Shape: shape}, known
		}
		use := func(pod *corev1.Pod) bool { return pod.Name != "0" }
		pick := func(what string, n int) string { return fmt.Sprint(rapid.IntRange(0, n-1).Draw(t, what)) }
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			namespace, name := pick("namespace", 2), pick("pod", 5)
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "/" + name)}}
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0:
				_, known := shapes[pod.UID]
				shapes[pod.UID] = rapid.SampledFrom([]string{"small", "large"}).Draw(t, "shape")
				if known { // only a new version of the pod has another key
					u.set(pod, pods[pod.UID] != nil)
				}
			case 1:
				u.set(pod, false)
				delete(pods, pod.UID)
			default:
				u.set(pod, true)
				pods[pod.UID] = pod
			}
			key := demand.Key{Namespace: namespace, Shape: rapid.SampledFrom([]string{"small", "large"}).Draw(t, "counted")}
			want := int32(0)
			for _, pod := range pods {
				if of, known := keyOf(pod); known && of == key && use(pod) {
					want++
				}
			}
			if got := u.count(key, keyOf, use); got != want {
				t.Fatalf("counted %d pods of %v, want %d", got, key, want)
			}
		}
	})
}

// TestManyEvents: a pod gets few events of a reason whose details change all the time, and the
// last one of them later.
func TestManyEvents(t *testing.T) {
	p, now := newPendingPods(), time.Unix(1000, 0)
	p.add("web-0", types.NamespacedName{Namespace: "shop", Name: "web-0"})
	announce := func(key string) bool {
		return p.announce("web-0", event{reason: "OverflowQueued", key: key}, now, func(types.UID) bool { return false })
	}
	events := 0
	for i := range 600 { // ten minutes
		if announce(fmt.Sprint("paris=", i%2)) {
			events++
		}
		p.takeLate(now)
		now = now.Add(time.Second)
	}
	if events < 10 || events > 15 {
		t.Errorf("%d events in ten minutes, want one in each, and a few at once", events)
	}
	announce("paris=last")
	if late := p.takeLate(now); len(late) != 0 {
		t.Errorf("%v is late at once", late)
	}
	now = now.Add(eventInterval)
	if late := p.takeLate(now); len(late) != 1 || !announce("paris=last") {
		t.Errorf("%v is late, want the pod, which gets the last change", late)
	}
	if announce("paris=last") {
		t.Error("the same event is repeated")
	}
}
