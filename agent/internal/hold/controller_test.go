package hold_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/capacity/capacitytest"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var set, pods, total = capacitytest.Set, capacitytest.Pods, capacitytest.Total

const namespace = "default"

type env struct {
	*testing.T
	client.Client
	provider   *fake.Provider
	reconciler *hold.Reconciler
	clock      *clocktesting.FakePassiveClock
	// beforeGrant is called once, by the next EnsureGrant for berlin.
	beforeGrant *atomic.Pointer[func()]
	// slow makes grants take effect later.
	slow *slowGrants
	// answerWithin is how long the broker waits for the answers to attempts; nil if it does not
	// say.
	answerWithin *metav1.Duration
	// lending are the terms of agent.
	lending broker.Lending
	// guestNamespaces of each consumer.
	guestNamespaces []string
	patches         *atomic.Int64
	config          *rest.Config
	// inFlight are the writes of the Reconciler's clients that are not answered yet.
	inFlight *inFlight
	// cached is the client that the Reconciler reads with, and tracker what follows the nodes
	// and pods for it; nil without a manager.
	cached  client.Client
	tracker *inventory.Tracker
}

// inFlight counts the requests of clients, but for reads, that are not answered yet.
type inFlight struct {
	now, most atomic.Int64
	// before is called before each; an error fails it.
	before atomic.Pointer[func(*http.Request) error]
}

func (f *inFlight) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Method != http.MethodGet {
			now := f.now.Add(1)
			defer f.now.Add(-1)
			for most := f.most.Load(); now > most && !f.most.CompareAndSwap(most, now); most = f.most.Load() {
			}
			if before := f.before.Load(); before != nil {
				if err := (*before)(r); err != nil {
					return nil, err
				}
			}
		}
		return next.RoundTrip(r)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// countingClient counts the patches of statuses.
type countingClient struct {
	client.Client
	patches *atomic.Int64
}

func (c countingClient) Status() client.SubResourceWriter {
	return countingWriter{c.Client.Status(), c.patches}
}

type countingWriter struct {
	client.SubResourceWriter
	patches *atomic.Int64
}

func (w countingWriter) Patch(ctx context.Context, o client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
	w.patches.Add(1)
	return w.SubResourceWriter.Patch(ctx, o, patch, options...)
}

// hookedProvider calls a function between the decision about berlin's instructions
// and the write of their statuses.
type hookedProvider struct {
	*fake.Provider
	beforeGrant *atomic.Pointer[func()]
	slow        *slowGrants
}

// slowGrants makes each change of a consumer's grant take two calls, as one does that
// waits for the cluster's quota controller. Only the controller's worker calls it.
type slowGrants struct {
	on   atomic.Bool
	last map[string]string
}

func (s *slowGrants) waits(consumer string, total corev1.ResourceList, pods int32) bool {
	grant := fmt.Sprint(broker.FromList(total), pods)
	changed := s.last[consumer] != grant
	s.last[consumer] = grant
	return changed && s.on.Load()
}

func (p hookedProvider) EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	if consumer == "berlin" {
		if hook := p.beforeGrant.Swap(nil); hook != nil {
			(*hook)()
		}
	}
	if p.slow.waits(consumer, total, pods) {
		return peering.Waiting("QuotaPending", "the grant is not in effect yet"), nil
	}
	return p.Provider.EnsureGrant(ctx, consumer, total, pods)
}

// guestOf knows guests by their namespace's label.
func guestOf(pod *corev1.Pod, namespaceLabels func(string) map[string]string) (string, bool) {
	consumer := namespaceLabels(pod.Namespace)[broker.LabelGuestsOf]
	return consumer, consumer != ""
}

func TestMain(m *testing.M) {
	ctrl.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	controlplane.Main(m)
}

func start(t *testing.T, wrap ...func(*env, peering.Provider) peering.Provider) *env {
	t.Helper()
	return startWith(t, controlplane.Start(t), func(*hold.Options) {}, wrap...)
}

// startWith starts a Reconciler with other options.
func startWith(t *testing.T, restConfig *rest.Config, change func(*hold.Options), wrap ...func(*env, peering.Provider) peering.Provider) *env {
	t.Helper()
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	writes := &inFlight{}
	agentConfig := rest.CopyConfig(restConfig)
	agentConfig.Wrap(writes.wrap)
	mgr, err := ctrl.NewManager(agentConfig, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: ptr.To(true)}, Cache: cache.Options{ByObject: inventory.CacheByObject()},
	})
	expect.NoError(t, err)
	e := &env{T: t, provider: fake.NewProvider(), clock: clocktesting.NewFakePassiveClock(time.Now()), beforeGrant: &atomic.Pointer[func()]{}, slow: &slowGrants{last: map[string]string{}}, patches: &atomic.Int64{}, config: restConfig, inFlight: writes, cached: mgr.GetClient()}
	var provider peering.Provider = hookedProvider{e.provider, e.beforeGrant, e.slow}
	for _, w := range wrap {
		provider = w(e, provider)
	}
	recorder := events.NewRecorder(mgr.GetEventRecorder("spillway-agent"))
	options := hold.Options{
		Namespace: namespace, Lending: broker.Lending{Enabled: true, Consumers: []string{"rome", "berlin"}},
		Headroom: expect.Resources("cpu", "500m"), PeeringIdleTime: time.Hour, Clock: e.clock, Recognizer: inventory.Recognizer{Guest: guestOf},
	}
	change(&options)
	tracker := inventory.NewTracker(options.Recognizer)
	e.tracker = tracker
	options.Observe = func(ctx context.Context) (hold.Observed, error) { return tracker, tracker.WaitSynced(ctx) }
	e.reconciler = hold.New(countingClient{mgr.GetClient(), e.patches}, mgr.GetAPIReader(), recorder, provider, options)
	tracker.PlaceChanged = e.reconciler.PlaceChanged
	expect.NoError(t, errors.Join(tracker.SetupWithManager(mgr), e.reconciler.SetupWithManager(mgr)))
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(t.Context()) }()
	t.Cleanup(func() { <-stopped })
	e.Client, err = client.New(restConfig, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	return e
}

func (e *env) node(name string, allocatable corev1.ResourceList) {
	e.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	expect.NoError(e, e.Create(e.Context(), n))
	// Admission taints new nodes, and no node controller runs here.
	n.Spec.Taints = nil
	expect.NoError(e, e.Update(e.Context(), n))
	allocatable[corev1.ResourcePods] = resource.MustParse("110")
	n.Status = corev1.NodeStatus{Capacity: allocatable, Allocatable: allocatable, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	expect.NoError(e, e.Status().Update(e.Context(), n))
	e.knownNode(n)
}

// knownNode waits until the agent knows a node as it is now: of an instruction, which it
// decides once, it learns by another watch, which may be ahead.
func (e *env) knownNode(n *corev1.Node) {
	e.Helper()
	if e.tracker == nil {
		return
	}
	e.known("node "+n.Name, func() error {
		if known := e.tracker.Node(n.Name); known == nil || known.ResourceVersion != n.ResourceVersion {
			return fmt.Errorf("it knows %v", known)
		}
		return nil
	})
}

// hold makes an attempt of an instruction; an empty capacity releases it.
func (e *env) hold(name, consumer string, attempt int64, want broker.HeldCapacity) {
	e.Helper()
	// The agent may write the status at the same time.
	expect.Eventually(e, "the instruction "+name+" to be written", func() (bool, string) {
		in := &broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		err := e.Get(e.Context(), client.ObjectKeyFromObject(in), in)
		in.Spec = broker.ProviderInstructionSpec{
			ReservationName: name, RequesterClusterID: consumer, RequestedResources: want.Totals, PodSets: want.PodSets,
			Releasing: want.Empty(), Attempt: attempt, AnswerWithin: e.answerWithin,
		}
		if err == nil {
			err = e.Update(e.Context(), in)
		} else {
			err = e.Create(e.Context(), in)
		}
		return err == nil, fmt.Sprint(err)
	})
}

func (e *env) get(name string) (*broker.ProviderInstruction, metav1.Condition) {
	e.Helper()
	in := &broker.ProviderInstruction{}
	expect.NoError(e, client.IgnoreNotFound(e.Get(e.Context(), client.ObjectKey{Namespace: namespace, Name: name}, in)))
	if c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced); c != nil {
		return in, *c
	}
	return in, metav1.Condition{}
}

// decided waits for the final status of an attempt. pods is how many are held.
func (e *env) decided(name string, attempt int64, reason, message string, pods int32) {
	e.Helper()
	e.decidedAs(reason == verdict.ReasonAccepted, name, attempt, reason, message, pods)
}

// decidedAs is decided of a hold that is enforced or not.
func (e *env) decidedAs(enforced bool, name string, attempt int64, reason, message string, pods int32) {
	e.Helper()
	expect.Eventually(e, fmt.Sprintf("attempt %d of %s to be %s, enforced=%t", attempt, name, reason, enforced), func() (bool, string) {
		in, c := e.get(name)
		return in.Status.ObservedAttempt == attempt && c.Reason == reason && in.Status.Enforced == enforced, fmt.Sprintf("%+v", in.Status)
	})
	in, c := e.get(name)
	if !strings.Contains(c.Message, message) || c.ObservedGeneration != in.Generation {
		e.Errorf("the message is %q for generation %d, want %q for %d", c.Message, c.ObservedGeneration, message, in.Generation)
	}
	if in.Status.Enforced != enforced || in.Status.Held == nil != (pods == 0) || pods > 0 && in.Status.Held.Pods() != pods {
		e.Errorf("want enforced=%t with %d pods held: %+v", enforced, pods, in.Status)
	}
}

func (e *env) granted(consumer, resources string, pods int32) {
	e.Helper()
	if pods > 0 {
		pods += peering.DaemonSetPodsAllowance
	}
	expect.Eventually(e, consumer+" is granted "+resources, func() (bool, string) {
		g := e.provider.Granted(consumer)
		return broker.FromList(g.Resources).String() == resources && g.Pods == pods, fmt.Sprintf("%s, %d pods", broker.FromList(g.Resources), g.Pods)
	})
}

// guest makes a bound pod in the namespace of a consumer's guests.
func (e *env) guest(name, consumer, node string, requests corev1.ResourceList, changes ...func(*corev1.Pod)) *corev1.Pod {
	e.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "guests-of-" + consumer},
		Spec: corev1.PodSpec{
			NodeName: node, AutomountServiceAccountToken: ptr.To(false), TerminationGracePeriodSeconds: ptr.To[int64](0),
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: requests}}},
		},
	}
	for _, change := range changes {
		change(pod)
	}
	expect.NoError(e, e.Create(e.Context(), pod))
	if e.tracker != nil {
		e.known("guest "+name, func() error {
			if !slices.ContainsFunc(e.tracker.Places(consumer).Guests, func(known *corev1.Pod) bool { return known.UID == pod.UID }) {
				return errors.New("it does not know it")
			}
			return nil
		})
	}
	return pod
}

func TestProvide(t *testing.T) {
	e := start(t)
	for _, consumer := range []string{"rome", "berlin"} {
		name := "guests-of-" + consumer
		expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelGuestsOf: consumer}}}))
		expect.NoError(t, e.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: name}}))
	}
	e.node("a", expect.Resources("cpu", "2500m", "memory", "8Gi"))
	// They build on each other.
	for _, step := range []struct {
		name string
		run  func(*env)
	}{
		{"grant before acceptance", grantBeforeAcceptance},
		{"promised capacity is not available", promisedIsNotAvailable},
		{"guests are not counted twice", guestsAreNotCountedTwice},
		{"shrink and release wait for guests", shrinkWaitsForGuests},
		{"a replaced instruction is decided itself", replacedInstruction},
		{"totals and terms", totalsAndTerms},
		{"cleanup", cleanup},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			in := *e
			in.T = t
			step.run(&in)
		}) {
			return
		}
	}
}

func half() corev1.ResourceList { return expect.Resources("cpu", "500m", "memory", "64Mi") }

func grantBeforeAcceptance(e *env) {
	e.provider.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	e.hold("r1", "rome", 1, pods(set("pods", 2, half())))
	expect.Eventually(e, "the hold to be recorded", func() (bool, string) {
		in, c := e.get("r1")
		return c.Reason == verdict.ReasonGrantPending && in.Status.Held.Pods() == 2, fmt.Sprint(in.Status)
	})
	expect.Eventually(e, "the condition to have the driver's message", func() (bool, string) {
		// The wait may begin only after the hold is recorded.
		e.clock.SetTime(e.clock.Now().Add(5 * time.Second))
		in, c := e.get("r1")
		return c.Reason == verdict.ReasonGrantPending && c.Message == "waiting for the quota", fmt.Sprint(in.Status)
	})
	if in, _ := e.get("r1"); in.Status.Enforced || in.Status.ObservedAttempt != 0 || len(e.provider.Calls("EnsureGrant")) == 0 {
		e.Fatalf("enforced is reported before the grant is in effect: %+v", in.Status)
	}
	e.provider.Free("EnsureGrant")
	e.decided("r1", 1, verdict.ReasonAccepted, "Holding 2 pods of cpu 500m, memory 64Mi for consumer rome.", 2)
	e.granted("rome", "cpu 1, memory 128Mi", 2)
}

// What rome was promised and does not use is not available to berlin: of 2500m,
// 500m is headroom and 1 rome's.
func promisedIsNotAvailable(e *env) {
	e.hold("b1", "berlin", 5, pods(set("pods", 3, half())))
	e.decided("b1", 5, verdict.ReasonInsufficientCapacity, "2 of 3 pods", 0)
	e.granted("berlin", "nothing", 0)
	e.hold("b1", "berlin", 6, pods(set("pods", 2, half())))
	e.decided("b1", 6, verdict.ReasonAccepted, "2 pods", 2)

	// A refused growth leaves what was held.
	e.hold("r1", "rome", 2, pods(set("pods", 3, half())))
	e.decided("r1", 2, verdict.ReasonInsufficientCapacity, "2 of 3 pods", 2)
	e.granted("rome", "cpu 1, memory 128Mi", 2)
	e.hold("r1", "rome", 3, pods(set("pods", 2, half())))
	e.decided("r1", 3, verdict.ReasonAccepted, "2 pods", 2)
}

// Guests use what is promised to their consumer.
func guestsAreNotCountedTwice(e *env) {
	e.guest("g1", "rome", "a", half())
	e.guest("g2", "rome", "a", half())
	e.hold("b1", "berlin", 7, broker.HeldCapacity{})
	e.decided("b1", 7, broker.ReasonReleased, "", 0)
	e.hold("b1", "berlin", 8, pods(set("pods", 2, half())))
	e.decided("b1", 8, verdict.ReasonAccepted, "", 2)
}

// A shrink is confirmed when the guests fit in what remains; the grant is lowered
// at once. A release is confirmed when the last guest has finished, even if it is
// not deleted.
func shrinkWaitsForGuests(e *env) {
	e.hold("r1", "rome", 4, pods(set("pods", 1, half())))
	e.granted("rome", "cpu 500m, memory 64Mi", 1)
	expect.Eventually(e, "the condition to name the guests", func() (bool, string) {
		in, c := e.get("r1")
		return c.Reason == verdict.ReasonGuestsRemain && strings.Contains(c.Message, "2 pods with cpu 1"), fmt.Sprint(in.Status)
	})
	if in, _ := e.get("r1"); in.Status.ObservedAttempt == 4 || in.Status.Held.Pods() != 2 {
		e.Errorf("the shrink is confirmed while guests use more: %+v", in.Status)
	}
	guest := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "guests-of-rome", Name: "g1"}}
	expect.NoError(e, e.Delete(e.Context(), guest))
	e.decided("r1", 4, verdict.ReasonAccepted, "1 pods", 1)

	e.hold("r1", "rome", 5, broker.HeldCapacity{})
	e.granted("rome", "nothing", 0)
	guest.Name = "g2"
	expect.NoError(e, e.Get(e.Context(), client.ObjectKeyFromObject(guest), guest))
	guest.Status.Phase = corev1.PodSucceeded
	expect.NoError(e, e.Status().Update(e.Context(), guest))
	e.decided("r1", 5, broker.ReasonReleased, "No capacity is held", 0)
}

func totalsAndTerms(e *env) {
	e.hold("r2", "rome", 1, total(expect.Resources("cpu", "1500m")))
	e.decided("r2", 1, verdict.ReasonInsufficientCapacity, "Insufficient cpu on the nodes without taints: requested 1500m.", 0)
	e.hold("r2", "rome", 2, total(expect.Resources("cpu", "1")))
	expect.Eventually(e, "the total to be held", func() (bool, string) {
		in, c := e.get("r2")
		return c.Reason == verdict.ReasonAccepted && c.Message == "Holding cpu 1 for consumer rome." && in.Status.Enforced, fmt.Sprint(in.Status)
	})

	// The provider's terms hold even if the broker ignores them.
	e.hold("o1", "oslo", 1, pods(set("pods", 1, expect.Resources("cpu", "1m"))))
	e.decided("o1", 1, capacity.ReasonConsumerNotAdmitted, "does not offer capacity to oslo", 0)
}

// The decision about an instruction is not written to another one of its name that
// has replaced it meanwhile.
func replacedInstruction(e *env) {
	replace := func() {
		expect.NoError(e, e.Delete(e.Context(), &broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "b2"}}))
		e.hold("b2", "berlin", 1, pods(set("pods", 100, half())))
	}
	e.beforeGrant.Store(&replace)
	e.hold("b2", "berlin", 1, pods(set("pods", 1, expect.Resources("cpu", "1m"))))
	e.decided("b2", 1, verdict.ReasonInsufficientCapacity, "of 100 pods", 0)
}

// A consumer without an instruction loses its grant at once, and what remains of it
// is removed when it has been idle for long.
func cleanup(e *env) {
	expect.NoError(e, e.DeleteAllOf(e.Context(), &broker.ProviderInstruction{}, client.InNamespace(namespace)))
	expect.Eventually(e, "rome's grant to end", func() (bool, string) {
		g := e.provider.Granted("rome")
		return len(g.Resources) == 0 && g.Pods == 0, fmt.Sprint(g)
	})
	if calls := e.provider.Calls("Teardown"); len(calls) > 0 {
		e.Fatalf("torn down at once: %v", calls)
	}
	expect.Eventually(e, "what remains of rome to be removed", func() (bool, string) {
		// The agent may take note of since when it is idle only now.
		e.clock.SetTime(e.clock.Now().Add(2*time.Hour + 6*time.Minute))
		e.reconciler.Enqueue("rome")
		return len(e.provider.Calls("Teardown")) > 0, "not torn down"
	})
}
