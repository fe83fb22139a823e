package provider

import (
	"strings"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const kindShadowPod = "ShadowPod"

// RecognizeGuest returns the consumer that a pod runs for. With Liqo a consumer
// may not write pods or namespaces here, only ShadowPods, whose labels Liqo copies
// to the pod. So only what Liqo's own controllers write on this side counts: the
// pod is controlled by a ShadowPod, its namespace is labelled with the consumer it
// was created for, and the creator's name, which Liqo's admission overwrites with
// the authenticated one, is that of a user of the same consumer.
func RecognizeGuest(pod *corev1.Pod, namespaceLabels func(namespace string) map[string]string) (consumer string, ok bool) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || owner.Kind != kindShadowPod || !strings.HasPrefix(owner.APIVersion, offloadingv1beta1.SchemeGroupVersion.Group+"/") {
		return "", false
	}
	consumer = namespaceLabels(pod.Namespace)[consts.RemoteClusterID]
	if consumer == "" || !strings.HasSuffix(pod.Labels[consts.CreatorLabelKey], userOf("", consumer)) {
		return "", false
	}
	return consumer, true
}
