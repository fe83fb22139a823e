package hold_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// trials makes namespaces to try guests in, for consumers that have none.
type trials struct {
	client.Client
	// waits is why there is none yet.
	waits string
	// none: there will be none.
	none bool
}

func (*trials) GuestNamespaces(context.Context, string) ([]string, error) { return nil, nil }

func (n *trials) EnsureTrialNamespace(ctx context.Context, consumer string) (string, peering.Progress, error) {
	if n.none {
		return "", peering.Done("Terminating", "the last one is being deleted"), nil
	}
	if n.waits != "" {
		return "", peering.Waiting("Pending", n.waits), nil
	}
	name := "trial-of-" + consumer
	err := n.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelGuestsOf: consumer}}})
	return name, peering.Done("Ready", ""), client.IgnoreAlreadyExists(err)
}

func (n *trials) RemoveTrialNamespace(ctx context.Context, consumer string) error {
	return client.IgnoreNotFound(n.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "trial-of-" + consumer}}))
}

// refuseGuests makes admission refuse pods in namespaces of guests, until lift is called.
func (e *env) refuseGuests(words string) (lift func()) {
	e.Helper()
	return e.admitGuests(words, admissionv1.Validation{Expression: "false", Message: words})
}

// admitGuests makes admission refuse pods in namespaces of guests that break one of some rules,
// until lift is called. words are those about a pod that requests nothing.
func (e *env) admitGuests(words string, rules ...admissionv1.Validation) (lift func()) {
	e.Helper()
	const name = "no-guests"
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{
			NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: broker.LabelGuestsOf, Operator: metav1.LabelSelectorOpExists}}},
			ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
			}}},
		},
		Validations: rules,
	}}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "guests-of-oslo", Labels: map[string]string{broker.LabelGuestsOf: "oslo"}}}
	for _, object := range []client.Object{policy, binding, other} {
		expect.NoError(e, e.Create(e.Context(), object))
	}
	refused := func(want bool) {
		e.Helper()
		expect.Eventually(e, fmt.Sprintf("the policy to be in effect: %t", want), func() (bool, string) {
			// The API server may know the PriorityClass later.
			err := e.Create(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: other.Name}, Spec: corev1.PodSpec{
				PriorityClassName: guest.PriorityClass, Containers: []corev1.Container{{Name: "c", Image: "i"}},
			}}, client.DryRunAll)
			return err == nil && !want || err != nil && want && strings.Contains(err.Error(), words), fmt.Sprint(err)
		})
	}
	refused(true)
	return func() {
		e.Helper()
		expect.NoError(e, e.Delete(e.Context(), binding))
		refused(false)
	}
}

// TestColdNamespace: guests of a consumer without a namespace are tried in one that is made for
// that, before the answer is yes, and removed when the consumer is promised nothing any more.
func TestColdNamespace(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.priorityClasses(guest.PriorityClass)
	lift := e.refuseGuests("only in namespaces of teams")
	namespaces := &trials{Client: e.Client}
	agent := e.agent(e.Client, func(o *hold.Options) { o.GuestNamespaces = namespaces })
	want := pods(set("pods", 2, expect.Resources("cpu", "1m")))

	e.hold("r1", "rome", 1, want)
	reconciled(t, agent, "rome")
	e.decided("r1", 1, verdict.ReasonGuestNotAdmitted, "only in namespaces of teams", 0)
	namespaces.none = true
	e.hold("untried", "rome", 1, want)
	reconciled(t, agent, "rome")
	e.decided("untried", 1, verdict.ReasonAccepted, "Holding 2 pods", 2)
	untried, _ := e.get("untried")
	expect.NoError(t, e.Delete(t.Context(), untried))
	namespaces.none = false
	lift()
	e.hold("r1", "rome", 2, want)
	reconciled(t, agent, "rome")
	e.decided("r1", 2, verdict.ReasonAccepted, "Holding 2 pods", 2)

	namespaces.waits = "the last one is being deleted"
	e.hold("r2", "rome", 1, want)
	reconciled(t, agent, "rome")
	e.clock.SetTime(e.clock.Now().Add(5 * time.Second))
	reconciled(t, agent, "rome")
	if in, c := e.get("r2"); c.Reason != verdict.ReasonTrialPending || c.Message != "Waiting to try whether the API server admits the guests: the last one is being deleted." || in.Status.Held.Pods() != 2 || in.Status.ObservedAttempt != 0 {
		t.Errorf("while guests cannot be tried: %+v", in.Status)
	}
	e.granted("rome", "cpu 2m", 2)
	e.clock.SetTime(e.clock.Now().Add(time.Minute))
	reconciled(t, agent, "rome")
	e.decided("r2", 1, verdict.ReasonGuestNotAdmitted, "It is not known whether the API server admits pods of cpu 1m: the last one is being deleted.", 0)

	for _, name := range []string{"r1", "r2"} {
		in, _ := e.get(name)
		expect.NoError(t, e.Delete(t.Context(), in))
	}
	reconciled(t, agent, "rome")
	var namespace corev1.Namespace
	if err := e.Get(t.Context(), client.ObjectKey{Name: "trial-of-rome"}, &namespace); client.IgnoreNotFound(err) != nil || err == nil && namespace.DeletionTimestamp.IsZero() {
		t.Errorf("the namespace is not deleted: %v", err)
	}
}

// TestTrialEndsBesideARefusal: a hold whose guests cannot be tried is refused in time, also if
// another one was refused since.
func TestTrialEndsBesideARefusal(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.priorityClasses(guest.PriorityClass)
	requests := func(cpu string) string {
		return "object.spec.containers.all(c, string(c.?resources.?requests[?'cpu'].orValue('0')) == '" + cpu + "')"
	}
	e.admitGuests("not small enough",
		admissionv1.Validation{Expression: requests("1m") + " || " + requests("2m"), Message: "not small enough"},
		admissionv1.Validation{Expression: "!" + requests("1m"), Message: "a guest may only request resources that are granted to its cluster"},
		admissionv1.Validation{Expression: "!" + requests("2m"), Message: "none of 2m"})
	agent := e.agent(e.Client, func(o *hold.Options) { o.GuestNamespaces = &trials{Client: e.Client} })

	e.hold("r1", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "1m"))))
	e.hold("r2", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "2m"))))
	reconciled(t, agent, "rome")
	e.decided("r2", 1, verdict.ReasonGuestNotAdmitted, "none of 2m", 0)
	if in, _ := e.get("r1"); in.Status.ObservedAttempt != 0 {
		t.Errorf("decided before its guests are tried: %+v", in.Status)
	}
	e.clock.SetTime(e.clock.Now().Add(time.Minute))
	reconciled(t, agent, "rome")
	e.decided("r1", 1, verdict.ReasonGuestNotAdmitted, "It is not known", 0)
}

// TestTriedOnceGranted: where admission refuses what is not granted, a hold is granted before its
// guests are tried, and no longer than it takes.
func TestTriedOnceGranted(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.priorityClasses(guest.PriorityClass)
	lift := e.refuseGuests("a guest may only request resources that are granted to its cluster")
	agent := e.agent(e.Client, func(o *hold.Options) { o.GuestNamespaces = &trials{Client: e.Client} })
	want := pods(set("pods", 2, expect.Resources("cpu", "1m")))

	e.hold("r1", "rome", 1, want)
	reconciled(t, agent, "rome")
	e.granted("rome", "cpu 2m", 2)
	if in, _ := e.get("r1"); in.Status.ObservedAttempt != 0 {
		t.Errorf("decided before its guests are tried: %+v", in.Status)
	}
	e.clock.SetTime(e.clock.Now().Add(time.Minute))
	reconciled(t, agent, "rome")
	e.decided("r1", 1, verdict.ReasonGuestNotAdmitted, "It is not known", 0)
	e.granted("rome", "nothing", 0)

	e.hold("r1", "rome", 2, want)
	reconciled(t, agent, "rome")
	lift()
	reconciled(t, agent, "rome")
	e.decided("r1", 2, verdict.ReasonAccepted, "Holding 2 pods", 2)
	e.granted("rome", "cpu 2m", 2)
}

// TestProofAndTrialTogether: the time in which an attempt is proven and its guests are tried
// begins when it is recorded, so that the answer comes before the broker's proofDeadline of 30 s.
// However late it is proven, its guests are tried for some seconds.
func TestProofAndTrialTogether(t *testing.T) {
	const proofDeadline = 30 * time.Second
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.priorityClasses(guest.PriorityClass, placeholder.PriorityClass)
	expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: holds}}))
	namespaces := &trials{Client: e.Client}
	agent := e.agent(e.Client, func(o *hold.Options) {
		o.GuestNamespaces, o.Placeholders = namespaces, placeholder.Options{Namespace: holds, Image: placeholder.DefaultImage}
		o.Recognizer.Placeholder = func(pod *corev1.Pod) (string, bool) { return placeholder.ConsumerOf(pod, holds) }
	})
	for i, tc := range []struct {
		name string
		// provenAfter is when the scheduler finds the place, triedAfter when guests can be
		// tried, 0 for never.
		provenAfter, triedAfter time.Duration
		// undecidedAt and decidedAt are times after the attempt was recorded.
		undecidedAt, decidedAt time.Duration
		reason                 string
	}{
		{"what the proof leaves", 15 * time.Second, 0, 19 * time.Second, 21 * time.Second, verdict.ReasonGuestNotAdmitted},
		{"all of it", time.Second, 0, 19 * time.Second, 21 * time.Second, verdict.ReasonGuestNotAdmitted},
		{"the least time", 19 * time.Second, 0, 21500 * time.Millisecond, 24 * time.Second, verdict.ReasonGuestNotAdmitted},
		{"a guest is tried in the least time", 19 * time.Second, 21 * time.Second, 20 * time.Second, 22 * time.Second, verdict.ReasonAccepted},
	} {
		attempt, recorded := int64(i+1), e.clock.Now()
		at := func(after time.Duration) {
			t.Helper()
			if namespaces.waits = "the last one is being deleted"; tc.triedAfter > 0 && after >= tc.triedAfter {
				namespaces.waits = ""
			}
			e.clock.SetTime(recorded.Add(after))
			reconciled(t, agent, "rome")
		}
		undecided := func(when string) {
			t.Helper()
			if in, _ := e.get("r1"); in.Status.ObservedAttempt == attempt {
				t.Errorf("%s: decided %s: %+v", tc.name, when, in.Status)
			}
		}
		e.hold("r1", "rome", attempt, pods(set("pods", 1, expect.Resources("cpu", "1m"))))
		at(0)
		at(tc.provenAfter - 100*time.Millisecond)
		undecided("before it is proven")
		e.bindAll(holds, "a")
		at(tc.provenAfter)
		at(tc.undecidedAt)
		undecided("too early")
		at(tc.decidedAt)
		in, c := e.get("r1")
		if in.Status.ObservedAttempt != attempt || c.Reason != tc.reason || tc.decidedAt >= proofDeadline {
			t.Errorf("%s: want %s by %s, got %+v", tc.name, tc.reason, tc.decidedAt, in.Status)
		}
		e.clock.SetTime(e.clock.Now().Add(time.Minute))
	}
	e.triedAgain(agent, namespaces)
}

// triedAgain: guests that were tried while the grant is not in effect, and cannot be tried any
// more, are tried for some seconds again, and those of another attempt for all of its time.
func (e *env) triedAgain(agent *hold.Reconciler, namespaces *trials) {
	after := func(wait time.Duration, waits string) metav1.Condition {
		e.Helper()
		e.clock.SetTime(e.clock.Now().Add(wait))
		namespaces.waits = waits
		reconciled(e.T, agent, "rome")
		_, c := e.get("r2")
		return c
	}
	e.provider.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	e.hold("r2", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "2m"))))
	after(0, "pending")
	e.bindAll(holds, "a")
	after(5*time.Second, "pending")
	after(time.Second, "")
	e.provider.Free("EnsureGrant")
	if c := after(time.Minute, "pending"); c.Status != metav1.ConditionUnknown {
		e.Errorf("guests are not tried again: %+v", c)
	}
	e.hold("r2", "rome", 2, pods(set("pods", 1, expect.Resources("cpu", "2m"))))
	if c := after(4*time.Second, "pending"); c.Status != metav1.ConditionUnknown {
		e.Errorf("another attempt has the time of the one before: %+v", c)
	}
	if c := after(20*time.Second, "pending"); c.Reason != verdict.ReasonGuestNotAdmitted {
		e.Errorf("guests are tried for longer: %+v", c)
	}
}

// bindAll binds the pods of a namespace that have no node.
func (e *env) bindAll(namespace, node string) {
	e.Helper()
	var list corev1.PodList
	expect.NoError(e, e.List(e.Context(), &list, client.InNamespace(namespace)))
	for i := range list.Items {
		if pod := &list.Items[i]; pod.Spec.NodeName == "" {
			binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}}
			expect.NoError(e, e.SubResource("binding").Create(e.Context(), pod, binding))
		}
	}
}
