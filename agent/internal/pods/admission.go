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

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Admission is a pod that is to tolerate a provider's virtual node.
type Admission struct {
	Pod      *corev1.Pod
	Provider string
}

// Admissions chooses the pending pods that get the free slots of each provider,
// the oldest first. Pods that have all tolerations for a node with a free slot, as
// steered ones do from the beginning, already take it.
func Admissions(pending []*corev1.Pod, free map[string]int32, required func(provider string) []corev1.Toleration) []Admission {
	tolerations := map[string][]corev1.Toleration{}
	for provider := range free {
		tolerations[provider] = required(provider)
	}
	if !slices.ContainsFunc(pending, func(pod *corev1.Pod) bool {
		for _, all := range tolerations {
			if len(missing(pod, all)) > 0 {
				return true
			}
		}
		return false
	}) {
		return nil // as for all that were steered
	}
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
		_, admitted := take(func(provider string) bool { return len(missing(pod, tolerations[provider])) == 0 })
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

// admit adds the tolerations for virtual nodes with free slots to pending pods of Spillway's
// scheduler that the webhook has not steered: that name it themselves, or by default if it
// is the only one, and were created while the webhook was not available or in a namespace
// that it does not see. Another scheduler would choose the node, and may not bind to it.
func (r *Reconciler) admit(ctx context.Context, reservation *broker.Reservation, need virtualnode.Need) error {
	free := map[string]int32{}
	for _, a := range reservation.Status.Allocations {
		if usable := a.Usable(); usable > 0 {
			free[a.Cluster] = min(usable, virtualnode.PodsOf(reservation.Spec.PodSets)) - need.Bound[a.Cluster]
		}
	}
	var conflict error
	for _, a := range Admissions(need.Pending, free, r.driver.Tolerations) {
		changed := a.Pod.DeepCopy()
		changed.Spec.Tolerations = append(changed.Spec.Tolerations, missing(a.Pod, r.driver.Tolerations(a.Provider))...)
		err := r.client.Patch(ctx, changed, client.MergeFromWithOptions(a.Pod, client.MergeFromWithOptimisticLock{}))
		if apierrors.IsNotFound(err) {
			continue
		}
		if apierrors.IsConflict(err) {
			conflict = err
			continue
		}
		if err != nil {
			return fmt.Errorf("admitting pod %s/%s to the virtual node of %s: %w", a.Pod.Namespace, a.Pod.Name, a.Provider, err)
		}
		log.FromContext(ctx).V(1).Info("Admitted a pod to a virtual node", "pod", client.ObjectKeyFromObject(a.Pod), "provider", a.Provider)
	}
	return conflict
}
