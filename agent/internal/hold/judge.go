package hold

import (
	"context"
	"errors"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/hold/handover"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
)

// JudgeAll is the request to judge the holds of all consumers again, because less
// capacity may be free than before.
var JudgeAll = reconcile.Request{}

// preempts is the priority from which a pending pod of this cluster takes the place of
// a hold that was accepted before: it would preempt its guests.
func (r *Reconciler) preempts() int32 { return r.Priority + 1 }

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// judgeOnNodes enqueues JudgeAll when a node offers less than before, and when its guests may
// stay again.
func (r *Reconciler) judgeOnNodes() handler.EventHandler {
	return handler.Funcs{
		DeleteFunc: func(_ context.Context, _ event.DeleteEvent, q queue) { q.AddAfter(JudgeAll, r.Debounce) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
			offered := r.Recognizer.Eligible(before)
			if offered != r.Recognizer.Eligible(after) || offered && (!equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
				!equality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) ||
				!equality.Semantic.DeepEqual(before.Status.Allocatable, after.Status.Allocatable)) {
				q.AddAfter(JudgeAll, r.Debounce)
			}
		},
	}
}

// judgeOnPods enqueues JudgeAll when a pod uses more of a node than before, when a
// guest is gone whose place another pod may have taken, and when a pod waits that
// preempts.
func (r *Reconciler) judgeOnPods() handler.EventHandler {
	uses := func(pod *corev1.Pod) bool {
		_, placeholder := r.Recognizer.PlaceholderFor(pod)
		return pod.Spec.NodeName != "" && !inventory.Finished(pod) && !placeholder
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
			if pod := e.Object.(*corev1.Pod); uses(pod) || ptr.Deref(pod.Spec.Priority, 0) >= r.preempts() {
				q.AddAfter(JudgeAll, r.Debounce)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			if _, guest := r.guestOf(ctx, e.Object.(*corev1.Pod)); guest {
				q.AddAfter(JudgeAll, r.Debounce)
			}
		},
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			before, after := e.ObjectOld.(*corev1.Pod), e.ObjectNew.(*corev1.Pod)
			if uses(after) != uses(before) || uses(after) && before.Generation != after.Generation {
				q.AddAfter(JudgeAll, r.Debounce)
			}
		},
	}
}

// judgeStanding finds the holds of which a part no longer fits the nodes, and lowers
// them. A consumer that is to be reconciled again is enqueued: the losses of all are not computed
// again for it.
func (r *Reconciler) judgeStanding(ctx context.Context) (result reconcile.Result, err error) {
	in, err := r.read(ctx, "", r.preempts())
	if err != nil {
		return result, err
	}
	losses := verdict.Losses(in.Input)
	r.memory.Lose(losses)
	consumers := map[string]bool{}
	for _, of := range in.Instructions {
		// Placeholders leave nodes that run no pods any more.
		consumer := of.Spec.RequesterClusterID
		consumers[consumer] = consumers[consumer] || losses[of.UID] != nil || r.Placeholders.Namespace != ""
	}
	var errs []error
	for _, consumer := range slices.Sorted(maps.Keys(consumers)) {
		if !consumers[consumer] && !r.of(consumer).marking {
			// Its holds stay as they are.
			_, exposed := handover.Leaving(in.observed.Places(consumer), r.offered(in), nil)
			if exposed == 0 {
				continue
			}
		}
		r.of(consumer).marking = true
		lowered, err := r.reconcileConsumer(ctx, consumer)
		if errs = append(errs, err); lowered.RequeueAfter > 0 {
			r.sendAfter(consumer, lowered.RequeueAfter)
		}
	}
	return result, errors.Join(errs...)
}
