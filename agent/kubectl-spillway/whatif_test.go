package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// written writes a manifest to a file.
func written(t *testing.T, content string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "manifest.yaml")
	expect.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// lends creates the advertisement of a cluster with free cores.
func (c *testCluster) lends(id, free string) {
	c.t.Helper()
	amount := broker.FromList(expect.Resources("cpu", free, "memory", "64Gi"))
	c.create(&broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: id}, Spec: broker.ClusterAdvertisementSpec{
		ClusterID: id, Timestamp: metav1.Now(), Lending: broker.Lending{Enabled: true}, Resources: broker.AdvertisedResources{Capacity: amount, Allocatable: amount},
		NodeClasses: []broker.NodeClass{{Name: "std", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: amount, Pods: 110}}}},
	}, Status: broker.ClusterAdvertisementStatus{Active: true}})
}

const manifests = `
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Service, metadata: {name: web}, spec: {ports: [{port: 80}]}}
- apiVersion: apps/v1
  kind: Deployment
  metadata: {name: web}
  spec:
    replicas: 2
    selector: {matchLabels: {app: web}}
    template:
      metadata: {labels: {app: web}}
      spec: {containers: [{name: web, image: web}]}
---
---
{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "large"}, "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "c", "resources": {"limits": {"cpu": "7"}}}]}}}}
`

// TestWhatIf: the decision for a manifest, whose pods the API server completes.
func TestWhatIf(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.installed()
	c.lends("paris", "12")
	c.lends("berlin", "4")
	c.create(&corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "default"}, Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{
		{Type: corev1.LimitTypeContainer, DefaultRequest: expect.Resources("cpu", "1500m", "memory", "256Mi")}}}})
	file := written(t, manifests)
	out, _ := c.run(0, "what-if", "-f", file)
	c.golden("what-if", out)
	var pods corev1.PodList
	expect.NoError(t, c.List(t.Context(), &pods))
	if len(pods.Items) != 2 {
		t.Errorf("what-if has created pods: there are %d", len(pods.Items))
	}

	var stdout, stderr bytes.Buffer
	streams := genericclioptions.IOStreams{In: strings.NewReader(manifests), Out: &stdout, ErrOut: &stderr}
	if code := run(t.Context(), append(append([]string{}, c.args...), "what-if", "-f=-", "--hub-context=rome"), streams); code != 0 || stdout.String() != out {
		t.Errorf("what-if -f - exits with %d and prints\n%s%s", code, stdout.String(), stderr.String())
	}
	if out, _ := c.run(0, "what-if", "-f", file, "-o=json"); !strings.Contains(out, `"outcome": "Placed"`) || !strings.Contains(out, `"score": `) {
		t.Errorf("as JSON: %s", out)
	}
	if out, _ := c.run(exitNo, "what-if", "-f", written(t, strings.Replace(manifests, "replicas: 2", "replicas: 99", 1))); !strings.Contains(out, "OverflowPolicy all allows") {
		t.Errorf("of too many pods it says\n%s", out)
	}
	c.grantAlice()
	out, errors := c.run(exitNoAnswer, "what-if", "-f", file, "--as=alice", "--hub-context=rome", "--consumer=rome")
	if !strings.Contains(errors, "is not known: see above") || !strings.Contains(out, "you may not list clusteradvertisements.broker.fluidos.eu in namespace spillway-system") || !strings.Contains(out, "would request") {
		t.Errorf("without permissions it says\n%s%s", out, errors)
	}
	for message, arguments := range map[string][]string{
		"no such file":                      {"what-if", "-f", file + "x"},
		"document 1":                        {"what-if", "-f", written(t, "a: [")},
		"is no Kubernetes object":           {"what-if", "-f", written(t, "a: 1")},
		"neither an object with pods nor a": {"what-if", "-f", written(t, "{apiVersion: v1, kind: Service, metadata: {name: s}}")},
		"its pods have no containers":       {"what-if", "-f", written(t, "{apiVersion: v1, kind: Pod, metadata: {name: s}}")},
		`context "hub" does not exist`:      {"what-if", "-f", file, "--hub-context=hub"},
	} {
		if _, errors := c.run(exitNoAnswer, arguments...); !strings.Contains(errors, message) {
			t.Errorf("%v fails with %q, want %q", arguments, errors, message)
		}
	}
}

// TestWhatIfWithoutHub: what is known here is said, and how to name the hub.
func TestWhatIfWithoutHub(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	out, _ := c.run(exitNoAnswer, "what-if", "-f", written(t, manifests))
	if !strings.Contains(out, "name the context of the hub by --hub-context") || !strings.Contains(out, "shop is opted in") {
		t.Errorf("it says\n%s", out)
	}
}
