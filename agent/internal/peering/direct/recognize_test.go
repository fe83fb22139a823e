package direct

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func TestRecognizeGuest(t *testing.T) {
	ours := map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelGuestsOf: "rome"}
	cases := map[string]struct {
		reason, namespace      string
		namespaceLabels, label map[string]string
		want                   string
	}{
		"a guest":                {"its namespace is its consumer's", broker.GuestNamespace("rome"), ours, nil, "rome"},
		"labels of the consumer": {"only the namespace counts", broker.GuestNamespace("rome"), ours, map[string]string{broker.LabelGuestsOf: "berlin", broker.LabelRequester: "berlin"}, "rome"},
		"an own pod":             {"its namespace has no labels", "home", nil, nil, ""},
		"labelled by others":     {"Spillway did not create the namespace", broker.GuestNamespace("rome"), map[string]string{broker.LabelGuestsOf: "rome"}, nil, ""},
		"another name":           {"it is not the namespace for that consumer", "moved", ours, nil, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: tc.namespace, Labels: tc.label}}
			got, ok := RecognizeGuest(pod, func(string) map[string]string { return tc.namespaceLabels })
			if got != tc.want || ok != (tc.want != "") {
				t.Errorf("%s: got %q %v, want %q", tc.reason, got, ok, tc.want)
			}
		})
	}
}
