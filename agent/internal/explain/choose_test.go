package explain_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// TestChoose: of a workload, the pod is explained that one most wants to know about.
func TestChoose(t *testing.T) {
	pod := func(name, node string, phase corev1.PodPhase, hold string) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelHold: hold}}, Spec: corev1.PodSpec{NodeName: node}}
		p.Status.Phase = phase
		return p
	}
	all := []corev1.Pod{pod("ended", "n", corev1.PodSucceeded, ""), pod("home", "n", corev1.PodRunning, ""), pod("away", "spillway-paris", corev1.PodRunning, "h"),
		pod("starts", "spillway-paris", corev1.PodPending, "h"), pod("waits-b", "", corev1.PodPending, ""), pod("waits-a", "", corev1.PodPending, "")}
	for _, want := range []string{"waits-a", "waits-b", "starts", "away", "home", "ended"} {
		got := explain.Choose(all)
		if got.Name != want {
			t.Errorf("of %d pods, %s is explained, want %s", len(all), got.Name, want)
		}
		var rest []corev1.Pod
		for _, p := range all {
			if p.Name != got.Name {
				rest = append(rest, p)
			}
		}
		all = rest
	}
	if explain.Choose(nil) != nil {
		t.Error("of no pods, one is explained")
	}
}

// TestLatestEvents: only the last event of each reason counts, in any of the forms of events.
func TestLatestEvents(t *testing.T) {
	at := func(minute int) time.Time { return time.Date(2026, 1, 1, 0, minute, 0, 0, time.UTC) }
	got := explain.Latest([]corev1.Event{
		{Reason: "OverflowQueued", Message: "former", LastTimestamp: metav1.NewTime(at(1))},
		{Reason: "OverflowQueued", Message: "last", EventTime: metav1.NewMicroTime(at(0)), Series: &corev1.EventSeries{LastObservedTime: metav1.NewMicroTime(at(9))}},
		{Reason: "OverflowRequested", Message: "once", EventTime: metav1.NewMicroTime(at(2))},
	})
	want := []explain.Event{{Reason: "OverflowQueued", Message: "last"}, {Reason: "OverflowRequested", Message: "once"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestMinimum: how many pods each kind of group needs.
func TestMinimum(t *testing.T) {
	object := func(spec map[string]any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	}
	gang := map[string]any{"gang": map[string]any{"minCount": int64(4)}}
	for _, of := range []struct {
		group *unstructured.Unstructured
		gang  demand.Gang
		want  int64
	}{
		{object(map[string]any{"minMember": int64(3)}), demand.Gang{API: demand.CoschedulingGangs, PodGroup: "a"}, 3},
		{object(map[string]any{"schedulingPolicy": gang}), demand.Gang{API: demand.KubernetesGangs, PodGroup: "a"}, 4},
		{object(map[string]any{"podGroups": []any{map[string]any{"name": "b"}, map[string]any{"name": "a", "policy": gang}}}), demand.Gang{API: demand.KubernetesGangs, Workload: "w", PodGroup: "a"}, 4},
		{object(map[string]any{"minMember": "many"}), demand.Gang{API: demand.CoschedulingGangs, PodGroup: "a"}, 0},
	} {
		if got := explain.Minimum(of.group, of.gang); got != of.want {
			t.Errorf("%s needs %d pods, want %d", of.gang, got, of.want)
		}
	}
}
