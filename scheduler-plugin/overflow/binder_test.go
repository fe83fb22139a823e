package overflow

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestParallelBindings counts the bindings that an API server, which answers none of them
// yet, has received.
func TestParallelBindings(t *testing.T) {
	var pending, most atomic.Int64
	answer := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := pending.Add(1)
		defer pending.Add(-1)
		for seen := most.Load(); n > seen && !most.CompareAndSwap(seen, n); seen = most.Load() {
		}
		select {
		case <-answer:
		case <-r.Context().Done():
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Success"}`)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	expect.NoError(t, err)

	b := newBinder()
	b.times = bindingTimes{turn: time.Hour, deadline: time.Hour}
	pod := func(i int) *corev1.Binding {
		return &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprintf("web-%d", i)}}
	}
	var binding sync.WaitGroup
	for i := range 3 * parallelBindings {
		binding.Go(func() {
			if err := b.bind(t.Context(), client, pod(i)); err != nil {
				t.Errorf("binding pod %d: %v", i, err)
			}
		})
	}
	expect.Eventually(t, "bindings are in progress", func() (bool, string) {
		n := pending.Load()
		return n >= parallelBindings, fmt.Sprintf("%d of %d", n, parallelBindings)
	})
	// One that waits for its turn gives up when its context ends.
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := b.bind(ctx, client, pod(-1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a binding without time for its turn: %v", err)
	}
	close(answer)
	binding.Wait()
	if n := most.Load(); n != parallelBindings {
		t.Errorf("%d bindings were in progress at once, want %d", n, parallelBindings)
	}
}
