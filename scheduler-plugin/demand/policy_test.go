package demand_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func TestPolicyFor(t *testing.T) {
	policy := func(name string, selector map[string]string) *broker.OverflowPolicy {
		return &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: broker.OverflowPolicySpec{NamespaceSelector: metav1.LabelSelector{MatchLabels: selector}}}
	}
	all := []*broker.OverflowPolicy{policy("z-all", nil), policy("b", map[string]string{"team": "a"}), policy("a", map[string]string{"team": "b"})}
	for team, want := range map[string]string{"a": "b", "b": "a", "c": "z-all"} {
		got, err := (demand.Policies{Decoded: all}).Of(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"team": team}}})
		if err != nil || got.Name != want {
			t.Errorf("team %s: got %v %v, want %s", team, got, err, want)
		}
	}
	if got, err := (demand.Policies{}).Of(&corev1.Namespace{}); got != nil || err != nil {
		t.Errorf("without policies: got %v %v", got, err)
	}
}

// TestUndecodedPolicyStopsItsNamespacesOnly: where a policy applies that cannot be decoded, nothing is
// requested; it stops no other namespace.
func TestUndecodedPolicyStopsItsNamespacesOnly(t *testing.T) {
	undecoded := func(spec string) []broker.Undecoded {
		return []broker.Undecoded{{Name: "m", Message: `unknown unit "d"`, Raw: []byte(`{"spec":` + spec + `}`)}}
	}
	policy := func(name string) *broker.OverflowPolicy {
		return &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"team": "shop"}}}
	for name, tc := range map[string]struct {
		reason   string
		policies demand.Policies
		want     string
	}{
		"selects all":            {"a policy without a selector applies to all", demand.Policies{Undecoded: undecoded(`{"duration":"1d"}`)}, "error"},
		"selects it":             {"the selector can be decoded", demand.Policies{Undecoded: undecoded(`{"duration":"1d","namespaceSelector":{"matchLabels":{"team":"shop"}}}`)}, "error"},
		"selects others":         {"the namespace has another policy", demand.Policies{Decoded: []*broker.OverflowPolicy{policy("z")}, Undecoded: undecoded(`{"duration":"1d","namespaceSelector":{"matchLabels":{"team":"bank"}}}`)}, "z"},
		"after another":          {"the first by name applies", demand.Policies{Decoded: []*broker.OverflowPolicy{policy("a")}, Undecoded: undecoded(`{"duration":"1d"}`)}, "a"},
		"before another":         {"the namespace must not be without its limits", demand.Policies{Decoded: []*broker.OverflowPolicy{policy("z")}, Undecoded: undecoded(`{"duration":"1d"}`)}, "error"},
		"its last version":       {"what it was before has been changed", demand.Policies{Decoded: []*broker.OverflowPolicy{policy("m")}, Undecoded: undecoded(`{"duration":"1d"}`)}, "error"},
		"unknown operator":       {"it does not say which namespaces it is for", demand.Policies{Undecoded: undecoded(`{"namespaceSelector":{"matchExpressions":[{"key":"team","operator":"Unlike"}]}}`)}, ""},
		"a label that none has":  {"no namespace can have it", demand.Policies{Undecoded: undecoded(`{"namespaceSelector":{"matchLabels":{"team":"a b"}}}`)}, ""},
		"selector of other type": {"it does not say which namespaces it is for", demand.Policies{Undecoded: undecoded(`{"namespaceSelector":"shop"}`)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tc.policies.Of(namespace)
			have := ""
			switch {
			case err != nil:
				have = "error"
				if !strings.Contains(err.Error(), `OverflowPolicy m, which applies to namespace shop, cannot be decoded: unknown unit "d": correct it`) {
					t.Errorf("have %v", err)
				}
			case got != nil:
				have = got.Name
			}
			if have != tc.want {
				t.Errorf("%s: have %q, want %q", tc.reason, have, tc.want)
			}
		})
	}
}
