package hold_test

import (
	"context"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	driver "github.com/spillway-dev/spillway/agent/internal/peering/fake"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestConsumerThatLeft: nothing is remembered of a consumer that has neither instructions nor
// guests, once its peering is removed.
func TestConsumerThatLeft(t *testing.T) {
	scheme := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(scheme))
	expect.NoError(t, broker.AddToScheme(scheme))
	c := fake.NewClientBuilder().WithScheme(scheme).Build()
	clock, provider := clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), driver.NewProvider()
	r := hold.New(c, c, events.NewFakeRecorder(10), provider, hold.Options{
		Namespace: namespace, Recognizer: inventory.Recognizer{Guest: guestOf}, PeeringIdleTime: time.Hour, Clock: clock,
		Observe: func(context.Context) (hold.Observed, error) {
			return inventory.NewTracker(inventory.Recognizer{Guest: guestOf}), nil
		},
	})
	reconcileRome := func(want int) {
		t.Helper()
		r.Enqueue("rome")
		_, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "rome"}})
		expect.NoError(t, err)
		if known := r.Known(); known != want {
			t.Errorf("%d records, want %d", known, want)
		}
	}
	reconcileRome(0)
	// A grant, also of nothing, is a peering of the driver in memory.
	_, err := provider.EnsureGrant(t.Context(), "rome", nil, 0)
	expect.NoError(t, err)
	reconcileRome(1)
	clock.SetTime(clock.Now().Add(3 * time.Hour))
	reconcileRome(0)
}
