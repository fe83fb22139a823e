package virtualnode_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func podSet(count int32, requests corev1.ResourceList) []broker.PodSet {
	return []broker.PodSet{{Name: "pods", Count: count, Requests: broker.FromList(requests)}}
}

func bound(n int, requests corev1.ResourceList) virtualnode.Pods {
	var pods []*corev1.Pod
	for i := range n {
		pods = append(pods, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i), Namespace: "shop"},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: requests}}}},
		})
	}
	return virtualnode.SumOf(pods...)
}

func grant(count int32, requests corev1.ResourceList, change ...func(*virtualnode.Grant)) virtualnode.Grant {
	g := virtualnode.Grant{
		Instruction: &broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{
			SourceNamespace: "shop", SourceName: "web", PodSets: podSet(count, requests), RequestedResources: broker.FromList(broker.Times(requests, count)),
		}},
		Reservation: &broker.Reservation{}, Limit: -1,
	}
	for _, c := range change {
		c(&g)
	}
	return g
}

func limit(n int32) func(*virtualnode.Grant) { return func(g *virtualnode.Grant) { g.Limit = n } }
func with(pods virtualnode.Pods) func(*virtualnode.Grant) {
	return func(g *virtualnode.Grant) { g.Bound = pods }
}
func releasing(g *virtualnode.Grant) { g.Reservation = nil }
func divisible(t corev1.ResourceList) func(*virtualnode.Grant) {
	return func(g *virtualnode.Grant) {
		g.Instruction.Spec.PodSets, g.Instruction.Spec.RequestedResources = nil, broker.FromList(t)
	}
}

func of(grants ...virtualnode.Grant) virtualnode.Snapshot {
	return virtualnode.Snapshot{Grants: grants}
}

func TestNodePlan(t *testing.T) {
	small := expect.Resources("cpu", "300m", "memory", "64Mi")
	cases := map[string]struct {
		reason   string
		snapshot virtualnode.Snapshot
		want     string
	}{
		"nothing":             {reason: "parked", want: "nothing, 0 pods, []"},
		"one grant":           {reason: "exactly it", snapshot: of(grant(3, small)), want: "cpu 900m, memory 192Mi, 3 pods, [shop]"},
		"two grants":          {reason: "their sum", snapshot: of(grant(3, small), grant(1, expect.Resources("cpu", "1"))), want: "cpu 1900m, memory 192Mi, 4 pods, [shop]"},
		"a release":           {reason: "shrunk to what is kept", snapshot: of(grant(3, small, limit(1))), want: "cpu 300m, memory 64Mi, 1 pods, [shop]"},
		"a release with use":  {reason: "never below what runs", snapshot: of(grant(3, small, limit(1), with(bound(2, small)))), want: "cpu 600m, memory 128Mi, 2 pods, [shop]"},
		"released to zero":    {reason: "parked", snapshot: of(grant(3, small, limit(0))), want: "nothing, 0 pods, [shop]"},
		"releasing":           {reason: "only what runs", snapshot: of(grant(3, small, releasing, with(bound(1, small)))), want: "cpu 300m, memory 64Mi, 1 pods, [shop]"},
		"released":            {reason: "nothing runs", snapshot: of(grant(3, small, releasing)), want: "nothing, 0 pods, [shop]"},
		"larger than granted": {reason: "what runs counts as it is", snapshot: of(grant(1, small, with(bound(1, expect.Resources("cpu", "1"))))), want: "cpu 1, memory 64Mi, 1 pods, [shop]"},
		"ungranted":           {reason: "take no grant's capacity", snapshot: virtualnode.Snapshot{Grants: []virtualnode.Grant{grant(1, small)}, Ungranted: bound(2, small)}, want: "cpu 900m, memory 192Mi, 3 pods, [shop]"},
		"finished":            {reason: "need no capacity, but their namespace", snapshot: virtualnode.Snapshot{Finished: bound(2, small)}, want: "nothing, 0 pods, [shop]"},
		"a divisible total":   {reason: "all of it, for as many pods as a node takes", snapshot: of(grant(0, nil, divisible(expect.Resources("cpu", "4")))), want: "cpu 4, 110 pods, [shop]"},
		"pods for nothing":    {reason: "a node that is not parked", snapshot: of(grant(2, nil)), want: "cpu 1m, memory 1Mi, 2 pods, [shop]"},
		"daemons":             {reason: "a pod slot each, and no resources", snapshot: virtualnode.Snapshot{Grants: []virtualnode.Grant{grant(2, small)}, DaemonPods: 1}, want: "cpu 600m, memory 128Mi, 3 pods, [shop]"},
		"daemons alone":       {reason: "keep no node from being parked", snapshot: virtualnode.Snapshot{DaemonPods: 2}, want: "nothing, 0 pods, []"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := virtualnode.NodePlan(&tc.snapshot)
			if s := fmt.Sprintf("%s, %d pods, %v", broker.FromList(got.Resources), got.Pods, got.Namespaces); s != tc.want {
				t.Errorf("%s: got %s, want %s", tc.reason, s, tc.want)
			}
			if parked := strings.HasPrefix(tc.want, "nothing"); got.Parked() != parked {
				t.Errorf("%s: parked is %v", tc.reason, got.Parked())
			}
		})
	}
}

// The virtual node has the labels of the provider's nodes that any of its pods selects.
func TestNodePlanHasSelectedLabels(t *testing.T) {
	labelled := func(labels map[string]string) func(*virtualnode.Grant) {
		return func(g *virtualnode.Grant) { g.Instruction.Spec.NodeLabels = labels }
	}
	small := expect.Resources("cpu", "300m")
	snapshot := of(grant(1, small, labelled(map[string]string{"zone": "a"})), grant(1, small), grant(1, small, labelled(map[string]string{"gpu": "a100"})))
	if got, want := virtualnode.NodePlan(&snapshot).Labels, map[string]string{"zone": "a", "gpu": "a100"}; !maps.Equal(got, want) {
		t.Errorf("labels %v, want %v", got, want)
	}
}

// TestNodePlanNeverBelowUse: whatever is limited or released, the node carries what
// runs there, and with no limit all that is granted.
func TestNodePlanNeverBelowUse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var grants []virtualnode.Grant
		var used, granted corev1.ResourceList
		var pods int32
		limited := false
		for range rapid.IntRange(0, 4).Draw(t, "grants") {
			requests := corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(rapid.Int64Range(0, 3000).Draw(t, "cpu"), resource.DecimalSI)}
			count := rapid.Int32Range(1, 5).Draw(t, "count")
			n := rapid.IntRange(0, 6).Draw(t, "bound")
			g := grant(count, requests, with(bound(n, requests)), limit(rapid.Int32Range(-1, 5).Draw(t, "limit")))
			if rapid.Bool().Draw(t, "releasing") {
				releasing(&g)
			}
			limited = limited || g.Limit >= 0 || g.Releasing()
			grants = append(grants, g)
			used = broker.AddTo(used, broker.Times(requests, int32(n)))
			granted = broker.AddTo(granted, broker.Times(requests, count))
			pods += int32(n)
		}
		plan := virtualnode.NodePlan(&virtualnode.Snapshot{Grants: grants})
		atLeast := func(what string, need corev1.ResourceList) {
			for name, amount := range need {
				if have := plan.Resources[name]; have.Cmp(amount) < 0 {
					t.Fatalf("%s %s of %s, the node carries %s", amount.String(), name, what, have.String())
				}
			}
		}
		atLeast("use", used)
		if plan.Pods < pods {
			t.Fatalf("%d pods run, the node takes %d", pods, plan.Pods)
		}
		if !limited {
			atLeast("grants", granted)
		}
	})
}
