package pods

import (
	"bytes"
	"context"
	"fmt"
	"hash/fnv"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// writeStatus replaces the status of the pod, unless it has this status. The status was
// computed from the pod as the cache has it: if others have changed the pod since, it is to
// be computed again after requeueAfter, or before, when the cache has their change. Otherwise
// it would revert theirs, such as conditions of readiness gates.
func (h *Handler) writeStatus(ctx context.Context, pod *corev1.Pod, status corev1.PodStatus) (requeueAfter time.Duration, err error) {
	current, err := pod.Status.Marshal()
	if err != nil {
		return 0, err
	}
	desired, err := status.Marshal()
	if err != nil {
		return 0, err
	}
	if bytes.Equal(current, desired) || h.isWritten(pod, desired) {
		return 0, nil
	}
	if wait := h.pace(pod.UID); wait > 0 {
		return wait, nil
	}
	update := *pod
	update.Status = status
	// What hangs here leaves time for the guest. The response is not decoded.
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	err = h.ConsumerClient.CoreV1().RESTClient().Put().
		Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("status").Body(&update).Do(ctx).Error()
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case apierrors.IsConflict(err):
		return cacheDelay, nil
	case err != nil:
		return 0, fmt.Errorf("writing the status of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	h.setWritten(pod, desired)
	return 0, nil
}

// A provider that changes the status of a guest without end makes this cluster write it once
// in writeInterval, after the first writeBurst.
const (
	writeInterval = 2 * time.Second
	writeBurst    = 20
)

// pace returns how long the status of a pod is not to be written yet, 0 if it may be written
// now.
func (h *Handler) pace(uid types.UID) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	state, now := h.state(uid), h.Clock.Now()
	if state.writes == nil {
		state.writes = rate.NewLimiter(rate.Every(writeInterval), writeBurst)
	}
	reservation := state.writes.ReserveN(now, 1)
	wait := reservation.DelayFrom(now)
	if wait > 0 {
		reservation.CancelAt(now)
	}
	return wait
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
