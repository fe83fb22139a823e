package virtualnode_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func list(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

func podSet(count int32, requests corev1.ResourceList) []broker.PodSet {
	return []broker.PodSet{{Name: "pods", Count: count, Requests: broker.FromList(requests)}}
}

func bound(n int, requests corev1.ResourceList) (pods []*corev1.Pod) {
	for i := range n {
		pods = append(pods, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i), Namespace: "shop"},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: requests}}}},
		})
	}
	return pods
}

func grant(count int32, requests corev1.ResourceList, change ...func(*virtualnode.Grant)) virtualnode.Grant {
	g := virtualnode.Grant{
		Instruction: &broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{
			SourceNamespace: "shop", PodSets: podSet(count, requests), RequestedResources: broker.FromList(broker.Times(requests, count)),
		}},
		Reservation: &broker.Reservation{}, Limit: -1,
	}
	for _, c := range change {
		c(&g)
	}
	return g
}

func limit(n int32) func(*virtualnode.Grant) { return func(g *virtualnode.Grant) { g.Limit = n } }
func with(pods []*corev1.Pod) func(*virtualnode.Grant) {
	return func(g *virtualnode.Grant) { g.Bound = pods }
}
func gone(g *virtualnode.Grant) { g.Reservation = nil }
func divisible(t corev1.ResourceList) func(*virtualnode.Grant) {
	return func(g *virtualnode.Grant) {
		g.Instruction.Spec.PodSets, g.Instruction.Spec.RequestedResources = nil, broker.FromList(t)
	}
}

func TestNodePlan(t *testing.T) {
	small := list("cpu", "300m", "memory", "64Mi")
	cases := map[string]struct {
		reason              string
		grants              []virtualnode.Grant
		strangers, finished []*corev1.Pod
		daemons             int32
		want                string
	}{
		"nothing":            {reason: "parked", want: "nothing, 0 pods, []"},
		"one grant":          {reason: "exactly it", grants: []virtualnode.Grant{grant(3, small)}, want: "cpu 900m, memory 192Mi, 3 pods, [shop]"},
		"two grants":         {reason: "their sum", grants: []virtualnode.Grant{grant(3, small), grant(1, list("cpu", "1"))}, want: "cpu 1900m, memory 192Mi, 4 pods, [shop]"},
		"a release":          {reason: "shrunk to what is kept", grants: []virtualnode.Grant{grant(3, small, limit(1))}, want: "cpu 300m, memory 64Mi, 1 pods, [shop]"},
		"a release with use": {reason: "never below what runs", grants: []virtualnode.Grant{grant(3, small, limit(1), with(bound(2, small)))}, want: "cpu 600m, memory 128Mi, 2 pods, [shop]"},
		"released to zero":   {reason: "parked", grants: []virtualnode.Grant{grant(3, small, limit(0))}, want: "nothing, 0 pods, [shop]"},
		"ending":             {reason: "only what runs", grants: []virtualnode.Grant{grant(3, small, gone, with(bound(1, small)))}, want: "cpu 300m, memory 64Mi, 1 pods, [shop]"},
		"ended":              {reason: "nothing runs", grants: []virtualnode.Grant{grant(3, small, gone)}, want: "nothing, 0 pods, [shop]"},
		"larger than asked":  {reason: "what runs counts as it is", grants: []virtualnode.Grant{grant(1, small, with(bound(1, list("cpu", "1"))))}, want: "cpu 1, memory 64Mi, 1 pods, [shop]"},
		"strangers":          {reason: "take no grant's place", grants: []virtualnode.Grant{grant(1, small)}, strangers: bound(2, small), want: "cpu 900m, memory 192Mi, 3 pods, [shop]"},
		"finished":           {reason: "need no room, but their namespace", finished: bound(2, small), want: "nothing, 0 pods, [shop]"},
		"a divisible total":  {reason: "the whole, for as many pods as a node takes", grants: []virtualnode.Grant{grant(0, nil, divisible(list("cpu", "4")))}, want: "cpu 4, 110 pods, [shop]"},
		"pods for nothing":   {reason: "a node that is not parked", grants: []virtualnode.Grant{grant(2, nil)}, want: "cpu 1m, memory 1Mi, 2 pods, [shop]"},
		"daemons":            {reason: "a place each, and no capacity", grants: []virtualnode.Grant{grant(2, small)}, daemons: 1, want: "cpu 600m, memory 128Mi, 3 pods, [shop]"},
		"daemons alone":      {reason: "keep no node from being parked", daemons: 2, want: "nothing, 0 pods, []"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := virtualnode.NodePlan(tc.grants, tc.strangers, tc.finished, tc.daemons)
			if s := fmt.Sprintf("%s, %d pods, %v", broker.FromList(got.Resources), got.Pods, got.Namespaces); s != tc.want {
				t.Errorf("%s: got %s, want %s", tc.reason, s, tc.want)
			}
			if parked := strings.HasPrefix(tc.want, "nothing"); got.Parked() != parked {
				t.Errorf("%s: parked is %v", tc.reason, got.Parked())
			}
		})
	}
}

// TestNodePlanNeverBelowUse: whatever is limited or ending, the node carries what
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
			if rapid.Bool().Draw(t, "ending") {
				gone(&g)
			}
			limited = limited || g.Limit >= 0 || g.Ending()
			grants = append(grants, g)
			used = broker.AddTo(used, broker.Times(requests, int32(n)))
			granted = broker.AddTo(granted, broker.Times(requests, count))
			pods += int32(n)
		}
		plan := virtualnode.NodePlan(grants, nil, nil, 0)
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

func TestSlack(t *testing.T) {
	const grace = 30 * time.Second
	type look struct {
		after       time.Duration
		need, asked int32
		target      int32
		due         bool
	}
	cases := map[string]struct {
		reason string
		looks  []look
	}{
		"all is needed":   {"never due", []look{{0, 3, 3, 3, false}, {time.Hour, 4, 3, 3, false}}},
		"less for long":   {"due after the grace, with what is needed", []look{{0, 1, 3, 3, false}, {29 * time.Second, 1, 3, 3, false}, {time.Second, 1, 3, 1, true}}},
		"a short dip":     {"a roll-out is not slack", []look{{0, 1, 3, 3, false}, {20 * time.Second, 3, 3, 3, false}, {20 * time.Second, 1, 3, 3, false}, {29 * time.Second, 1, 3, 3, false}, {time.Second, 1, 3, 1, true}}},
		"a peak meantime": {"no less than what was needed at times", []look{{0, 0, 5, 5, false}, {10 * time.Second, 3, 5, 5, false}, {20 * time.Second, 0, 5, 3, true}}},
		"in two steps":    {"what was needed until lately has a grace of its own", []look{{0, 2, 5, 5, false}, {grace, 1, 5, 2, true}, {0, 1, 2, 2, false}, {grace, 1, 2, 1, true}}},
		"none":            {"down to zero", []look{{0, 0, 2, 2, false}, {grace, 0, 2, 0, true}}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var slack virtualnode.Slack
			now := time.Unix(0, 0)
			for i, l := range tc.looks {
				now = now.Add(l.after)
				target, wait, due := slack.Judge(now, l.need, l.asked, grace)
				if target != l.target || due != l.due || (wait > 0) != (!due && l.need < l.asked) {
					t.Errorf("%s: look %d: got target %d, wait %s, due %v", tc.reason, i, target, wait, due)
				}
			}
		})
	}
}

func TestKeep(t *testing.T) {
	type m = map[string]int32
	cases := map[string]struct {
		reason          string
		target          int32
		granted, remote m
		want            m
	}{
		"one provider":        {"the target", 2, m{"paris": 5}, m{"paris": 1}, m{"paris": 2}},
		"where they run":      {"the other becomes free", 2, m{"berlin": 3, "paris": 3}, m{"paris": 2}, m{"berlin": 0, "paris": 2}},
		"both":                {"each keeps its own", 3, m{"berlin": 3, "paris": 3}, m{"paris": 2, "berlin": 1}, m{"berlin": 1, "paris": 2}},
		"waiting too":         {"they go where most run", 4, m{"berlin": 3, "paris": 3}, m{"paris": 2, "berlin": 1}, m{"berlin": 1, "paris": 3}},
		"more than granted":   {"no more than there is", 9, m{"paris": 3}, m{"paris": 2}, m{"paris": 3}},
		"nothing":             {"all is given back", 0, m{"paris": 3}, nil, m{"paris": 0}},
		"no grant":            {"nothing to keep", 3, nil, nil, m{}},
		"more than the grant": {"pods beyond it keep no hold", 3, m{"paris": 1}, m{"paris": 3}, m{"paris": 1}},
	}
	for name, tc := range cases {
		if diff := cmp.Diff(tc.want, virtualnode.Keep(tc.target, tc.granted, tc.remote)); diff != "" {
			t.Errorf("%s: %s (-want +got):\n%s", name, tc.reason, diff)
		}
	}
}

func TestWelcomes(t *testing.T) {
	at := func(name string, age int, tolerated ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(1000-age), 0))}}
		for _, c := range tolerated {
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: c, Effect: corev1.TaintEffectNoSchedule})
		}
		return p
	}
	type m = map[string]int32
	cases := map[string]struct {
		reason  string
		waiting []*corev1.Pod
		free    m
		want    string
	}{
		"as many as places":   {"the oldest first", []*corev1.Pod{at("young", 1), at("old", 3), at("middle", 2)}, m{"paris": 2}, "old→paris middle→paris"},
		"some are in already": {"they count", []*corev1.Pod{at("a", 3), at("b", 2, "paris"), at("c", 1)}, m{"paris": 2}, "a→paris"},
		"no place":            {"nobody", []*corev1.Pod{at("a", 1)}, m{"paris": 0, "berlin": -1}, ""},
		"two providers":       {"one place for each", []*corev1.Pod{at("a", 2), at("b", 1)}, m{"paris": 1, "berlin": 1}, "a→berlin b→paris"},
		"the wrong place":     {"who tolerates a full provider gets another", []*corev1.Pod{at("a", 2, "paris")}, m{"paris": 0, "berlin": 1}, "a→berlin"},
	}
	for name, tc := range cases {
		var got []string
		for _, w := range virtualnode.Welcomes(tc.waiting, tc.free) {
			got = append(got, w.Pod.Name+"→"+w.Cluster)
		}
		if s := strings.Join(got, " "); s != tc.want {
			t.Errorf("%s: %s: got %q, want %q", name, tc.reason, s, tc.want)
		}
	}
}
