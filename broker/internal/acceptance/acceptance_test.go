package acceptance

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// TestAccepted: with a real API server, a BrokerConfig says whether the broker uses it, and is
// written once.
func TestAccepted(t *testing.T) {
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(scheme))
	expect.NoError(t, broker.AddToScheme(scheme))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	const ns = broker.SystemNamespace
	expect.NoError(t, c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}))
	spec := broker.BrokerConfigSpec{Weights: &broker.ScoreWeights{Resources: 70, Cost: 30}, Queueing: broker.QueueingNone, KeepFreeFor: &metav1.Duration{Duration: time.Hour}}
	expect.NoError(t, c.Create(t.Context(), &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: settings.Name}, Spec: spec}))
	w := &Writer{Client: c, Namespace: ns, Clock: clocktesting.NewFakeClock(time.Now().Truncate(time.Second))}
	expectLine := func(name, part string) {
		t.Helper()
		expect.Eventually(t, "the line of "+name, func() (bool, string) {
			_, err := w.reconcile(t.Context(), name)
			line, lineErr := controlplane.Line(t.Context(), config, true, "brokerconfigs", ns, name)
			return err == nil && lineErr == nil && strings.Contains(line, part), fmt.Sprintf("%s (%v, %v), want %q", line, err, lineErr, part)
		})
	}
	expectLine("default", "Accepted=False, Resources=70, Cost=30, ")
	expectLine("default", "Message=keepFreeFor 1h0m0s has no effect with queueing None")

	current := &broker.BrokerConfig{}
	get := func() {
		expect.NoError(t, c.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "default"}, current))
	}
	get()
	current.Spec.KeepFreeFor = nil
	expect.NoError(t, c.Update(t.Context(), current))
	expectLine("default", "Accepted=True, Resources=70, Cost=30, ")
	get()
	version := current.ResourceVersion
	_, err = w.reconcile(t.Context(), settings.Name)
	expect.NoError(t, err)
	if get(); current.ResourceVersion != version || current.Status.ObservedGeneration != current.Generation {
		t.Errorf("the status is written again without a change: %+v", current.Status)
	}
}

func TestUnusable(t *testing.T) {
	for name, tc := range map[string]struct {
		spec broker.BrokerConfigSpec
		want string
	}{
		"empty":              {},
		"kept free for none": {broker.BrokerConfigSpec{Queueing: broker.QueueingNone, KeepFreeFor: &metav1.Duration{Duration: time.Hour}}, "keepFreeFor 1h0m0s"},
		"longer than all":    {broker.BrokerConfigSpec{MaxDuration: &metav1.Duration{Duration: time.Hour}, DefaultDuration: &metav1.Duration{Duration: 2 * time.Hour}}, "defaultDuration 2h0m0s"},
		"usable everything":  {broker.BrokerConfigSpec{Weights: &broker.ScoreWeights{Cost: 100}, StaleAfter: &metav1.Duration{Duration: time.Minute}}, ""},
	} {
		status := statusOf(&broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Name: settings.Name}, Spec: tc.spec}, metav1.Now())
		c := meta.FindStatusCondition(status.Conditions, broker.ConditionAccepted)
		if (c.Status == metav1.ConditionTrue) != (tc.want == "") || !strings.Contains(c.Message, tc.want) {
			t.Errorf("%s: %+v, want %q", name, c, tc.want)
		}
	}
}
