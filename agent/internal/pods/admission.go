package pods

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Need is what the pods of a Reservation need.
type Need struct {
	// Pending pods have no node and may overflow.
	Pending []*corev1.Pod
	// Bound is the number of pods on each provider's virtual node that have not
	// finished.
	Bound map[string]int32
}

// Pods is the number of pods that need capacity.
func (n Need) Pods() int32 {
	total := int32(len(n.Pending))
	for _, pods := range n.Bound {
		total += pods
	}
	return total
}

// need reads the pods of a Reservation. Pending pods count only if the namespace is
// opted in.
func (r *Reconciler) need(ctx context.Context, reservation *broker.Reservation, key demand.Key) (Need, error) {
	need := Need{Bound: map[string]int32{}}
	var namespace corev1.Namespace
	if err := r.client.Get(ctx, client.ObjectKey{Name: reservation.Namespace}, &namespace); err != nil {
		return need, fmt.Errorf("reading namespace %s: %w", reservation.Namespace, err)
	}
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.InNamespace(reservation.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return need, fmt.Errorf("listing pods of namespace %s: %w", reservation.Namespace, err)
	}
	byHand, err := r.nodes.ByHand(ctx)
	if err != nil {
		return need, err
	}
	optedIn, resolve := namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled, r.nodes.ResolveOwners(ctx)
	providers := map[string]string{} // by node
	for i := range pods.Items {
		pod := &pods.Items[i]
		provider, known := providers[pod.Spec.NodeName]
		if !known {
			if provider, err = virtualnode.BoundTo(ctx, r.client, pod.Spec.NodeName); err != nil {
				return need, err
			}
			providers[pod.Spec.NodeName] = provider
		}
		local := pod.Spec.NodeName != "" && provider == ""
		if provider != "" && byHand[pod.Labels[broker.LabelHold]] {
			continue // it uses a Reservation made by hand instead
		}
		if local || inventory.Finished(pod) || virtualnode.RunsOnEveryNode(pod) || !belongsTo(pod, reservation, key, resolve) {
			continue
		}
		if provider != "" {
			need.Bound[provider]++
		} else if optedIn && mayOverflow(pod) {
			need.Pending = append(need.Pending, pod)
		}
	}
	return need, nil
}

// belongsTo reports whether a pod has the key of a Reservation. A pod whose owner
// is gone belongs to it by its hold label.
func belongsTo(pod *corev1.Pod, reservation *broker.Reservation, key demand.Key, resolve demand.Resolve) bool {
	owner, ok := demand.OwnerOf(pod, resolve)
	if !ok {
		return reservation.Status.ID != "" && pod.Labels[broker.LabelHold] == demand.HoldLabel(reservation.Status.ID)
	}
	if owner.UID != key.OwnerUID {
		return false
	}
	if key.IsGang() {
		return true // whatever its shape
	}
	shape, _ := demand.ShapeOf(pod)
	return shape == key.Shape
}

// mayOverflow reports whether a pod without a node may get a virtual one.
func mayOverflow(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 && pod.Labels[broker.LabelOverflow] != broker.OverflowDisabled
}

// Admission is a pod that is to tolerate a provider's virtual node.
type Admission struct {
	Pod      *corev1.Pod
	Provider string
}

// Admissions chooses the pending pods that get the free slots of each provider,
// the oldest first. Pods that have all tolerations for a node with a free slot, as
// steered ones do from the beginning, already take it.
func Admissions(pending []*corev1.Pod, free map[string]int32, required func(provider string) []corev1.Toleration) []Admission {
	pending = slices.Clone(pending)
	slices.SortFunc(pending, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	free = maps.Clone(free)
	providers := slices.Sorted(maps.Keys(free))
	take := func(fits func(provider string) bool) (provider string, ok bool) {
		i := slices.IndexFunc(providers, func(p string) bool { return free[p] > 0 && fits(p) })
		if i < 0 {
			return "", false
		}
		free[providers[i]]--
		return providers[i], true
	}
	pending = slices.DeleteFunc(pending, func(pod *corev1.Pod) bool {
		_, admitted := take(func(provider string) bool { return len(missing(pod, required(provider))) == 0 })
		return admitted
	})
	var out []Admission
	for _, pod := range pending {
		provider, ok := take(func(string) bool { return true })
		if !ok {
			break
		}
		out = append(out, Admission{Pod: pod, Provider: provider})
	}
	return out
}

// missing returns the tolerations of which a pod has neither the same nor one that
// tolerates every value of the same taint.
func missing(pod *corev1.Pod, required []corev1.Toleration) []corev1.Toleration {
	var out []corev1.Toleration
	for _, t := range required {
		if !slices.ContainsFunc(pod.Spec.Tolerations, func(own corev1.Toleration) bool {
			return own == t || own.Key == t.Key && own.Operator == corev1.TolerationOpExists && own.Effect == t.Effect && own.TolerationSeconds == nil
		}) {
			out = append(out, t)
		}
	}
	return out
}

// required returns the tolerations for a provider's virtual node: that of the overflow
// taint, with operator Equal, because it admits to one provider, and the driver's.
func (r *Reconciler) required(provider string) []corev1.Toleration {
	overflow := corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: provider, Effect: corev1.TaintEffectNoSchedule}
	return append([]corev1.Toleration{overflow}, slices.DeleteFunc(r.driver.Tolerations(provider), func(t corev1.Toleration) bool { return t == overflow })...)
}

// admit adds the tolerations for virtual nodes with free slots to pending pods that
// the webhook has not steered: those that were created while it was not available, or
// that name Spillway's scheduler themselves in a namespace that it does not see.
func (r *Reconciler) admit(ctx context.Context, reservation *broker.Reservation, need Need) error {
	free := map[string]int32{}
	for _, a := range reservation.Status.Allocations {
		if usable := a.Usable(); usable > 0 {
			free[a.Cluster] = min(usable, virtualnode.PodsOf(reservation.Spec.PodSets)) - need.Bound[a.Cluster]
		}
	}
	for _, a := range Admissions(need.Pending, free, r.required) {
		changed := a.Pod.DeepCopy()
		changed.Spec.Tolerations = append(changed.Spec.Tolerations, missing(a.Pod, r.required(a.Provider))...)
		err := r.client.Patch(ctx, changed, client.MergeFromWithOptions(a.Pod, client.MergeFromWithOptimisticLock{}))
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			// The event of that change enqueues the Reservation again.
			continue
		}
		if err != nil {
			return fmt.Errorf("admitting pod %s/%s to the virtual node of %s: %w", a.Pod.Namespace, a.Pod.Name, a.Provider, err)
		}
		log.FromContext(ctx).V(1).Info("Admitted a pod to a virtual node", "pod", client.ObjectKeyFromObject(a.Pod), "provider", a.Provider)
	}
	return nil
}
