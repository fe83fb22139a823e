package liqo

import (
	"crypto/sha256"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	kindShadowPod       = "ShadowPod"
	groupOffloading     = "offloading.liqo.io/"
	labelCreatorUser    = "liqo.io/creator-user"
	labelRemoteCluster  = "liqo.io/remote-cluster-id"
	labelNodeType       = "liqo.io/type"
	nodeTypeVirtualNode = "virtual-node"
)

// RecognizeGuest returns the consumer that a pod runs for. With Liqo a consumer
// may not write pods or namespaces here, only ShadowPods, whose labels Liqo copies
// to the pod. So only what Liqo's own controllers write on this side counts: the
// pod is controlled by a ShadowPod, its namespace is labelled with the consumer it
// was created for, and the creator's name, which Liqo's admission overwrites with
// the authenticated one, ends in a hash of that same consumer.
func RecognizeGuest(pod *corev1.Pod, namespaceLabels func(namespace string) map[string]string) (consumer string, ok bool) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || owner.Kind != kindShadowPod || !strings.HasPrefix(owner.APIVersion, groupOffloading) {
		return "", false
	}
	consumer = namespaceLabels(pod.Namespace)[labelRemoteCluster]
	if consumer == "" {
		return "", false
	}
	// Liqo names a consumer's user after its slice and the first six bytes of
	// the SHA-256 of its cluster ID.
	sum := sha256.Sum256([]byte(consumer))
	if !strings.HasSuffix(pod.Labels[labelCreatorUser], fmt.Sprintf("-%x", sum[:6])) {
		return "", false
	}
	return consumer, true
}

// RecognizeVirtualNode reports whether a node is one of Liqo's virtual nodes.
func RecognizeVirtualNode(node *corev1.Node) bool {
	return node.Labels[labelNodeType] == nodeTypeVirtualNode
}
