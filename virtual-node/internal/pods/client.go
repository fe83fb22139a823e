package pods

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
)

// statusPatcher is the client for virtual-kubelet. It patches the status alone:
// virtual-kubelet updates the pod as it was when the status was computed, and
// would revert later changes to labels and annotations.
type statusPatcher struct{ typedcorev1.PodsGetter }

func (p statusPatcher) Pods(namespace string) typedcorev1.PodInterface {
	return podStatusPatcher{p.PodsGetter.Pods(namespace)}
}

type podStatusPatcher struct{ typedcorev1.PodInterface }

// UpdateStatus replaces the status of the pod with this UID.
func (p podStatusPatcher) UpdateStatus(ctx context.Context, pod *corev1.Pod, _ metav1.UpdateOptions) (*corev1.Pod, error) {
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": pod.UID},
		{"op": "replace", "path": "/status", "value": pod.Status},
	})
	if err != nil {
		return nil, fmt.Errorf("encoding the status of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return p.Patch(ctx, pod.Name, types.JSONPatchType, patch, metav1.PatchOptions{}, "status")
}
