package virtualnode

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// limit is how many pods a virtual node is to keep room for on behalf of an
// instruction; negative where for all. A Reservation's retained pods limit the
// attempts that were in force when its count was lowered, and no later one; nor
// any once the count is raised again.
func (r *Reconciler) limit(reservation *broker.Reservation, in *broker.ReservationInstruction) int32 {
	if release := r.releaseOf(reservation); release != nil {
		return release.keep[in.Spec.TargetClusterID]
	}
	if asked(reservation) > reservation.Spec.RetainedCount() {
		return -1
	}
	for _, retained := range reservation.Spec.Retained {
		if retained.Cluster == in.Spec.TargetClusterID && in.Spec.Attempt <= retained.Attempt {
			return retained.Count
		}
	}
	return -1
}

// asked is how many pods a Reservation asks room for.
func asked(reservation *broker.Reservation) int32 {
	return broker.HeldCapacity{PodSets: reservation.Spec.PodSets}.Pods()
}

// reconcileReservation lets the pods of one Reservation use its places, and
// gives back those that none needs.
func (r *Reconciler) reconcileReservation(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	reservation := &broker.Reservation{}
	if err := r.client.Get(ctx, request.NamespacedName, reservation); err != nil {
		if apierrors.IsNotFound(err) {
			r.untrack(request.NamespacedName)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if reservation.Labels[broker.LabelRequester] != "" {
		// The broker's own, in a hub that is also a consumer.
		return reconcile.Result{}, nil
	}
	if reservation.DeletionTimestamp != nil {
		r.untrack(request.NamespacedName)
		return reconcile.Result{}, nil
	}
	key, ok := demand.KeyOfReservation(reservation)
	if !ok {
		return reconcile.Result{}, nil
	}
	waiting, need, err := r.need(ctx, reservation, key)
	if err != nil {
		return reconcile.Result{}, err
	}
	if err := r.welcome(ctx, reservation, waiting, need); err != nil {
		if apierrors.IsConflict(err) {
			return reconcile.Result{RequeueAfter: soonest}, nil
		}
		return reconcile.Result{}, err
	}
	if reservation.Labels[broker.LabelManagedBy] != broker.ManagedBySpillway || len(reservation.Spec.PodSets) != 1 {
		return reconcile.Result{}, nil
	}
	if reservation.Status.Phase == broker.ReservationReleased {
		// Over at the broker, by its duration: it grants nothing any more, and the
		// scheduler asks anew once it is gone.
		err := r.client.Delete(ctx, reservation, client.Preconditions{UID: &reservation.UID})
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	result, err := r.release(ctx, reservation, need)
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: soonest}, nil
	}
	return result, err
}

// need counts the pods of a Reservation, and returns those that wait.
func (r *Reconciler) need(ctx context.Context, reservation *broker.Reservation, key demand.Key) (waiting []*corev1.Pod, need Need, err error) {
	need.Remote = map[string]int32{}
	var namespace corev1.Namespace
	if err := r.client.Get(ctx, client.ObjectKey{Name: reservation.Namespace}, &namespace); err != nil {
		return nil, need, fmt.Errorf("reading namespace %s: %w", reservation.Namespace, err)
	}
	optedIn := namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.InNamespace(reservation.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, need, fmt.Errorf("listing pods of %s: %w", reservation.Namespace, err)
	}
	resolve := r.resolve(ctx)
	for i := range pods.Items {
		pod := &pods.Items[i]
		provider := providerOfNode(pod.Spec.NodeName)
		if inventory.Finished(pod) || ofEveryNode(pod) || pod.Spec.NodeName != "" && provider == "" || !belongs(pod, reservation, key, resolve) {
			continue
		}
		switch {
		case provider != "":
			need.Remote[provider]++
		case optedIn && waits(pod):
			need.Pending++
			waiting = append(waiting, pod)
		}
	}
	return waiting, need, nil
}

// belongs reports whether a pod is of a Reservation's key; by its label where
// its owner is gone already.
func belongs(pod *corev1.Pod, reservation *broker.Reservation, key demand.Key, resolve demand.Resolve) bool {
	owner, ok := demand.OwnerOf(pod, resolve)
	if !ok {
		return reservation.Status.ID != "" && pod.Labels[broker.LabelHold] == demand.HoldLabel(reservation.Status.ID)
	}
	if owner.UID != key.OwnerUID {
		return false
	}
	shape, _ := demand.ShapeOf(pod)
	return shape == key.Shape
}

// waits reports whether a pod without a node may still overflow.
func waits(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 && pod.Labels[broker.LabelOverflow] != broker.OverflowDisabled
}

// welcome lets waiting pods tolerate the virtual nodes that have a place for
// them.
func (r *Reconciler) welcome(ctx context.Context, reservation *broker.Reservation, waiting []*corev1.Pod, need Need) error {
	free := map[string]int32{}
	for _, a := range reservation.Status.Allocations {
		if usable := a.Usable(); usable > 0 {
			free[a.Cluster] = min(usable, asked(reservation)) - need.Remote[a.Cluster]
		}
	}
	for _, w := range Welcomes(waiting, free) {
		changed := w.Pod.DeepCopy()
		for _, t := range append([]corev1.Toleration{overflowToleration(w.Cluster)}, r.driver.Tolerations(w.Cluster)...) {
			if !slices.Contains(changed.Spec.Tolerations, t) {
				changed.Spec.Tolerations = append(changed.Spec.Tolerations, t)
			}
		}
		err := r.client.Patch(ctx, changed, client.MergeFromWithOptions(w.Pod, client.MergeFromWithOptimisticLock{}))
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			// Whoever changed it wakes this again.
			continue
		}
		if err != nil {
			return fmt.Errorf("letting pod %s/%s onto the virtual node of %s: %w", w.Pod.Namespace, w.Pod.Name, w.Cluster, err)
		}
		log.FromContext(ctx).V(1).Info("Pod may overflow", "pod", client.ObjectKeyFromObject(w.Pod), "provider", w.Cluster)
	}
	return nil
}

// release gives back what has not been needed for the grace: the virtual nodes
// shrink, the pods are looked at live, then the count is lowered, or the
// Reservation deleted where nothing is left.
func (r *Reconciler) release(ctx context.Context, reservation *broker.Reservation, need Need) (reconcile.Result, error) {
	t := r.track(reservation)
	target, wait, due := t.slack.Judge(r.Clock.Now(), need.Total(), asked(reservation), r.ReleaseGrace)
	if !due {
		// Also when the count has been lowered: the release is complete.
		r.setRelease(t, nil)
		return reconcile.Result{RequeueAfter: cmpOrMin(wait, lookAgain)}, nil
	}
	instructions, err := r.instructions(ctx, reservation)
	if err != nil {
		return reconcile.Result{}, err
	}
	granted, attempts := map[string]int32{}, map[string]int64{}
	for _, in := range instructions {
		granted[in.Spec.TargetClusterID] = broker.HeldCapacity{PodSets: in.Spec.PodSets}.Pods()
		attempts[in.Spec.TargetClusterID] = in.Spec.Attempt
	}
	keep := Keep(target, granted, need.Remote)
	r.setRelease(t, &release{target: target, keep: keep})
	// The nodes shrink in their own round, which wakes this one.
	for _, in := range instructions {
		provider := in.Spec.TargetClusterID
		if keep[provider] < granted[provider] && !r.settled(provider, in.UID, keep[provider]) {
			return reconcile.Result{RequeueAfter: soonest}, nil
		}
	}
	// Nobody can be on the way to a place that is not there any more, but the
	// cache may not show who came last.
	for _, in := range instructions {
		provider := in.Spec.TargetClusterID
		if keep[provider] == granted[provider] {
			continue
		}
		fresh, err := r.gather(ctx, provider, r.live)
		if err != nil {
			return reconcile.Result{}, err
		}
		for _, g := range fresh.grants {
			if g.Instruction.UID == in.UID && int32(len(g.Bound)) > keep[provider] {
				return reconcile.Result{RequeueAfter: soonest}, nil
			}
		}
	}
	logger := log.FromContext(ctx).WithValues("asked", asked(reservation), "needed", target)
	if target == 0 {
		logger.Info("Deleting a reservation that nobody needs any more")
		err := r.client.Delete(ctx, reservation, client.Preconditions{UID: &reservation.UID, ResourceVersion: &reservation.ResourceVersion})
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	logger.Info("Lowering a reservation to what is needed", "keep", keep)
	changed := reservation.DeepCopy()
	changed.Spec.PodSets[0].Count = target
	changed.Spec.Retained = nil
	for _, cluster := range slices.Sorted(maps.Keys(granted)) {
		changed.Spec.Retained = append(changed.Spec.Retained, broker.RetainedPods{Cluster: cluster, Count: keep[cluster], Attempt: attempts[cluster]})
	}
	if err := r.client.Patch(ctx, changed, client.MergeFromWithOptions(reservation, client.MergeFromWithOptimisticLock{})); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("lowering reservation %s/%s: %w", reservation.Namespace, reservation.Name, err))
	}
	return reconcile.Result{RequeueAfter: soonest}, nil
}

// cmpOrMin is a pause of at most most; most where pause is 0.
func cmpOrMin(pause, most time.Duration) time.Duration {
	if pause == 0 {
		return most
	}
	return min(pause, most)
}

func (r *Reconciler) instructions(ctx context.Context, reservation *broker.Reservation) ([]broker.ReservationInstruction, error) {
	var all broker.ReservationInstructionList
	if err := r.client.List(ctx, &all, client.InNamespace(r.InstructionNamespace)); err != nil {
		return nil, fmt.Errorf("listing reservation instructions: %w", err)
	}
	return slices.DeleteFunc(all.Items, func(in broker.ReservationInstruction) bool {
		return in.Spec.SourceUID != reservation.UID
	}), nil
}

func (r *Reconciler) track(reservation *broker.Reservation) *tracked {
	r.mu.Lock()
	defer r.mu.Unlock()
	name := client.ObjectKeyFromObject(reservation)
	t := r.tracked[name]
	if t == nil || t.uid != reservation.UID {
		t = &tracked{uid: reservation.UID}
		r.tracked[name] = t
	}
	return t
}

func (r *Reconciler) untrack(name types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.tracked, name)
}

// setRelease records a release that is on its way, and has the nodes looked at
// where it is a new one, or given up.
func (r *Reconciler) setRelease(t *tracked, is *release) {
	r.mu.Lock()
	was := t.release
	t.release = is
	r.mu.Unlock()
	if was.same(is) {
		return
	}
	for _, either := range []*release{was, is} {
		if either != nil {
			for provider := range either.keep {
				r.Enqueue(provider)
			}
		}
	}
}

func (a *release) same(b *release) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.target == b.target && maps.Equal(a.keep, b.keep)
}
