// Command lab creates the clusters that Spillway is tested on: hub, rome, paris
// and berlin, kind clusters, with Liqo unless they use driver direct. Everything in them
// is built from Go modules and Debian packages; no container registry is needed.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/cluster"
	"github.com/spillway-dev/spillway/e2e/lab/engine"
	"github.com/spillway-dev/spillway/e2e/lab/image"
	"github.com/spillway-dev/spillway/e2e/lab/install"
)

const usage = `usage: lab COMMAND

  up [DRIVER]       create the clusters that do not exist and install or upgrade Liqo and
                    Spillway, with driver liqo (the default) or direct
  status            exit 0 if all clusters are running
  down              remove everything that up created
  images            build Spillway's images into the cache and print their paths
  program NAME …    build programs into the cache and print their paths; those of control
                    planes of the versions in KUBERNETES, such as 1.35
  run PACKAGE ARG … build a program of this project and run it`

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	start := time.Now()
	log := func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "[%5.1fs] %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
	}
	if len(args) == 0 {
		return fmt.Errorf("no command given\n%s", usage)
	}
	driver := install.Drivers[0]
	switch args[0] {
	case "program":
		names, err := binaries.AtWantedMinors(args[1:]...)
		if err != nil {
			return err
		}
		paths, err := binaries.Programs(ctx, log, names...)
		if err != nil {
			return err
		}
		for _, name := range names {
			fmt.Println(paths[name])
		}
		return nil
	case "run":
		if len(args) < 2 {
			return fmt.Errorf("run needs a package\n%s", usage)
		}
		return runProgram(ctx, log, args[1], args[2:])
	case "images":
		images, err := install.Images(ctx, log)
		for _, i := range images {
			fmt.Println(i.Name, i.Archive)
		}
		return err
	case "up":
		if len(args) > 1 {
			driver = args[1]
		}
		if !slices.Contains(install.Drivers, driver) {
			return fmt.Errorf("unknown driver %q: use one of %v", driver, install.Drivers)
		}
	case "down", "status":
	default:
		return fmt.Errorf("unknown command %q\n%s", args[0], usage)
	}

	cache, err := binaries.CacheDir()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(cache, "lab"), 0o755); err != nil {
		return err
	}
	unlock, err := binaries.Lock(ctx, filepath.Join(cache, "lab", "lock"))
	if err != nil {
		return err
	}
	defer unlock()
	switch args[0] {
	case "down":
		return down(ctx, log)
	case "status":
		if !engine.Running(ctx) {
			return fmt.Errorf("docker is not running")
		}
		lab, node, err := open(ctx, log)
		if err != nil {
			return err
		}
		if !lab.Ready(ctx, node) {
			return fmt.Errorf("not all clusters are running: make lab")
		}
		return nil
	}
	if err := engine.Ensure(ctx, log); err != nil {
		return err
	}
	lab, node, err := open(ctx, log)
	if err != nil {
		return err
	}
	if err := lab.Up(ctx, node); err != nil {
		return err
	}
	if err := install.Up(ctx, lab, driver); err != nil {
		return err
	}
	log("the lab is ready: export KUBECONFIG=%s; contexts kind-hub, kind-rome, kind-paris, kind-berlin", lab.Kubeconfig)
	return nil
}

// runProgram runs one of the project's programs in place of this one. Unlike go run, it logs
// the progress of compiling.
func runProgram(ctx context.Context, log binaries.Log, pkg string, args []string) error {
	root, err := binaries.Root()
	if err != nil {
		return err
	}
	dir := filepath.Join(root, ".work", "run")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := binaries.Own(ctx, log, dir, pkg); err != nil {
		return err
	}
	program := filepath.Join(dir, filepath.Base(pkg))
	return syscall.Exec(program, append([]string{program}, args...), os.Environ())
}

func open(ctx context.Context, log binaries.Log) (*cluster.Lab, string, error) {
	node, err := image.Node(ctx, log)
	if err != nil {
		return nil, "", err
	}
	lab, err := cluster.Open(ctx, log)
	return lab, node, err
}

func down(ctx context.Context, log binaries.Log) error {
	lab, err := cluster.Open(ctx, log)
	if err != nil {
		return err
	}
	if err := lab.Down(ctx); err != nil {
		return err
	}
	return engine.Stop(ctx, log)
}
