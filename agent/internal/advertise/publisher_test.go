package advertise_test

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// TestPublisher runs the Publisher on a real API server.
func TestPublisher(t *testing.T) {
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{ByObject: inventory.CacheByObject()},
	})
	if err != nil {
		t.Fatal(err)
	}
	hub := transporttest.New("paris")
	publisher := advertise.New(hub, advertise.Options{
		Terms: inventory.Terms{ClusterID: "paris", PeerKey: "key", Lending: broker.Lending{Enabled: true}},
		// Longer than the test, so that what is seen was a change.
		Interval: time.Hour, Debounce: 50 * time.Millisecond,
		CopyName: "own", CopyNamespace: "default",
	})
	if err := publisher.SetupWithManager(mgr); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(ctx) }()
	t.Cleanup(func() { <-stopped })
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	create := func(o client.Object) {
		t.Helper()
		status := o.DeepCopyObject().(client.Object)
		if err := c.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
		status.SetResourceVersion(o.GetResourceVersion())
		status.SetUID(o.GetUID())
		if err := c.Status().Update(ctx, status); err != nil {
			t.Fatal(err)
		}
	}
	var last broker.ClusterAdvertisementSpec
	eventually := func(what string, ok func(broker.ClusterAdvertisementSpec) bool) {
		t.Helper()
		deadline := time.After(20 * time.Second)
		for {
			if calls := hub.Calls("PublishAdvertisement", ""); len(calls) > 0 {
				last = calls[len(calls)-1].Argument.(broker.ClusterAdvertisementSpec)
				if ok(last) {
					return
				}
			}
			select {
			case <-deadline:
				t.Fatalf("never published: %s; last was %+v", what, last.Resources)
			case <-time.After(20 * time.Millisecond):
			}
		}
	}

	create(node("w1", list("cpu", "4", "memory", "8Gi")))
	eventually("the new node", func(s broker.ClusterAdvertisementSpec) bool {
		return s.Resources.Allocatable.CPU != nil && s.Resources.Allocatable.CPU.String() == "4" && s.ClusterID == "paris" && s.PeerKey == "key"
	})
	first := last.Sequence

	p := pod("w1", list("cpu", "500m"))
	p.Namespace, p.Spec.Containers[0].Name, p.Spec.Containers[0].Image = "default", "c", "i"
	create(p)
	eventually("the new pod", func(s broker.ClusterAdvertisementSpec) bool { return s.Resources.Allocated.String() == "cpu 500m" })
	if last.Sequence <= first {
		t.Errorf("sequence went from %d to %d", first, last.Sequence)
	}

	hub.Fail("PublishAdvertisement", errors.New("the broker is away"))
	before := len(hub.Calls("PublishAdvertisement", ""))
	n := &corev1.Node{}
	if err := c.Get(ctx, client.ObjectKey{Name: "w1"}, n); err != nil {
		t.Fatal(err)
	}
	n.Spec.Unschedulable = true
	if err := c.Update(ctx, n); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for len(hub.Calls("PublishAdvertisement", "")) == before {
		if time.Now().After(deadline) {
			t.Fatal("no attempt to publish a cordon")
		}
		time.Sleep(20 * time.Millisecond)
	}
	hub.Fail("PublishAdvertisement", nil)
	eventually("the cordon, when the broker is back", func(s broker.ClusterAdvertisementSpec) bool { return s.Resources.Allocatable.CPU == nil })

	own := &broker.ClusterAdvertisement{}
	for deadline := time.Now().Add(20 * time.Second); ; {
		err := c.Get(ctx, client.ObjectKey{Namespace: "default", Name: "own"}, own)
		if err == nil && own.Spec.Sequence >= last.Sequence {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the copy for people is not kept: %v, sequence %d, want %d", err, own.Spec.Sequence, last.Sequence)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if len(own.Status.Holds) > 0 || own.Status.Active {
		t.Errorf("the copy has a status: %+v", own.Status)
	}
}
