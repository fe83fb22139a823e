package waiting

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
		u, pods, shapes := NewUntriedPods(clock.RealClock{}), map[types.UID]*corev1.Pod{}, map[types.UID]string{}
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
					u.Set(pod, pods[pod.UID] != nil)
				}
			case 1:
				u.Set(pod, false)
				delete(pods, pod.UID)
			default:
				u.Set(pod, true)
				pods[pod.UID] = pod
			}
			key := demand.Key{Namespace: namespace, Shape: rapid.SampledFrom([]string{"small", "large"}).Draw(t, "counted")}
			want := int32(0)
			for _, pod := range pods {
				if of, known := keyOf(pod); known && of == key && use(pod) {
					want++
				}
			}
			if got := u.Count(key, keyOf, use); got != want {
				t.Fatalf("counted %d pods of %v, want %d", got, key, want)
			}
		}
	})
}

// TestOneEventForEachState: a pod gets an event of a reason once in EventInterval, and once in an hour
// if it is the same as the last one.
func TestOneEventForEachState(t *testing.T) {
	for name, tc := range map[string]struct {
		key   string
		after time.Duration
		want  bool
	}{
		"the same, within an hour":      {"paris=NoFit", RepeatAfter - time.Second, false},
		"the same, after an hour":       {"paris=NoFit", RepeatAfter, true},
		"another one, at once":          {"paris=Closed", EventInterval - time.Second, false},
		"another one, at the next look": {"paris=Closed", EventInterval, true},
	} {
		t.Run(name, func(t *testing.T) {
			p, now := NewPendingPods(), time.Unix(1000, 0)
			p.Add("web-0", types.NamespacedName{Namespace: "shop", Name: "web-0"}, now)
			announce := func(reason, key string, after time.Duration) bool {
				return p.Announce("web-0", Event{Reason: reason, Key: key}, now.Add(after), nil)
			}
			if !announce("OverflowQueued", "paris=NoFit", 0) {
				t.Error("not the first one")
			}
			if got := announce("OverflowQueued", tc.key, tc.after); got != tc.want {
				t.Errorf("announced: %t, want %t", got, tc.want)
			}
			if !announce("OverflowFailed", tc.key, tc.after) {
				t.Error("not one of another reason")
			}
		})
	}
}
