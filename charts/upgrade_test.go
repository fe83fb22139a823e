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
	expectVersionChecked(t, access)
	run := func(command, chart string) {
		t.Helper()
		_, err := helm(t, append([]string{command, "spillway-agent", chart, access, "--create-namespace"}, set(append(slices.Clone(needed), "driver=direct"))...)...)
		expect.NoError(t, err)
	}
	run("install", dir)

	api, err := client.NewWithWatch(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
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

// expectVersionChecked: a chart that needs another version than the cluster's is not installed,
// and says which; it can be rendered without a cluster.
func expectVersionChecked(t *testing.T, access string) {
	t.Helper()
	for chart, version := range map[string]string{"agent": "1.35", "broker": "1.29"} {
		dir := filepath.Join(t.TempDir(), chart)
		expect.NoError(t, os.CopyFS(dir, os.DirFS(chart)))
		path := filepath.Join(dir, "templates", "required.yaml")
		text, err := os.ReadFile(path)
		expect.NoError(t, err)
		// As if the cluster were older.
		expect.NoError(t, os.WriteFile(path, bytes.ReplaceAll(text, []byte("<"+version+".0-0"), []byte("<1.99.0-0")), 0o600))
		values := set(map[string][]string{"agent": needed}[chart])
		_, err = helm(t, append([]string{"install", "x", dir, access, "--create-namespace"}, values...)...)
		if err == nil || !strings.Contains(err.Error(), "requires Kubernetes "+version+" or newer, and the cluster has v1.") {
			t.Errorf("chart %s: want a refusal that names both versions, got %v", chart, err)
		}
		_, err = helm(t, append([]string{"template", "x", dir}, values...)...)
		expect.NoError(t, err)
	}
}
