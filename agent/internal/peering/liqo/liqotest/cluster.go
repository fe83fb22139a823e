// Package liqotest has what tests of both sides of driver liqo share: clusters with Liqo's
// types.
package liqotest

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// CRDs is the folder of Liqo's CRDs in the module cache.
func CRDs(t testing.TB) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/liqotech/liqo").Output()
	expect.NoError(t, err)
	return filepath.Join(strings.TrimSpace(string(out)), "deployments/liqo/charts/liqo-crds/crds")
}

// NewClient returns a client that knows Liqo's types and webhooks.
func NewClient(t testing.TB, config *rest.Config) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(liqo.AddToScheme(scheme), admissionv1.AddToScheme(scheme)))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	return c
}

// Read returns an object that must exist.
func Read[T client.Object](t testing.TB, c client.Client, namespace, name string, into T) T {
	t.Helper()
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, into); err != nil {
		t.Fatalf("%T %s/%s: %v", into, namespace, name, err)
	}
	return into
}
