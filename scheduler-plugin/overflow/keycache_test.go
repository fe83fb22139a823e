package overflow

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// TestKeyCache: however many pods there are, the key of each is computed once, until the pod
// is changed or deleted.
func TestKeyCache(t *testing.T) {
	computed := 0
	c := owners.NewKeyCache(clock.RealClock{}, func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool, bool) {
		computed++
		return nil, true, false
	})
	pods := make([]*corev1.Pod, 30_000)
	for i := range pods {
		pods[i] = demandtest.JobPod("crunch", fmt.Sprint("pod-", i), "1")
		c.Get(pods[i])
	}
	expectComputed := func(what string, want int) {
		t.Helper()
		computed = 0
		for _, pod := range pods {
			if _, ok := c.Get(pod); !ok {
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
	c.Forget(pods[8].UID)
	expectComputed("after a change and a deletion", 2)
}

// TestRefusedOwner: an owner that the API server refuses is the root of a pod while it is
// refused, not for the pod's life.
func TestRefusedOwner(t *testing.T) {
	now, refused := clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), true
	c := owners.NewKeyCache(now, func(_ string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool, bool) {
		if refused || ref.Kind == "Schedule" {
			return nil, true, refused
		}
		return &metav1.OwnerReference{APIVersion: ref.APIVersion, Kind: "Schedule", Name: "nightly", UID: "nightly"}, true, false
	})
	pod := demandtest.JobPod("crunch", "pod", "1")
	for _, step := range []struct {
		pass    time.Duration
		refused bool
		want    types.UID
	}{{0, true, "crunch"}, {owners.CheckRefused - time.Second, false, "crunch"}, {time.Second, false, "nightly"}, {time.Hour, true, "nightly"}} {
		refused = step.refused
		now.SetTime(now.Now().Add(step.pass))
		if key, ok := c.KeyOf(pod); !ok || key.OwnerUID != step.want {
			t.Errorf("after another %s: owner %q, want %q", step.pass, key.OwnerUID, step.want)
		}
	}
}

// TestKeyOfADeletedPod: what is kept of a pod does not outlive it, also if it is deleted
// during a cycle.
func TestKeyOfADeletedPod(t *testing.T) {
	for name, pod := range map[string]*corev1.Pod{"a pod": demandtest.JobPod("crunch", "crunch-0", "1"), "a pod of a gang": ringPod("crunch-0")} {
		t.Run(name, func(t *testing.T) {
			p := testPlugin(OverflowArgs{})
			p.handle = profile{}
			cached, _ := p.unreadRing(t, pod)
			p.keys.Exists = p.gangs.Exists
			handler := p.podHandler(func() bool { return false }, waiting.NewUntriedPods(p.clock))
			handler.OnAdd(pod, false)
			cycle := func() {
				p.gangs.Hold(pod)
				if _, ok := p.keys.Get(pod); !ok {
					t.Fatal("the pod has no key")
				}
			}
			if cycle(); !p.keys.Has(pod.UID) {
				t.Error("the key of a pod is not kept")
			}
			expect.NoError(t, cached.Delete(pod))
			handler.OnDelete(pod)
			if cycle(); p.keys.Has(pod.UID) || p.gangs.Keeps(pod.UID) {
				t.Error("something is kept of a deleted pod")
			}
		})
	}
}
