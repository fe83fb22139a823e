package instruction_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/holdtest"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// startProvider starts the provider's controllers in a cluster without nodes: no pod fits.
func startProvider(t *testing.T, b *transporttest.Broker) (client.Client, *instruction.Provider) {
	t.Helper()
	restConfig := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	c, err := client.New(restConfig, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	mgr, err := manager.New(restConfig, manager.Options{
		Scheme: scheme, Logger: testr.New(t), Metrics: server.Options{BindAddress: "0"}, Cache: cache.Options{ByObject: inventory.CacheByObject()},
		Controller: config.Controller{UsePriorityQueue: ptr.To(false), SkipNameValidation: ptr.To(true)},
	})
	expect.NoError(t, err)
	mirror := transport.NewProviderMirror(b)
	holds := hold.New(mgr.GetClient(), mgr.GetAPIReader(), events.NewRecorder(mgr.GetEventRecorder("spillway-agent")), fake.NewProvider(), hold.Options{
		Namespace: "default", Lending: broker.Lending{Enabled: true}, PeeringIdleTime: time.Hour,
		Observe: func(ctx context.Context) (hold.Observed, error) {
			return holdtest.Observed(ctx, mgr.GetClient(), inventory.Recognizer{})
		},
	})
	provided := instruction.NewProvider(mgr.GetClient(), "default", b, mirror, clock.RealClock{})
	expect.NoError(t, errors.Join(mgr.Add(mirror), holds.SetupWithManager(mgr), provided.SetupWithManager(mgr)))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		expect.NoError(t, <-done)
	})
	return c, provided
}

// granted is what the broker has granted to rome in these tests.
var granted = capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(expect.Resources("cpu", "300m"))}})

// list makes the broker list a hold of rome.
func list(b *transporttest.Broker, attempt int64, promised broker.HeldCapacity) {
	b.UpdateHold("rome-1", func(v *protocol.ProviderView) {
		v.Requester = "rome"
		v.Hold = broker.Hold{ReservationUID: "uid", Attempt: attempt, AcceptedAttempt: attempt, Promised: promised, Granted: &promised}
	})
}

// A provider that has accepted a hold must not refuse it because its instruction
// was deleted, even if nothing more fits its nodes: the hold controller decides
// with what was held, from the moment at which the instruction exists.
func TestDeletedInstructionKeepsWhatIsHeld(t *testing.T) {
	b := transporttest.New("paris")
	list(b, 3, granted)
	c, _ := startProvider(t, b)

	var former types.UID
	for range 5 {
		in := &broker.ProviderInstruction{}
		expect.Eventually(t, "a decision about the instruction", func() (bool, string) {
			err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "rome-1"}, in)
			return err == nil && in.UID != former && in.Status.ObservedAttempt == 3, fmt.Sprintf("%v, %+v", err, in.Status)
		})
		if !in.Status.Enforced || in.Status.Held == nil || in.Status.Held.Pods() != 2 {
			t.Fatalf("a hold that was accepted is refused: %+v", in.Status)
		}
		former = in.UID
		expect.NoError(t, c.Delete(t.Context(), in))
	}
}

// TestUnlistedBeyondListed checks that a provider advertises what it holds if the broker
// lists a smaller hold: the hub was restored from a backup of the time before it grew.
func TestUnlistedBeyondListed(t *testing.T) {
	b := transporttest.New("paris")
	list(b, 3, granted)
	c, provided := startProvider(t, b)
	in := &broker.ProviderInstruction{}
	expect.Eventually(t, "a decision about the instruction", func() (bool, string) {
		err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "rome-1"}, in)
		return err == nil && in.Status.ObservedAttempt == 3, fmt.Sprintf("%v, %+v", err, in.Status)
	})
	expect.Eventually(t, "what is listed not to be advertised", func() (bool, string) {
		unlisted, err := provided.Unlisted(t.Context())
		return err == nil && len(unlisted) == 0, fmt.Sprintf("%v, %+v", err, unlisted)
	})
	smaller := capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: 1, Requests: broker.FromList(expect.Resources("cpu", "300m"))}})
	list(b, 2, smaller)
	expect.Eventually(t, "what is held to be advertised", func() (bool, string) {
		unlisted, err := provided.Unlisted(t.Context())
		return err == nil && len(unlisted) == 1 && unlisted[0].ReservationUID == "uid" && unlisted[0].Requester == "rome" && unlisted[0].Held.String() == granted.Totals.String(), fmt.Sprintf("%v, %+v", err, unlisted)
	})
}
