package inventory

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Cluster is what the caches know of this cluster's nodes and pods.
type Cluster struct {
	Nodes      []*corev1.Node
	Pods       []*corev1.Pod
	namespaces map[string]map[string]string
}

// GuestOf tells whose guest a pod is.
func (c Cluster) GuestOf(pod *corev1.Pod) (consumer string, ok bool) {
	return GuestOf(pod, func(name string) map[string]string { return c.namespaces[name] })
}

// Read gathers nodes, pods and namespaces. The objects are the cache's own and
// must not be changed.
func Read(ctx context.Context, reader client.Reader) (Cluster, error) {
	var (
		nodes      corev1.NodeList
		pods       corev1.PodList
		namespaces corev1.NamespaceList
		cluster    = Cluster{namespaces: map[string]map[string]string{}}
	)
	if err := reader.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return cluster, fmt.Errorf("listing nodes: %w", err)
	}
	if err := reader.List(ctx, &pods, client.UnsafeDisableDeepCopy); err != nil {
		return cluster, fmt.Errorf("listing pods: %w", err)
	}
	if err := reader.List(ctx, &namespaces, client.UnsafeDisableDeepCopy); err != nil {
		return cluster, fmt.Errorf("listing namespaces: %w", err)
	}
	for i := range nodes.Items {
		cluster.Nodes = append(cluster.Nodes, &nodes.Items[i])
	}
	for i := range pods.Items {
		cluster.Pods = append(cluster.Pods, &pods.Items[i])
	}
	for _, ns := range namespaces.Items {
		cluster.namespaces[ns.Name] = ns.Labels
	}
	return cluster, nil
}
