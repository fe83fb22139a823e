package advertise_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// listCounter is a client that counts the lists that it reads.
type listCounter struct {
	client.Client
	lists *atomic.Int64
}

func (c listCounter) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	c.lists.Add(1)
	return c.Client.List(ctx, list, options...)
}

// One change costs what one change costs, whatever the size of the cluster: no list is read for
// the advertisement.
func TestChangesAreNotListed(t *testing.T) {
	config := controlplane.Start(t)
	var lists atomic.Int64
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: clientgoscheme.Scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{ByObject: inventory.CacheByObject()},
		NewClient: func(config *rest.Config, options client.Options) (client.Client, error) {
			c, err := client.New(config, options)
			return listCounter{c, &lists}, err
		},
	})
	expect.NoError(t, err)
	hub := transporttest.New("paris")
	recognizer := inventory.Recognizer{Guest: inventory.AnyOf()}
	tracker := inventory.NewTracker(recognizer)
	publisher := advertise.New(hub, &connections{}, advertise.Options{
		Terms: inventory.Terms{ClusterID: "paris", Lending: broker.Lending{Enabled: true}}, Recognizer: recognizer, Inventory: tracker,
		// Longer than the test, so that only changes are published.
		Interval: time.Hour, Debounce: 50 * time.Millisecond,
	})
	expect.NoError(t, tracker.SetupWithManager(mgr))
	expect.NoError(t, publisher.SetupWithManager(mgr))
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(t.Context()) }()
	t.Cleanup(func() { <-stopped })
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)

	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	expect.NoError(t, c.Create(t.Context(), node))
	node.Status = corev1.NodeStatus{
		Allocatable: expect.Resources("cpu", "4", "memory", "8Gi", "pods", "110"),
		Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
	}
	expect.NoError(t, c.Status().Update(t.Context(), node))
	for i, want := range []string{"cpu 500m", "cpu 1", "cpu 1500m"} {
		expect.NoError(t, c.Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("p", i)},
			Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{
				Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "500m")},
			}}},
		}))
		expect.Eventually(t, "the new pod in the advertisement", func() (bool, string) {
			calls := hub.Calls("PublishAdvertisement", "")
			if len(calls) == 0 {
				return false, "nothing is published"
			}
			got := calls[len(calls)-1].Argument.(broker.ClusterAdvertisementSpec).Resources.Allocated.String()
			return got == want, got
		})
	}
	if n := lists.Load(); n != 0 {
		t.Errorf("%d lists were read for the advertisement", n)
	}
}
