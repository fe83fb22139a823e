package charts_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestMistakesAreExplained: the API server says what to write instead.
func TestMistakesAreExplained(t *testing.T) {
	c, err := client.New(controlplane.Start(t), client.Options{})
	expect.NoError(t, err)
	for name, mistake := range map[string]struct{ object, want string }{
		"a BrokerConfig that is not used": {"kind: BrokerConfig\nmetadata: {name: mine, namespace: default}\nspec: {}", "must be named default"},
		"a duration in words":             {"kind: Reservation\nmetadata: {name: a, namespace: default}\nspec: {requestedResources: {cpu: 1}, duration: 1day}", "such as 24h"},
		"a deadline in words":             {"kind: Reservation\nmetadata: {name: a, namespace: default}\nspec: {requestedResources: {cpu: 1}, deadline: soon}", "such as 10m"},
	} {
		object := &unstructured.Unstructured{}
		expect.NoError(t, yaml.UnmarshalStrict([]byte("apiVersion: "+broker.GroupVersion.String()+"\n"+mistake.object), &object.Object))
		if err := c.Create(t.Context(), object); err == nil || !strings.Contains(err.Error(), mistake.want) {
			t.Errorf("creating %s returned %v, want an error with %q", name, err, mistake.want)
		}
	}
}

// TestExamples applies every example to a real API server, which rejects fields that do
// not exist. There is one for each kind that users write.
func TestExamples(t *testing.T) {
	c, err := client.New(controlplane.Start(t), client.Options{})
	expect.NoError(t, err)
	expect.NoError(t, c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}}))
	kinds := map[string]int{}
	for _, pattern := range []string{"*/examples/*.yaml", "*/examples/original/*.yaml"} {
		files, err := filepath.Glob(pattern)
		expect.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			expect.NoError(t, err)
			for document := range strings.SplitSeq(string(text), "\n---\n") {
				object := &unstructured.Unstructured{}
				expect.NoError(t, yaml.UnmarshalStrict([]byte(document), &object.Object))
				if err := c.Create(t.Context(), object, client.FieldValidation(metav1.FieldValidationStrict)); err != nil {
					t.Errorf("%s: %v", file, err)
				}
				kinds[object.GetKind()]++
			}
		}
	}
	for kind, atLeast := range map[string]int{"Reservation": 8, "OverflowPolicy": 1, "BrokerConfig": 1, "ClusterAdvertisement": 1} {
		if kinds[kind] < atLeast {
			t.Errorf("%d examples of kind %s, want %d", kinds[kind], kind, atLeast)
		}
	}
}
