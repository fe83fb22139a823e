package inventory

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/broker/capacity"
)

// Recognizer distinguishes what the drivers created from the cluster's own nodes
// and pods.
type Recognizer struct {
	Guest GuestRecognizer
	// VirtualNode reports whether a node is a driver's virtual node. Nodes with
	// Spillway's own labels are virtual in any case.
	VirtualNode func(*corev1.Node) bool
	// Placeholder returns the consumer that a pod holds a place for; nil if there are none.
	// Placeholders count as the hold, which the broker charges: not as pods.
	Placeholder func(pod *corev1.Pod) (consumer string, ok bool)
	// DropsSelection is whether guests lose the node selector and node affinity of their
	// pods, and so may run on any node whose taints they tolerate.
	DropsSelection bool
}

// PlaceholderFor returns the consumer that a pod holds a place for.
func (r Recognizer) PlaceholderFor(pod *corev1.Pod) (consumer string, ok bool) {
	if r.Placeholder == nil {
		return "", false
	}
	return r.Placeholder(pod)
}

// Cluster is the state of this cluster's nodes and pods, as cached.
type Cluster struct {
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// NamespaceLabels by the namespace's name.
	NamespaceLabels map[string]map[string]string
	Recognizer      Recognizer
}

// GuestOf returns the consumer that a pod runs for.
func (c *Cluster) GuestOf(pod *corev1.Pod) (consumer string, ok bool) {
	return c.Recognizer.Guest(pod, func(namespace string) map[string]string { return c.NamespaceLabels[namespace] })
}

// usage returns the eligible nodes and what pods use of them.
func (c *Cluster) usage() (eligible []*corev1.Node, used func(node string) *usage) {
	byNode := map[string]*usage{}
	for _, n := range c.Nodes {
		if c.Recognizer.Eligible(n) {
			eligible, byNode[n.Name] = append(eligible, n), &usage{}
		}
	}
	for _, pod := range c.Pods {
		if _, placeholder := c.Recognizer.PlaceholderFor(pod); placeholder {
			continue
		}
		consumer, _ := c.GuestOf(pod)
		if u := byNode[nodeOf(pod, consumer)]; u != nil && !Finished(pod) {
			u.add(consumer, Requests(pod), 1)
		}
	}
	for _, pod := range c.Pods {
		if !repelsGuests(pod) || Finished(pod) {
			continue
		}
		on := c.Node(pod.Spec.NodeName)
		for _, n := range eligible {
			byNode[n.Name].closed = byNode[n.Name].closed || repels(pod, on, n)
		}
	}
	return eligible, func(node string) *usage { return byNode[node] }
}

// Slots are the eligible nodes, sorted by name, each a slot of its own with the
// name of the node class that it is advertised in.
func (c *Cluster) Slots(headroom corev1.ResourceList) []capacity.Slot {
	eligible, used := c.usage()
	return slots(freeNodes(eligible, used, headroom))
}

// Read lists nodes, pods and namespaces. The objects are the cache's own and must not be
// changed.
func Read(ctx context.Context, reader client.Reader, recognizer Recognizer) (*Cluster, error) {
	var (
		nodes      corev1.NodeList
		pods       corev1.PodList
		namespaces corev1.NamespaceList
		cluster    = &Cluster{NamespaceLabels: map[string]map[string]string{}, Recognizer: recognizer}
	)
	if err := reader.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	if err := reader.List(ctx, &pods, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	if err := reader.List(ctx, &namespaces, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing namespaces: %w", err)
	}
	for i := range nodes.Items {
		cluster.Nodes = append(cluster.Nodes, &nodes.Items[i])
	}
	for i := range pods.Items {
		cluster.Pods = append(cluster.Pods, &pods.Items[i])
	}
	for _, namespace := range namespaces.Items {
		cluster.NamespaceLabels[namespace.Name] = namespace.Labels
	}
	return cluster, nil
}
