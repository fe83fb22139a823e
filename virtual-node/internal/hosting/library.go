package hosting

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
)

type (
	listOptions = metav1.ListOptions
	metaObject  = metav1.Object
)

// podClient is what the library writes pods with. A status it writes replaces
// the status and nothing else: the library would send the whole pod as it was
// when the status was computed, and with it take back what others have since
// written to its labels and annotations.
type podClient struct{ typed.PodsGetter }

func (c podClient) Pods(namespace string) typed.PodInterface {
	return statusWriter{c.PodsGetter.Pods(namespace)}
}

type statusWriter struct{ typed.PodInterface }

// UpdateStatus replaces a pod's status, if the pod is still the same.
func (w statusWriter) UpdateStatus(ctx context.Context, pod *corev1.Pod, _ metav1.UpdateOptions) (*corev1.Pod, error) {
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": pod.UID},
		{"op": "replace", "path": "/status", "value": pod.Status},
	})
	if err != nil {
		return nil, fmt.Errorf("encoding the status of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return w.Patch(ctx, pod.Name, types.JSONPatchType, patch, metav1.PatchOptions{}, "status")
}

// silent takes the library's Events, which speak of retries: people are told in
// this package's own words.
type silent struct{}

func (silent) Event(runtime.Object, string, string, string)          {}
func (silent) Eventf(runtime.Object, string, string, string, ...any) {}
func (silent) AnnotatedEventf(runtime.Object, map[string]string, string, string, string, ...any) {
}
