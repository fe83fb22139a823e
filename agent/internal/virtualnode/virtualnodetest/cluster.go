// Package virtualnodetest simulates a consumer's cluster for tests: an API server
// and a fake driver that creates Node objects. The test stands in for scheduler,
// broker and provider.
package virtualnodetest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

const (
	// Namespace is opted in.
	Namespace = "shop"
	// InstructionNamespace holds the ReservationInstructions.
	InstructionNamespace = "default"
)

// Cluster is a consumer's cluster.
type Cluster struct {
	*testing.T
	client.Client
	// Config is an administrator's.
	Config *rest.Config
	Driver *fake.Driver
	// owner of the pods.
	owner *appsv1.ReplicaSet
}

// Start runs a cluster with the controllers that setup adds, until the test ends.
func Start(t *testing.T, setup func(ctrl.Manager, *fake.Driver) error) *Cluster {
	t.Helper()
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{ByObject: inventory.CacheByObject()},
		Controller: crconfig.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false)},
	})
	expect.NoError(t, err)
	c := &Cluster{T: t, Config: config, Driver: fake.NewDriver()}
	c.Client, err = client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	c.Driver.Changed = c.applyNode
	expect.NoError(t, setup(mgr, c.Driver))
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(t.Context()) }()
	t.Cleanup(func() { <-stopped })

	c.Make(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}})
	c.Make(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: Namespace}})
	labels := map[string]string{"app": "web"}
	c.owner = &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: Namespace},
		Spec: appsv1.ReplicaSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}},
		},
	}
	c.Make(c.owner)
	return c
}

// applyNode makes a Ready Node of what the driver carries.
func (c *Cluster) applyNode(clusterID string, capacity *peering.Capacity) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(clusterID), Labels: map[string]string{broker.LabelProvider: clusterID}}}
	if capacity == nil {
		return client.IgnoreNotFound(c.Client.Delete(c.Context(), node))
	}
	if err := client.IgnoreAlreadyExists(c.Client.Create(c.Context(), node)); err != nil {
		return err
	}
	if err := c.Client.Get(c.Context(), client.ObjectKeyFromObject(node), node); err != nil {
		return err
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return c.Client.Status().Update(c.Context(), node)
}

// Make creates an object.
func (c *Cluster) Make(o client.Object) {
	c.Helper()
	expect.NoError(c, c.Create(c.Context(), o))
}

// Remove deletes an object.
func (c *Cluster) Remove(o client.Object) {
	c.Helper()
	expect.NoError(c, c.Delete(c.Context(), o))
}

// Refresh reads an object again.
func (c *Cluster) Refresh(o client.Object) {
	c.Helper()
	expect.NoError(c, c.Get(c.Context(), client.ObjectKeyFromObject(o), o))
}

// Exists reports whether an object is there.
func (c *Cluster) Exists(o client.Object) bool {
	c.Helper()
	err := c.Get(c.Context(), client.ObjectKeyFromObject(o), o.DeepCopyObject().(client.Object))
	expect.NoError(c, client.IgnoreNotFound(err))
	return err == nil
}

// ExpectEvent waits for an event about an object.
func (c *Cluster) ExpectEvent(o client.Object, reason string) {
	c.Helper()
	expect.Eventually(c, fmt.Sprintf("event %s about %s", reason, o.GetName()), func() (bool, string) {
		var all corev1.EventList
		expect.NoError(c, c.List(c.Context(), &all, client.InNamespace(Namespace)))
		var seen []string
		for _, e := range all.Items {
			if e.Reason == reason && e.InvolvedObject.UID == o.GetUID() {
				return true, ""
			}
			seen = append(seen, e.InvolvedObject.Name+": "+e.Reason)
		}
		return false, strings.Join(seen, ", ")
	})
}

// Pod creates a pod of the ReplicaSet, of Spillway's scheduler.
func (c *Cluster) Pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	c.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: c.owner.Name, UID: c.owner.UID, Controller: ptr.To(true)},
		}},
		Spec: corev1.PodSpec{
			SchedulerName: broker.SchedulerName, TerminationGracePeriodSeconds: ptr.To[int64](0), AutomountServiceAccountToken: ptr.To(false),
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "300m", "memory", "64Mi")}}},
		},
	}
	for _, change := range change {
		change(p)
	}
	c.Make(p)
	return p
}

// Bind binds a pod to a provider's virtual node.
func (c *Cluster) Bind(pod *corev1.Pod, provider string) {
	c.Helper()
	expect.NoError(c, c.SubResource("binding").Create(c.Context(), pod, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace},
		Target:     corev1.ObjectReference{Kind: "Node", Name: broker.VirtualNodeName(provider)},
	}))
}

// SetPhase sets a pod's phase, as its virtual kubelet does once the provider has
// started the pod.
func (c *Cluster) SetPhase(pod *corev1.Pod, phase corev1.PodPhase) {
	c.Helper()
	c.Refresh(pod)
	before := pod.DeepCopy()
	pod.Status.Phase, pod.Status.StartTime = phase, ptr.To(metav1.Now())
	expect.NoError(c, c.Status().Patch(c.Context(), pod, client.MergeFrom(before)))
}

// Reservation creates what the plugin does for pods like the given one.
func (c *Cluster) Reservation(like *corev1.Pod, count int32) *broker.Reservation {
	c.Helper()
	shape, set := demand.ShapeOf(like)
	set.Count = count
	key := demand.Key{Namespace: Namespace, OwnerUID: c.owner.UID, Shape: shape}
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: Namespace, Name: key.Name(c.owner.Name), Finalizers: []string{broker.FinalizerRequest},
			Labels: map[string]string{broker.LabelOwnerUID: string(key.OwnerUID), broker.LabelShape: shape, broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{set}},
	}
	c.Make(r)
	return r
}

// UpdateReservation changes a Reservation, and retries conflicts.
func (c *Cluster) UpdateReservation(r *broker.Reservation, change func(*broker.Reservation)) {
	c.Helper()
	expect.Eventually(c, "the Reservation to be changed", func() (bool, string) {
		c.Refresh(r)
		before := r.DeepCopy()
		change(r)
		err := c.Patch(c.Context(), r, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		return err == nil, fmt.Sprint(err)
	})
}

// SetUsable sets the status of a Reservation of which a provider's virtual node
// carries so many pods.
func (c *Cluster) SetUsable(r *broker.Reservation, provider string, count int32) {
	c.Helper()
	expect.Eventually(c, "the status of the Reservation to be written", func() (bool, string) {
		c.Refresh(r)
		set := *r.Spec.PodSets[0].DeepCopy()
		set.Count = count
		r.Status.ID = id(r)
		r.Status.Allocations = []broker.Allocation{{Cluster: provider, PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true}}
		err := c.Status().Update(c.Context(), r)
		return err == nil, fmt.Sprint(err)
	})
}

func id(r *broker.Reservation) string { return "rome-" + string(r.UID) }

// InstructionOf is the instruction for a Reservation and a provider, without its
// content.
func InstructionOf(r *broker.Reservation, provider string) *broker.ReservationInstruction {
	return &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: InstructionNamespace, Name: id(r) + "-" + provider}}
}

// Instruct writes the instruction for a Reservation and a provider.
func (c *Cluster) Instruct(r *broker.Reservation, provider string, attempt int64, count int32) {
	c.Helper()
	set := *r.Spec.PodSets[0].DeepCopy()
	set.Count = count
	c.InstructSets(r, provider, attempt, set)
}

// InstructSets is Instruct for these pod sets.
func (c *Cluster) InstructSets(r *broker.Reservation, provider string, attempt int64, sets ...broker.PodSet) {
	c.Helper()
	in := InstructionOf(r, provider)
	expect.Eventually(c, "the instruction to be written", func() (bool, string) {
		exists := c.Exists(in)
		if exists {
			c.Refresh(in)
		}
		in.Spec = broker.ReservationInstructionSpec{
			ReservationName: id(r), ReservationUID: types.UID("hub-" + id(r)),
			SourceNamespace: r.Namespace, SourceName: r.Name, SourceUID: r.UID, TargetClusterID: provider, PeerKey: "key",
			RequestedResources: capacity.OfPodSets(sets).Totals, PodSets: sets, Attempt: attempt,
		}
		var err error
		if exists {
			err = c.Update(c.Context(), in)
		} else {
			err = c.Create(c.Context(), in)
		}
		return err == nil, fmt.Sprint(err)
	})
}

// Withdraw changes the instruction for a Reservation and a provider to the number of pods
// that remain after a withdrawal.
func (c *Cluster) Withdraw(r *broker.Reservation, provider string, attempt int64, remaining int32, leaveBy time.Time) {
	c.Helper()
	in := InstructionOf(r, provider)
	expect.Eventually(c, "the withdrawal to be written", func() (bool, string) {
		c.Refresh(in)
		in.Spec.PodSets[0].Count = remaining
		in.Spec.RequestedResources = broker.FromList(broker.Times(in.Spec.PodSets[0].Requests.List(), remaining))
		in.Spec.Withdrawal = &broker.GrantWithdrawal{Attempt: attempt, LeaveBy: metav1.NewTime(leaveBy.Truncate(time.Second))}
		in.Spec.Attempt = attempt
		err := c.Update(c.Context(), in)
		return err == nil, fmt.Sprint(err)
	})
}

// InstructFromHub writes the instruction for a Reservation of the hub: a divisible total
// in a provider. It is returned without its status.
func (c *Cluster) InstructFromHub(name, provider string, total corev1.ResourceList) *broker.ReservationInstruction {
	c.Helper()
	in := &broker.ReservationInstruction{
		ObjectMeta: metav1.ObjectMeta{Namespace: InstructionNamespace, Name: name + "-" + provider},
		Spec: broker.ReservationInstructionSpec{
			ReservationName: name, ReservationUID: types.UID("hub-" + name), TargetClusterID: provider, PeerKey: "key",
			RequestedResources: broker.FromList(total), Attempt: 1,
		},
	}
	c.Make(in)
	return in
}

// UpdateInstruction changes the spec of an instruction, and retries conflicts.
func (c *Cluster) UpdateInstruction(in *broker.ReservationInstruction, change func(*broker.ReservationInstructionSpec)) {
	c.Helper()
	expect.Eventually(c, "the instruction to be changed", func() (bool, string) {
		c.Refresh(in)
		change(&in.Spec)
		err := c.Update(c.Context(), in)
		return err == nil, fmt.Sprint(err)
	})
}

// ExpectCondition waits for a condition of an instruction, and for the status to
// answer the attempt.
func (c *Cluster) ExpectCondition(r *broker.Reservation, provider, kind string, status metav1.ConditionStatus, attempt int64, message string) {
	c.Helper()
	in := InstructionOf(r, provider)
	expect.Eventually(c, fmt.Sprintf("%s=%s at attempt %d, %q", kind, status, attempt, message), func() (bool, string) {
		c.Refresh(in)
		have := ptr.Deref(meta.FindStatusCondition(in.Status.Conditions, kind), metav1.Condition{})
		ok := have.Status == status && have.ObservedGeneration == in.Generation && in.Status.ObservedAttempt == attempt && strings.Contains(have.Message, message)
		return ok, fmt.Sprintf("attempt %d: %+v", in.Status.ObservedAttempt, have)
	})
}

// ExpectCapacity waits until the driver was last called with this capacity.
func (c *Cluster) ExpectCapacity(provider, want string) {
	c.Helper()
	expect.Eventually(c, "the virtual node of "+provider+" to carry "+want, func() (bool, string) {
		var last string
		for _, call := range c.Driver.Calls("EnsureCapacity") {
			if call.Cluster == provider {
				last = fmt.Sprintf("%s, %d pods, %v", broker.FromList(call.Capacity.Resources), call.Capacity.Pods, call.Capacity.Namespaces)
			}
		}
		return last == want, last
	})
}
