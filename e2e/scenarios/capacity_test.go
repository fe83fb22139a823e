//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelpers "k8s.io/component-helpers/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// freeCPU is what a node's pods have left of its CPU, computed from the
// Node and its pods.
func freeCPU(ctx context.Context, r *remote, node string) (resource.Quantity, error) {
	var n corev1.Node
	if err := r.Get(ctx, client.ObjectKey{Name: node}, &n); err != nil {
		return resource.Quantity{}, err
	}
	var pods corev1.PodList
	if err := r.List(ctx, &pods); err != nil {
		return resource.Quantity{}, err
	}
	free := n.Status.Allocatable.Cpu().DeepCopy()
	for _, p := range pods.Items {
		if p.Spec.NodeName == node && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			free.Sub(resourcehelpers.PodRequests(&p, resourcehelpers.PodResourcesOptions{})[corev1.ResourceCPU])
		}
	}
	return free, nil
}

// fill takes a node's CPU with a pod of its own, all but leave, and returns what
// gives it back.
func fill(ctx context.Context, t *testing.T, r *remote, node, leave string) (empty func()) {
	t.Helper()
	free, err := freeCPU(ctx, r, node)
	if err != nil {
		t.Fatal(err)
	}
	free.Sub(resource.MustParse(leave))
	if free.Sign() <= 0 {
		return func() {}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "filler-" + node},
		Spec:       podSpec(corev1.ResourceList{corev1.ResourceCPU: free}, "serve"),
	}
	pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	remove := func(ctx context.Context) {
		r.Delete(ctx, pod.DeepCopy(), client.GracePeriodSeconds(1))
		eventually(ctx, t, "the filler of "+node+" is gone", time.Minute, func(ctx context.Context) (bool, string) {
			err := r.Get(ctx, client.ObjectKeyFromObject(pod), &corev1.Pod{})
			return err != nil && client.IgnoreNotFound(err) == nil, "it is still there"
		})
	}
	remove(ctx) // left by a run that was cut off
	if err := r.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	removed := false
	empty = func() {
		if !removed {
			removed = true
			remove(context.WithoutCancel(ctx))
		}
	}
	t.Cleanup(empty)
	eventually(ctx, t, "the filler of "+node+" runs", time.Minute, func(ctx context.Context) (bool, string) {
		err := r.Get(ctx, client.ObjectKeyFromObject(pod), pod)
		return err == nil && pod.Status.Phase == corev1.PodRunning, fmt.Sprint(pod.Status.Phase, pod.Status.Conditions, err)
	})
	return empty
}

// expectUnused waits until nothing of an earlier scenario is in use. Peerings may be warm: they
// and their parked virtual nodes are kept for a while.
func expectUnused(ctx context.Context, t *testing.T) {
	t.Helper()
	expectNone(ctx, t, "no reservation, no guest and no virtual node with room is left", used)
}

// expectIdle waits until nothing of an earlier scenario is left, not even a peering, for scenarios
// that begin without one.
func expectIdle(ctx context.Context, t *testing.T) {
	t.Helper()
	expectNone(ctx, t, "no reservation, no guest, no virtual node and no peering is left", used, peered)
}

func expectNone(ctx context.Context, t *testing.T, what string, find ...func(context.Context) ([]string, error)) {
	t.Helper()
	eventually(ctx, t, what, 4*time.Minute, func(ctx context.Context) (bool, string) {
		var left []string
		for _, find := range find {
			found, err := find(ctx)
			if err != nil {
				return false, err.Error()
			}
			left = append(left, found...)
		}
		return len(left) == 0, strings.Join(left, ", ")
	})
}

// used lists what is reserved, held and used in other clusters.
func used(ctx context.Context) (found []string, err error) {
	for _, r := range []*remote{hub, rome} {
		var reservations broker.ReservationList
		if err := r.List(ctx, &reservations); err != nil {
			return nil, err
		}
		for _, v := range reservations.Items {
			found = append(found, r.Name+" reservation "+v.Name)
		}
	}
	var ledgers broker.ClusterAdvertisementList
	if err := hub.List(ctx, &ledgers, client.InNamespace(broker.SystemNamespace)); err != nil {
		return nil, err
	}
	for _, l := range ledgers.Items {
		for _, h := range l.Status.Holds {
			found = append(found, l.Spec.ClusterID+" hold "+h.ReservationName)
		}
	}
	for _, r := range []*remote{paris, berlin} {
		var pods corev1.PodList
		if err := r.List(ctx, &pods); err != nil {
			return nil, err
		}
		for _, p := range pods.Items {
			if p.Labels[broker.LabelHold] != "" || p.Namespace == "spillway-holds" {
				found = append(found, fmt.Sprintf("%s pod %s/%s", r.Name, p.Namespace, p.Name))
			}
		}
	}
	nodes, err := virtualNodes(ctx)
	for _, n := range nodes {
		if !n.Status.Allocatable.Pods().IsZero() {
			found = append(found, "room on node "+n.Name)
		}
	}
	return found, err
}

// peered lists virtual nodes and the namespaces of peerings.
func peered(ctx context.Context) (found []string, err error) {
	nodes, err := virtualNodes(ctx)
	if err != nil {
		return nil, err
	}
	for _, n := range nodes {
		found = append(found, "node "+n.Name)
	}
	for _, r := range []*remote{rome, paris, berlin} {
		var namespaces corev1.NamespaceList
		if err := r.List(ctx, &namespaces, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}); err != nil {
			return nil, err
		}
		for _, n := range namespaces.Items {
			found = append(found, r.Name+" namespace "+n.Name)
		}
	}
	return found, nil
}

func virtualNodes(ctx context.Context) ([]corev1.Node, error) {
	var nodes corev1.NodeList
	err := rome.List(ctx, &nodes, client.HasLabels{broker.LabelProvider})
	return nodes.Items, err
}

// waitingDaemons is the number of pods of DaemonSets that wait for a virtual node, which takes
// them in addition. The API server denies them as soon as it knows the node: one can be created
// at the moment at which the node is.
func waitingDaemons(ctx context.Context, node string) (waiting int64, err error) {
	var pods corev1.PodList
	if err := rome.List(ctx, &pods); err != nil {
		return 0, err
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		owner := metav1.GetControllerOf(pod)
		if owner == nil || owner.Kind != "DaemonSet" || pod.Spec.NodeName != "" || pod.Spec.Affinity == nil || pod.Spec.Affinity.NodeAffinity == nil ||
			pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
			continue
		}
		for _, term := range pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			if slices.ContainsFunc(term.MatchFields, func(f corev1.NodeSelectorRequirement) bool { return slices.Contains(f.Values, node) }) {
				waiting++
			}
		}
	}
	return waiting, nil
}

// granted is what the hub's reservations allot rome at a provider, in all.
func granted(ctx context.Context, provider string) (total corev1.ResourceList, pods int64, err error) {
	var reservations broker.ReservationList
	if err := hub.List(ctx, &reservations); err != nil {
		return nil, 0, err
	}
	total = corev1.ResourceList{}
	for _, r := range reservations.Items {
		for _, a := range r.Status.Allocations {
			if r.Spec.RequesterID != rome.Name || a.Cluster != provider {
				continue
			}
			broker.AddTo(total, a.Resources.List())
			for _, s := range a.PodSets {
				pods += int64(s.Count)
			}
		}
	}
	return total, pods, nil
}
