package charts_test

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestKubernetesVersion: helm refuses a cluster that is too old, and names the version that
// the chart requires. Versions of vendors and release candidates are admitted.
func TestKubernetesVersion(t *testing.T) {
	for _, c := range []struct {
		chart, version string
		ok             bool
	}{
		{"agent", "v1.34.9", false}, {"agent", "v1.35.0", true}, {"agent", "v1.35.0-rc.1", true},
		{"agent", "v1.35.2-eks-abc123", true}, {"agent", "v1.36.1+k3s1", true},
		{"broker", "v1.28.15-gke.100", false}, {"broker", "v1.29.0-gke.100", true}, {"broker", "v1.35.4", true},
	} {
		t.Run(c.chart+"/"+c.version, func(t *testing.T) {
			values := map[string][]string{"agent": needed}[c.chart]
			_, err := helm(t, append([]string{"template", "x", c.chart, "--kube-version", c.version}, set(values)...)...)
			switch {
			case c.ok && err != nil:
				t.Error(err)
			case !c.ok && (err == nil || !strings.Contains(err.Error(), "chart requires kubeVersion: >=1.") || !strings.Contains(err.Error(), "incompatible with Kubernetes "+strings.Split(c.version, "-")[0])):
				t.Errorf("want a refusal that names both versions, got %v", err)
			}
		})
	}
}

// TestUpgradeLeavesNoGap: where an upgrade replaces a policy by one of another name, the new
// one and its binding exist before the former ones are deleted.
func TestUpgradeLeavesNoGap(t *testing.T) {
	const policy, former = "spillway-guest-remains", "spillway-guest-former"
	dir := filepath.Join(t.TempDir(), "agent")
	expect.NoError(t, os.CopyFS(dir, os.DirFS("agent")))
	expect.NoError(t, filepath.WalkDir(filepath.Join(dir, "templates"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, bytes.ReplaceAll(text, []byte(policy), []byte(former)), 0o600)
	}))
	config := controlplane.Start(t)
	access := kubeconfig(t, config)
	run := func(command, chart string) {
		t.Helper()
		_, err := helm(t, append([]string{command, "spillway-agent", chart, access, "--create-namespace"}, set(append(slices.Clone(needed), "driver=direct"))...)...)
		expect.NoError(t, err)
	}
	run("install", dir)

	api, err := client.NewWithWatch(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	lists := map[string]client.ObjectList{"policies": &admissionv1.ValidatingAdmissionPolicyList{}, "bindings": &admissionv1.ValidatingAdmissionPolicyBindingList{}}
	watches := map[string]watch.Interface{}
	for kind, list := range lists {
		watches[kind], err = api.Watch(ctx, list)
		expect.NoError(t, err)
	}
	run("upgrade", "agent")
	for kind, w := range watches {
		var order []string
		for e := range w.ResultChan() { // ends with the context
			object, ok := e.Object.(client.Object)
			if ok && (object.GetName() == policy && e.Type == watch.Added || object.GetName() == former && e.Type == watch.Deleted) {
				order = append(order, string(e.Type)+" "+object.GetName())
			}
			if len(order) == 2 {
				w.Stop()
				break
			}
		}
		if want := []string{"ADDED " + policy, "DELETED " + former}; !slices.Equal(order, want) {
			t.Errorf("%s: got %q, want %q", kind, order, want)
		}
	}
}
