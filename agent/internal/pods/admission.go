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

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Admission is a pod that is to tolerate a provider's virtual node.
type Admission struct {
	Pod      *corev1.Pod
	Provider string
}

// Admissions chooses the pending pods that get the free slots of each provider,
// the oldest first. Pods that tolerate a node with a free slot already take it.
func Admissions(pending []*corev1.Pod, free map[string]int32) []Admission {
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
		_, admitted := take(func(provider string) bool { return slices.Contains(pod.Spec.Tolerations, overflowToleration(provider)) })
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

// overflowToleration has operator Equal, never Exists: it admits to one provider.
func overflowToleration(provider string) corev1.Toleration {
	return corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: provider, Effect: corev1.TaintEffectNoSchedule}
}

// freeSlots is the number of pods that each provider's virtual node can take
// beside those bound to it.
func freeSlots(reservation *broker.Reservation, bound map[string]int32) map[string]int32 {
	free := map[string]int32{}
	for _, a := range reservation.Status.Allocations {
		if usable := a.Usable(); usable > 0 {
			free[a.Cluster] = min(usable, requestedPods(reservation)) - bound[a.Cluster]
		}
	}
	return free
}

// admit adds the tolerations for virtual nodes with free slots to pending pods.
func (r *Reconciler) admit(ctx context.Context, reservation *broker.Reservation, need Need) error {
	for _, a := range Admissions(need.Pending, freeSlots(reservation, need.Bound)) {
		changed := a.Pod.DeepCopy()
		for _, t := range append([]corev1.Toleration{overflowToleration(a.Provider)}, r.driver.Tolerations(a.Provider)...) {
			if !slices.Contains(changed.Spec.Tolerations, t) {
				changed.Spec.Tolerations = append(changed.Spec.Tolerations, t)
			}
		}
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
