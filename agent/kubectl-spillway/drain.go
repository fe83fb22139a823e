package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// onCluster is a command that acts on the virtual nodes of a provider.
func onCluster(o *options, use, short, long string, act func(context.Context, client.Client, []corev1.Node) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " CLUSTER", Short: short, Long: long,
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: func(command *cobra.Command, arguments []string, _ string) ([]string, cobra.ShellCompDirective) {
			var clusters []string
			var nodes corev1.NodeList
			if c, err := o.client(); err == nil && len(arguments) == 0 && c.List(command.Context(), &nodes, client.HasLabels{broker.LabelProvider}) == nil {
				for i := range nodes.Items {
					clusters = append(clusters, nodes.Items[i].Labels[broker.LabelProvider])
				}
			}
			return clusters, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(command *cobra.Command, arguments []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			var nodes corev1.NodeList
			r := newReader(command.Context(), c)
			r.list(explain.Nodes, &nodes, client.HasLabels{broker.LabelProvider})
			if denied := r.wait(); r.failed != nil {
				return r.err(o)
			} else if len(denied) > 0 {
				return fmt.Errorf("you may not %s", denied[0].Permission)
			}
			of := nodesOf(arguments[0], nodes.Items)
			if len(of) == 0 {
				return fmt.Errorf("%s has no virtual node of cluster %q: kubectl spillway clusters lists them", o.cluster(), arguments[0])
			}
			return act(command.Context(), c, of)
		},
	}
}

// nodesOf are the virtual nodes of a cluster, or the one of that name.
func nodesOf(name string, nodes []corev1.Node) []corev1.Node {
	without := func(other func(corev1.Node) bool) []corev1.Node { return slices.DeleteFunc(slices.Clone(nodes), other) }
	if of := without(func(n corev1.Node) bool { return name == "" || n.Labels[broker.LabelProvider] != name }); len(of) > 0 {
		return of
	}
	return without(func(n corev1.Node) bool { return n.Name != strings.TrimPrefix(name, "node/") })
}

func newCordon(o *options) *cobra.Command {
	return onCluster(o, "cordon", "Let no new pod overflow to a cluster",
		"Cordons the virtual node of a cluster: no new pod gets there, those that run stay. Spillway does not undo it.",
		func(ctx context.Context, c client.Client, nodes []corev1.Node) error {
			return o.cordon(ctx, c, nodes, true)
		})
}

func newUncordon(o *options) *cobra.Command {
	return onCluster(o, "uncordon", "Let pods overflow to a cluster again",
		`Uncordons the virtual node of a cluster. A Reservation that could not use it meanwhile gets capacity there again after
retryAfter of the broker's configuration (30 s), or later if that has happened several times.`,
		func(ctx context.Context, c client.Client, nodes []corev1.Node) error {
			return o.cordon(ctx, c, nodes, false)
		})
}

// cordon sets whether nodes are cordoned.
func (o *options) cordon(ctx context.Context, c client.Client, nodes []corev1.Node, cordoned bool) error {
	word := map[bool]string{true: "cordoned", false: "uncordoned"}[cordoned]
	for i := range nodes {
		node := &nodes[i]
		if node.Spec.Unschedulable == cordoned {
			fmt.Fprintf(o.Out, "node/%s already %s\n", node.Name, word)
			continue
		}
		before := node.DeepCopy()
		node.Spec.Unschedulable = cordoned
		if err := c.Patch(ctx, node, client.MergeFrom(before)); err != nil {
			node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
			return o.refused("patch", node, err)
		}
		fmt.Fprintf(o.Out, "node/%s %s\n", node.Name, word)
	}
	return nil
}

func newDrain(o *options) *cobra.Command {
	timeout, force := time.Duration(0), false
	command := onCluster(o, "drain", "Let all pods leave a cluster",
		`Cordons the virtual node of a cluster, and evicts its pods within their PodDisruptionBudgets. Their controllers
replace them: at home, or in another cluster. Exits with 1 if pods are left after --timeout. A pod without a controller
is not replaced: it is evicted with --force only.`,
		func(ctx context.Context, c client.Client, nodes []corev1.Node) error {
			if err := o.cordon(ctx, c, nodes, true); err != nil {
				return err
			}
			return o.drain(ctx, c, nodes, timeout, force)
		})
	command.Flags().DurationVar(&timeout, "timeout", 10*time.Minute, "How long pods may take to leave.")
	command.Flags().BoolVar(&force, "force", false, "Evict also pods without a controller, which nothing replaces.")
	return command
}

// drain evicts the pods on nodes until none is left, and prints what happens.
func (o *options) drain(ctx context.Context, c client.Client, nodes []corev1.Node, timeout time.Duration, force bool) error {
	said := map[client.ObjectKey]string{}
	say := func(pod *corev1.Pod, what string) {
		if key := client.ObjectKeyFromObject(pod); said[key] != what {
			said[key] = what
			fmt.Fprintf(o.Out, "pod/%s %s\n", key, text.Line(what, maxError))
		}
	}
	first, left := -1, 0
	done, err := o.poll(ctx, timeout, func() (bool, error) {
		pods, err := o.podsOn(ctx, c, nodes)
		if err != nil {
			return false, err
		}
		evict, kept := leaving(pods, force)
		if len(kept) > 0 {
			return false, fmt.Errorf("pods without a controller are not replaced, --force evicts them: %s", strings.Join(kept[:min(len(kept), 5)], ", "))
		}
		for i := range evict {
			pod := &evict[i]
			if pod.DeletionTimestamp != nil {
				say(pod, "is leaving")
				continue
			}
			err := c.SubResource("eviction").Create(ctx, pod, &policyv1.Eviction{DeleteOptions: &metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))}})
			switch {
			case err == nil:
				say(pod, "evicted")
			case apierrors.IsNotFound(err), apierrors.IsConflict(err): // gone, or another one
			case apierrors.IsTooManyRequests(err):
				say(pod, "waits: "+err.Error())
			case apierrors.IsForbidden(err):
				pod.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
				return false, o.refused("evict", pod, err)
			default: // the others may leave
				say(pod, "is not evicted: "+err.Error())
			}
		}
		if left = len(evict); first < 0 {
			first = left
		}
		return left == 0, nil
	})
	switch {
	case err != nil:
		return err
	case !done:
		fmt.Fprintf(o.Out, "%d of %d pods have not left after %s\n", left, max(first, left), timeout)
		return errNo
	}
	fmt.Fprintf(o.Out, "drained: %d pods have left\n", max(first, 0))
	return nil
}

// podsOn lists the pods of nodes.
func (o *options) podsOn(ctx context.Context, c client.Client, nodes []corev1.Node) (all []corev1.Pod, err error) {
	for i := range nodes {
		var pods corev1.PodList
		if err := c.List(ctx, &pods, client.MatchingFields{"spec.nodeName": nodes[i].Name}); err != nil {
			return nil, fmt.Errorf("listing the pods on node %s: %w", nodes[i].Name, err)
		}
		all = append(all, pods.Items...)
	}
	return all, nil
}

// leaving returns the pods that a drain evicts, and the names of those that it keeps because nothing
// replaces them. Pods that have ended, and those of DaemonSets, do not count.
func leaving(pods []corev1.Pod, force bool) (evict []corev1.Pod, kept []string) {
	for _, pod := range pods {
		controller := metav1.GetControllerOf(&pod)
		switch {
		case pod.Status.Phase == corev1.PodSucceeded, pod.Status.Phase == corev1.PodFailed, controller != nil && controller.Kind == "DaemonSet":
		case controller == nil && !force && pod.DeletionTimestamp == nil:
			kept = append(kept, pod.Namespace+"/"+pod.Name)
		default:
			evict = append(evict, pod)
		}
	}
	return evict, kept
}
