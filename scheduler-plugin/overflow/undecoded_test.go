package overflow_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// typo is an OverflowPolicy for the namespaces of a team whose duration no program can decode.
func typo(team, duration string) *unstructured.Unstructured {
	policy := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"duration": duration, "namespaceSelector": map[string]any{"matchLabels": map[string]any{"team": team}},
	}}}
	policy.SetGroupVersionKind(broker.GroupVersion.WithKind("OverflowPolicy"))
	policy.SetName(team)
	return policy
}

// TestPolicyThatCannotBeDecoded: a typo in a policy that the API server once accepted stops the
// namespaces of that policy only, whether the scheduler starts with it or sees it come, and until it
// is corrected.
func TestPolicyThatCannotBeDecoded(t *testing.T) {
	c := startTestCluster(t)
	controlplane.InstallCRDsWithoutRules(t, c.config)
	for _, name := range []string{"free", "bank"} {
		c.namespace(name, map[string]string{broker.LabelOverflow: broker.OverflowEnabled, "team": name})
	}
	bank := typo("bank", "2d")
	c.create(bank)
	c.node("home", "1", nil)
	c.startScheduler()
	overflows := func(namespace, name string) {
		_, of := c.deployment(namespace, name)
		c.create(schedulerPod(namespace, name, "2", of))
	}
	overflows("free", "web")
	c.expectReservation("free", "web", 1)
	c.expectEvent("default", "bank", "NotDecodable", `unknown unit "d" in duration "2d"`, "Correct it", "no capacity is requested for pods of the namespaces that it selects")
	overflows("bank", "ledger")
	c.expectEvent("bank", "ledger", "OverflowFailed", "OverflowPolicy bank", `unknown unit "d" in duration "2d"`, "correct it")

	c.create(typo("others", "1d"))
	c.expectEvent("default", "others", "NotDecodable", `unknown unit "d" in duration "1d"`)
	overflows("free", "shop")
	c.expectReservation("free", "shop", 1)

	expect.NoError(t, unstructured.SetNestedField(bank.Object, "48h", "spec", "duration"))
	expect.NoError(t, c.Update(t.Context(), bank))
	if r := c.expectReservation("bank", "ledger", 1); r.Spec.Duration == nil || r.Spec.Duration.Hours() != 48 {
		t.Errorf("the corrected policy does not apply: the duration is %v", r.Spec.Duration)
	}
}
