package overflow

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
)

// parallelBindings is how many bindings are in progress at most. kube-scheduler has no such
// limit: after a grant for a thousand pods, all would be sent at once. The API server
// answers those beyond its queue with status 429, and they come again a second later: a
// busy one then does little else. Four times the scheduler's own parallelism keeps even a
// distant API server busy.
const parallelBindings = 64

// bindingTimes are how long a binding may take.
type bindingTimes struct {
	// turn is how long one that has no answer keeps others waiting: what hangs, such as an
	// admission webhook for some pods, must not hold up the others.
	turn time.Duration
	// deadline is when it is given up.
	deadline time.Duration
}

// defaultBindingTimes has the limit of an API server as the deadline, so that a pod of this
// cluster is bound whenever kube-scheduler would have bound it.
var defaultBindingTimes = bindingTimes{turn: 5 * time.Second, deadline: time.Minute}

// binder binds pods, some at a time.
type binder struct {
	slots *semaphore.Weighted
	times bindingTimes
}

func newBinder() *binder {
	return &binder{slots: semaphore.NewWeighted(parallelBindings), times: defaultBindingTimes}
}

// bind waits for its turn, and binds the pod. It returns the context's error if that ends
// first. An error may mean that the pod is bound later: the API server then refuses another
// binding.
func (b *binder) bind(ctx context.Context, client kubernetes.Interface, binding *corev1.Binding) error {
	if err := b.slots.Acquire(ctx, 1); err != nil {
		return err
	}
	pass := sync.OnceFunc(func() { b.slots.Release(1) })
	defer pass()
	defer time.AfterFunc(b.times.turn, pass).Stop()
	ctx, cancel := context.WithTimeoutCause(ctx, b.times.deadline, fmt.Errorf("the API server has not answered within %s", b.times.deadline))
	defer cancel()
	// The API server gives up at the same time, so that the pod is not bound later.
	err := client.CoreV1().RESTClient().Post().Namespace(binding.Namespace).Resource("pods").Name(binding.Name).
		SubResource("binding").Timeout(b.times.deadline).Body(binding).Do(ctx).Error()
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}
