package virtualnode

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// describe writes what a Tracker has, index by index and group by group.
func describe(t *Tracker) string {
	var lines []string
	for node := range t.onNode {
		for _, g := range t.observeOn(node) {
			lines = append(lines, fmt.Sprintf("%s: %+v %d of %s: %v", node, g.groupKey, g.Count, broker.FromList(g.Requests), g.names()))
		}
	}
	for key := range t.candidates {
		for _, g := range t.candidatesWith(key) {
			lines = append(lines, fmt.Sprintf("%+v: %+v %d: %v", key, g.groupKey, g.count, SumOf(t.members(g.groupKey)...).names()))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestTrackerEqualsRecount: after any events, a Tracker equals one that sees the pods that
// are left for the first time, and it remembers nothing else.
func TestTrackerEqualsRecount(t *testing.T) {
	nodes, namespaces := []string{"", "home-1", "spillway-paris", "spillway-berlin"}, []string{"shop", "bank"}
	rapid.Check(t, func(t *rapid.T) {
		tracker, exist := NewTracker(broker.SchedulerName), map[types.NamespacedName]*corev1.Pod{}
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			name := types.NamespacedName{Namespace: rapid.SampledFrom(namespaces).Draw(t, "namespace"), Name: fmt.Sprint("pod-", rapid.IntRange(0, 7).Draw(t, "pod"))}
			if rapid.IntRange(0, 4).Draw(t, "event") == 0 {
				delete(exist, name)
				tracker.Delete(name)
				continue
			}
			exist[name] = anyPod(t, name, nodes, exist[name])
			tracker.Set(exist[name])
		}
		recount := NewTracker(broker.SchedulerName)
		for _, pod := range exist {
			recount.Set(pod)
		}
		if got, want := describe(tracker), describe(recount); got != want {
			t.Fatalf("got\n%s\nwant\n%s", got, want)
		}
		if len(tracker.onNode) != len(recount.onNode) || len(tracker.candidates) != len(recount.candidates) {
			t.Fatalf("%d nodes and %d keys are remembered, want %d and %d", len(tracker.onNode), len(tracker.candidates), len(recount.onNode), len(recount.candidates))
		}
		if len(tracker.pods) != len(recount.pods) || len(tracker.groups) != len(recount.groups) {
			t.Fatalf("%d pods and %d groups are remembered, want %d and %d", len(tracker.pods), len(tracker.groups), len(recount.pods), len(recount.groups))
		}
	})
}

// TestCandidates: every group that belongs to a Reservation is found by what its pods have in
// common, whatever the others are, and once.
func TestCandidates(t *testing.T) {
	resolve := func(_ string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		return nil, ref.Name != "gone"
	}
	rapid.Check(t, func(t *rapid.T) {
		tracker := NewTracker(broker.SchedulerName)
		for i := range rapid.IntRange(1, 20).Draw(t, "pods") {
			pod := anyPod(t, types.NamespacedName{Namespace: rapid.SampledFrom([]string{"shop", "bank"}).Draw(t, "namespace"), Name: fmt.Sprint("pod-", i)}, []string{"", "spillway-paris"}, nil)
			switch rapid.SampledFrom([]string{"gone", "gang", ""}).Draw(t, "kind") {
			case "gone":
				pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "gone", UID: "gone", Controller: ptr.To(true)}}
			case "gang":
				pod.Labels[broker.LabelPodGroup] = "gang"
			}
			tracker.Set(pod)
		}
		gang, _, _, _ := demand.KeyOf(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Labels: map[string]string{broker.LabelPodGroup: "gang"}}}, resolve)
		keys := []demand.Key{gang.OfReservation()}
		for key := range tracker.groups {
			for _, owner := range []types.UID{"web", demand.SharedOwner} {
				keys = append(keys, demand.Key{Namespace: "shop", OwnerUID: owner, Shape: key.shape})
			}
		}
		slices.SortFunc(keys, func(a, b demand.Key) int { return strings.Compare(a.String(), b.String()) })
		key := rapid.SampledFrom(keys).Draw(t, "key")
		reservation := &broker.Reservation{Status: broker.ReservationStatus{ID: rapid.SampledFrom([]string{"", "hold-1"}).Draw(t, "ID")}}
		found := map[groupKey]bool{}
		for _, g := range tracker.candidatesWith(candidatesFor(reservation, key)...) {
			if found[g.groupKey] {
				t.Fatalf("%+v is found twice", g.groupKey)
			}
			found[g.groupKey] = true
		}
		for _, g := range tracker.groups {
			counts := (g.use == waits || g.use == runs) && g.namespace == key.Namespace
			if counts && (candidate{g.groupKey, g.member, 1}).belongsTo(reservation, key, resolve) && !found[g.groupKey] {
				t.Fatalf("%+v belongs to %s, and is not found", g.groupKey, key)
			}
		}
	})
}

// What was observed of a single pod is still there after another version of it has come.
func TestMembersOfSinglePod(t *testing.T) {
	pod := func(version string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: version},
			Spec:       corev1.PodSpec{NodeName: "spillway-paris"}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
		}
	}
	tracker := NewTracker("", pod("1"))
	seen := tracker.observeOn("spillway-paris")
	tracker.Set(pod("2"))
	if all := seen[0].all(); len(all) != 1 || all[0].ResourceVersion != "2" {
		t.Errorf("the pods are %v, want the new version of the pod", all)
	}
	tracker.Delete(types.NamespacedName{Namespace: "shop", Name: "web"})
	if all := seen[0].all(); len(all) != 0 {
		t.Errorf("the pods are %v, want none", all)
	}
}

// anyPod draws a version of a pod, which may have the generation of the one before if its
// spec is the same.
func anyPod(t *rapid.T, name types.NamespacedName, nodes []string, before *corev1.Pod) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: types.UID(name.Name), Generation: 1, Labels: map[string]string{}}}
	if before != nil {
		pod.Generation = before.Generation + 1
	}
	cpu := *resource.NewMilliQuantity(int64(rapid.IntRange(0, 2).Draw(t, "cpu"))*300, resource.DecimalSI)
	pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: cpu}}}}
	pod.Spec.NodeName = rapid.SampledFrom(nodes).Draw(t, "node")
	pod.Spec.SchedulerName = rapid.SampledFrom([]string{broker.SchedulerName, broker.SchedulerName, corev1.DefaultSchedulerName}).Draw(t, "scheduler")
	pod.Spec.HostNetwork = rapid.IntRange(0, 5).Draw(t, "host network") == 0
	if before != nil && rapid.Bool().Draw(t, "same spec") {
		pod.Spec, pod.Generation = before.Spec, before.Generation
	}
	pod.Status.Phase = rapid.SampledFrom([]corev1.PodPhase{corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded}).Draw(t, "phase")
	if owner := rapid.SampledFrom([]string{"", "web", "db", "DaemonSet"}).Draw(t, "owner"); owner == "DaemonSet" {
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "d", UID: "d", Controller: ptr.To(true)}}
	} else if owner != "" {
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: owner, UID: types.UID(owner), Controller: ptr.To(true)}}
	}
	for label, values := range map[string][]string{broker.LabelHold: {"", "hold-1"}, broker.LabelShape: {"", "shape-1"}, broker.LabelOverflow: {"", broker.OverflowDisabled}} {
		if value := rapid.SampledFrom(values).Draw(t, label); value != "" {
			pod.Labels[label] = value
		}
	}
	if rapid.IntRange(0, 5).Draw(t, "deleted") == 0 {
		pod.DeletionTimestamp = ptr.To(metav1.NewTime(time.Unix(1, 0)))
	}
	return pod
}

// TestTrackerUse: which pods count, and as what.
func TestTrackerUse(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.Pod)
		want   use
		not    bool
	}{
		"a pod that waits":               {change: func(*corev1.Pod) {}, want: waits},
		"one that cannot overflow":       {change: func(p *corev1.Pod) { p.Spec.RuntimeClassName = ptr.To("kata") }, not: true},
		"one that ended without a node":  {change: func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, not: true},
		"one of another scheduler":       {change: func(p *corev1.Pod) { p.Spec.SchedulerName = "another" }, not: true},
		"one of another scheduler there": {change: func(p *corev1.Pod) { p.Spec.SchedulerName, p.Spec.NodeName = "another", "spillway-paris" }, want: runs},
		"one there that cannot overflow": {change: func(p *corev1.Pod) { p.Spec.HostNetwork, p.Spec.NodeName = true, "spillway-paris" }, want: runs},
		"one that is gated":              {change: func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "wait"}} }, not: true},
		"one at home":                    {change: func(p *corev1.Pod) { p.Spec.NodeName = "home-1" }, not: true},
		"one that overflowed":            {change: func(p *corev1.Pod) { p.Spec.NodeName = "spillway-paris" }, want: runs},
		"one that is being deleted":      {change: func(p *corev1.Pod) { p.DeletionTimestamp = ptr.To(metav1.Now()) }, not: true},
		"one that is being deleted there": {change: func(p *corev1.Pod) {
			p.DeletionTimestamp, p.Spec.NodeName = ptr.To(metav1.Now()), "spillway-paris"
		}, want: runs},
		"one that ended there": {change: func(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = "spillway-paris", corev1.PodFailed }, want: ended},
		"a DaemonSet's pod that waits for a virtual node": {change: func(p *corev1.Pod) {
			p.Spec.SchedulerName = corev1.DefaultSchedulerName
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: ptr.To(true)}}
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Values: []string{"spillway-paris"}}}}}}}}
		}, want: daemon},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}, Spec: corev1.PodSpec{SchedulerName: broker.SchedulerName}}
			tc.change(pod)
			tracked := NewTracker(broker.SchedulerName, pod).pods[client.ObjectKeyFromObject(pod)]
			if tc.not != (tracked == nil) || tracked != nil && tracked.key.use != tc.want {
				t.Errorf("tracked as %+v, want %d (not at all: %t)", tracked, tc.want, tc.not)
			}
		})
	}
}

// TestTrackerScheduler: of the pods that wait, those count that Spillway's scheduler
// schedules, under the name that it has in this cluster.
func TestTrackerScheduler(t *testing.T) {
	for scheduler, want := range map[string][]string{
		broker.SchedulerName:        {broker.SchedulerName},
		corev1.DefaultSchedulerName: {"", corev1.DefaultSchedulerName},
		"":                          nil,
	} {
		var counted []string
		for _, name := range []string{"", corev1.DefaultSchedulerName, broker.SchedulerName, "another"} {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}, Spec: corev1.PodSpec{SchedulerName: name}}
			if len(NewTracker(scheduler, pod).pods) > 0 {
				counted = append(counted, name)
			}
		}
		if !slices.Equal(counted, want) {
			t.Errorf("scheduler %q: pods of %q count, want %q", scheduler, counted, want)
		}
	}
}
