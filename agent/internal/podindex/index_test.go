package podindex

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

// describe writes what an Index has, key by key and group by group.
func describe(x *Index) string {
	names := func(g Group) (names []string) {
		for _, pod := range x.Members(g.Key) {
			names = append(names, pod.Namespace+"/"+pod.Name)
		}
		slices.Sort(names)
		return names
	}
	var lines []string
	for node := range x.onNode {
		for _, g := range x.OnNode(node) {
			lines = append(lines, fmt.Sprintf("%s: %+v %d of %s: %v", node, g.Key, g.Count, broker.FromList(g.Requests), names(g)))
		}
	}
	for key := range x.candidates {
		for _, g := range x.candidatesWith(key) {
			lines = append(lines, fmt.Sprintf("%+v: %+v %d: %v", key, g.Key, g.Count, names(g)))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestIndexEqualsRecount: after any events, an Index equals one that sees the pods that
// are left for the first time, and it remembers nothing else.
func TestIndexEqualsRecount(t *testing.T) {
	nodes, namespaces := []string{"", "home-1", "spillway-paris", "spillway-berlin"}, []string{"shop", "bank"}
	rapid.Check(t, func(t *rapid.T) {
		index, exist := New(broker.SchedulerName), map[types.NamespacedName]*corev1.Pod{}
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			name := types.NamespacedName{Namespace: rapid.SampledFrom(namespaces).Draw(t, "namespace"), Name: fmt.Sprint("pod-", rapid.IntRange(0, 7).Draw(t, "pod"))}
			if rapid.IntRange(0, 4).Draw(t, "event") == 0 {
				delete(exist, name)
				index.Delete(name)
				continue
			}
			exist[name] = anyPod(t, name, nodes, exist[name])
			index.Set(exist[name])
		}
		recount := New(broker.SchedulerName)
		for _, pod := range exist {
			recount.Set(pod)
		}
		if got, want := describe(index), describe(recount); got != want {
			t.Fatalf("got\n%s\nwant\n%s", got, want)
		}
		if len(index.onNode) != len(recount.onNode) || len(index.candidates) != len(recount.candidates) {
			t.Fatalf("%d nodes and %d keys are remembered, want %d and %d", len(index.onNode), len(index.candidates), len(recount.onNode), len(recount.candidates))
		}
		if len(index.pods) != len(recount.pods) || len(index.groups) != len(recount.groups) {
			t.Fatalf("%d pods and %d groups are remembered, want %d and %d", len(index.pods), len(index.groups), len(recount.pods), len(recount.groups))
		}
	})
}

// TestCandidates: every group that may use a Reservation is found by what its pods have in
// common, whatever the others are, and once.
func TestCandidates(t *testing.T) {
	resolve := func(_ string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		return nil, ref.Name != "gone"
	}
	rapid.Check(t, func(t *rapid.T) {
		index := New(broker.SchedulerName)
		for i := range rapid.IntRange(1, 20).Draw(t, "pods") {
			pod := anyPod(t, types.NamespacedName{Namespace: rapid.SampledFrom([]string{"shop", "bank"}).Draw(t, "namespace"), Name: fmt.Sprint("pod-", i)}, []string{"", "spillway-paris"}, nil)
			switch rapid.SampledFrom([]string{"gone", "gang", ""}).Draw(t, "kind") {
			case "gone":
				pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "gone", UID: "gone", Controller: ptr.To(true)}}
			case "gang":
				pod.Labels[broker.LabelPodGroup] = "gang"
			}
			index.Set(pod)
		}
		gang, _, _, _ := demand.KeyOf(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Labels: map[string]string{broker.LabelPodGroup: "gang"}}}, resolve)
		keys := []demand.Key{gang.OfReservation()}
		for key := range index.groups {
			for _, owner := range []types.UID{"web", demand.SharedOwner} {
				keys = append(keys, demand.Key{Namespace: "shop", OwnerUID: owner, Shape: key.Shape})
			}
		}
		slices.SortFunc(keys, func(a, b demand.Key) int { return strings.Compare(a.String(), b.String()) })
		key := rapid.SampledFrom(keys).Draw(t, "key")
		reservation := &broker.Reservation{Status: broker.ReservationStatus{ID: rapid.SampledFrom([]string{"", "hold-1"}).Draw(t, "ID")}}
		found := map[Key]bool{}
		for _, g := range index.ServedBy(reservation, key, true, resolve) {
			if found[g.Key] {
				t.Fatalf("%+v is found twice", g.Key)
			}
			found[g.Key] = true
		}
		for _, g := range index.groups {
			counts := (g.Use == Waits || g.Use == Runs) && g.Namespace == key.Namespace
			if counts && (Group{Key: g.Key, Member: g.member}).mayUse(reservation, key, resolve) && !found[g.Key] {
				t.Fatalf("%+v may use %s, and is not found", g.Key, key)
			}
		}
	})
}

// TestServedByIsOfOneTime: a pod that is bound while owners are looked up waits, or runs, and does
// not count as neither: its place would be given to another one.
func TestServedByIsOfOneTime(t *testing.T) {
	index, pods := New(broker.SchedulerName), map[string]*corev1.Pod{}
	for _, name := range []string{"web-1", "web-2"} {
		pods[name] = &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web", UID: "web", Controller: ptr.To(true)}}},
			Spec:       corev1.PodSpec{SchedulerName: broker.SchedulerName},
		}
		index.Set(pods[name])
	}
	resolve := func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		bound := pods["web-1"].DeepCopy()
		bound.Spec.NodeName = "spillway-paris"
		index.Set(bound)
		return nil, true
	}
	shape, _ := demand.ShapeOf(pods["web-1"])
	var counted []string
	for _, g := range index.ServedBy(&broker.Reservation{}, demand.Key{Namespace: "shop", OwnerUID: "web", Shape: shape}, true, resolve) {
		for _, pod := range g.Waiting {
			counted = append(counted, pod.Name)
		}
	}
	slices.Sort(counted)
	if want := []string{"web-1", "web-2"}; !slices.Equal(counted, want) || len(index.PodsOn("spillway-paris")) != 1 {
		t.Errorf("%v wait, want %v; on the virtual node are %d pods, want 1", counted, want, len(index.PodsOn("spillway-paris")))
	}
}

// What was observed of a single pod is still there after another version of it has come.
func TestMembersOfSinglePod(t *testing.T) {
	pod := func(version string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: version},
			Spec:       corev1.PodSpec{NodeName: "spillway-paris"}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
		}
	}
	index := New("")
	index.Set(pod("1"))
	seen := index.OnNode("spillway-paris")[0].Key
	index.Set(pod("2"))
	if all := index.Members(seen); len(all) != 1 || all[0].ResourceVersion != "2" {
		t.Errorf("the pods are %v, want the new version of the pod", all)
	}
	index.Delete(types.NamespacedName{Namespace: "shop", Name: "web"})
	if all := index.Members(seen); len(all) != 0 {
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

// TestUse: which pods count, and as what.
func TestUse(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.Pod)
		want   Use
		not    bool
	}{
		"a pod that waits":               {change: func(*corev1.Pod) {}, want: Waits},
		"one that cannot overflow":       {change: func(p *corev1.Pod) { p.Spec.RuntimeClassName = ptr.To("kata") }, not: true},
		"one that ended without a node":  {change: func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, not: true},
		"one of another scheduler":       {change: func(p *corev1.Pod) { p.Spec.SchedulerName = "another" }, not: true},
		"one of another scheduler there": {change: func(p *corev1.Pod) { p.Spec.SchedulerName, p.Spec.NodeName = "another", "spillway-paris" }, want: Runs},
		"one there that cannot overflow": {change: func(p *corev1.Pod) { p.Spec.HostNetwork, p.Spec.NodeName = true, "spillway-paris" }, want: Runs},
		"one that is gated":              {change: func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "wait"}} }, not: true},
		"one at home":                    {change: func(p *corev1.Pod) { p.Spec.NodeName = "home-1" }, not: true},
		"one that overflowed":            {change: func(p *corev1.Pod) { p.Spec.NodeName = "spillway-paris" }, want: Runs},
		"one that is being deleted":      {change: func(p *corev1.Pod) { p.DeletionTimestamp = ptr.To(metav1.Now()) }, not: true},
		"one that is being deleted there": {change: func(p *corev1.Pod) {
			p.DeletionTimestamp, p.Spec.NodeName = ptr.To(metav1.Now()), "spillway-paris"
		}, want: Runs},
		"one that ended there": {change: func(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = "spillway-paris", corev1.PodFailed }, want: Ended},
		"a DaemonSet's pod that waits for a virtual node": {change: func(p *corev1.Pod) {
			p.Spec.SchedulerName = corev1.DefaultSchedulerName
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: ptr.To(true)}}
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Values: []string{"spillway-paris"}}}}}}}}
		}, want: Daemon},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}, Spec: corev1.PodSpec{SchedulerName: broker.SchedulerName}}
			tc.change(pod)
			index := New(broker.SchedulerName)
			index.Set(pod)
			tracked := index.pods[client.ObjectKeyFromObject(pod)]
			if tc.not != (tracked == nil) || tracked != nil && tracked.key.Use != tc.want {
				t.Errorf("tracked as %+v, want %d (not at all: %t)", tracked, tc.want, tc.not)
			}
		})
	}
}

// TestScheduler: of the pods that wait, those count that Spillway's scheduler
// schedules, under the name that it has in this cluster.
func TestScheduler(t *testing.T) {
	for scheduler, want := range map[string][]string{
		broker.SchedulerName:        {broker.SchedulerName},
		corev1.DefaultSchedulerName: {"", corev1.DefaultSchedulerName},
		"":                          nil,
	} {
		var counted []string
		for _, name := range []string{"", corev1.DefaultSchedulerName, broker.SchedulerName, "another"} {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}, Spec: corev1.PodSpec{SchedulerName: name}}
			index := New(scheduler)
			index.Set(pod)
			if len(index.pods) > 0 {
				counted = append(counted, name)
			}
		}
		if !slices.Equal(counted, want) {
			t.Errorf("scheduler %q: pods of %q count, want %q", scheduler, counted, want)
		}
	}
}
