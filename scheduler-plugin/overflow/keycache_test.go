package overflow

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestKeyCache: however many pods there are, the key of each is computed once, until the pod
// is changed or deleted.
func TestKeyCache(t *testing.T) {
	computed := 0
	c := newKeyCache(func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		computed++
		return nil, true
	})
	pods := make([]*corev1.Pod, 30_000)
	for i := range pods {
		pods[i] = jobPod("crunch", fmt.Sprint("pod-", i), "1")
		c.get(pods[i])
	}
	expectComputed := func(what string, want int) {
		t.Helper()
		computed = 0
		for _, pod := range pods {
			if _, ok := c.get(pod); !ok {
				t.Fatalf("%s has no key", pod.Name)
			}
		}
		if computed != want {
			t.Errorf("%s: %d keys were computed, want %d", what, computed, want)
		}
	}
	expectComputed("again", 0)
	pods[7] = pods[7].DeepCopy()
	pods[7].Generation++
	c.forget(pods[8].UID)
	expectComputed("after a change and a deletion", 2)
}
