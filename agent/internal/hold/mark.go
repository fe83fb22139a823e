package hold

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/hold/handover"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
)

// markGuests marks the guests of a consumer that must leave with condition PodMustLeave,
// which the drivers carry to the consumer: it does not know which node a guest runs on. The
// marks of other guests are removed. Some are written at a time, as places are handed over. It
// is to be repeated while exposed guests run, and soon if more are to be written.
func (r *Reconciler) markGuests(ctx context.Context, in input, consumer string) (exposed, more bool, err error) {
	var promises []charge.Promise
	for _, of := range in.Instructions {
		if of.Spec.RequesterClusterID == consumer {
			// A larger hold that is being tried may be refused: what was accepted counts.
			promises = append(promises, charge.PromiseOf(of, *cmp.Or(of.Status.Accepted, instruction.Held(of), &broker.HeldCapacity{})))
		}
	}
	guests := in.observed.Places(consumer)
	must, on := handover.Leaving(guests, r.offered(in), promises)
	var changed []*corev1.Pod
	for _, pod := range guests.Guests {
		if pod.DeletionTimestamp == nil && handover.Marked(pod) != must[pod.UID] {
			changed = append(changed, pod)
		}
	}
	if more = len(changed) > maxMoved; more {
		changed = changed[:maxMoved]
	}
	return on > 0 || more, more, r.each(ctx, changed, func(ctx context.Context, pod *corev1.Pod) error { return r.mark(ctx, pod, must[pod.UID]) })
}

// offered reports whether the capacity of a node is.
func (r *Reconciler) offered(in input) func(node string) bool {
	return func(name string) bool {
		node := in.observed.Node(name)
		return node != nil && r.Recognizer.Eligible(node)
	}
}

// mark adds or removes the mark of a guest.
func (r *Reconciler) mark(ctx context.Context, pod *corev1.Pod, must bool) error {
	target := pod.DeepCopy()
	if must {
		target.Status.Conditions = append(target.Status.Conditions, corev1.PodCondition{
			Type: broker.PodMustLeave, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(r.Clock.Now()), Reason: "CapacityWithdrawn",
			Message: "The node that the pod runs on is to run no more pods, and the cluster has no other place for it.",
		})
	} else {
		target.Status.Conditions = slices.DeleteFunc(target.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == broker.PodMustLeave })
	}
	// The cache has not all conditions: a merge patch would replace them.
	err := client.IgnoreNotFound(r.client.Status().Patch(ctx, target, client.StrategicMergeFrom(pod, client.MergeFromWithOptimisticLock{})))
	if err != nil {
		return fmt.Errorf("marking guest %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	log.FromContext(ctx).Info("Marked a guest", "guest", client.ObjectKeyFromObject(pod).String(), "mustLeave", must)
	return nil
}
