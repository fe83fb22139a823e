package charts_test

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
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
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

// TestUpgradeLeavesNoGap: where an upgrade replaces a policy by one of another name, the new
// one and its binding exist before the former ones are deleted.
func TestUpgradeLeavesNoGap(t *testing.T) {
	const policy, former = "spillway-guest-objects", "spillway-guest-former"
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

// expectVersionChecked: a chart is not rendered for a cluster of a version that it does not
// support, and says which it does; without a cluster, it is.
func expectVersionChecked(t *testing.T, access string) {
	t.Helper()
	const oldest, newest = compatibility.Oldest, compatibility.Newest
	supports := fmt.Sprintf("this chart supports Kubernetes %s to %s, and the cluster has v", oldest, newest)
	for _, tc := range []struct{ chart, version, want, then string }{
		{"agent", (oldest - 1).String() + ".9", supports, ": upgrade the cluster first"},
		{"agent", oldest.String() + ".0", "", ""},
		{"agent", newest.String() + ".9-gke.1042000", "", ""},
		{"agent", newest.String() + ".9+k3s1", "", ""},
		{"agent", (newest + 1).String() + ".0-alpha.1", supports, ": install a newer version of Spillway"},
		{"broker", "1.28.9", "this chart requires Kubernetes " + oldestHub(t) + " or newer, and the cluster has v", ": upgrade the cluster first"},
		{"broker", oldestHub(t) + ".0-gke.1", "", ""},
		{"broker", (newest + 1).String() + ".0", "", ""},
	} {
		// As if the cluster had the version; flag --kube-version of helm drops what follows a patch.
		dir := filepath.Join(t.TempDir(), tc.chart)
		expect.NoError(t, os.CopyFS(dir, os.DirFS(tc.chart)))
		path := filepath.Join(dir, "templates", "required.yaml")
		text, err := os.ReadFile(path)
		expect.NoError(t, err)
		expect.NoError(t, os.WriteFile(path, bytes.ReplaceAll(text, []byte(".Capabilities.KubeVersion.Version"), []byte(`"v`+tc.version+`"`)), 0o600))
		render := append([]string{"template", "x", dir}, set(map[string][]string{"agent": needed}[tc.chart])...)
		_, err = helm(t, append(render, access, "--dry-run=server")...)
		switch want := tc.want + tc.version + tc.then; {
		case tc.want == "" && err != nil:
			t.Errorf("chart %s in a cluster of %s: %v", tc.chart, tc.version, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("chart %s in a cluster of %s: want a refusal with %q, got %v", tc.chart, tc.version, want, err)
		}
		_, err = helm(t, render...)
		expect.NoError(t, err)
	}
}

var leastVersion = regexp.MustCompile(`semverCompare "<(1\.[0-9]+)\.0-0"`)

// oldestHub is the oldest version that the broker's chart supports, such as 1.29.
func oldestHub(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("broker/templates/required.yaml")
	expect.NoError(t, err)
	match := leastVersion.FindSubmatch(text)
	if match == nil {
		t.Fatal("the broker's chart requires no version of Kubernetes")
	}
	return string(match[1])
}
