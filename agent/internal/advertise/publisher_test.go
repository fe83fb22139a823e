package advertise_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// connections is what the Publisher has subscribed with.
type connections struct {
	changed func(transport.Change[protocol.ProviderView])
}

func (c *connections) Subscribe(changed func(transport.Change[protocol.ProviderView])) {
	c.changed = changed
}

// expectBeat connects the broker: a beat is sent, and the unchanged advertisement to a broker
// that does not know it.
func (c *connections) expectBeat(t *testing.T, hub *transporttest.Broker, last broker.ClusterAdvertisementSpec) {
	t.Helper()
	connect := func(method string) (calls int) {
		t.Helper()
		before := len(hub.Calls(method, ""))
		c.changed(transport.Change[protocol.ProviderView]{Relisted: true})
		expect.Eventually(t, method+" for a broker that connects", func() (bool, string) {
			return len(hub.Calls(method, "")) > before, "no call"
		})
		return before
	}
	sent := len(hub.Calls("PublishAdvertisement", ""))
	first := connect("Beat")
	beat := hub.Calls("Beat", "")[first].Argument.(protocol.Beat)
	if beat.Digest != protocol.Digest(last) || beat.Sequence <= last.Sequence {
		t.Errorf("the beat is %+v, the last advertisement has sequence %d and digest %s", beat, last.Sequence, protocol.Digest(last))
	}
	connect("Beat")
	if n := len(hub.Calls("PublishAdvertisement", "")); n > sent {
		t.Errorf("%d unchanged advertisements were sent to a broker that knows them", n-sent)
	}
	hub.ForgetAdvertisement()
	connect("PublishAdvertisement")
}

// TestPublisher runs the Publisher on a real API server.
func TestPublisher(t *testing.T) {
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{ByObject: inventory.CacheByObject()},
	})
	expect.NoError(t, err)
	hub := transporttest.New("paris")
	connected := &connections{}
	tracker := inventory.NewTracker(inventory.Recognizer{Guest: inventory.AnyOf()})
	publisher := advertise.New(hub, connected, advertise.Options{
		Unlisted:   instruction.NewProvider(mgr.GetClient(), "default", hub, transport.NewProviderMirror(hub), nil).Unlisted,
		Terms:      inventory.Terms{ClusterID: "paris", PeerKey: "key", Lending: broker.Lending{Enabled: true}},
		Recognizer: inventory.Recognizer{Guest: inventory.AnyOf()}, Inventory: tracker,
		// Longer than the test, so that only changes are published.
		Interval: time.Hour, Debounce: 50 * time.Millisecond,
		CopyName: "own", CopyNamespace: "default",
		Prices: types.NamespacedName{Namespace: "default", Name: "prices"}, Tariff: advertise.Tariff{Base: broker.Cost{Currency: "EUR"}},
	})
	expect.NoError(t, errors.Join(tracker.SetupWithManager(mgr), publisher.SetupWithManager(mgr)))
	ctx := t.Context()
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(ctx) }()
	t.Cleanup(func() { <-stopped })
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	create := func(o client.Object) {
		t.Helper()
		status := o.DeepCopyObject().(client.Object)
		expect.NoError(t, c.Create(ctx, o))
		status.SetResourceVersion(o.GetResourceVersion())
		status.SetUID(o.GetUID())
		expect.NoError(t, c.Status().Update(ctx, status))
	}
	var last broker.ClusterAdvertisementSpec
	published := func(what string, ok func(broker.ClusterAdvertisementSpec) bool) {
		t.Helper()
		expect.Eventually(t, what+" in the advertisement", func() (bool, string) {
			calls := hub.Calls("PublishAdvertisement", "")
			if len(calls) == 0 {
				return false, "nothing is published"
			}
			last = calls[len(calls)-1].Argument.(broker.ClusterAdvertisementSpec)
			return ok(last), fmt.Sprintf("%+v", last.Resources)
		})
	}

	create(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "w1"},
		Status: corev1.NodeStatus{
			Allocatable: expect.Resources("cpu", "4", "memory", "8Gi", "pods", "110"),
			Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	})
	published("the new node", func(s broker.ClusterAdvertisementSpec) bool {
		return s.Resources.Allocatable.CPU != nil && s.Resources.Allocatable.CPU.String() == "4" && s.ClusterID == "paris" && s.PeerKey == "key"
	})
	first := last.Sequence

	create(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"},
		Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{
			Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "500m")},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	})
	published("the new pod", func(s broker.ClusterAdvertisementSpec) bool { return s.Resources.Allocated.String() == "cpu 500m" })
	if last.Sequence <= first {
		t.Errorf("sequence went from %d to %d", first, last.Sequence)
	}

	testPrices(t, c, hub, published)

	testUnlisted(t, c, create, published)

	connected.expectBeat(t, hub, last)

	hub.Fail("PublishAdvertisement", errors.New("the broker is unavailable"))
	before := len(hub.Calls("PublishAdvertisement", ""))
	n := &corev1.Node{}
	expect.NoError(t, c.Get(ctx, client.ObjectKey{Name: "w1"}, n))
	n.Spec.Unschedulable = true
	expect.NoError(t, c.Update(ctx, n))
	expect.Eventually(t, "an attempt to publish the cordon", func() (bool, string) {
		return len(hub.Calls("PublishAdvertisement", "")) > before, "no call"
	})
	hub.Fail("PublishAdvertisement", nil)
	published("the cordon, when the broker is available again,", func(s broker.ClusterAdvertisementSpec) bool { return s.Resources.Allocatable.CPU == nil })

	expect.Eventually(t, "the cordon to be accepted", func() (bool, string) { return hub.Advertised() == protocol.Digest(last), "it is not" })

	// The clock was set back since the process before this one.
	future := last.Sequence + 1_000_000_000
	hub.Fail("PublishAdvertisement", &protocol.OutdatedError{Latest: future})
	before = len(hub.Calls("PublishAdvertisement", ""))
	expect.NoError(t, c.Get(ctx, client.ObjectKey{Name: "w1"}, n))
	n.Spec.Unschedulable = false
	expect.NoError(t, c.Update(ctx, n))
	expect.Eventually(t, "an attempt to publish what the broker knows better", func() (bool, string) {
		return len(hub.Calls("PublishAdvertisement", "")) > before, "no call"
	})
	hub.Fail("PublishAdvertisement", nil)
	published("a sequence after the latest", func(s broker.ClusterAdvertisementSpec) bool {
		return s.Sequence > future && s.Resources.Allocatable.CPU != nil
	})

	own := &broker.ClusterAdvertisement{}
	expect.Eventually(t, "the copy in the cluster", func() (bool, string) {
		err := c.Get(ctx, client.ObjectKey{Namespace: "default", Name: "own"}, own)
		return err == nil && own.Spec.Sequence >= last.Sequence, fmt.Sprintf("%v, sequence %d, want %d", err, own.Spec.Sequence, last.Sequence)
	})
	if len(own.Status.Holds) > 0 || own.Status.Active {
		t.Errorf("the copy has a status: %+v", own.Status)
	}
}

// testUnlisted: what is held for a Reservation that the broker does not list is advertised as it
// is, at once: the broker has charged it until it hears otherwise.
func testUnlisted(t *testing.T, c client.Client, create func(client.Object), published func(string, func(broker.ClusterAdvertisementSpec) bool)) {
	t.Helper()
	held := func(cpu string) *broker.HeldCapacity {
		return &broker.HeldCapacity{Totals: broker.ResourceQuantities{CPU: new(resource.MustParse(cpu))}}
	}
	advertised := func(cpu string) func(broker.ClusterAdvertisementSpec) bool {
		return func(s broker.ClusterAdvertisementSpec) bool {
			return len(s.UnlistedHolds) == 1 && s.UnlistedHolds[0].Held.CPU.String() == cpu
		}
	}
	o := &broker.ProviderInstruction{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rome-1"},
		Spec:       broker.ProviderInstructionSpec{ReservationUID: "u", ReservationName: "rome-1", RequesterClusterID: "rome", Attempt: 1},
		Status:     broker.ProviderInstructionStatus{Held: held("2"), ObservedGeneration: 1},
	}
	create(o)
	published("a hold that the broker does not list", advertised("2"))
	expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(o), o))
	o.Status.Held = held("1")
	expect.NoError(t, c.Status().Update(t.Context(), o))
	published("what is left of it", advertised("1"))
	expect.NoError(t, c.Delete(t.Context(), o))
	published("its end", func(s broker.ClusterAdvertisementSpec) bool { return len(s.UnlistedHolds) == 0 })
}

// testPrices: prices change without a restart; mistaken ones change nothing.
func testPrices(t *testing.T, c client.Client, hub *transporttest.Broker, published func(string, func(broker.ClusterAdvertisementSpec) bool)) {
	t.Helper()
	prices := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "prices"}, Data: map[string]string{"cpu": "0.04"}}
	priced := func(cpu, gpu string) func(broker.ClusterAdvertisementSpec) bool {
		return func(s broker.ClusterAdvertisementSpec) bool {
			return s.Cost != nil && *s.Cost == broker.Cost{CPUCost: cpu, GPUCost: gpu, Currency: "EUR"}
		}
	}
	expect.NoError(t, c.Create(t.Context(), prices))
	published("the new price", priced("0.04", ""))
	prices.Data = map[string]string{"cpu": "free", "gpu": "1"}
	expect.NoError(t, c.Update(t.Context(), prices))
	expect.Eventually(t, "an event about the prices", func() (bool, string) {
		var all corev1.EventList
		expect.NoError(t, c.List(t.Context(), &all, client.InNamespace("default")))
		return slices.ContainsFunc(all.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == "prices" && e.Reason == "PricesInvalid" && strings.Contains(e.Message, `"free", is not a decimal number`)
		}), fmt.Sprint(len(all.Items))
	})
	prices.Data = map[string]string{"cpu": "0.05", "gpu": "1"}
	expect.NoError(t, c.Update(t.Context(), prices))
	published("the changed prices", priced("0.05", "1"))
	for _, call := range hub.Calls("PublishAdvertisement", "") {
		if cost := call.Argument.(broker.ClusterAdvertisementSpec).Cost; cost != nil && (cost.CPUCost == "free" || cost.CPUCost == "" || cost.CPUCost == "0.04" && cost.GPUCost != "") {
			t.Errorf("prices that are not valid were published: %+v", cost)
		}
	}
	expect.NoError(t, c.Delete(t.Context(), prices))
	published("no prices", func(s broker.ClusterAdvertisementSpec) bool { return s.Cost == nil })
}
