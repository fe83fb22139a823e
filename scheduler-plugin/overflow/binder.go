package overflow

import (
	"context"

	"golang.org/x/sync/semaphore"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// parallelBindings is how many bindings are in progress at most. kube-scheduler has no such
// limit: after a grant for a thousand pods, all would be sent at once. The API server
// answers those beyond its queue with status 429, and they come again a second later: a
// busy one then does little else. Four times the scheduler's own parallelism keeps even a
// distant API server busy.
const parallelBindings = 64

// binder binds pods, some at a time.
type binder struct {
	slots *semaphore.Weighted
}

func newBinder() *binder { return &binder{slots: semaphore.NewWeighted(parallelBindings)} }

// bind waits for its turn, and binds the pod. It returns the context's error if that ends
// first.
func (b *binder) bind(ctx context.Context, client kubernetes.Interface, binding *corev1.Binding) error {
	if err := b.slots.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.slots.Release(1)
	return client.CoreV1().Pods(binding.Namespace).Bind(ctx, binding, metav1.CreateOptions{})
}
