package virtualnode_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// guestPod is a Ready pod that was created so many seconds after the first.
func guestPod(name string, created int64, requests corev1.ResourceList, change ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: requests}}}},
	}
	pod.Name, pod.CreationTimestamp = name, metav1.Unix(1000+created, 0)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	for _, c := range change {
		c(pod)
	}
	return pod
}

func TestBeyond(t *testing.T) {
	small, large := expect.Resources("cpu", "300m"), expect.Resources("cpu", "1")
	without := expect.Resources("cpu", "1", "memory", "0", "nvidia.com/gpu", "0")
	notReady := func(p *corev1.Pod) { p.Status.Conditions = nil }
	marked := func(p *corev1.Pod) {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: broker.PodMustLeave, Status: corev1.ConditionTrue})
	}
	important := func(p *corev1.Pod) { p.Spec.Priority = ptr.To[int32](10) }
	terminating := func(p *corev1.Pod) { p.DeletionTimestamp = ptr.To(metav1.Now()) }
	three := []*corev1.Pod{guestPod("old", 1, small), guestPod("new", 3, small), guestPod("mid", 2, small)}
	twoSets := func(g *virtualnode.Grant) {
		g.Instruction.Spec.PodSets = []broker.PodSet{
			{Name: "leader", Count: 1, Requests: broker.FromList(large)}, {Name: "workers", Count: 2, Requests: broker.FromList(small)},
		}
	}
	cases := map[string]struct {
		reason string
		grant  virtualnode.Grant
		want   string
	}{
		"within":         {"no pod leaves", grant(3, small, with(virtualnode.SumOf(three...))), ""},
		"one":            {"the newest leaves", grant(2, small, with(virtualnode.SumOf(three...))), "new"},
		"all":            {"the newest first", grant(0, small, with(virtualnode.SumOf(three...))), "new mid old"},
		"not ready":      {"one that does not run leaves before newer ones", grant(2, small, with(virtualnode.SumOf(guestPod("old", 1, small, notReady), three[1]))), ""},
		"not ready goes": {"one that does not run leaves before newer ones", grant(1, small, with(virtualnode.SumOf(guestPod("old", 1, small, notReady), three[1]))), "old"},
		"marked":         {"one that the provider has marked leaves before one that is not Ready", grant(1, small, with(virtualnode.SumOf(guestPod("old", 1, small, marked, important), guestPod("new", 3, small, notReady)))), "old"},
		"marked stays":   {"no more pods leave than are beyond the grant", grant(2, small, with(virtualnode.SumOf(guestPod("old", 1, small, marked), guestPod("new", 3, small, marked)))), ""},
		"priority":       {"a pod of higher priority stays, although it is newer", grant(1, small, with(virtualnode.SumOf(three[0], guestPod("new", 3, small, important)))), "old"},
		"terminating":    {"one that leaves already is the first", grant(1, small, with(virtualnode.SumOf(guestPod("old", 1, small, terminating), three[1]))), "old"},
		"two sets":       {"a set loses its own pods", grant(0, nil, with(virtualnode.SumOf(append([]*corev1.Pod{guestPod("leader", 9, large)}, three...)...)), twoSets), "new"},
		"zeros":          {"an amount of zero is no other request", grant(0, nil, with(virtualnode.SumOf(guestPod("leader", 9, without), three[0], three[1], three[2])), twoSets), "new"},
		"a larger place": {"a pod uses the place of a larger one that none uses, as at the provider", grant(0, nil, with(virtualnode.SumOf(three...)), twoSets), ""},
		"smaller pods":   {"those that are smaller than all sets have a place each", grant(2, large, with(virtualnode.SumOf(three...))), "new"},
		"other requests": {"pods that are not as any set count by number", grant(2, small, with(virtualnode.SumOf(guestPod("resized", 1, large), three[1], three[2]))), "new"},
		"total":          {"what fits stays, the newest leaves", grant(0, nil, with(virtualnode.SumOf(three...)), divisible(expect.Resources("cpu", "700m"))), "new"},
		"no total":       {"nothing remains", grant(0, nil, with(virtualnode.SumOf(three...)), divisible(nil)), "new mid old"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, pod := range tc.grant.Beyond() {
				got = append(got, pod.Name)
			}
			if strings.Join(got, " ") != tc.want {
				t.Errorf("%s: got %v, want %s", tc.reason, got, tc.want)
			}
		})
	}
}

// TestBeyondProperties: as many pods stay as the grant has places for, and no pod leaves
// while one stays that is to leave before it.
func TestBeyondProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		requests := expect.Resources("cpu", "100m")
		var pods []*corev1.Pod
		for i := range rapid.IntRange(0, 8).Draw(t, "pods") {
			pod := guestPod(fmt.Sprint("p", i), rapid.Int64Range(0, 3).Draw(t, "created"), requests)
			pod.Spec.Priority = ptr.To(rapid.Int32Range(0, 2).Draw(t, "priority"))
			if rapid.Bool().Draw(t, "notReady") {
				pod.Status.Conditions = nil
			}
			pods = append(pods, pod)
		}
		count := rapid.Int32Range(0, 9).Draw(t, "granted")
		beyond := grant(count, requests, with(virtualnode.SumOf(pods...))).Beyond()
		if want := max(0, len(pods)-int(count)); len(beyond) != want {
			t.Fatalf("%d of %d pods are beyond %d, want %d", len(beyond), len(pods), count, want)
		}
		leaves := map[*corev1.Pod]bool{}
		for _, pod := range beyond {
			leaves[pod] = true
		}
		for _, stays := range pods {
			for _, goes := range beyond {
				if !leaves[stays] && len(stays.Status.Conditions) == 0 && len(goes.Status.Conditions) > 0 {
					t.Fatalf("%s leaves and %s stays, which is not Ready", goes.Name, stays.Name)
				}
				if !leaves[stays] && len(stays.Status.Conditions) == len(goes.Status.Conditions) && *stays.Spec.Priority < *goes.Spec.Priority {
					t.Fatalf("%s leaves and %s stays, which has a lower priority", goes.Name, stays.Name)
				}
			}
		}
		// One grant more keeps one pod more, and all others as they are.
		if more := grant(count+1, requests, with(virtualnode.SumOf(pods...))).Beyond(); len(beyond) > 0 && (len(more) != len(beyond)-1 || len(more) > 0 && more[0] != beyond[0]) {
			t.Fatalf("with one more place %d pods leave instead of %d", len(more), len(beyond))
		}
	})
}
