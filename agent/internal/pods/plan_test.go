package pods

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func TestSurplus(t *testing.T) {
	const grace = 30 * time.Second
	type look struct {
		after           time.Duration
		need, requested int32
		target          int32
		due             bool
	}
	cases := map[string]struct {
		reason string
		looks  []look
	}{
		"all is needed":     {"never due", []look{{0, 3, 3, 3, false}, {time.Hour, 4, 3, 3, false}}},
		"less for long":     {"due after the grace period, with what is needed", []look{{0, 1, 3, 3, false}, {29 * time.Second, 1, 3, 3, false}, {time.Second, 1, 3, 1, true}}},
		"a short dip":       {"a rollout is no surplus", []look{{0, 1, 3, 3, false}, {20 * time.Second, 3, 3, 3, false}, {20 * time.Second, 1, 3, 3, false}, {29 * time.Second, 1, 3, 3, false}, {time.Second, 1, 3, 1, true}}},
		"a peak in between": {"no less than the peak", []look{{0, 0, 5, 5, false}, {10 * time.Second, 3, 5, 5, false}, {20 * time.Second, 0, 5, 3, true}}},
		"in two steps":      {"what was needed until lately has a grace period of its own", []look{{0, 2, 5, 5, false}, {grace, 1, 5, 2, true}, {0, 1, 2, 2, false}, {grace, 1, 2, 1, true}}},
		"nothing is needed": {"down to zero", []look{{0, 0, 2, 2, false}, {grace, 0, 2, 0, true}}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var surplus Surplus
			now := time.Unix(0, 0)
			for i, l := range tc.looks {
				now = now.Add(l.after)
				target, wait, due := surplus.Observe(now, l.need, l.requested, grace)
				if target != l.target || due != l.due || (wait > 0) != (!due && l.need < l.requested) {
					t.Errorf("%s: look %d: got target %d, wait %s, due %v", tc.reason, i, target, wait, due)
				}
			}
		})
	}
}

func TestRetain(t *testing.T) {
	type m = map[string]int32
	type list = []broker.RetainedPods
	paris := func(count int32) broker.RetainedPods {
		return broker.RetainedPods{Cluster: "paris", Count: count, Attempt: 7}
	}
	berlin := func(count int32) broker.RetainedPods {
		return broker.RetainedPods{Cluster: "berlin", Count: count, Attempt: 7}
	}
	instruction := func(provider string, count int32) broker.ReservationInstruction {
		return broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{TargetClusterID: provider, Attempt: 7, PodSets: []broker.PodSet{{Name: "pods", Count: count}}}}
	}
	type granted = []broker.ReservationInstruction
	both := granted{instruction("berlin", 3), instruction("paris", 3)}
	cases := map[string]struct {
		reason  string
		target  int32
		granted granted
		bound   m
		want    list
	}{
		"one provider":        {"the target", 2, granted{instruction("paris", 5)}, m{"paris": 1}, list{paris(2)}},
		"bound to one":        {"the other becomes free", 2, both, m{"paris": 2}, list{berlin(0), paris(2)}},
		"bound to both":       {"each retains its own", 3, both, m{"paris": 2, "berlin": 1}, list{berlin(1), paris(2)}},
		"pending too":         {"they go where most are bound", 4, both, m{"paris": 2, "berlin": 1}, list{berlin(1), paris(3)}},
		"more than granted":   {"no more than there is", 9, granted{instruction("paris", 3)}, m{"paris": 2}, list{paris(3)}},
		"nothing":             {"all is released", 0, granted{instruction("paris", 3)}, nil, list{paris(0)}},
		"no grant":            {"nothing to retain", 3, nil, nil, list{}},
		"more than the grant": {"pods beyond it retain nothing", 3, granted{instruction("paris", 1)}, m{"paris": 3}, list{paris(1)}},
	}
	for name, tc := range cases {
		if diff := cmp.Diff(tc.want, Retain(tc.target, tc.granted, tc.bound)); diff != "" {
			t.Errorf("%s: %s (-want +got):\n%s", name, tc.reason, diff)
		}
	}
}

func TestAdmissions(t *testing.T) {
	at := func(name string, age int, tolerated ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(1000-age), 0))}}
		for _, c := range tolerated {
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: c, Effect: corev1.TaintEffectNoSchedule})
		}
		if len(tolerated) > 0 {
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "driver.example.com/no", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute})
		}
		return p
	}
	driver := corev1.Toleration{Key: "driver.example.com/no", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}
	required := func(provider string) []corev1.Toleration { return at("", 0, provider).Spec.Tolerations }
	steered := func(name string, age int, driver ...corev1.Toleration) *corev1.Pod {
		p := at(name, age)
		p.Spec.Tolerations = append(driver, corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule})
		return p
	}
	type m = map[string]int32
	cases := map[string]struct {
		reason  string
		pending []*corev1.Pod
		free    m
		want    string
	}{
		"steered":              {"nothing is to be added", []*corev1.Pod{steered("a", 1, driver)}, m{"paris": 1}, ""},
		"without the driver's": {"the node has another taint", []*corev1.Pod{steered("a", 1)}, m{"paris": 1}, "a→paris"},
		"as many as slots":     {"the oldest first", []*corev1.Pod{at("young", 1), at("old", 3), at("middle", 2)}, m{"paris": 2}, "old→paris middle→paris"},
		"some are admitted":    {"they count", []*corev1.Pod{at("a", 3), at("b", 2, "paris"), at("c", 1)}, m{"paris": 2}, "a→paris"},
		"no free slot":         {"none", []*corev1.Pod{at("a", 1)}, m{"paris": 0, "berlin": -1}, ""},
		"two providers":        {"one slot each", []*corev1.Pod{at("a", 2), at("b", 1)}, m{"paris": 1, "berlin": 1}, "a→berlin b→paris"},
		"another provider":     {"a pod that tolerates a full provider is admitted to another", []*corev1.Pod{at("a", 2, "paris")}, m{"paris": 0, "berlin": 1}, "a→berlin"},
	}
	for name, tc := range cases {
		var got []string
		for _, a := range Admissions(tc.pending, tc.free, required) {
			got = append(got, a.Pod.Name+"→"+a.Provider)
		}
		if s := strings.Join(got, " "); s != tc.want {
			t.Errorf("%s: %s: got %q, want %q", name, tc.reason, s, tc.want)
		}
	}
}

// The timeout of a pod that the provider has not started begins again with each
// start of another, and ends after maxStartTimeouts at the latest.
func TestStartDeadline(t *testing.T) {
	const timeout = time.Minute
	scheduled := time.Unix(1000, 0)
	bound := corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
		{Type: corev1.PodScheduled, LastTransitionTime: metav1.NewTime(scheduled)},
	}}
	started := *bound.DeepCopy()
	started.StartTime = &metav1.Time{Time: scheduled}
	initialized := *bound.DeepCopy()
	initialized.Conditions = append(initialized.Conditions, corev1.PodCondition{Type: corev1.PodInitialized})
	for name, tc := range map[string]struct {
		reason    string
		status    corev1.PodStatus
		refusal   string
		lastStart time.Duration
		// want is the deadline after it was scheduled, 0 for none.
		want time.Duration
	}{
		"no pod was ever started":      {reason: "one timeout", status: bound, lastStart: -1000 * time.Second, want: timeout},
		"others were started before":   {reason: "one timeout", status: bound, lastStart: -time.Second, want: timeout},
		"others were started since":    {reason: "one timeout from then", status: bound, lastStart: 30 * time.Second, want: 90 * time.Second},
		"others are started all along": {reason: "bounded", status: bound, lastStart: time.Hour, want: maxStartTimeouts * timeout},
		"rejected":                     {reason: "other pods do not matter", status: initialized, refusal: "Full", lastStart: time.Hour, want: timeout},
		"started":                      {reason: "not evicted", status: started},
		"touched":                      {reason: "the provider has begun with it", status: initialized},
		"running":                      {reason: "not evicted", status: corev1.PodStatus{Phase: corev1.PodRunning}, refusal: "Full"},
	} {
		deadline, cause, ok := startDeadline(&corev1.Pod{Status: tc.status}, tc.refusal, scheduled.Add(tc.lastStart), timeout)
		if ok != (tc.want > 0) || ok && deadline.Sub(scheduled) != tc.want || !strings.Contains(cause, tc.refusal) && ok {
			t.Errorf("%s: %s: got %s (%v, %q), want %s", name, tc.reason, deadline.Sub(scheduled), ok, cause, tc.want)
		}
	}
}

func TestForceDeleteAt(t *testing.T) {
	const lostAfter = 10 * time.Minute
	begin := time.Unix(10_000, 0)
	node := func(status corev1.ConditionStatus, since time.Duration) *corev1.Node {
		return &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeReady, Status: status, LastTransitionTime: metav1.NewTime(begin.Add(since))},
		}}}
	}
	for name, tc := range map[string]struct {
		reason string
		node   *corev1.Node
		owner  string
		// want is the time after the pod was deleted, 0 for never.
		want time.Duration
	}{
		"unreachable before":   {reason: "counted from the deletion", node: node(corev1.ConditionUnknown, -time.Hour), owner: "ReplicaSet", want: lostAfter},
		"unreachable since":    {reason: "counted from then", node: node(corev1.ConditionFalse, time.Minute), owner: "ReplicaSet", want: lostAfter + time.Minute},
		"reachable":            {reason: "the provider confirms the end", node: node(corev1.ConditionTrue, -time.Hour), owner: "ReplicaSet"},
		"of a StatefulSet":     {reason: "its name must not be in use twice", node: node(corev1.ConditionUnknown, -time.Hour), owner: "StatefulSet"},
		"without a controller": {reason: "no replacement waits for it", node: node(corev1.ConditionUnknown, -time.Hour)},
		"no node":              {reason: "its loss is not observed", owner: "ReplicaSet"},
		"no condition":         {reason: "its loss is not observed", node: &corev1.Node{}, owner: "ReplicaSet"},
	} {
		// The deletion timestamp includes the grace period.
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: begin.Add(30 * time.Second)}, DeletionGracePeriodSeconds: ptr.To[int64](30)}}
		if tc.owner != "" {
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: tc.owner, Controller: ptr.To(true)}}
		}
		at, ok := forceDeleteAt(tc.node, pod, lostAfter)
		if ok != (tc.want > 0) || ok && at.Sub(begin) != tc.want {
			t.Errorf("%s: %s: got %s (%v), want %s", name, tc.reason, at.Sub(begin), ok, tc.want)
		}
	}
}
