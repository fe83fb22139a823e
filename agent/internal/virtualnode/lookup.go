package virtualnode

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

const (
	// IndexNode is the index of pods by the node they are bound to. It is also a
	// field selector of the API server.
	IndexNode = "spec.nodeName"
	// indexDaemonNode is the index of DaemonSets' pods without a node by the node
	// that they were created for.
	indexDaemonNode = "spillway.daemonNode"
)

// ProviderOf is the provider whose capacity a node carries; empty for a node of
// this cluster.
func ProviderOf(nodeName string) string {
	if provider, ok := strings.CutPrefix(nodeName, broker.VirtualNodePrefix); ok {
		return provider
	}
	return ""
}

// ReadNode reads a provider's virtual node; nil if there is none.
func ReadNode(ctx context.Context, reader client.Reader, provider string) (*corev1.Node, error) {
	node, name := &corev1.Node{}, broker.VirtualNodeName(provider)
	switch err := reader.Get(ctx, client.ObjectKey{Name: name}, node); {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading node %s: %w", name, err)
	}
	return node, nil
}

// ReadyCondition is a node's condition Ready; nil if it has none.
func ReadyCondition(node *corev1.Node) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == corev1.NodeReady {
			return &node.Status.Conditions[i]
		}
	}
	return nil
}

// nodeReady reports whether a node, nil for none, is Ready.
func nodeReady(node *corev1.Node) bool {
	if node == nil {
		return false
	}
	ready := ReadyCondition(node)
	return ready != nil && ready.Status == corev1.ConditionTrue
}

// RunsOnEveryNode reports whether a pod comes with each node, as those of
// DaemonSets do, and uses no grant.
func RunsOnEveryNode(pod *corev1.Pod) bool {
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return true
	}
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner != nil && (owner.Kind == "DaemonSet" || owner.Kind == "Node")
}

// nodeOfDaemonPod lists the nodes that a pending pod of a DaemonSet is for: one.
func nodeOfDaemonPod(o client.Object) []string {
	pod := o.(*corev1.Pod)
	affinity := pod.Spec.Affinity
	if pod.Spec.NodeName != "" || !RunsOnEveryNode(pod) || affinity == nil || affinity.NodeAffinity == nil ||
		affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	var nodes []string
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, field := range term.MatchFields {
			if field.Key == metav1.ObjectNameField {
				nodes = append(nodes, field.Values...)
			}
		}
	}
	return nodes
}

// ResolveOwners looks up the controllers of ReplicaSets with the reader, each once.
func ResolveOwners(ctx context.Context, reader client.Reader) demand.Resolve {
	sets := map[types.UID]*metav1.PartialObjectMetadata{}
	return func(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		set, known := sets[ref.UID]
		if !known {
			set = &metav1.PartialObjectMetadata{}
			set.SetGroupVersionKind(schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "ReplicaSet"})
			if err := reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: ref.Name}, set); err != nil || set.UID != ref.UID {
				set = nil
			}
			sets[ref.UID] = set
		}
		if set == nil {
			return nil, false
		}
		return metav1.GetControllerOf(set), true
	}
}
