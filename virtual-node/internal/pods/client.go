package pods

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// writeStatus replaces the status of the pod with this UID, unless it has this status. It
// patches the status alone: an update would revert changes of labels and annotations that
// the cache does not have yet.
func (h *Handler) writeStatus(ctx context.Context, pod *corev1.Pod, status corev1.PodStatus) error {
	current, err := pod.Status.Marshal()
	if err != nil {
		return err
	}
	desired, err := status.Marshal()
	if err != nil {
		return err
	}
	if bytes.Equal(current, desired) || h.isWritten(pod, desired) {
		return nil
	}
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": pod.UID},
		{"op": "replace", "path": "/status", "value": status},
	})
	if err != nil {
		return fmt.Errorf("encoding the status of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	// What hangs here leaves time for the guest. The response is not decoded.
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	err = h.ConsumerClient.CoreV1().RESTClient().Patch(types.JSONPatchType).
		Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("status").Body(patch).Do(ctx).Error()
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("writing the status of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	h.setWritten(pod, desired)
	return nil
}

// statusTimeout is how long the write of a status may take.
const statusTimeout = 10 * time.Second

// isWritten reports whether this status was the last one that was written, and the cache
// has not shown a change of the pod since.
func (h *Handler) isWritten(pod *corev1.Pod, status []byte) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.states[pod.UID]
	return state != nil && state.writtenTo == pod.ResourceVersion && state.written == hashOf(status)
}

func (h *Handler) setWritten(pod *corev1.Pod, status []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.state(pod.UID)
	state.written, state.writtenTo = hashOf(status), pod.ResourceVersion
	if !state.pending.IsZero() {
		state.pending = h.Clock.Now()
	}
}

func hashOf(data []byte) uint64 {
	hash := fnv.New64a()
	hash.Write(data)
	return hash.Sum64()
}
