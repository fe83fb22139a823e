// Package controlplane starts real API servers for tests: etcd and
// kube-apiserver as plain processes, from the project's own builds, with
// Spillway's CRDs installed.
package controlplane

import (
	"path/filepath"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/spillway-dev/spillway/e2e/lab/build"
)

// Start brings up an API server with Spillway's CRDs for the life of a test, or
// fails the test. The first run on a machine builds the servers, which takes
// minutes.
func Start(t testing.TB, extraCRDs ...string) *rest.Config {
	t.Helper()
	root, err := build.Root()
	if err != nil {
		t.Fatal(err)
	}
	paths := map[string]string{}
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		if paths[name], err = build.Program(t.Context(), name, t.Logf); err != nil {
			t.Fatal(err)
		}
	}
	env := &envtest.Environment{
		CRDDirectoryPaths:     append([]string{filepath.Join(root, "charts/broker/crds"), filepath.Join(root, "charts/agent/crds")}, extraCRDs...),
		ErrorIfCRDPathMissing: true,
	}
	env.ControlPlane.GetAPIServer().Path = paths["kube-apiserver"]
	env.ControlPlane.Etcd = &envtest.Etcd{Path: paths["etcd"]}
	env.ControlPlane.Etcd.Configure().Append("unsafe-no-fsync", "true")
	env.ControlPlane.KubectlPath = paths["kubectl"]
	config, err := env.Start()
	if err != nil {
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
