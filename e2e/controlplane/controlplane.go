// Package controlplane starts real API servers for tests: etcd and
// kube-apiserver as plain processes, from the project's own builds, with
// Spillway's CRDs installed.
package controlplane

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// Start brings up an API server with Spillway's CRDs for the life of a test, or
// fails the test. The first run on a machine builds the servers, which takes
// minutes.
func Start(t testing.TB, extraCRDs ...string) *rest.Config {
	t.Helper()
	return start(t, append(crds(t), extraCRDs...))
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
	if _, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{Paths: crds(t), ErrorIfPathMissing: true}); err != nil {
		t.Fatalf("installing the CRDs: %v", err)
	}
}

// crds are the directories of the charts' CRDs.
func crds(t testing.TB) []string {
	t.Helper()
	root, err := binaries.Root()
	if err != nil {
		t.Fatal(err)
	}
	return []string{filepath.Join(root, "charts/broker/crds"), filepath.Join(root, "charts/agent/crds")}
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
		CRDDirectoryPaths:     crds,
		ErrorIfCRDPathMissing: true,
		// On a busy machine it takes far longer than the default of 20 seconds.
		ControlPlaneStartTimeout: 2 * time.Minute,
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
