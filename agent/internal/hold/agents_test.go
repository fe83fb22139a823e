package hold_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clientevents "k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/holdtest"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// direct is an API server and a client of it, without a manager.
func direct(t *testing.T) *env {
	t.Helper()
	restConfig := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	e := &env{T: t, lending: broker.Lending{Enabled: true}, provider: fake.NewProvider(), clock: clocktesting.NewFakePassiveClock(time.Now())}
	var err error
	e.Client, err = client.New(restConfig, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	return e
}

// agent is a Reconciler of its own.
func (e *env) agent(c client.Client, changes ...func(*hold.Options)) *hold.Reconciler {
	options := hold.Options{
		Namespace: namespace, Lending: e.lending, Clock: e.clock, Recognizer: inventory.Recognizer{Guest: guestOf},
	}
	if len(e.guestNamespaces) > 0 {
		options.GuestNamespaces = fake.GuestNamespaces{Of: func(string) []string { return e.guestNamespaces }}
	}
	options.Observe = func(ctx context.Context) (hold.Observed, error) { return holdtest.Observed(ctx, c, options.Recognizer) }
	for _, change := range changes {
		change(&options)
	}
	return hold.New(c, e.Client, clientevents.NewFakeRecorder(100), e.provider, options)
}

func reconciled(t *testing.T, agent *hold.Reconciler, consumer string) {
	t.Helper()
	_, err := agent.Reconcile(context.WithoutCancel(t.Context()), reconcile.Request{NamespacedName: types.NamespacedName{Name: consumer}})
	expect.NoError(t, err)
}

// slowClient waits before it writes a status for the first time.
type slowClient struct {
	client.Client
	writing, proceed chan struct{}
}

func (c slowClient) Status() client.SubResourceWriter {
	return slowWriter{c.Client.Status(), c.writing, c.proceed}
}

type slowWriter struct {
	client.SubResourceWriter
	writing, proceed chan struct{}
}

func (w slowWriter) Patch(ctx context.Context, o client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
	select {
	case w.writing <- struct{}{}:
	default:
	}
	<-w.proceed
	return w.SubResourceWriter.Patch(ctx, o, patch, options...)
}

// TestTwoAgents: of two agents that decide at once on different holds, one of which
// fits, only one holds it.
func TestTwoAgents(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "1", "memory", "8Gi"))
	want := pods(set("pods", 1, expect.Resources("cpu", "600m")))
	e.hold("r1", "rome", 1, want)

	paused := slowClient{e.Client, make(chan struct{}, 1), make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		reconciled(t, e.agent(paused), "rome")
	}()
	<-paused.writing
	e.hold("b1", "berlin", 1, want)
	reconciled(t, e.agent(e.Client), "berlin")
	e.decided("b1", 1, verdict.ReasonAccepted, "", 1)
	close(paused.proceed)
	<-done
	e.decided("r1", 1, verdict.ReasonInsufficientCapacity, "0 of 1 pods", 0)
	e.granted("rome", "nothing", 0)
}

// TestJudgeAllIsNotRepeated: a consumer that is to be reconciled again soon, such as one whose
// guests are being given their places, is enqueued itself; the losses of all consumers are not
// computed again for it.
func TestJudgeAllIsNotRepeated(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "1", "memory", "8Gi"))
	expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: holds}}))
	agent := e.agent(e.Client, func(o *hold.Options) {
		o.Placeholders = placeholder.Options{Namespace: holds, Image: placeholder.DefaultImage}
	})
	e.provider.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	e.hold("r1", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "100m"))))
	result, err := agent.Reconcile(t.Context(), hold.JudgeAll)
	expect.NoError(t, err)
	if result.RequeueAfter > 0 {
		t.Errorf("the holds of all consumers are judged again because of one: %+v", result)
	}
	expect.Eventually(t, "rome to be enqueued", func() (bool, string) {
		enqueued := agent.Enqueued()
		return slices.Equal(enqueued, []string{"rome"}), fmt.Sprintf("%q are enqueued", enqueued)
	})
}

// TestPendingPods: what the cluster's own pending pods need is not promised; pods that
// no node suits take nothing.
func TestPendingPods(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	for name, change := range map[string]func(*corev1.PodSpec){
		"waits":  func(*corev1.PodSpec) {},
		"misfit": func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{"disk": "ssd"} },
		"gated":  func(s *corev1.PodSpec) { s.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/later"}} },
	} {
		spec := corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1")}}}}
		change(&spec)
		_ = e.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: namespace}})
		expect.NoError(t, e.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}, Spec: spec}))
	}
	agent := e.agent(e.Client)
	e.hold("r1", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1"))))
	reconciled(t, agent, "rome")
	e.decided("r1", 1, verdict.ReasonInsufficientCapacity, "1 of 2 pods", 0)
	e.hold("r1", "rome", 2, pods(set("pods", 1, expect.Resources("cpu", "1"))))
	reconciled(t, agent, "rome")
	e.decided("r1", 2, verdict.ReasonAccepted, "", 1)
}

// TestOlderContent: a decision about former content of the same attempt is not taken
// for one about the present content.
func TestOlderContent(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	agent := e.agent(e.Client)
	e.hold("r1", "rome", 1, pods(set("pods", 9, expect.Resources("cpu", "1"))))
	reconciled(t, agent, "rome")
	e.decided("r1", 1, verdict.ReasonInsufficientCapacity, "2 of 9 pods", 0)
	e.hold("r1", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "1"))))
	reconciled(t, agent, "rome")
	e.decided("r1", 1, verdict.ReasonAccepted, "", 1)
}
