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

// upstream are the programs of control planes by their minor of Kubernetes.
type upstream map[string]cluster.Programs

// buildUpstream builds what control planes are made of and what renders charts, if the
// cache does not hold it: minutes on the first run on a machine.
func buildUpstream(ctx context.Context, log Log, minors binaries.Minors) (upstream, error) {
	names := []string{"etcd", "render"}
	for _, minor := range []string{minors.Consumers, minors.Others} {
		names = append(names, binaries.At("kube-apiserver", minor), binaries.At("kube-controller-manager", minor))
	}
	paths, err := binaries.Programs(ctx, log, names...)
	if err != nil {
		return nil, err
	}
	all := upstream{}
	for _, minor := range []string{minors.Consumers, minors.Others} {
		all[minor] = cluster.Programs{
			Etcd: paths["etcd"], APIServer: paths[binaries.At("kube-apiserver", minor)], ControllerManager: paths[binaries.At("kube-controller-manager", minor)],
		}
	}
	return all, nil
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
