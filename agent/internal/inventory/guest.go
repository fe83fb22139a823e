package inventory

import (
	"crypto/sha256"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	liqoShadowPodKind  = "ShadowPod"
	liqoOffloading     = "offloading.liqo.io/"
	liqoCreatorUser    = "liqo.io/creator-user"
	liqoRemoteClusters = "liqo.io/remote-cluster-id"
)

// GuestOf tells whose guest a pod is. namespace returns the labels of a
// namespace.
//
// With the direct driver it is the namespace that tells: this cluster's agent
// made it for one consumer, whose token is good for it alone and changes nothing
// of the namespace itself.
//
// With Liqo a consumer may not write pods or namespaces here, only ShadowPods,
// whose labels Liqo copies to the pod. So what counts is what Liqo's own
// controllers wrote on this side: the pod is controlled by a ShadowPod, its
// namespace is labelled with the consumer it was made for, and the creator's
// name, which Liqo's admission overwrites with the one that was authenticated,
// ends in a hash of that same consumer.
//
// Every other label of the pod is the consumer's word. A pod that does not pass
// is the cluster's own.
func GuestOf(pod *corev1.Pod, namespace func(name string) map[string]string) (consumer string, ok bool) {
	if labels := namespace(pod.Namespace); labels[broker.LabelManagedBy] == broker.ManagedBySpillway {
		if consumer := labels[broker.LabelGuestsOf]; consumer != "" && pod.Namespace == broker.GuestNamespace(consumer) {
			return consumer, true
		}
	}
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || owner.Kind != liqoShadowPodKind || !strings.HasPrefix(owner.APIVersion, liqoOffloading) {
		return "", false
	}
	consumer = namespace(pod.Namespace)[liqoRemoteClusters]
	if consumer == "" {
		return "", false
	}
	// Liqo names a consumer's user after its slice and the first six bytes of
	// the SHA-256 of its cluster ID.
	sum := sha256.Sum256([]byte(consumer))
	if !strings.HasSuffix(pod.Labels[liqoCreatorUser], fmt.Sprintf("-%x", sum[:6])) {
		return "", false
	}
	return consumer, true
}
