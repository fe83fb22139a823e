package server

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
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
	// A count that any quota has accepted can be lowered, whatever is retained.
	spec.PodSets[0].NodeSelector["long"] = strings.Repeat("x", 16<<10)
	for i := range broker.MaxRetained {
		id := fmt.Sprintf("%0*d", protocol.MaxClusterID, i)
		spec.Retained = append(spec.Retained, broker.RetainedPods{Cluster: id, Count: 1 << 30, Attempt: 1 << 40})
	}
	if err := validateSpec(&spec); err != nil {
		t.Errorf("a spec of more than 16 KiB that retains pods in %d clusters: %v", broker.MaxRetained, err)
	}
	advertisement := broker.ClusterAdvertisementSpec{NodeClasses: []broker.NodeClass{{Name: "a", FreeShapes: []broker.FreeShape{{Nodes: 2147483647}, {Nodes: 2147483647}}}}}
	if err := validateAdvertisement(&advertisement); err == nil || !strings.Contains(err.Error(), "nodes") {
		t.Errorf("an advertisement of billions of nodes: %v", err)
	}
}

// TestBoundsOfCRDs compares the bounds that the broker checks before the API server does.
func TestBoundsOfCRDs(t *testing.T) {
	for _, tc := range []struct {
		kind, field string
		want        int64
	}{
		{"reservations", "spec.retained", broker.MaxRetained},
		{"reservations", "spec.requesterID", protocol.MaxClusterID},
		{"reservations", "spec.targetClusterID", protocol.MaxClusterID},
		{"reservations", "status.used.pods", broker.MaxUsePods},
		{"clusteradvertisements", "spec.clusterID", protocol.MaxClusterID},
	} {
		schema := fieldOf(t, tc.kind, tc.field)
		bound := schema.MaxItems
		if schema.Type == "string" {
			bound = schema.MaxLength
		}
		if bound == nil || *bound != tc.want {
			t.Errorf("%s of %s: the CRD allows %v, the broker %d", tc.field, tc.kind, bound, tc.want)
		}
	}
}

// fieldOf is the schema of a field in a CRD of the chart; of a list's items, the fields
// follow its own name.
func fieldOf(t *testing.T, kind, path string) apiextensionsv1.JSONSchemaProps {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../charts/broker/crds", broker.Group+"_"+kind+".yaml"))
	expect.NoError(t, err)
	crd := &apiextensionsv1.CustomResourceDefinition{}
	expect.NoError(t, yaml.Unmarshal(text, crd))
	schema := *crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	for name := range strings.SplitSeq(path, ".") {
		if schema.Items != nil {
			schema = *schema.Items.Schema
		}
		field, known := schema.Properties[name]
		if !known {
			t.Fatalf("%s has no field %s", kind, path)
		}
		schema = field
	}
	return schema
}
