package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clientevents "k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/holdtest"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// silent sends nothing.
type silent struct{}

func (silent) Send(context.Context, peering.Peer, []byte) error { return nil }

// TestColdDryRun: with each driver, a provider refuses what admission refuses in the namespaces
// of guests, before the consumer has any. What is made for that is removed.
func TestColdDryRun(t *testing.T) {
	for driver, label := range map[string]string{driverDirect: broker.LabelGuestsOf, driverLiqo: "liqo.io/remote-cluster-id"} {
		t.Run(driver, func(t *testing.T) {
			config := controlplane.Start(t, liqoCRDs(t))
			controlplane.StartControllers(t, config, "resourcequota-controller", "namespace-controller")
			o, err := parse([]string{"--driver=" + driver, "--placeholders-namespace=", "--cluster-id=paris"})
			expect.NoError(t, err)
			scheme := runtime.NewScheme()
			expect.NoError(t, clientgoscheme.AddToScheme(scheme))
			expect.NoError(t, broker.AddToScheme(scheme))
			expect.NoError(t, addDriverToScheme(scheme, o))
			c, err := client.New(config, client.Options{Scheme: scheme})
			expect.NoError(t, err)
			createNode(t, c)
			lift := refuseGuests(t, c, label)

			chosen, err := newDriver(o, driverOptions{client: c, config: config, clusterID: "paris", messenger: silent{}})
			expect.NoError(t, err)
			agent := hold.New(c, c, clientevents.NewFakeRecorder(100), chosen.Provider, hold.Options{
				Namespace: "default", Lending: o.lending, PeeringIdleTime: time.Hour, Recognizer: recognizerOf(o), GuestNamespaces: chosen.GuestNamespaces, ProofTimeout: 2 * expect.Deadline,
				Observe: func(ctx context.Context) (hold.Observed, error) { return holdtest.Observed(ctx, c, recognizerOf(o)) },
			})
			eventually := func(what string, check func() (bool, string)) {
				t.Helper()
				expect.Eventually(t, what, func() (bool, string) {
					_, err := agent.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "rome"}})
					ok, state := check()
					return ok, fmt.Sprintf("%s, %v", state, err)
				})
			}
			in := &broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "r1"}, Spec: broker.ProviderInstructionSpec{
				ReservationName: "r1", RequesterClusterID: "rome", Attempt: 1,
				PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(expect.Resources("cpu", "500m"))}},
			}}
			expect.NoError(t, c.Create(t.Context(), in))
			decided := func(attempt int64, reason, words string) {
				t.Helper()
				eventually(fmt.Sprintf("attempt %d to be %s", attempt, reason), func() (bool, string) {
					expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(in), in))
					condition := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced)
					return in.Status.ObservedAttempt == attempt && condition.Reason == reason && strings.Contains(condition.Message, words), fmt.Sprintf("%+v", in.Status)
				})
			}
			decided(1, verdict.ReasonGuestNotAdmitted, "no pods of other clusters")
			lift()
			in.Spec.Attempt = 2
			expect.NoError(t, c.Update(t.Context(), in))
			decided(2, verdict.ReasonAccepted, "Holding 2 pods")
			expect.NoError(t, c.Delete(t.Context(), in))
			eventually("the namespace to be removed", func() (bool, string) {
				var namespaces corev1.NamespaceList
				expect.NoError(t, c.List(t.Context(), &namespaces, client.HasLabels{label}))
				return len(namespaces.Items) == 0, fmt.Sprint(len(namespaces.Items))
			})
		})
	}
}

// refuseGuests makes admission refuse pods in namespaces with a label, until lift is called.
func refuseGuests(t *testing.T, c client.Client, label string) (lift func()) {
	t.Helper()
	const words = "no pods of other clusters"
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "no-guests"}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{
			NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: label, Operator: metav1.LabelSelectorOpExists}}},
			ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
			}}},
		},
		Validations: []admissionv1.Validation{{Expression: "false", Message: words}},
	}}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: "no-guests"}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: "no-guests", ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "probe", Labels: map[string]string{label: ""}}}
	for _, object := range []client.Object{policy, binding, other} {
		expect.NoError(t, c.Create(t.Context(), object))
	}
	refused := func(want bool) {
		t.Helper()
		expect.Eventually(t, fmt.Sprintf("the policy to be in effect: %t", want), func() (bool, string) {
			// The API server may know the PriorityClass later.
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: other.Name}, Spec: corev1.PodSpec{
				PriorityClassName: guest.PriorityClass, Containers: []corev1.Container{{Name: "c", Image: "i"}},
			}}
			err := c.Create(t.Context(), pod, client.DryRunAll)
			return err == nil && !want || err != nil && want && strings.Contains(err.Error(), words), fmt.Sprint(err)
		})
	}
	refused(true)
	return func() {
		t.Helper()
		expect.NoError(t, c.Delete(t.Context(), binding))
		refused(false)
		expect.NoError(t, c.Delete(t.Context(), other))
	}
}
