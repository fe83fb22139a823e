package instruction

import (
	"encoding/json"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// FuzzHeld reads arbitrary annotations.
func FuzzHeld(f *testing.F) {
	for _, seed := range []string{"", "null", "{", `{"totals":{"cpu":"1"},"podSets":[{"name":"pods","count":2,"requests":{"cpu":"500m"}}]}`, `{"totals":{"cpu":"1e1000"}}`, `{"podSets":[{"count":-1}]}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		held := Held(&broker.ProviderInstruction{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{annotationHeld: text}}})
		if held == nil {
			return
		}
		if _, err := json.Marshal(held); err != nil {
			t.Fatalf("%q was decoded, but cannot be encoded: %v", text, err)
		}
	})
}
