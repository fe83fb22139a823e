package pods

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// cached is a client of which reads cost what they cost with a manager's cache.
type cached struct {
	client.Client
	// reads are the number of reads and copies since it was last cleared, by the type.
	reads, copies map[string]int
	objects       map[string]client.Object
	lists         map[string][]client.Object
}

func (c *cached) set(kind string, o client.Object) {
	key := kind + "/" + client.ObjectKeyFromObject(o).String()
	if _, known := c.objects[key]; !known {
		c.lists[kind] = append(c.lists[kind], o)
	}
	c.objects[key] = o
}

func (c *cached) Get(_ context.Context, name client.ObjectKey, o client.Object, options ...client.GetOption) error {
	kind := fmt.Sprintf("%T", o)
	c.reads[kind]++
	found, ok := c.objects[kind+"/"+name.String()]
	if !ok {
		return apierrors.NewNotFound(schema.GroupResource{Resource: kind}, name.Name)
	}
	var get client.GetOptions
	get.ApplyOptions(options)
	if ptr.Deref(get.UnsafeDisableDeepCopy, false) {
		reflect.ValueOf(o).Elem().Set(reflect.ValueOf(found).Elem())
		return nil
	}
	c.copies[kind]++
	switch into := o.(type) {
	case *corev1.Namespace:
		found.(*corev1.Namespace).DeepCopyInto(into)
	case *corev1.Node:
		found.(*corev1.Node).DeepCopyInto(into)
	case *broker.Reservation:
		found.(*broker.Reservation).DeepCopyInto(into)
	case *metav1.PartialObjectMetadata:
		found.(*metav1.PartialObjectMetadata).DeepCopyInto(into)
	}
	return nil
}

func (c *cached) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	node := ""
	if o.FieldSelector != nil {
		node = o.FieldSelector.Requirements()[0].Value
	}
	var items []runtime.Object
	kind := fmt.Sprintf("%T", list)
	c.reads[kind]++
	for _, object := range c.lists[kind] {
		if pod, ok := object.(*corev1.Pod); ok && (node != "" && pod.Spec.NodeName != node || o.Namespace != "" && pod.Namespace != o.Namespace) {
			continue
		}
		if ptr.Deref(o.UnsafeDisableDeepCopy, false) {
			items = append(items, object)
		} else {
			c.copies[kind]++
			items = append(items, object.DeepCopyObject())
		}
	}
	return meta.SetList(list, items)
}

func (c *cached) Status() client.SubResourceWriter { return statuses{c} }

type statuses struct{ *cached }

func (s statuses) Create(context.Context, client.Object, client.Object, ...client.SubResourceCreateOption) error {
	return nil
}

func (s statuses) Update(context.Context, client.Object, ...client.SubResourceUpdateOption) error {
	return nil
}

func (s statuses) Apply(context.Context, runtime.ApplyConfiguration, ...client.SubResourceApplyOption) error {
	return nil
}

func (s statuses) Patch(_ context.Context, o client.Object, _ client.Patch, _ ...client.SubResourcePatchOption) error {
	in := o.(*broker.ReservationInstruction)
	for _, item := range s.lists[fmt.Sprintf("%T", &broker.ReservationInstructionList{})] {
		if stored := item.(*broker.ReservationInstruction); stored.Name == in.Name {
			stored.Status = in.Status
		}
	}
	return nil
}

// crowd is a cluster of pods of some Deployments, of which a fifth is at home, a third waits
// and the others are with two providers.
type crowd struct {
	*cached
	*Reconciler
	reservations []types.NamespacedName
	pods         []*corev1.Pod
	// shapes that the pods have: those of one Deployment are alike.
	shapes int
}

func newCrowd(tb testing.TB, pods, deployments, shapes int) *crowd {
	tb.Helper()
	c := &crowd{cached: &cached{objects: map[string]client.Object{}, lists: map[string][]client.Object{}, reads: map[string]int{}, copies: map[string]int{}}, shapes: shapes}
	c.set("*v1.Namespace", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "crowd", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}})
	for _, provider := range []string{"p1", "p2"} {
		c.set("*v1.Node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(provider), Labels: map[string]string{broker.LabelProvider: provider}}})
	}
	for i := range pods {
		c.pods = append(c.pods, c.pod(i, i%deployments))
		c.set("*v1.PodList", c.pods[i])
	}
	for d := range deployments {
		c.deployment(d, int32(pods/deployments))
	}
	driver := fake.NewDriver()
	c.Reconciler = New(virtualnode.New(c.cached, c.cached, nil, driver, virtualnode.Options{InstructionNamespace: "default", SchedulerName: broker.SchedulerName, ReadyTimeout: time.Hour, PeeringIdleTime: time.Hour}), driver, Options{
		ReleaseGrace: time.Hour, StartTimeout: time.Hour, ProviderLostAfter: time.Hour,
	})
	c.Reconciler.client = c.cached
	c.follow(tb)
	return c
}

func (c *crowd) deployment(d int, pods int32) {
	name := fmt.Sprint("crowd-", d)
	c.set("*v1.PartialObjectMetadata", &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: "crowd", Name: name + "-5d9c7b8f6", UID: types.UID("rs-" + name),
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "Deployment", Name: name, UID: types.UID(name), Controller: ptr.To(true)}},
	}})
	shape, set := demand.ShapeOf(c.pods[d])
	set.Count = pods
	key := demand.Key{Namespace: "crowd", OwnerUID: types.UID(name), Shape: shape}
	reservation := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "crowd", Name: key.Name(name), UID: types.UID("r-" + name), Labels: map[string]string{
			broker.LabelOwnerUID: name, broker.LabelShape: shape, broker.LabelManagedBy: broker.ManagedBySpillway,
		}},
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{set}}, Status: broker.ReservationStatus{ID: "home-" + name},
	}
	c.set("*v1alpha1.Reservation", reservation)
	c.reservations = append(c.reservations, client.ObjectKeyFromObject(reservation))
	for _, provider := range []string{"p1", "p2"} {
		half := set
		half.Count = pods / 2
		c.set("*v1alpha1.ReservationInstructionList", &broker.ReservationInstruction{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name + "-" + provider, UID: types.UID(name + provider)},
			Spec: broker.ReservationInstructionSpec{ReservationName: "home-" + name, SourceNamespace: "crowd", SourceName: reservation.Name, SourceUID: reservation.UID,
				TargetClusterID: provider, PodSets: []broker.PodSet{half}, Attempt: 1},
		})
	}
}

// pod is one of a Deployment.
func (c *crowd) pod(i, deployment int) *corev1.Pod {
	name := fmt.Sprint("crowd-", deployment)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "crowd", Name: fmt.Sprintf("%s-5d9c7b8f6-%05d", name, i), UID: types.UID(fmt.Sprint("pod-", i)), Generation: 1, Labels: map[string]string{"app": name},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: name + "-5d9c7b8f6", UID: types.UID("rs-" + name), Controller: ptr.To(true)}}},
		Spec: corev1.PodSpec{
			SchedulerName: broker.SchedulerName,
			Containers:    []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", fmt.Sprint(1+deployment%c.shapes), "memory", "1Gi")}}},
			Tolerations:   []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable"}}},
	}
	switch {
	case i%5 == 0:
		pod.Spec.NodeName = fmt.Sprint("home-", i%200)
	case i%15 > 5:
		pod.Spec.NodeName = broker.VirtualNodeName(fmt.Sprint("p", i%2+1))
		pod.Status.Phase, pod.Status.StartTime = corev1.PodRunning, ptr.To(metav1.Now())
		pod.Labels[broker.LabelHold] = charge.Label("home-" + name)
	}
	trimmed, _ := inventory.TrimPod(pod)
	return trimmed.(*corev1.Pod)
}

// BenchmarkPodEvents: what one event of a pod costs in a cluster of so many.
func BenchmarkPodEvents(b *testing.B) {
	for _, pods := range []int{1000, 10000} {
		b.Run(fmt.Sprint(pods), func(b *testing.B) {
			c := newCrowd(b, pods, 10, 1)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				before := c.pods[i%pods]
				after := before.DeepCopy()
				after.Status.Conditions = append(after.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady})
				c.event(before, after)
				c.event(after, before)
			}
		})
	}
}

// TestReconcileReadsNoOther: the reconcile of one of many Reservations reads no other one, only
// owners of pods of its shape, and copies nothing else but a virtual node; that of a provider
// copies no more.
func TestReconcileReadsNoOther(t *testing.T) {
	const deployments, shapes = 100, 10
	c := newCrowd(t, 1000, deployments, shapes)
	provider := reconcile.Request{NamespacedName: types.NamespacedName{Name: "p1"}}
	for name, tc := range map[string]struct {
		reconcile func() (reconcile.Result, error)
		// reads and copies at most, by the type; reads only of the types that are named.
		reads, copies map[string]int
	}{
		"Reservation": {
			reconcile: func() (reconcile.Result, error) {
				return c.reconcileReservation(t.Context(), reconcile.Request{NamespacedName: c.reservations[1]})
			},
			reads:  map[string]int{"*v1alpha1.Reservation": 1, "*v1.PartialObjectMetadata": deployments / shapes},
			copies: map[string]int{"*v1alpha1.Reservation": 1, "*v1.Node": 1},
		},
		"provider": {
			reconcile: func() (reconcile.Result, error) { return c.reconcileProvider(t.Context(), provider) },
			reads:     map[string]int{"*v1alpha1.Reservation": 0},
			copies:    map[string]int{"*v1.Node": 1},
		},
		"virtual node": {
			reconcile: func() (reconcile.Result, error) { return c.nodes.Reconcile(t.Context(), provider) },
			copies:    map[string]int{"*v1.Node": 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			clear(c.reads)
			clear(c.copies)
			_, err := tc.reconcile()
			expect.NoError(t, err)
			for kind, most := range tc.reads {
				if n := c.reads[kind]; n > most {
					t.Errorf("%d of %s are read, want at most %d", n, kind, most)
				}
			}
			for kind, n := range c.copies {
				if n > tc.copies[kind] {
					t.Errorf("%d copies of %s are made, want at most %d", n, kind, tc.copies[kind])
				}
			}
		})
	}
}

// BenchmarkReconciles: what it costs to reconcile every Reservation and provider once.
func BenchmarkReconciles(b *testing.B) {
	for _, size := range []struct{ pods, deployments int }{{1000, 10}, {10000, 10}, {10000, 1000}} {
		b.Run(fmt.Sprintf("%d pods of %d Deployments", size.pods, size.deployments), func(b *testing.B) {
			c := newCrowd(b, size.pods, size.deployments, 1)
			b.ReportAllocs()
			for b.Loop() {
				for _, name := range c.reservations {
					_, err := c.reconcileReservation(b.Context(), reconcile.Request{NamespacedName: name})
					expect.NoError(b, err)
				}
				for _, provider := range []string{"p1", "p2"} {
					request := reconcile.Request{NamespacedName: types.NamespacedName{Name: provider}}
					_, err := c.reconcileProvider(b.Context(), request)
					expect.NoError(b, err)
					_, err = c.nodes.Reconcile(b.Context(), request)
					expect.NoError(b, err)
				}
			}
		})
	}
}
