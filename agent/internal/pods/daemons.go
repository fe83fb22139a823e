package pods

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
)

// daemonGrace is how long a DaemonSet's pod may wait for a virtual node, more with each pod of the
// same DaemonSet: by then the API server knows the node, and denies the next pod. If it does not,
// the deletions become rare.
var daemonGrace = wait.Backoff{Duration: 2 * time.Second, Factor: 2, Cap: 10 * time.Minute, Steps: 10}

// daemonBackoff is when the pod of one DaemonSet that waits for a virtual node may be deleted, and
// the grace of the next one.
type daemonBackoff struct {
	due   time.Time
	grace wait.Backoff
}

// deleteDaemons deletes the pods of DaemonSets that wait for a virtual node, and returns when
// to requeue the provider. No scheduler can bind them, but one would preempt other pods for
// them. The API server denies their creation, unless a pod is created at the moment at which
// the node is.
func (r *Reconciler) deleteDaemons(ctx context.Context, waiting []*corev1.Pod, provider string, state *providerState) (requeueAfter time.Duration, err error) {
	requeueAfter = virtualnode.ResyncPeriod
	now := r.nodes.Clock.Now()
	var errs []error
	for _, pod := range waiting {
		owner := metav1.GetControllerOfNoCopy(pod)
		if owner == nil || owner.Kind != "DaemonSet" || pod.DeletionTimestamp != nil || inventory.Finished(pod) {
			continue
		}
		backoff, known := state.daemons[owner.UID]
		if !known {
			backoff.grace = daemonGrace
		}
		if !now.Before(backoff.due) {
			if known {
				errs = append(errs, r.deleteDaemon(ctx, pod, provider))
			}
			backoff.due = now.Add(backoff.grace.Step())
		}
		state.daemons[owner.UID] = backoff
		requeueAfter = min(requeueAfter, backoff.due.Sub(now))
	}
	return requeueAfter, errors.Join(errs...)
}

func (r *Reconciler) deleteDaemon(ctx context.Context, pod *corev1.Pod, provider string) error {
	err := r.client.Delete(ctx, named(pod), client.Preconditions{UID: &pod.UID})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("deleting pod %s/%s of a DaemonSet, which waits for the virtual node of %s: %w", pod.Namespace, pod.Name, provider, err)
	}
	r.recorder.Eventf(pod, nil, corev1.EventTypeNormal, "DaemonSetPodDeleted", "Delete",
		"Deleted the pod, which waited for the virtual node for provider %s: DaemonSets have no pods on virtual nodes.", provider)
	log.FromContext(ctx).Info("Deleted a pod of a DaemonSet that waited for a virtual node", "pod", client.ObjectKeyFromObject(pod), "provider", provider)
	return nil
}
