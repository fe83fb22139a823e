package virtualnode

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// The status shows what a virtual node carries for an instruction until the node
// carries what the instruction says now, and not once the node is gone or the
// grant is being released.
func TestInstructionStatusCarried(t *testing.T) {
	pods := func(n int32) broker.HeldCapacity {
		return broker.HeldCapacity{PodSets: []broker.PodSet{{Name: "pods", Count: n}}}
	}
	ready := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
	done, waiting := peering.Done("Done", ""), peering.Waiting("Growing", "the node grows")
	for name, tc := range map[string]struct {
		node      *corev1.Node
		releasing bool
		progress  progress
		want      int32
	}{
		"carries it all":               {node: ready, progress: progress{peered: done, node: done}, want: 5},
		"grows":                        {node: ready, progress: progress{peered: done, node: waiting}, want: 2},
		"a step failed":                {node: ready, progress: progress{peered: done, node: waiting, err: errors.New("no")}, want: 2},
		"the provider has lost it":     {node: ready, progress: progress{peered: done, node: peering.Waiting(peering.ReasonGrantPending, ""), overdue: true}},
		"the node is gone":             {progress: progress{peered: waiting, node: waiting}},
		"the node is not ready":        {node: &corev1.Node{}, progress: progress{peered: done, node: waiting}},
		"the reservation is not there": {node: ready, releasing: true, progress: progress{peered: done, node: waiting}},
	} {
		t.Run(name, func(t *testing.T) {
			in := &broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{SourceName: "web", Attempt: 2, PodSets: pods(5).PodSets}}
			in.Status.Carried = ptr.To(pods(2))
			g := Grant{Instruction: in, Reservation: &broker.Reservation{}, Limit: -1}
			if tc.releasing {
				g.Reservation = nil
			}
			var got int32
			if status := instructionStatus(g, &Snapshot{Provider: "paris", Node: tc.node}, tc.progress, false); status.Carried != nil {
				got = status.Carried.Pods()
			}
			if got != tc.want {
				t.Errorf("carries %d pods, want %d", got, tc.want)
			}
		})
	}
}

func TestPodLimit(t *testing.T) {
	paris := func(count int32, attempt int64) []broker.RetainedPods {
		return []broker.RetainedPods{{Cluster: "paris", Count: count, Attempt: attempt}}
	}
	for name, tc := range map[string]struct {
		reason            string
		requested         int32
		retained, release []broker.RetainedPods
		want              int32
	}{
		"nothing retained":        {reason: "no limit", requested: 3, want: -1},
		"count lowered":           {reason: "limited until the broker has answered", requested: 2, retained: paris(2, 5), want: 2},
		"later attempt":           {reason: "in force in full", requested: 2, retained: paris(2, 4), want: -1},
		"count raised again":      {reason: "what is retained counts no more", requested: 3, retained: paris(2, 5), want: -1},
		"another provider":        {reason: "not limited", requested: 2, retained: []broker.RetainedPods{{Cluster: "berlin", Count: 2, Attempt: 5}}, want: -1},
		"release under way":       {reason: "limited before the count is lowered", requested: 3, release: paris(1, 5), want: 1},
		"later attempt meanwhile": {reason: "limited until the release is computed for it", requested: 3, release: paris(1, 4), want: 1},
		"new provider meanwhile":  {reason: "gets none until the release is computed for it", requested: 3, release: []broker.RetainedPods{{Cluster: "berlin", Count: 1, Attempt: 5}}, want: 0},
		"release without grants":  {reason: "gets none until the release is computed for it", requested: 3, release: []broker.RetainedPods{}, want: 0},
		"release of more":         {reason: "the release is later than the retained pods", requested: 2, retained: paris(2, 5), release: paris(0, 5), want: 0},
	} {
		t.Run(name, func(t *testing.T) {
			spec := &broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: tc.requested}}, Retained: tc.retained}
			in := &broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{TargetClusterID: "paris", Attempt: 5}}
			if got := podLimit(spec, in, tc.release); got != tc.want {
				t.Errorf("%s: got %d, want %d", tc.reason, got, tc.want)
			}
		})
	}
}

func TestKeepPeering(t *testing.T) {
	now := time.Unix(10_000, 0)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	finished := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(ago(10 * time.Second))}}
	for name, tc := range map[string]struct {
		reason    string
		snapshot  Snapshot
		lastGrant time.Time
		want      time.Duration
	}{
		"just idle":      {reason: "looked at again at the next resync", lastGrant: now, want: ResyncPeriod},
		"nearly over":    {reason: "looked at again when it is", lastGrant: ago(55 * time.Second), want: 5 * time.Second},
		"idle for long":  {reason: "removed", lastGrant: ago(time.Minute), want: 0},
		"finished pod":   {reason: "kept for its logs", snapshot: Snapshot{Finished: SumOf(finished)}, lastGrant: ago(time.Hour), want: 20 * time.Second},
		"ungranted pods": {reason: "kept while they run", snapshot: Snapshot{Ungranted: SumOf(&corev1.Pod{})}, lastGrant: ago(time.Hour), want: ResyncPeriod},
		"cordoned":       {reason: "kept, as its next node would not be cordoned", snapshot: Snapshot{Node: &corev1.Node{Spec: corev1.NodeSpec{Unschedulable: true}}}, lastGrant: ago(time.Hour), want: ResyncPeriod},
		"not cordoned":   {reason: "removed", snapshot: Snapshot{Node: &corev1.Node{}}, lastGrant: ago(time.Hour), want: 0},
	} {
		if got := keepPeering(&tc.snapshot, tc.lastGrant, now, time.Minute, 30*time.Second); got != tc.want {
			t.Errorf("%s: %s: got %s, want %s", name, tc.reason, got, tc.want)
		}
	}
}
