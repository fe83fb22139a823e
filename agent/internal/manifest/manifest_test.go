package manifest_test

import (
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/agent/internal/manifest"
	"github.com/spillway-dev/spillway/agent/internal/whatif"
)

// TestMalformed: what is wrong with a manifest is said in words of its author.
func TestMalformed(t *testing.T) {
	for content, want := range map[string]string{
		"a: [":                    "document 1 is neither YAML nor JSON: line 1: did not find expected node content",
		`{"a": `:                  "document 1 is neither YAML nor JSON: unexpected EOF",
		"kind: Pod\n\tname: x":    "document 1 is neither YAML nor JSON: line 2: found a tab character",
		"\x7fELF\x01":             "document 1 is neither YAML nor JSON: control characters are not allowed",
		"a: 1":                    "document 1 is no Kubernetes object: each has apiVersion, kind and metadata",
		"kind: Service\n---\nx":   "document 2 is no Kubernetes object",
		"[a, b]":                  "document 1 is no Kubernetes object",
		pod("containers: a"):      "Pod shop/web: spec.containers cannot be a string",
		pod(container("lots")):    "Pod shop/web: an amount is no quantity, such as 500m or 8Gi",
		pod("containers: []"):     "Pod shop/web: its pods have no containers",
		deployment("two", `80`):   "Deployment shop/web: replicas must be a whole number",
		deployment("2", `"http"`): "Deployment shop/web: spec.containers.ports.containerPort cannot be a string",
		"{apiVersion: broker.fluidos.eu/v1alpha1, kind: Reservation, metadata: {name: warm}, spec: {deadline: soon}}": `Reservation shop/warm: time: invalid duration "soon"`,
	} {
		objects, err := manifest.Read([]string{"-"}, strings.NewReader(content))
		for _, object := range objects {
			if err == nil {
				_, _, err = whatif.Of(object, "shop")
			}
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("of %q it says %v, want %q", content, err, want)
		}
	}
}

func pod(spec string) string {
	return "{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {" + spec + "}}"
}

func container(cpu string) string {
	return "containers: [{name: web, image: web, resources: {requests: {cpu: " + cpu + "}}}]"
}

func deployment(replicas, port string) string {
	return "{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}, spec: {replicas: " + replicas +
		", template: {spec: {containers: [{name: web, image: web, ports: [{containerPort: " + port + "}]}]}}}}"
}
