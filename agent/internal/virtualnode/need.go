package virtualnode

import (
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/podindex"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Need is what the pods of a Reservation need.
type Need struct {
	// Pending pods have no node and may get a virtual one.
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

// Need returns what the pods of the Reservation with a key need. Pending pods count only if
// the namespace is opted in.
func (r *Reconciler) Need(ctx context.Context, reservation *broker.Reservation, key demand.Key) (Need, error) {
	need := Need{Bound: map[string]int32{}}
	var namespace corev1.Namespace
	if err := r.client.Get(ctx, client.ObjectKey{Name: reservation.Namespace}, &namespace, client.UnsafeDisableDeepCopy); err != nil {
		return need, fmt.Errorf("reading namespace %s: %w", reservation.Namespace, err)
	}
	if err := r.Pods.WaitSynced(ctx); err != nil {
		return need, err
	}
	shapes, onNode := map[string]bool{}, map[string]int32{}
	optedIn := namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled
	var failed error
	resolve, claims := r.ResolveOwners(ctx), map[string]*claim{}
	for _, g := range r.Pods.ServedBy(reservation, key, optedIn, resolve) {
		switch {
		case g.Use == podindex.Waits:
			need.Pending = append(need.Pending, g.Waiting...)
			shapes[g.Shape] = true
		case g.Use == podindex.Runs:
			if claims[g.Node] == nil {
				claims[g.Node] = &claim{key: key, label: charge.Label(reservation.Status.ID), others: sync.OnceValue(func() *charge.Index[demand.Key] {
					grants, err := r.grants(ctx, r.client, podindex.ProviderOf(g.Node))
					failed = errors.Join(failed, err)
					return holdsOf(grants)
				})}
			}
			if own, _ := charge.Of(g.Pod(resolve), claims[g.Node]); own {
				onNode[g.Node] += g.Count
			}
		}
	}
	if failed != nil {
		return need, failed
	}
	for node, pods := range onNode {
		provider, err := boundTo(ctx, r.client, node)
		if err != nil {
			return need, err
		}
		if provider != "" {
			need.Bound[provider] += pods
		}
	}
	if key.IsGang() && len(need.Bound) == 0 && isOutdated(reservation.Spec.PodSets, shapes) {
		need.Pending = nil
	}
	return need, nil
}

// claim finds what the pods on a virtual node use as far as it concerns one Reservation: true for
// that, whether or not it is granted there, and false for others of the grants there, which are read
// only if they matter.
type claim struct {
	key    demand.Key
	label  string
	others func() *charge.Index[demand.Key]
}

// ByHand implements charge.Holds.
func (c *claim) ByHand(label string) (own, ok bool) {
	if label != c.label {
		_, ok = c.others().ByHand(label)
	}
	return false, ok
}

// OfKey implements charge.Holds.
func (c *claim) OfKey(key demand.Key, label string) (own, ok bool) {
	if key == c.key {
		return true, true
	}
	_, ok = c.others().OfKey(key, label)
	return false, ok
}

// Named implements charge.Holds.
func (c *claim) Named(_, label string) (own, ok bool) { return true, label == c.label }

// isOutdated reports whether a gang's Reservation, which no pod runs with, was made for pods
// that have come back with other requests: it lacks the shape of a pod, and has one that no
// pod has. The scheduler then waits for its end, to request capacity for the pods as they are
// now.
func isOutdated(sets []broker.PodSet, pending map[string]bool) bool {
	used := 0
	for _, set := range sets {
		if pending[set.Name] {
			used++
		}
	}
	return used < len(pending) && used < len(sets)
}
