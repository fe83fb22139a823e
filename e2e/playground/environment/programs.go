package environment

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// Log takes progress, a line each.
type Log = binaries.Log

// own are the packages of the project's programs.
var own = map[string]string{
	"spillway-broker":       "./broker",
	"spillway-agent":        "./agent",
	"spillway-scheduler":    "./scheduler-plugin",
	"spillway-virtual-node": "./virtual-node",
}

// buildUpstream builds what a control plane is made of and what renders charts, if the
// cache does not hold it: minutes on the first run on a machine.
func buildUpstream(ctx context.Context, log Log) (cluster.Programs, error) {
	paths, err := binaries.Programs(ctx, log, "etcd", "kube-apiserver", "kube-controller-manager", "render")
	return cluster.Programs{Etcd: paths["etcd"], APIServer: paths["kube-apiserver"], ControllerManager: paths["kube-controller-manager"]}, err
}

// buildOwn builds the project's programs and returns their paths by the name of their
// Deployment.
func buildOwn(ctx context.Context, log Log) (map[string]string, error) {
	cache, err := binaries.CacheDir()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, "playground")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	unlock, err := binaries.Lock(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return nil, err
	}
	defer unlock()
	log("building Spillway's own programs …")
	if err := binaries.Own(ctx, log, dir, slices.Collect(maps.Values(own))...); err != nil {
		return nil, err
	}
	paths := map[string]string{}
	for name, pkg := range own {
		paths[name] = filepath.Join(dir, pkg)
	}
	return paths, nil
}
