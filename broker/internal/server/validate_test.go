package server

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func TestBoundsOfBodies(t *testing.T) {
	for name, tc := range map[string]struct{ body, want string }{
		"an ordinary quantity":  {`{"spec":{"requestedResources":{"cpu":"1500m","memory":"1e9"}}}`, ""},
		"a long exponent":       {`{"spec":{"requestedResources":{"cpu":"1e-2147483648"}}}`, "exponent"},
		"the same, as a number": {`{"spec":{"requestedResources":{"cpu":1E100000000}}}`, "exponent"},
		"the same, escaped":     {`{"spec":{"requestedResources":{"cpu":"1\u0065-100000000"}}}`, "exponent"},
	} {
		t.Run(name, func(t *testing.T) {
			var into struct {
				Spec broker.ReservationSpec `json:"spec"`
			}
			err := decodeJSON(strings.NewReader(tc.body), &into, true)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("got %v, want %q", err, tc.want)
			}
		})
	}
	one := resource.MustParse("1")
	spec := broker.ReservationSpec{PodSets: []broker.PodSet{{
		Name: "pods", Count: 1, Requests: broker.ResourceQuantities{CPU: &one},
		NodeSelector: map[string]string{"long": strings.Repeat("x", maxSpec)},
	}}}
	if err := validateSpec(&spec); err == nil || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("a spec of more than %d bytes: %v", maxSpec, err)
	}
	// A count that was accepted can be lowered, whatever is retained.
	spec.PodSets[0].NodeSelector["long"] = strings.Repeat("x", maxSpec-256)
	for i := range maxRetained {
		spec.Retained = append(spec.Retained, broker.RetainedPods{Cluster: fmt.Sprint("cluster-", i), Count: 1, Attempt: 1})
	}
	if err := validateSpec(&spec); err != nil {
		t.Errorf("a spec of almost %d bytes that retains pods in %d clusters: %v", maxSpec, maxRetained, err)
	}
	advertisement := broker.ClusterAdvertisementSpec{NodeClasses: []broker.NodeClass{{Name: "a", FreeShapes: []broker.FreeShape{{Nodes: 2147483647}, {Nodes: 2147483647}}}}}
	if err := validateAdvertisement(&advertisement); err == nil || !strings.Contains(err.Error(), "nodes") {
		t.Errorf("an advertisement of billions of nodes: %v", err)
	}
}
