package environment

import (
	"context"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// Log takes progress, a line each.
type Log func(format string, args ...any)

// Programs are the paths of all that the playground runs.
type Programs struct {
	cluster.Programs
	Helm string
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

// Build makes whatever the cache does not hold, which takes minutes the first
// time on a machine and seconds from then on.
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
	for _, p := range []struct {
		name string
		path *string
	}{
		{"etcd", &programs.Etcd},
		{"kube-apiserver", &programs.APIServer},
		{"kube-controller-manager", &programs.ControllerManager},
		{"kwok", &programs.Kwok},
		{"helm", &programs.Helm},
	} {
		if *p.path, err = binaries.Program(ctx, p.name, log); err != nil {
			return programs, err
		}
	}
	log("building Spillway's own programs …")
	// All at once: when nothing has changed, each build only looks.
	group, ctx := errgroup.WithContext(ctx)
	for name, pkg := range own {
		target := filepath.Join(dir, name)
		programs.Own[name] = target
		group.Go(func() error { return binaries.Own(ctx, pkg, target) })
	}
	programs.Scheduler = programs.Own["spillway-scheduler"]
	return programs, group.Wait()
}
