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

// Programs are the paths of all programs that the playground runs.
type Programs struct {
	cluster.Programs
	// Own are the project's programs by the name of their Deployment.
	Own map[string]string
}

// own are the packages of the project's programs.
var own = map[string]string{
	"spillway-broker":       "./broker",
	"spillway-agent":        "./agent",
	"spillway-scheduler":    "./scheduler-plugin",
	"spillway-virtual-node": "./virtual-node",
}

// Build builds the programs that the cache does not hold: minutes on the first
// run on a machine, seconds from then on.
func Build(ctx context.Context, log Log) (Programs, error) {
	programs := Programs{Own: map[string]string{}}
	cache, err := binaries.CacheDir()
	if err != nil {
		return programs, err
	}
	dir := filepath.Join(cache, "playground")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return programs, err
	}
	unlock, err := binaries.Lock(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return programs, err
	}
	defer unlock()
	upstream, err := binaries.Programs(ctx, log, "etcd", "kube-apiserver", "kube-controller-manager", "kwok", "render")
	if err != nil {
		return programs, err
	}
	log("building Spillway's own programs …")
	if err := binaries.Own(ctx, dir, slices.Collect(maps.Values(own))...); err != nil {
		return programs, err
	}
	for name, pkg := range own {
		programs.Own[name] = filepath.Join(dir, pkg)
	}
	programs.Etcd, programs.APIServer, programs.ControllerManager = upstream["etcd"], upstream["kube-apiserver"], upstream["kube-controller-manager"]
	programs.Kwok = upstream["kwok"]
	programs.Scheduler = programs.Own["spillway-scheduler"]
	return programs, nil
}
