// Package controlplane starts real API servers for tests and benches: etcd and
// kube-apiserver as plain processes, from the project's own builds, with
// Spillway's CRDs installed.
package controlplane

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// patience is how long an API server may take to start, to accept the CRDs, and to stop: on
// a busy machine far longer than the defaults of 10 and 20 seconds.
const patience = 3 * time.Minute

// Run starts an API server with Spillway's CRDs for a bench. Its state is in dir, and its
// clients have no rate limit. The caller stops it; it does not outlive this process.
func Run(ctx context.Context, name, dir string) (*cluster.Cluster, error) {
	programs, err := binaries.Programs(ctx, Log, "etcd", "kube-apiserver")
	if err != nil {
		return nil, err
	}
	paths, err := crds()
	if err != nil {
		return nil, err
	}
	c, err := cluster.Start(ctx, cluster.Options{
		Name: name, Dir: dir, Programs: cluster.Programs{Etcd: programs["etcd"], APIServer: programs["kube-apiserver"]},
	})
	if err != nil {
		return nil, err
	}
	if _, err := envtest.InstallCRDs(c.Admin, envtest.CRDInstallOptions{Paths: paths, ErrorIfPathMissing: true, MaxTime: patience}); err != nil {
		c.Kill()
		return nil, fmt.Errorf("installing the CRDs: %w", err)
	}
	return c, nil
}

// Log prints what takes long to standard error, which leaves standard output to results.
func Log(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// Start brings up an API server with Spillway's CRDs for the life of a test, or
// fails the test. The first run on a machine builds the servers, which takes
// minutes.
func Start(t testing.TB, extraCRDs ...string) *rest.Config {
	t.Helper()
	paths, err := crds()
	if err != nil {
		t.Fatal(err)
	}
	return start(t, append(paths, extraCRDs...))
}

// StartBare brings up an API server on which Spillway was never installed, with flags of
// kube-apiserver such as "feature-gates=GenericWorkload=true".
func StartBare(t testing.TB, flags ...string) *rest.Config {
	t.Helper()
	return start(t, nil, flags...)
}

// InstallCRDs installs Spillway's CRDs on such a one.
func InstallCRDs(t testing.TB, config *rest.Config) {
	t.Helper()
	paths, err := crds()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{Paths: paths, ErrorIfPathMissing: true, MaxTime: patience}); err != nil {
		t.Fatalf("installing the CRDs: %v", err)
	}
}

// crds are the directories of the charts' CRDs.
func crds() ([]string, error) {
	root, err := binaries.Root()
	return []string{filepath.Join(root, "charts/broker/crds"), filepath.Join(root, "charts/agent/crds")}, err
}

func start(t testing.TB, crds []string, flags ...string) *rest.Config {
	t.Helper()
	var err error
	paths := map[string]string{}
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		if paths[name], err = binaries.Program(t.Context(), name, t.Logf); err != nil {
			t.Fatal(err)
		}
	}
	env := &envtest.Environment{
		CRDDirectoryPaths:        crds,
		CRDInstallOptions:        envtest.CRDInstallOptions{MaxTime: patience},
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: patience,
		ControlPlaneStopTimeout:  patience,
	}
	env.ControlPlane.GetAPIServer().Path = paths["kube-apiserver"]
	for _, f := range flags {
		name, value, _ := strings.Cut(f, "=")
		env.ControlPlane.GetAPIServer().Configure().Append(name, value)
	}
	env.ControlPlane.Etcd = &envtest.Etcd{Path: paths["etcd"]}
	env.ControlPlane.Etcd.Configure().Append("unsafe-no-fsync", "true")
	env.ControlPlane.KubectlPath = paths["kubectl"]
	config, err := env.Start()
	if err != nil {
		// What has started already would outlive the test.
		_ = env.Stop()
		t.Fatalf("starting an API server: %v", err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Errorf("stopping the API server: %v", err)
		}
	})
	config.QPS, config.Burst = 1000, 2000
	return config
}

// InstallCRDsWithoutRules installs Spillway's CRDs as if no field had a rule: with them, a test makes
// the objects that were written before a rule was added.
func InstallCRDsWithoutRules(t testing.TB, config *rest.Config) {
	t.Helper()
	folders, err := crds()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]*apiextensionsv1.CustomResourceDefinition{}
	for _, folder := range folders {
		files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			byName[filepath.Base(file)] = withoutRules(t, file)
		}
	}
	if _, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{CRDs: slices.Collect(maps.Values(byName)), MaxTime: patience}); err != nil {
		t.Fatalf("installing the CRDs: %v", err)
	}
}

// withoutRules reads a CRD without patterns and CEL rules.
func withoutRules(t testing.TB, file string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var object map[string]any
	if err := yaml.Unmarshal(content, &object); err != nil {
		t.Fatal(err)
	}
	strip(object)
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object, crd); err != nil {
		t.Fatal(err)
	}
	return crd
}

func strip(in any) {
	switch in := in.(type) {
	case map[string]any:
		delete(in, "pattern")
		delete(in, "x-kubernetes-validations")
		for _, value := range in {
			strip(value)
		}
	case []any:
		for _, value := range in {
			strip(value)
		}
	}
}
