package reservation_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clientgoevents "k8s.io/client-go/tools/events"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/internal/advertisement"
	"github.com/spillway-dev/spillway/broker/internal/commit"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// env is a namespace of its own for one test, with the brokers that it starts.
type env struct {
	*testing.T
	config    *rest.Config
	client    client.Client
	namespace string
	clock     *testclock.FakeClock
	sequence  int64
	audit     auditLines
}

// auditLines are the lines of the audit log.
type auditLines struct {
	sync.Mutex
	lines []string
}

func (a *auditLines) logger() logr.Logger {
	return funcr.New(func(prefix, args string) {
		a.Lock()
		defer a.Unlock()
		if prefix == "audit" {
			a.lines = append(a.lines, args)
		}
	}, funcr.Options{})
}

func (a *auditLines) String() string {
	a.Lock()
	defer a.Unlock()
	return strings.Join(a.lines, "\n")
}

// count returns how many lines have all parts.
func (a *auditLines) count(parts ...string) (n int) {
	a.Lock()
	defer a.Unlock()
	for _, line := range a.lines {
		if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) }) {
			n++
		}
	}
	return n
}

var envs atomic.Int32

func newEnv(t *testing.T, config *rest.Config) *env {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: scheme(t)})
	expect.NoError(t, err)
	e := &env{T: t, config: config, client: c, namespace: fmt.Sprintf("broker-%d", envs.Add(1)), clock: testclock.NewFakeClock(time.Now())}
	expect.NoError(t, c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: e.namespace}}))
	return e
}

func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(s))
	expect.NoError(t, broker.AddToScheme(s))
	return s
}

// process is a running broker.
type process struct {
	*reservation.Reconciler
	*advertisement.Clusters
	*env
	stop func()
	// reads are those of the API server, and events those that were recorded.
	reads, events *counter
}

// countedRecorder counts events by their reason.
type countedRecorder struct {
	clientgoevents.EventRecorder
	count *counter
}

func (r countedRecorder) Eventf(regarding, related runtime.Object, kind, reason, action, note string, arguments ...any) {
	r.count.add(reason)
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, note, arguments...)
}

// start runs a broker until the test ends or stop is called. If intercept is not nil,
// it intercepts the broker's calls to the API server.
func (e *env) start(intercept *interceptor.Funcs) *process {
	e.Helper()
	options := ctrl.Options{
		Scheme:     scheme(e.T),
		Logger:     e.audit.logger(),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Cache:      cache.Options{DefaultNamespaces: map[string]cache.Config{e.namespace: {}}},
		Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false)},
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
	mgr, err := ctrl.NewManager(e.config, options)
	expect.NoError(e, err)
	live, err := client.NewWithWatch(e.config, client.Options{Scheme: options.Scheme})
	expect.NoError(e, err)
	p := &process{env: e, reads: &counter{}, events: &counter{}}
	committer := commit.New(commit.Hub{Client: mgr.GetClient(), Live: interceptor.NewClient(live, p.reads.liveReads()), Namespace: e.namespace}, e.clock)
	p.Clusters = advertisement.New(advertisement.Options{Committer: committer, Clock: e.clock, Workers: 128})
	p.Reconciler = reservation.New(p.Clusters, countedRecorder{events.NewRecorder(mgr.GetEventRecorder("spillway-broker")), p.events})
	expect.NoError(e, p.Reconciler.SetupWithManager(mgr))
	expect.NoError(e, p.Clusters.SetupWithManager(mgr))
	expect.NoError(e, committer.Store.Watch(mgr.GetCache(), e.namespace))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			e.Errorf("the broker failed: %v", err)
		}
	})
	e.Cleanup(p.stop)
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		e.Fatal("the broker's cache did not sync")
	}
	return p
}

// cpu is an amount of cpu.
func cpu(quantity string) broker.ResourceQuantities {
	return broker.FromList(expect.Resources("cpu", quantity))
}

// spec of a cluster with one node with that much free cpu.
func (e *env) spec(id, free string) broker.ClusterAdvertisementSpec {
	e.sequence++
	return broker.ClusterAdvertisementSpec{
		ClusterID:   id,
		EndpointURL: "https://" + id + ":6443",
		Lending:     broker.Lending{Enabled: true},
		Resources:   broker.AdvertisedResources{Capacity: cpu(free), Allocatable: cpu(free)},
		NodeClasses: []broker.NodeClass{{Name: "std", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: cpu(free), Pods: 100}}}},
		Cost:        &broker.Cost{CPUCost: "0.1", Currency: "EUR"},
		Timestamp:   metav1.Time{Time: e.clock.Now()},
		Sequence:    e.sequence,
	}
}

// register creates the registration of a cluster, unless it exists.
func (e *env) register(id string) {
	e.Helper()
	err := e.client.Create(e.Context(), &broker.ClusterRegistration{
		ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: id, Finalizers: []string{broker.FinalizerCluster}},
		Spec:       broker.ClusterRegistrationSpec{ClusterID: id},
	})
	expect.NoError(e, client.IgnoreAlreadyExists(err))
}

// advertise stores the advertisement of a cluster that has joined.
func (p *process) advertise(spec broker.ClusterAdvertisementSpec) {
	p.Helper()
	p.register(spec.ClusterID)
	expect.NoError(p, p.StoreAdvertisement(p.Context(), spec))
}

// request creates a Reservation of count pods of 100m each by rome.
func (e *env) request(name string, count int32, change ...func(*broker.Reservation)) {
	e.Helper()
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: name},
		Spec:       broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: "pods", Count: count, Requests: cpu("100m")}}},
	}
	for _, f := range change {
		f(r)
	}
	expect.NoError(e, e.client.Create(e.Context(), r))
}

func (e *env) get(name string) *broker.Reservation {
	e.Helper()
	var r broker.Reservation
	expect.NoError(e, e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: name}, &r))
	return &r
}

// edit changes a Reservation's spec or metadata, and retries on conflict.
func (e *env) edit(name string, change func(*broker.Reservation)) {
	e.Helper()
	e.eventually(name+" to be updated", func() error {
		r := e.get(name)
		change(r)
		return e.client.Update(e.Context(), r)
	})
}

// touch makes the broker reconcile a Reservation.
func (e *env) touch(name string) {
	e.Helper()
	e.edit(name, func(r *broker.Reservation) {
		metav1.SetMetaDataAnnotation(&r.ObjectMeta, "touched", r.ResourceVersion)
	})
}

func (e *env) ad(cluster string) *broker.ClusterAdvertisement {
	e.Helper()
	var ad broker.ClusterAdvertisement
	expect.NoError(e, e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: cluster}, &ad))
	return &ad
}

// hold of a Reservation at a cluster; nil if there is none.
func (e *env) hold(cluster, name string) *broker.Hold {
	e.Helper()
	for _, hold := range e.ad(cluster).Status.Holds {
		if hold.ReservationName == name {
			return &hold
		}
	}
	return nil
}

func (e *env) eventually(what string, check func() error) {
	e.Helper()
	expect.Eventually(e, what, func() (bool, string) {
		err := check()
		return err == nil, fmt.Sprint(err)
	})
}

// expect waits until the Reservation has that phase and summary.
func (e *env) expect(name string, phase broker.ReservationPhase, summary string) *broker.Reservation {
	e.Helper()
	var r *broker.Reservation
	expect.Eventually(e, fmt.Sprintf("%s to be %s, %q", name, phase, summary), func() (bool, string) {
		r = e.get(name)
		return r.Status.Phase == phase && r.Status.Summary == summary,
			fmt.Sprintf("%s, %q: %s", r.Status.Phase, r.Status.Summary, message(r, broker.ConditionReady))
	})
	return r
}

// expectCondition waits until a condition has that status and that part in its message.
func (e *env) expectCondition(name, kind string, status bool, part string) {
	e.Helper()
	expect.Eventually(e, fmt.Sprintf("%s of %s to be %t with %q", kind, name, status, part), func() (bool, string) {
		r := e.get(name)
		return meta.IsStatusConditionTrue(r.Status.Conditions, kind) == status && strings.Contains(message(r, kind), part), message(r, kind)
	})
}

func message(r *broker.Reservation, kind string) string {
	if c := meta.FindStatusCondition(r.Status.Conditions, kind); c != nil {
		return c.Message
	}
	return ""
}

// expectRejection waits until the Reservation is queued because a cluster is rejected
// with that reason (any if empty) and that part in its message.
func (e *env) expectRejection(name, cluster, reason, part string) {
	e.Helper()
	expect.Eventually(e, fmt.Sprintf("%s to be queued and %s rejected with %q, %q", name, cluster, reason, part), func() (bool, string) {
		r := e.get(name)
		got := rejection(r, cluster)
		return meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued) && (reason == "" || got.Reason == reason) &&
			strings.Contains(got.Message, part) && strings.Contains(message(r, broker.ConditionQueued), cluster+": "+got.Message), fmt.Sprintf("%+v", got)
	})
}

func rejection(r *broker.Reservation, cluster string) (rejection broker.ClusterRejection) {
	if r.Status.Decision == nil {
		return rejection
	}
	for _, rejection = range r.Status.Decision.Rejections {
		if rejection.Cluster == cluster {
			return rejection
		}
	}
	return broker.ClusterRejection{}
}

// expectDeleted waits until the Reservation does not exist.
func (e *env) expectDeleted(name string) {
	e.Helper()
	expect.Eventually(e, name+" to be deleted", func() (bool, string) {
		err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: name}, &broker.Reservation{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

// expectEvents waits until there are that many events about a Reservation, repeated ones
// included.
func (e *env) expectEvents(name, reason string, want int32) {
	e.Helper()
	expect.Eventually(e, fmt.Sprintf("%d events %s of %s", want, reason, name), func() (bool, string) {
		var events eventsv1.EventList
		expect.NoError(e, e.client.List(e.Context(), &events, client.InNamespace(e.namespace)))
		var got int32
		for i := range events.Items {
			if event := &events.Items[i]; event.Regarding.Name == name && event.Reason == reason {
				got++
				if event.Series != nil {
					got += event.Series.Count - 1
				}
			}
		}
		return got == want, fmt.Sprint(got)
	})
}

// answer acks the current hold as its provider.
func (p *process) answer(cluster, name string, accepted bool, message string) {
	p.Helper()
	hold := p.hold(cluster, name)
	if hold == nil {
		p.Fatalf("%s has no hold for %s", cluster, name)
	}
	ack := protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Accepted: accepted, Message: message}
	expect.NoError(p, p.ApplyProviderAck(p.Context(), cluster, name, ack))
}

// use reports virtual nodes as ready, as the consumer.
func (p *process) use(name string, clusters ...string) {
	p.Helper()
	r := p.get(name)
	ack := protocol.RequesterAck{ReservationUID: r.UID, Attempt: r.Status.Attempt.Number, Ready: clusters}
	expect.NoError(p, p.ApplyRequesterAck(p.Context(), "rome", name, ack))
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

func (e *env) expectPods(cluster, name string, promised, unconfirmed, granted int32) {
	e.Helper()
	want := fmt.Sprintf("promised %d, unconfirmed %d, granted %d", promised, unconfirmed, granted)
	expect.Eventually(e, fmt.Sprintf("the hold of %s in %s: %s", name, cluster, want), func() (bool, string) {
		p, u, g := pods(e.hold(cluster, name))
		got := fmt.Sprintf("promised %d, unconfirmed %d, granted %d", p, u, g)
		return got == want, got
	})
}
