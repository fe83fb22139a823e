// Package demandtest makes pods, Reservations and caches of them, for tests of what pods request.
package demandtest

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	clientevents "k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// NewIndexer returns an informer's cache with these objects.
func NewIndexer(objects ...any) cache.Indexer {
	indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	for _, obj := range objects {
		_ = indexer.Add(obj) // fails only for objects without metadata
	}
	return indexer
}

// RootOwner is the result for an owner without a controller.
func RootOwner(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) { return nil, true }

// UnknownOwner is the result for an owner that is not known (yet).
func UnknownOwner(string, metav1.OwnerReference) (*metav1.OwnerReference, bool, bool) {
	return nil, false, false
}

// JobPod returns a pod of a Job that requests CPU.
func JobPod(job, name, cpu string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "example.com/v1", Kind: "Batch", Name: job, UID: types.UID(job), Controller: ptr.To(true)},
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}}},
	}
}

// ReservationFor returns a Reservation for the pods of this pod's key, with usable
// slots by provider.
func ReservationFor(pod *corev1.Pod, slots map[string]int32) *broker.Reservation {
	owner, _ := demand.OwnerOf(pod, RootOwner)
	shape, set := demand.ShapeOf(pod)
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: owner.Name, Labels: map[string]string{
		broker.LabelOwnerUID: string(owner.UID), broker.LabelShape: shape,
	}}}
	r.Status.ID = "rome-" + owner.Name
	set.Count = 100
	r.Spec.PodSets = []broker.PodSet{set}
	for cluster, n := range slots {
		set.Count = n
		r.Status.Allocations = append(r.Status.Allocations, broker.Allocation{Cluster: cluster, PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true})
	}
	return r
}

// EventCounts records events by pod and reason.
type EventCounts map[PodReason]int

// PodReason is an event's pod and reason.
type PodReason struct{ Pod, Reason string }

// Eventf implements events.EventRecorder.
func (c EventCounts) Eventf(regarding, _ runtime.Object, _, reason, _, _ string, _ ...any) {
	c[PodReason{regarding.(*corev1.Pod).Name, reason}]++
}

// WithLogger implements events.EventRecorderLogger.
func (c EventCounts) WithLogger(klog.Logger) clientevents.EventRecorderLogger { return c }

// Of returns the number of events of a reason by pod.
func (c EventCounts) Of(reason string) map[string]int {
	byPod := map[string]int{}
	for of, n := range c {
		if of.Reason == reason {
			byPod[of.Pod] = n
		}
	}
	return byPod
}
