package podindex

import (
	"context"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// source is one of requests for the pods of which a version differs from the one before,
// and at the beginning for one of each group.
func (x *Index) source(clock clock.PassiveClock, differ func(before, after *trackedPod) bool, requestsFor func(ctx context.Context, key Key, member *corev1.Pod) []reconcile.Request) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		p := &pace{clock: clock, due: map[reconcile.Request]time.Time{}}
		enqueue := func(key Key, member *corev1.Pod) {
			for _, request := range requestsFor(ctx, key, member) {
				queue.AddAfter(request, p.next(request))
			}
		}
		x.mu.Lock()
		existing := slices.Collect(maps.Values(x.groups))
		members := make([]*corev1.Pod, len(existing))
		for i, g := range existing {
			members[i] = g.member
		}
		x.changed = append(slices.Clone(x.changed), func(before, after *trackedPod) {
			if before != nil && after != nil && !differ(before, after) {
				return
			}
			if before != nil && (after == nil || before.key != after.key) {
				enqueue(before.key, before.pod)
			}
			if after != nil {
				enqueue(after.key, after.pod)
			}
		})
		x.mu.Unlock()
		for i, g := range existing {
			enqueue(g.Key, members[i])
		}
		return nil
	})
}

// SumsOnNodes is a source of requests, with the provider's name, for the pods on virtual nodes
// of which a version changes a sum.
func (x *Index) SumsOnNodes(clock clock.PassiveClock) source.Source {
	return x.onNodes(clock, countsDifferently)
}

// VersionsOnNodes is a source of requests, with the provider's name, for each version of the
// pods on virtual nodes.
func (x *Index) VersionsOnNodes(clock clock.PassiveClock) source.Source {
	return x.onNodes(clock, func(_, _ *trackedPod) bool { return true })
}

func (x *Index) onNodes(clock clock.PassiveClock, differ func(before, after *trackedPod) bool) source.Source {
	return x.source(clock, differ, func(_ context.Context, key Key, _ *corev1.Pod) []reconcile.Request {
		if provider := ProviderOf(key.Node); provider != "" {
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: provider}}}
		}
		return nil
	})
}

// Reservations is a source of requests, with the name of the Reservation, for the pods that may
// use one.
func (x *Index) Reservations(clock clock.PassiveClock, owners func(context.Context) demand.Resolve) source.Source {
	differ := func(before, after *trackedPod) bool {
		// A new generation may have other tolerations.
		return countsDifferently(before, after) || after.key.Use == Waits && (after.pod.Generation == 0 || before.pod.Generation != after.pod.Generation)
	}
	return x.source(clock, differ, func(ctx context.Context, key Key, member *corev1.Pod) []reconcile.Request {
		if key.Use == Daemon || key.Use == Ended {
			return nil
		}
		owner, ok := demand.OwnerOf(member, owners(ctx))
		if !ok {
			return nil
		}
		name := demand.Key{Namespace: key.Namespace, OwnerUID: owner.UID, Shape: key.Shape}.Name(owner.Name)
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: key.Namespace, Name: name}}}
	})
}

// countsDifferently reports whether a version of a pod changes a sum.
func countsDifferently(before, after *trackedPod) bool {
	return before.key != after.key || !quota.Equals(before.requests, after.requests)
}
