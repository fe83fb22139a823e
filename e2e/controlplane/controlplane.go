// Package controlplane starts real API servers for tests and benches: etcd and
// kube-apiserver as plain processes, from the project's own builds. There is no
// controller and no scheduler (see StartControllers and StartScheduler), and no
// admission of ServiceAccounts.
//
// The tests of a package use a server one after the other. After each it is
// reset: a test fails that leaves what cannot be removed, or a manager that still
// writes. The package needs a TestMain that calls Main.
//
// KUBERNETES=1.35 go test … runs them on an older API server.
package controlplane

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
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

// patience is how long an API server may take to accept the CRDs: on a busy machine far longer
// than the default of 10 seconds.
const patience = 3 * time.Minute

// Minor is the API servers' minor of Kubernetes, as 1.37: the first that the environment variable
// KUBERNETES names, or the newest.
func Minor() (string, error) {
	minors, err := binaries.WantedMinors()
	return minors.Consumers, err
}

// Run starts an API server with Spillway's CRDs for a bench. Its state is in dir, and its
// clients have no rate limit. The caller stops it; it does not outlive this process.
func Run(ctx context.Context, name, dir string) (*cluster.Cluster, error) {
	paths, err := crds()
	if err != nil {
		return nil, err
	}
	return run(ctx, cluster.Options{Name: name, Dir: dir}, paths)
}

// run starts etcd and an API server, and installs CRDs.
func run(ctx context.Context, o cluster.Options, crds []string) (*cluster.Cluster, error) {
	minor, err := Minor()
	if err != nil {
		return nil, err
	}
	server := binaries.At("kube-apiserver", minor)
	programs, err := binaries.Programs(ctx, Log, "etcd", server)
	if err != nil {
		return nil, err
	}
	o.Programs = cluster.Programs{Etcd: programs["etcd"], APIServer: programs[server]}
	c, err := cluster.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	if len(crds) == 0 {
		return c, nil
	}
	if _, err := envtest.InstallCRDs(c.Admin, envtest.CRDInstallOptions{Paths: crds, ErrorIfPathMissing: true, MaxTime: patience}); err != nil {
		c.Kill()
		return nil, fmt.Errorf("installing the CRDs: %w", err)
	}
	return c, nil
}

// Log prints what takes long to standard error, which leaves standard output to results.
func Log(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// Start gives a test an API server with Spillway's CRDs, and those of extraCRDs (files or
// folders), or fails the test. The first run on a machine builds the servers, which takes minutes.
func Start(t testing.TB, extraCRDs ...string) *rest.Config {
	t.Helper()
	paths, err := crds()
	if err != nil {
		t.Fatal(err)
	}
	return use(t, append(paths, extraCRDs...), nil, "")
}

// StartBare gives a test an API server on which Spillway was never installed, with flags of
// kube-apiserver such as "feature-gates=GenericWorkload=true".
func StartBare(t testing.TB, flags ...string) *rest.Config {
	t.Helper()
	return use(t, nil, flags, "")
}

// StartOwn is Start for a test whose API server no other uses, because a reset does not undo what
// was done to it: where no policy has parameters of a kind any more, kube-apiserver ends its
// informer of that kind for good, and later policies see the parameters of then.
func StartOwn(t testing.TB) *rest.Config {
	t.Helper()
	paths, err := crds()
	if err != nil {
		t.Fatal(err)
	}
	return use(t, paths, nil, t.Name())
}

// InstallCRDs installs Spillway's CRDs on an API server of StartBare.
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
