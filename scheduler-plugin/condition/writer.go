package condition

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

const (
	// perSecond is how many conditions are written: fewer than bindings, which must not wait for them.
	perSecond = 50
	// timeout of each write.
	timeout = 10 * time.Second
	// cacheLag is how long an own write takes precedence over the cache of pods.
	cacheLag = 30 * time.Second
)

// Writer writes conditions of pods. Safe for concurrent use.
type Writer struct {
	client  kubernetes.Interface
	wrote   func()
	clock   clock.PassiveClock
	limiter flowcontrol.RateLimiter
	pods    workqueue.TypedInterface[types.UID]

	mu sync.Mutex
	// writes are those that the caches of pods may not show yet.
	writes map[types.UID]entry
}

// entry is the last write of a pod's condition.
type entry struct {
	pod types.NamespacedName
	// condition, or nil to remove it.
	condition *corev1.PodCondition
	state     writeState
	// endedAt is when it was done or failed.
	endedAt time.Time
}

type writeState int

const (
	writePending writeState = iota
	writeDone
	writeFailed
)

// New returns a Writer, which writes nothing until Run or Next is called. wrote is called before each
// write.
func New(client kubernetes.Interface, clock clock.PassiveClock, wrote func()) *Writer {
	return &Writer{client: client, clock: clock, wrote: wrote, limiter: flowcontrol.NewTokenBucketRateLimiter(perSecond, 2*perSecond),
		pods: workqueue.NewTyped[types.UID](), writes: map[types.UID]entry{}}
}

// last returns the condition of a pod, nil if it has none: as it is to be written, or was and the cache
// may not show it yet.
func (w *Writer) last(pod *corev1.Pod) *corev1.PodCondition {
	w.mu.Lock()
	defer w.mu.Unlock()
	if e, own := w.writes[pod.UID]; own && (e.state == writePending || e.state == writeDone && w.clock.Since(e.endedAt) < cacheLag) {
		return e.condition
	}
	return of(pod)
}

// add writes a condition of a pod later, or removes it if that is nil. After a failure it does not for
// a time: the next pass tries again.
func (w *Writer) add(pod *corev1.Pod, condition *corev1.PodCondition) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if former := w.writes[pod.UID]; former.state == writeFailed && w.clock.Since(former.endedAt) < waiting.EventInterval {
		return
	}
	w.writes[pod.UID] = entry{pod: waiting.NameOf(pod), condition: condition}
	w.pods.Add(pod.UID)
}

// Forget drops the writes that are of no interest any more.
func (w *Writer) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.writes, func(_ types.UID, e entry) bool {
		return e.state != writePending && w.clock.Since(e.endedAt) >= waiting.EventInterval
	})
}

// Run writes until ctx ends.
func (w *Writer) Run(ctx context.Context, log klog.Logger) {
	for w.Next(ctx, log) {
	}
}

// ShutDown ends Run once all is written.
func (w *Writer) ShutDown() { w.pods.ShutDown() }

// Len is the number of conditions that are to be written.
func (w *Writer) Len() int { return w.pods.Len() }

// Unfinished reports whether a pod says that it waits, or is about to.
func (w *Writer) Unfinished(pod *corev1.Pod) bool { return unfinished(w.last(pod)) }

// Next writes one when there is one; it returns false after the end.
func (w *Writer) Next(ctx context.Context, log klog.Logger) bool {
	uid, shutdown := w.pods.Get()
	if shutdown {
		return false
	}
	defer w.pods.Done(uid)
	w.mu.Lock()
	e, some := w.writes[uid]
	w.mu.Unlock()
	if some && e.state == writePending && w.limiter.Wait(ctx) == nil {
		err := w.write(ctx, uid, e)
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			log.Error(err, "Failed to write what a pod waits for; retrying", "pod", e.pod)
		}
		w.ended(uid, e, err)
	}
	return true
}

// ended records the result of a write, unless another is to follow.
func (w *Writer) ended(uid types.UID, e entry, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.writes[uid].condition != e.condition {
		return
	}
	e.state, e.endedAt = writeDone, w.clock.Now()
	if err != nil {
		e.state = writeFailed
	}
	w.writes[uid] = e
}

func (w *Writer) write(ctx context.Context, uid types.UID, e entry) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var condition any = map[string]string{"type": string(broker.PodOverflow), "$patch": "delete"}
	if e.condition != nil {
		condition = e.condition
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": uid}, "status": map[string]any{"conditions": []any{condition}}})
	if err != nil {
		return fmt.Errorf("encoding a condition: %w", err)
	}
	w.wrote()
	if _, err := w.client.CoreV1().Pods(e.pod.Namespace).Patch(ctx, e.pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("writing a condition of pod %s: %w", e.pod, err)
	}
	return nil
}

// Set writes a condition of a pod unless it says that already: its figures after
// waiting.RepeatAfter, and another reason to wait as rarely as there are events.
func (w *Writer) Set(pod *corev1.Pod, condition corev1.PodCondition) {
	now := metav1.NewTime(w.clock.Now())
	said := w.last(pod)
	if said != nil {
		age := now.Sub(said.LastProbeTime.Time)
		switch {
		case meaning(said) == meaning(&condition) && age < waiting.RepeatAfter:
			return
		case unfinished(&condition) && (condition.Status == corev1.ConditionFalse || said.Status == corev1.ConditionTrue) && age < waiting.EventInterval:
			return
		}
	}
	condition.LastProbeTime, condition.LastTransitionTime = now, now
	if said != nil && said.Status == condition.Status {
		condition.LastTransitionTime = said.LastTransitionTime
	}
	w.add(pod, &condition)
}

// Remove removes the condition of a pod, if it has one.
func (w *Writer) Remove(pod *corev1.Pod) {
	if w.last(pod) != nil {
		w.add(pod, nil)
	}
}
