package pods

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/podindex"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// evictions is a Reconciler of pods that have not been started on the virtual node
// of paris for an hour; evict answers the evictions.
func evictions(evict func(pod string) error, names ...string) (*Reconciler, *events.FakeRecorder) {
	now := time.Now()
	scheme := runtime.NewScheme()
	utilruntime.Must(errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	builder := fakeclient.NewClientBuilder().WithScheme(scheme)
	index := podindex.New("")
	for _, name := range names {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", UID: types.UID(name)}}
		if name != "bare" {
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Controller: ptr.To(true)}}
		}
		pod.Spec.NodeName = broker.VirtualNodeName("paris")
		pod.Status.Phase = corev1.PodPending
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, LastTransitionTime: metav1.NewTime(now.Add(-time.Hour))}}
		builder.WithObjects(pod)
		index.Set(pod)
	}
	builder.WithInterceptorFuncs(interceptor.Funcs{
		SubResourceCreate: func(_ context.Context, _ client.Client, _ string, pod client.Object, _ client.Object, _ ...client.SubResourceCreateOption) error {
			return evict(pod.GetName())
		},
	})
	driver, recorder := fake.NewDriver(), events.NewFakeRecorder(100)
	clock := testclock.NewFakePassiveClock(now)
	c := builder.Build()
	r := New(virtualnode.New(c, c, nil, driver, virtualnode.Options{Clock: clock}), driver, Options{StartTimeout: time.Minute, ProviderLostAfter: time.Minute})
	r.client, r.recorder, r.nodes.Pods = c, recorder, index
	return r, recorder
}

var paris = reconcile.Request{NamespacedName: types.NamespacedName{Name: "paris"}}

// A pod that stays although it was not started is reported once, not at each
// reconcile.
func TestNotStartedReportedOnce(t *testing.T) {
	for name, evict := range map[string]func(string) error{
		"bare":    func(string) error { return errors.New("a bare pod is evicted") },
		"blocked": func(string) error { return apierrors.NewTooManyRequests("disruption budget", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			r, recorder := evictions(evict, name)
			for range 3 {
				result, err := r.reconcileProvider(t.Context(), paris)
				expect.NoError(t, err)
				if result.RequeueAfter == 0 {
					t.Error("not retried")
				}
			}
			if n := len(recorder.Events); n != 1 {
				t.Errorf("%d events, want 1", n)
			}
		})
	}
}

// A pod that cannot be evicted does not keep another from being evicted.
func TestEvictionErrorBlocksNoOtherPod(t *testing.T) {
	evicted := map[string]bool{}
	r, _ := evictions(func(pod string) error {
		evicted[pod] = true
		if pod == "a" {
			return errors.New("two PodDisruptionBudgets match")
		}
		return nil
	}, "a", "b")
	if _, err := r.reconcileProvider(t.Context(), paris); err == nil {
		t.Error("the error is not returned")
	}
	if !evicted["b"] {
		t.Error("b was not evicted")
	}
}

// A deleted pod is looked at again although nothing that is watched changes: the
// Ready condition of its node may turn from absent to Unknown.
func TestDeletedPodIsResynced(t *testing.T) {
	r, _ := evictions(nil)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "deleted", Namespace: "shop", Finalizers: []string{"test/keep"}}}
	pod.Spec.NodeName = broker.VirtualNodeName("paris")
	expect.NoError(t, r.client.Create(t.Context(), pod))
	expect.NoError(t, r.client.Delete(t.Context(), pod))
	expect.NoError(t, r.client.Get(t.Context(), client.ObjectKeyFromObject(pod), pod))
	r.nodes.Pods.Set(pod)
	result, err := r.reconcileProvider(t.Context(), paris)
	expect.NoError(t, err)
	if result.RequeueAfter == 0 {
		t.Error("not requeued")
	}
}

// What a pod refers to is carried when it starts and, since it may be created again, at
// intervals while it runs.
func TestCarriedAgain(t *testing.T) {
	r, _ := evictions(func(string) error { return nil })
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "shop", UID: "p"}, Spec: corev1.PodSpec{
		NodeName:   broker.VirtualNodeName("paris"),
		Containers: []corev1.Container{{EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "words"}}}}}},
	}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	r.nodes.Pods.Set(pod)
	clock := r.nodes.Clock.(*testclock.FakePassiveClock)
	for _, step := range []struct {
		after time.Duration
		want  int
	}{{0, 1}, {carryInterval - time.Second, 1}, {time.Second, 2}} {
		clock.SetTime(clock.Now().Add(step.after))
		_, err := r.reconcileProvider(t.Context(), paris)
		expect.NoError(t, err)
		if got := len(r.driver.(*fake.Driver).Calls("Carry")); got != step.want {
			t.Errorf("after another %s: carried %d times, want %d", step.after, got, step.want)
		}
	}
}
