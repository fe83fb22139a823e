package virtualnode

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
)

// withdrawn reports whether the provider has withdrawn a part of the grant and pods may
// have yet to leave. What a Reservation that is being released granted is not withdrawn
// again.
func (g Grant) withdrawn() bool {
	w := g.Instruction.Spec.Withdrawal
	return w != nil && w.Attempt > g.Instruction.Status.LeftAttempt && !g.Releasing()
}

// Beyond returns the bound pods that are beyond the grant, those that are to leave first
// at the beginning: pods that are already terminating, that the provider has marked, that
// are not Ready, then those of the lowest priority, then the newest. The others have a place as
// the provider counts them, the largest first. If there are pods that fit no pod set, such as
// those that were resized, pods count by their number.
func (g Grant) Beyond() []*corev1.Pod {
	pods := g.Bound.all()
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(
			before(a.DeletionTimestamp != nil, b.DeletionTimestamp != nil), before(MustLeave(a), MustLeave(b)), before(!Ready(a), !Ready(b)),
			cmp.Compare(ptr.Deref(a.Spec.Priority, 0), ptr.Deref(b.Spec.Priority, 0)),
			b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(b.Name, a.Name),
		)
	})
	granted := g.granted()
	used := charge.New([]charge.Promise{{Held: granted}})
	stays := slices.Clone(pods)
	slices.Reverse(stays) // those that leave last choose first
	if len(granted.PodSets) > 0 {
		if slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return !used.Fits(guest(pod)) }) {
			return pods[:max(0, len(pods)-int(granted.Pods()))]
		}
		slices.SortStableFunc(stays, func(a, b *corev1.Pod) int {
			return capacity.Compare(capacity.Ceil(inventory.Requests(b)), capacity.Ceil(inventory.Requests(a)))
		})
	}
	kept := map[*corev1.Pod]bool{}
	for _, pod := range stays {
		_, kept[pod] = used.Take(guest(pod))
	}
	return slices.DeleteFunc(pods, func(pod *corev1.Pod) bool { return kept[pod] })
}

func guest(pod *corev1.Pod) charge.Guest { return charge.Guest{Requests: inventory.Requests(pod)} }

// before orders what is true before what is not.
func before(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	default:
		return 1
	}
}

// Ready reports whether a pod is Ready.
func Ready(pod *corev1.Pod) bool { return isTrue(pod, corev1.PodReady) }

// MustLeave reports whether the provider has marked the guest of a pod because the node that
// it runs on has no place for it any more.
func MustLeave(pod *corev1.Pod) bool { return isTrue(pod, broker.PodMustLeave) }

func isTrue(pod *corev1.Pod, condition corev1.PodConditionType) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == condition && c.Status == corev1.ConditionTrue
	})
}

// Leaving are the pods that must leave a virtual node because its provider has withdrawn
// their capacity.
type Leaving struct {
	// Reservation is the local one; nil for one of the hub.
	Reservation *broker.Reservation
	// ByHand is whether the Reservation was made by hand.
	ByHand bool
	// Pods in the order in which they are to leave, and by when.
	Pods []*corev1.Pod
	By   time.Time
}

// Leaving returns the pods that must leave a provider's virtual node, by grant.
func (r *Reconciler) Leaving(ctx context.Context, provider string) ([]Leaving, error) {
	instructions, err := r.instructions(ctx, r.client, func(spec broker.ReservationInstructionSpec) bool {
		return spec.TargetClusterID == provider && spec.Withdrawal != nil
	})
	if err != nil || !slices.ContainsFunc(instructions, func(in broker.ReservationInstruction) bool {
		return in.Spec.Withdrawal.Attempt > in.Status.LeftAttempt
	}) {
		return nil, err
	}
	s, err := r.gather(ctx, r.client, provider)
	if err != nil {
		return nil, err
	}
	var out []Leaving
	for _, g := range s.Grants {
		if !g.withdrawn() {
			continue
		}
		if pods := g.Beyond(); len(pods) > 0 {
			out = append(out, Leaving{Reservation: g.Reservation, ByHand: g.ByHand(), Pods: pods, By: g.Instruction.Spec.Withdrawal.LeaveBy.Time})
		}
	}
	return out, nil
}

// withdrawalProgress is the status, reason and message of condition WithinGrant of a
// grant of which the provider has withdrawn a part; left is whether no pod can be beyond
// it any more.
func withdrawalProgress(g Grant, provider string, left bool) (within bool, reason, message string) {
	granted := g.granted()
	remains := "nothing"
	switch {
	case len(granted.PodSets) > 0:
		remains = fmt.Sprintf("%d pods", granted.Pods())
	case !granted.Empty():
		remains = granted.Totals.String()
	}
	beyond := g.Beyond()
	if len(beyond) == 0 {
		message = fmt.Sprintf("Provider %s has lowered its hold to %s, and no more pods use it.", provider, remains)
		if left {
			return true, "PodsLeft", message
		}
		return true, "WithinGrant", message
	}
	return false, "ProviderWithdrew", fmt.Sprintf("Provider %s has lowered its hold to %s: %d pods must leave by %s (%s). Those that the provider has marked or that are not Ready are evicted as soon as other capacity can be used, the others then.",
		provider, remains, len(beyond), g.Instruction.Spec.Withdrawal.LeaveBy.UTC().Format(time.RFC3339), podNames(SumOf(beyond...).names()))
}

// setWithinGrant sets condition WithinGrant of a grant of which the provider has
// withdrawn a part, and notes that its pods have left once the virtual node has had no
// capacity for more for as long as pods may still be bound to it.
func (r *Reconciler) setWithinGrant(status *broker.ReservationInstructionStatus, g Grant, provider string) {
	in := g.Instruction
	if in.Spec.Withdrawal == nil {
		meta.RemoveStatusCondition(&status.Conditions, broker.ConditionWithinGrant)
		return
	}
	if !g.withdrawn() {
		return
	}
	left := len(g.Beyond()) == 0 && r.carriesAtMost(in, g.Pods())
	within, reason, message := withdrawalProgress(g, provider, left)
	c := metav1.Condition{Type: broker.ConditionWithinGrant, Status: metav1.ConditionFalse, Reason: reason, Message: message, ObservedGeneration: in.Generation}
	if within {
		c.Status = metav1.ConditionTrue
	}
	if left {
		status.LeftAttempt = in.Spec.Withdrawal.Attempt
	}
	if before := meta.FindStatusCondition(status.Conditions, broker.ConditionWithinGrant); !within && (before == nil || before.Status == metav1.ConditionTrue) {
		var about runtime.Object = in
		if g.Reservation != nil {
			about = g.Reservation
		}
		r.recorder.Eventf(about, nil, corev1.EventTypeWarning, "CapacityWithdrawn", "Withdraw", "%s", message)
	}
	meta.SetStatusCondition(&status.Conditions, c)
}
