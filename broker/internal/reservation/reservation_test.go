package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

func TestReservations(t *testing.T) {
	ctrl.SetLogger(logr.Discard())
	config := controlplane.Start(t)
	for name, test := range map[string]func(*world){
		"LastCapacity":         lastCapacity,
		"Crash":                crash,
		"Refusal":              refusal,
		"Release":              release,
		"GrowAndShrink":        growAndShrink,
		"RefusedGrowth":        refusedGrowth,
		"Split":                split,
		"ShrinkKeeps":          shrinkKeeps,
		"Queue":                queue,
		"Restart":              restart,
		"Sweep":                sweep,
		"Expiry":               expiry,
		"Impossible":           impossible,
		"StaleAcks":            staleAcks,
		"SilentProvider":       silentProvider,
		"LostProvider":         lostProvider,
		"NoAnswer":             noAnswer,
		"NoAnswerToGrowth":     noAnswerToGrowth,
		"StoreWithoutNews":     storeWithoutNews,
		"HoldOfAnotherAttempt": holdOfAnotherAttempt,
	} {
		t.Run(name, func(t *testing.T) { test(newWorld(t, config)) })
	}
}

// world is a namespace of its own, with the brokers that are started in it.
type world struct {
	*testing.T
	config    *rest.Config
	client    client.Client
	namespace string
	clock     *testclock.FakeClock
	sequence  int64
}

var worlds atomic.Int32

func newWorld(t *testing.T, config *rest.Config) *world {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: scheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, config: config, client: c, namespace: fmt.Sprintf("broker-%d", worlds.Add(1)), clock: testclock.NewFakeClock(time.Now())}
	if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}); err != nil {
		t.Fatal(err)
	}
	return w
}

func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, broker.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// receipts is what a server remembers of when advertisements came in.
type receipts struct {
	sync.Mutex
	at map[string]time.Time
}

func (r *receipts) ReceivedAt(cluster string) (time.Time, bool) {
	r.Lock()
	defer r.Unlock()
	at, ok := r.at[cluster]
	return at, ok
}

// process is one running broker.
type process struct {
	*reservation.Reconciler
	*world
	receipts *receipts
	stop     func()
}

// start runs a broker until the test ends or stop is called. Intercept, if not
// nil, stands between it and the API server.
func (w *world) start(intercept *interceptor.Funcs) *process {
	w.Helper()
	options := ctrl.Options{
		Scheme:     scheme(w.T),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Cache:      cache.Options{DefaultNamespaces: map[string]cache.Config{w.namespace: {}}},
		Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
	}
	if intercept != nil {
		options.NewClient = func(config *rest.Config, o client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, o)
			if err != nil {
				return nil, err
			}
			return interceptor.NewClient(c, *intercept), nil
		}
	}
	mgr, err := ctrl.NewManager(w.config, options)
	if err != nil {
		w.Fatal(err)
	}
	p := &process{world: w, receipts: &receipts{at: map[string]time.Time{}}}
	p.Reconciler = reservation.New(mgr, reservation.Options{Namespace: w.namespace, Freshness: p.receipts, Clock: w.clock})
	if err := p.SetupWithManager(mgr); err != nil {
		w.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.Errorf("the broker ended with %v", err)
		}
	})
	w.Cleanup(p.stop)
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		w.Fatal("the broker's cache did not fill")
	}
	return p
}

func cpu(text string) broker.ResourceQuantities {
	return broker.ResourceQuantities{CPU: ptr.To(resource.MustParse(text))}
}

// spec of a cluster with one free node of that much cpu.
func (w *world) spec(id, free string) broker.ClusterAdvertisementSpec {
	w.sequence++
	return broker.ClusterAdvertisementSpec{
		ClusterID:   id,
		EndpointURL: "https://" + id + ":6443",
		Lending:     broker.Lending{Enabled: true},
		Resources:   broker.AdvertisedResources{Capacity: cpu(free), Allocatable: cpu(free)},
		NodeClasses: []broker.NodeClass{{Name: "std", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: cpu(free), Pods: 100}}}},
		Cost:        &broker.Cost{CPUCost: "0.1", Currency: "EUR"},
		Timestamp:   metav1.Time{Time: w.clock.Now()},
		Sequence:    w.sequence,
	}
}

func (p *process) advertise(spec broker.ClusterAdvertisementSpec) {
	p.Helper()
	p.receipts.Lock()
	p.receipts.at[spec.ClusterID] = p.clock.Now()
	p.receipts.Unlock()
	if err := p.StoreAdvertisement(p.Context(), spec); err != nil {
		p.Fatal(err)
	}
}

// ask creates a reservation of count pods of 100m each by rome.
func (w *world) ask(name string, count int32, change ...func(*broker.Reservation)) {
	w.Helper()
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec:       broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: "pods", Count: count, Requests: cpu("100m")}}},
	}
	for _, f := range change {
		f(r)
	}
	if err := w.client.Create(w.Context(), r); err != nil {
		w.Fatal(err)
	}
}

func (w *world) get(name string) *broker.Reservation {
	w.Helper()
	var r broker.Reservation
	if err := w.client.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: name}, &r); err != nil {
		w.Fatal(err)
	}
	return &r
}

// edit changes a reservation's spec or metadata, over conflicts.
func (w *world) edit(name string, change func(*broker.Reservation)) {
	w.Helper()
	w.eventually("editing "+name, func() error {
		r := w.get(name)
		change(r)
		return w.client.Update(w.Context(), r)
	})
}

func (w *world) ad(cluster string) *broker.ClusterAdvertisement {
	w.Helper()
	var ad broker.ClusterAdvertisement
	if err := w.client.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: cluster}, &ad); err != nil {
		w.Fatal(err)
	}
	return &ad
}

// hold of a reservation at a cluster, nil where there is none.
func (w *world) hold(cluster, name string) *broker.Hold {
	w.Helper()
	for _, hold := range w.ad(cluster).Status.Holds {
		if hold.ReservationName == name {
			return &hold
		}
	}
	return nil
}

func (w *world) eventually(what string, check func() error) {
	w.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("%s: %v", what, err)
		}
		select {
		case <-w.Context().Done():
			w.Fatal(w.Context().Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// expect waits until the reservation has that phase and summary.
func (w *world) expect(name string, phase broker.ReservationPhase, summary string) *broker.Reservation {
	w.Helper()
	var r *broker.Reservation
	w.eventually(fmt.Sprintf("waiting for %s to be %s, %q", name, phase, summary), func() error {
		if r = w.get(name); r.Status.Phase != phase || r.Status.Summary != summary {
			return fmt.Errorf("it is %s, %q: %s", r.Status.Phase, r.Status.Summary, message(r, broker.ConditionReady))
		}
		return nil
	})
	return r
}

// expectCondition waits until a condition has that status and its message that
// part.
func (w *world) expectCondition(name, kind string, is bool, part string) {
	w.Helper()
	w.eventually(fmt.Sprintf("waiting for %s of %s to be %t with %q", kind, name, is, part), func() error {
		r := w.get(name)
		if meta.IsStatusConditionTrue(r.Status.Conditions, kind) != is || !strings.Contains(message(r, kind), part) {
			return fmt.Errorf("it says %q", message(r, kind))
		}
		return nil
	})
}

func message(r *broker.Reservation, kind string) string {
	if c := meta.FindStatusCondition(r.Status.Conditions, kind); c != nil {
		return c.Message
	}
	return ""
}

// answer acks the hold there is, as its provider.
func (p *process) answer(cluster, name string, yes bool, why string) {
	p.Helper()
	hold := p.hold(cluster, name)
	if hold == nil {
		p.Fatalf("%s holds nothing for %s", cluster, name)
	}
	if err := p.ApplyProviderAck(p.Context(), cluster, name, protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Accepted: yes, Message: why}); err != nil {
		p.Fatal(err)
	}
}

// use reports the virtual nodes ready, as the requester.
func (p *process) use(name string, clusters ...string) {
	p.Helper()
	ack := protocol.RequesterAck{ReservationUID: p.get(name).UID, Attempt: p.get(name).Status.Attempt.Number, Ready: clusters}
	if err := p.ApplyRequesterAck(p.Context(), "rome", name, ack); err != nil {
		p.Fatal(err)
	}
}

func pods(hold *broker.Hold) (promised, unconfirmed, granted int32) {
	if hold == nil {
		return 0, 0, 0
	}
	if hold.Unconfirmed != nil {
		unconfirmed = hold.Unconfirmed.Pods()
	}
	if hold.Granted != nil {
		granted = hold.Granted.Pods()
	}
	return hold.Promised.Pods(), unconfirmed, granted
}

func (w *world) expectPods(cluster, name string, promised, unconfirmed, granted int32) {
	w.Helper()
	w.eventually(fmt.Sprintf("waiting for %s to hold %d, %d, %d for %s", cluster, promised, unconfirmed, granted, name), func() error {
		if a, b, c := pods(w.hold(cluster, name)); a != promised || b != unconfirmed || c != granted {
			return fmt.Errorf("it holds %d, %d, %d", a, b, c)
		}
		return nil
	})
}

// Two brokers that both believe to lead race for the last capacity.
func lastCapacity(w *world) {
	const asks, places = 8, 3
	one, two := w.start(nil), w.start(nil)
	one.advertise(w.spec("paris", "300m"))
	two.advertise(w.spec("paris", "300m"))
	for i := range asks {
		w.ask(fmt.Sprint("r", i), 1)
	}
	w.eventually("waiting for every ask to be placed or queued", func() error {
		placed, queued := 0, 0
		for i := range asks {
			r := w.get(fmt.Sprint("r", i))
			if len(r.Status.Allocations) == 1 {
				placed++
			} else if meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued) {
				queued++
			}
		}
		if placed != places || queued != asks-places {
			return fmt.Errorf("%d placed and %d queued", placed, queued)
		}
		return nil
	})
	status := w.ad("paris").Status
	if len(status.Holds) != places || !status.Available.CPU.IsZero() || status.Reserved.CPU.String() != "300m" {
		w.Errorf("paris carries %d holds, reserved %s, available %s", len(status.Holds), status.Reserved, status.Available)
	}
}

// A broker dies after the ledger was written and before the reservation was.
func crash(w *world) {
	var dead atomic.Bool
	killed := errors.New("killed")
	first := w.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if r, ok := o.(*broker.Reservation); ok && len(r.Status.Allocations) > 0 {
				dead.Store(true)
			}
			if dead.Load() {
				return killed
			}
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	first.advertise(w.spec("paris", "1"))
	first.advertise(w.spec("berlin", "1"))
	w.ask("r", 3)
	w.eventually("waiting for the broker to die", func() error {
		if !dead.Load() {
			return errors.New("it lives")
		}
		return nil
	})
	if got := w.get("r"); got.Status.Attempt.Number != 1 || len(got.Status.Allocations) != 0 {
		w.Fatalf("the break was not between the ledger and the reservation: %+v", got.Status)
	}
	first.stop()

	// The next one knows of no fresh advertisement, and needs none.
	w.start(nil)
	r := w.expect("r", broker.ReservationReserved, "3 of 3 pods in berlin")
	if r.Status.Attempt.Number != 1 {
		w.Errorf("the holds of attempt 1 were made again by attempt %d", r.Status.Attempt.Number)
	}
	w.expectPods("berlin", "r", 3, 0, 0)
	if w.hold("paris", "r") != nil {
		w.Error("there is a second hold, in paris")
	}
}

func refusal(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("berlin", "2"))
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 3)
	w.expect("r", broker.ReservationReserved, "3 of 3 pods in berlin")
	p.answer("berlin", "r", false, "node b1 went away")
	r := w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	if len(r.Status.Refused) != 1 || r.Status.Refused[0].Cluster != "berlin" {
		w.Errorf("the refusal is not on record: %+v", r.Status.Refused)
	}
	var told string
	for _, rejection := range r.Status.Decision.Rejections {
		if rejection.Cluster == "berlin" {
			told = rejection.Reason + ": " + rejection.Message
		}
	}
	if !strings.Contains(told, "Refused: The provider refused: node b1 went away") {
		w.Errorf("berlin was rejected with %q", told)
	}
	if w.hold("berlin", "r") != nil {
		w.Error("the refused hold stayed")
	}
	p.answer("paris", "r", false, "no room either")
	w.expectCondition("r", broker.ConditionQueued, true, "paris: The provider refused: no room either")
	p.advertise(w.spec("paris", "1100m"))
	w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
}

func release(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "300m"))
	w.ask("first", 3)
	w.expect("first", broker.ReservationReserved, "3 of 3 pods in paris")
	p.answer("paris", "first", true, "")
	w.expectCondition("first", broker.ConditionProviderAccepted, true, "3 pods in paris")
	p.use("first", "paris")
	w.expect("first", broker.ReservationActive, "3 of 3 pods in paris")
	w.expectCondition("first", broker.ConditionReady, true, "Ready for use")

	w.ask("second", 2)
	w.expectCondition("second", broker.ConditionQueued, true, "paris: 0 of 2 pods")

	if err := w.client.Delete(w.Context(), w.get("first")); err != nil {
		w.Fatal(err)
	}
	w.expect("first", broker.ReservationReleased, "released")
	w.expectPods("paris", "first", 0, 3, 0)
	// Not even another look at everything gives away what is not confirmed.
	p.advertise(w.spec("paris", "300m"))
	w.expectCondition("second", broker.ConditionQueued, true, "Insufficient cpu: requested 100m, available 0")

	p.answer("paris", "first", true, "")
	w.expect("second", broker.ReservationReserved, "2 of 2 pods in paris")
	w.eventually("waiting for the reservation to go", func() error {
		err := w.client.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: "first"}, &broker.Reservation{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("reading it gives %v", err)
		}
		return nil
	})
	if err := p.ApplyProviderAck(w.Context(), "paris", "first", protocol.ProviderAck{Attempt: 2, Accepted: true}); !apierrors.IsNotFound(err) {
		w.Errorf("a repeated ack of what is gone gives %v", err)
	}
}

func growAndShrink(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 3)
	w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	p.answer("paris", "r", true, "")
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	p.use("r", "paris")
	w.expect("r", broker.ReservationActive, "3 of 3 pods in paris")

	w.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 5 })
	w.expectPods("paris", "r", 5, 0, 3)
	r := w.expect("r", broker.ReservationActive, "3 of 5 pods in paris")
	if a := r.Status.Allocations[0]; !a.Accepted || !a.VirtualNodeReady || a.Resources.CPU.String() != "300m" {
		w.Errorf("what was granted is not in force while the growth waits: %+v", a)
	}
	before := r.Status.Attempt.Number
	p.answer("paris", "r", true, "")
	r = w.expect("r", broker.ReservationActive, "5 of 5 pods in paris")
	if r.Status.Attempt.Number == before || r.Status.Allocations[0].VirtualNodeReady {
		w.Error("the old report of the requester counts for the grown allocation")
	}
	p.use("r", "paris")
	w.expectCondition("r", broker.ConditionReady, true, "5 of 5 pods in paris")

	w.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 1 })
	w.expectPods("paris", "r", 1, 5, 1)
	w.expect("r", broker.ReservationActive, "1 of 1 pods in paris")
	if got := w.ad("paris").Status.Reserved.CPU.String(); got != "500m" {
		w.Errorf("reserved is %s before the provider has confirmed", got)
	}
	p.answer("paris", "r", true, "")
	w.expectPods("paris", "r", 1, 0, 1)
	if got := w.ad("paris").Status.Reserved.CPU.String(); got != "100m" {
		w.Errorf("reserved is %s after the provider has confirmed", got)
	}
}

func refusedGrowth(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 3)
	w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	p.answer("paris", "r", true, "")
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	w.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 5 })
	w.expectPods("paris", "r", 5, 0, 3)
	p.answer("paris", "r", false, "full")
	w.expectPods("paris", "r", 3, 0, 3)
	w.expectCondition("r", broker.ConditionQueued, true, "2 pods wait for room. paris: The provider refused: full")
	w.expect("r", broker.ReservationReserved, "3 of 5 pods in paris")
	p.advertise(w.spec("berlin", "1"))
	w.expect("r", broker.ReservationReserved, "3 of 5 pods in paris, 2 in berlin")
	w.expectCondition("r", broker.ConditionQueued, false, "")
}

func split(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("berlin", "200m"))
	p.advertise(w.spec("paris", "300m"))
	w.ask("r", 5)
	r := w.expect("r", broker.ReservationReserved, "2 of 5 pods in berlin, 3 in paris")
	if got := r.Status.Attempt; len(got.Clusters) != 2 {
		w.Errorf("the attempt is %+v", got)
	}
	p.answer("paris", "r", true, "")
	p.answer("berlin", "r", true, "")
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	p.use("r", "paris")
	w.expect("r", broker.ReservationActive, "2 of 5 pods in berlin, 3 in paris")
	w.expectCondition("r", broker.ConditionReady, false, "Waiting for rome to report the virtual node for berlin.")
	p.use("r", "paris", "berlin")
	w.expectCondition("r", broker.ConditionReady, true, "")
}

func shrinkKeeps(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("berlin", "200m"))
	p.advertise(w.spec("paris", "300m"))
	w.ask("r", 5)
	w.expect("r", broker.ReservationReserved, "2 of 5 pods in berlin, 3 in paris")
	p.answer("paris", "r", true, "")
	p.answer("berlin", "r", true, "")
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	w.edit("r", func(r *broker.Reservation) {
		r.Spec.PodSets[0].Count = 3
		r.Spec.Retained = []broker.RetainedPods{{Cluster: "paris", Count: 3}}
	})
	w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	w.expectPods("berlin", "r", 0, 2, 0)
	w.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count, r.Spec.Retained = 1, nil })
	w.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
	w.expectPods("paris", "r", 1, 3, 1)
}

func queue(w *world) {
	p := w.start(nil)
	w.ask("r", 3)
	w.expectCondition("r", broker.ConditionQueued, true, "no cluster but rome has advertised")
	p.advertise(w.spec("paris", "100m"))
	w.expect("r", broker.ReservationReserved, "1 of 3 pods in paris")
	w.expectCondition("r", broker.ConditionQueued, true, "2 pods wait for room. paris: 0 of 2 pods")
	p.advertise(w.spec("paris", "300m"))
	w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	w.expectCondition("r", broker.ConditionQueued, false, "")
}

func restart(w *world) {
	first := w.start(nil)
	spec := w.spec("paris", "1")
	first.advertise(spec)
	first.stop()
	second := w.start(nil)
	w.ask("r", 1)
	w.expectCondition("r", broker.ConditionQueued, true, "paris: The last advertisement is too old")
	second.advertise(spec) // word for word the same
	w.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
}

func sweep(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 3)
	w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	// Somebody takes the finalizer away by force.
	w.eventually("removing the finalizer", func() error {
		r := w.get("r")
		r.Finalizers = nil
		if err := w.client.Update(w.Context(), r); err != nil {
			return err
		}
		return w.client.Delete(w.Context(), r, client.Preconditions{ResourceVersion: &r.ResourceVersion})
	})
	w.expectPods("paris", "r", 0, 3, 0)
	p.answer("paris", "r", true, "")
	w.expectPods("paris", "r", 0, 0, 0)
}

func expiry(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 3, func(r *broker.Reservation) { r.Spec.Duration = &metav1.Duration{Duration: time.Hour} })
	r := w.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	if got := r.Status.ExpiresAt.Sub(r.Status.ReservedAt.Time); got != time.Hour {
		w.Errorf("it expires after %s", got)
	}
	p.answer("paris", "r", true, "")
	w.clock.Step(time.Hour + time.Second)
	w.edit("r", func(r *broker.Reservation) { r.Labels = map[string]string{"touched": "true"} })
	w.expect("r", broker.ReservationReleased, "released")
	w.expectCondition("r", broker.ConditionProviderReleased, false, "Waiting for paris")
	w.expectPods("paris", "r", 0, 3, 0)
	p.answer("paris", "r", true, "")
	w.expectCondition("r", broker.ConditionProviderReleased, true, "")
}

func impossible(w *world) {
	w.start(nil)
	w.ask("r", 1, func(r *broker.Reservation) {
		r.Spec.TargetClusterID = "paris"
		r.Spec.Placement = &broker.Placement{ExcludeClusters: []string{"paris"}}
	})
	w.expect("r", broker.ReservationFailed, "nothing")
	w.expectCondition("r", broker.ConditionReady, false, "pinned to paris (targetClusterID), which its placement excludes")
	w.edit("r", func(r *broker.Reservation) { r.Spec.Placement = nil })
	w.expect("r", broker.ReservationPending, "0 of 1 pods")
}

func staleAcks(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 2)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	stale := w.hold("paris", "r").Attempt
	w.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 3 })
	w.expectPods("paris", "r", 3, 0, 0)
	for _, yes := range []bool{true, false} {
		if err := p.ApplyProviderAck(w.Context(), "paris", "r", protocol.ProviderAck{Attempt: stale, Accepted: yes}); err != nil {
			w.Fatal(err)
		}
	}
	w.expectPods("paris", "r", 3, 0, 0)
	if err := p.ApplyRequesterAck(w.Context(), "rome", "r", protocol.RequesterAck{Attempt: stale, Ready: []string{"paris"}}); err != nil {
		w.Fatal(err)
	}
	if err := p.ApplyRequesterAck(w.Context(), "oslo", "r", protocol.RequesterAck{}); !apierrors.IsNotFound(err) {
		w.Errorf("another cluster's report gives %v", err)
	}
	if err := p.ApplyProviderAck(w.Context(), "paris", "unknown", protocol.ProviderAck{Attempt: 1}); !apierrors.IsNotFound(err) {
		w.Errorf("an ack of an unknown reservation gives %v", err)
	}
	if got := w.get("r").Status; got.Phase != broker.ReservationReserved || got.Allocations[0].VirtualNodeReady {
		w.Errorf("a stale report counted: %+v", got)
	}
}

func silentProvider(w *world) {
	p := w.start(nil)
	spec := w.spec("paris", "1")
	p.advertise(spec)
	w.ask("r", 2)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	w.expectPods("paris", "r", 2, 0, 2)
	w.clock.Step(11 * time.Minute)
	w.ask("late", 1)
	w.expectCondition("late", broker.ConditionQueued, true, "paris: The cluster has stopped advertising")
	w.expectPods("paris", "r", 2, 0, 2)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.advertise(spec)
	w.expect("late", broker.ReservationReserved, "1 of 1 pods in paris")
}

// A provider that has granted falls silent: another one takes over, and the
// first is let go of once the requester has lost its node.
func lostProvider(w *world) {
	p := w.start(nil)
	paris := w.spec("paris", "1")
	p.advertise(paris)
	w.ask("r", 2)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	w.expectPods("paris", "r", 2, 0, 2)
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	p.use("r", "paris")
	w.expect("r", broker.ReservationActive, "2 of 2 pods in paris")

	w.clock.Step(11 * time.Minute)
	p.advertise(w.spec("berlin", "1"))
	w.eventually("having paris looked at, for which a timer waits otherwise", func() error {
		ad := w.ad("paris")
		metav1.SetMetaDataAnnotation(&ad.ObjectMeta, "look", "again")
		return w.client.Update(w.Context(), ad)
	})
	w.expect("r", broker.ReservationActive, "2 of 2 pods in paris, 2 in berlin")
	p.answer("berlin", "r", true, "")
	w.expectPods("berlin", "r", 2, 0, 2)
	w.expectPods("paris", "r", 2, 0, 2)
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "berlin")
	p.use("r", "paris", "berlin")
	w.expectCondition("r", broker.ConditionVirtualNodeReady, true, "")
	w.expectPods("paris", "r", 2, 0, 2)
	p.use("r", "berlin")
	w.expectPods("paris", "r", 0, 2, 0)
	w.expect("r", broker.ReservationActive, "2 of 2 pods in berlin")

	p.advertise(paris)
	if left := w.ad("paris").Status.Available.CPU.String(); left != "800m" {
		w.Errorf("paris has %s to lend before it has answered", left)
	}
	p.answer("paris", "r", true, "")
	w.expectPods("paris", "r", 0, 0, 0)
	w.expectPods("berlin", "r", 2, 0, 2)
}

// A provider falls silent before it has answered: it is not waited for.
func noAnswer(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 2)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	w.clock.Step(time.Minute)
	p.advertise(w.spec("berlin", "1"))
	w.ask("other", 1)
	w.expect("other", broker.ReservationReserved, "1 of 1 pods in berlin")
	w.expectPods("berlin", "r", 0, 0, 0)
	w.clock.Step(time.Minute)
	p.advertise(w.spec("berlin", "900m"))
	w.edit("r", func(r *broker.Reservation) { metav1.SetMetaDataAnnotation(&r.ObjectMeta, "look", "again") })
	w.expectPods("berlin", "r", 2, 0, 0)
	w.expectPods("paris", "r", 2, 0, 0)
	p.answer("berlin", "r", true, "")
	w.expectPods("paris", "r", 0, 2, 0)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in berlin")
}

// A provider that has granted falls silent before it has answered to more: what
// it granted still counts, the rest is had elsewhere, and that stays.
func noAnswerToGrowth(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 2)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	w.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 3 })
	w.expectPods("paris", "r", 3, 0, 2)
	w.clock.Step(2 * time.Minute)
	p.advertise(w.spec("berlin", "1"))
	w.edit("r", func(r *broker.Reservation) { metav1.SetMetaDataAnnotation(&r.ObjectMeta, "look", "again") })
	w.expectPods("berlin", "r", 1, 0, 0)
	p.answer("berlin", "r", true, "")
	w.expectPods("berlin", "r", 1, 0, 1)
	w.expectPods("paris", "r", 3, 0, 2)
	attempt := w.get("r").Status.Attempt.Number
	w.edit("r", func(r *broker.Reservation) { metav1.SetMetaDataAnnotation(&r.ObjectMeta, "look", "once more") })
	w.ask("control", 1)
	w.expect("control", broker.ReservationReserved, "1 of 1 pods in berlin")
	if now := w.get("r").Status.Attempt.Number; now != attempt {
		w.Errorf("attempt %d followed %d though nothing has changed", now, attempt)
	}
	// It is back, and says yes: now there is one too many.
	p.advertise(w.spec("paris", "1"))
	p.answer("paris", "r", true, "")
	w.eventually("three pods are promised", func() error {
		var sum int32
		for _, cluster := range []string{"paris", "berlin"} {
			promised, _, _ := pods(w.hold(cluster, "r"))
			sum += promised
		}
		if sum != 3 {
			return fmt.Errorf("it is %d", sum)
		}
		return nil
	})
}

func storeWithoutNews(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("paris", "1"))
	w.ask("r", 2)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	before := w.ad("paris")
	w.clock.Step(time.Minute)
	p.advertise(w.spec("paris", "1"))
	if after := w.ad("paris"); after.ResourceVersion != before.ResourceVersion {
		w.Error("an advertisement without news was written")
	}
	w.clock.Step(5 * time.Minute)
	p.advertise(w.spec("paris", "1"))
	if after := w.ad("paris"); after.Spec.Sequence == before.Spec.Sequence || after.Status.Available.CPU.String() != "800m" || !after.Status.Active {
		w.Errorf("the advertisement is %d, available %s", after.Spec.Sequence, after.Status.Available)
	}
}

// A stale broker writes a hold of an attempt that another broker has left
// behind.
func holdOfAnotherAttempt(w *world) {
	p := w.start(nil)
	p.advertise(w.spec("berlin", "1"))
	p.advertise(w.spec("paris", "900m"))
	w.ask("r", 2)
	r := w.expect("r", broker.ReservationReserved, "2 of 2 pods in berlin")
	p.answer("berlin", "r", true, "")
	w.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	w.eventually("writing the stale hold", func() error {
		ad := w.ad("paris")
		ad.Status.Holds = append(ad.Status.Holds, broker.Hold{
			ReservationUID: r.UID, ReservationName: "r", Requester: "rome", Attempt: 1,
			Promised: broker.HeldCapacity{Totals: cpu("200m"), PodSets: r.Spec.PodSets},
		})
		return w.client.Status().Update(w.Context(), ad)
	})
	w.expectPods("paris", "r", 0, 2, 0)
	w.expectPods("berlin", "r", 2, 0, 2)
	p.answer("paris", "r", true, "")
	w.expectPods("paris", "r", 0, 0, 0)
	w.expect("r", broker.ReservationReserved, "2 of 2 pods in berlin")
}
