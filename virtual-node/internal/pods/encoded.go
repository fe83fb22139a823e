package pods

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
)

// encodedPod is a pod or guest in a cache: encoded, which takes a fraction of the memory of
// a corev1.Pod, and which the garbage collector does not scan. It is not modified.
type encodedPod struct {
	// ObjectMeta has the namespace, name, UID and resource version only.
	metav1.ObjectMeta
	// origin is the key of a guest's pod, and originUID its UID; empty if the pod is not a
	// guest of this program.
	origin    string
	originUID types.UID
	// ended is whether the pod is being deleted and none of its containers runs.
	ended bool
	// terminal is whether the pod has finished.
	terminal bool
	// content is the hash of all but the status and the resource version.
	content uint64
	data    []byte
}

// encodePod transforms the pods of this cluster for their cache.
func encodePod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil // encoded before
	}
	pod.ManagedFields = nil
	encoded, err := encode(pod)
	if err != nil {
		return nil, err
	}
	// With a grace period of 0, it is deleted already, but for its finalizers.
	encoded.ended = pod.DeletionTimestamp != nil && ptr.Deref(pod.DeletionGracePeriodSeconds, 1) != 0 && !isRunning(pod.Status)
	encoded.terminal = isTerminal(pod)
	return encoded, nil
}

// encodeGuest transforms the guests for their cache, which has only what update reads.
func encodeGuest(object any) (any, error) {
	guest, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	images := func(containers []corev1.Container) []corev1.Container {
		out := make([]corev1.Container, len(containers))
		for i, c := range containers {
			out[i] = corev1.Container{Name: c.Name, Image: c.Image}
		}
		return out
	}
	encoded, err := encode(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: guest.Namespace, Name: guest.Name, UID: guest.UID, ResourceVersion: guest.ResourceVersion,
			Labels: guest.Labels, Annotations: guest.Annotations,
			DeletionTimestamp: guest.DeletionTimestamp, DeletionGracePeriodSeconds: guest.DeletionGracePeriodSeconds,
		},
		Spec: corev1.PodSpec{
			InitContainers: images(guest.Spec.InitContainers), Containers: images(guest.Spec.Containers),
			ActiveDeadlineSeconds: guest.Spec.ActiveDeadlineSeconds, SchedulingGates: guest.Spec.SchedulingGates,
		},
		Status: guest.Status,
	})
	if err != nil {
		return nil, err
	}
	if namespace, name, uid, ok := translate.GuestOrigin(guest); ok {
		encoded.origin, encoded.originUID = namespace+"/"+name, uid
	}
	return encoded, nil
}

func encode(pod *corev1.Pod) (*encodedPod, error) {
	data, err := pod.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encoding pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	stateless := *pod
	stateless.Status, stateless.ResourceVersion = corev1.PodStatus{}, ""
	content, err := stateless.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encoding pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return &encodedPod{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion},
		content:    hashOf(content), data: data,
	}, nil
}

// decode returns a new copy of the pod.
func (e *encodedPod) decode() *corev1.Pod {
	pod := &corev1.Pod{}
	if err := pod.Unmarshal(e.data); err != nil {
		panic(fmt.Sprintf("decoding pod %s/%s, which was encoded here: %v", e.Namespace, e.Name, err))
	}
	return pod
}

// key is the pod's key in its cache.
func (e *encodedPod) key() string { return e.Namespace + "/" + e.Name }

// guestName is the name of the guest of a pod.
func (e *encodedPod) guestName() string {
	return translate.GuestName(&corev1.Pod{ObjectMeta: e.ObjectMeta})
}
