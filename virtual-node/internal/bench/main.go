// Command bench measures virtual-node: go run ./virtual-node/internal/bench -name=virtual_node_memory.
// It prints details, and then the figures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/spillway-dev/spillway/e2e/bench/figures"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// name of the bench.
const name = "virtual_node_memory"

// aimKiB is the aim for the memory of one pod that runs at a provider: 400 MiB for 7,800
// of them, of which the garbage collector may double what is in use.
const aimKiB = 20

// deadline of a run.
const deadline = 20 * time.Minute

func main() {
	chosen := flag.String("name", name, "Name of the benchmark.")
	pods := flag.Int("pods", 2000, "Number of pods on the virtual node.")
	profiles := flag.String("profiles", "", "Directory for cpu.pprof and heap.pprof. Empty for no profiles.")
	load := flag.String("load", "", "Kubeconfig: create the pods and run their guests instead. Used by the bench itself.")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	var err error
	switch {
	case *load != "":
		err = runLoad(ctx, *load, *pods)
	case *chosen != name:
		err = fmt.Errorf("unknown bench %q: -name is %s", *chosen, name)
	default:
		err = measure(ctx, *pods, *profiles)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// usage is what this process has used so far.
type usage struct {
	heap    uint64
	cpu     time.Duration
	peakMiB float64
}

func used() usage {
	// Twice: the first one ends the life of what finalizers hold.
	runtime.GC()
	debug.FreeOSMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	_, peak := process.Memory(os.Getpid())
	return usage{heap: memory.HeapAlloc, cpu: process.CPUTime(os.Getpid()), peakMiB: peak}
}

// measure runs the controller of virtual-node in this process, and all else in others.
func measure(ctx context.Context, pods int, profiles string) (err error) {
	dir, err := os.MkdirTemp("", "virtual-node-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// One API server is home and provider.
	ctrl.SetLogger(logr.Discard())
	api, err := controlplane.Run(ctx, "home", dir)
	if err != nil {
		return err
	}
	defer api.Kill()
	stop, err := startController(ctx, api)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	before := used()
	writes, err := api.Writes(ctx, "pods")
	if err != nil {
		return err
	}
	if profiles != "" {
		file, err := os.Create(filepath.Join(profiles, "cpu.pprof"))
		if err != nil {
			return err
		}
		defer file.Close()
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	start := time.Now()
	if err := startLoad(ctx, api, pods); err != nil {
		return err
	}
	took, busy := time.Since(start), process.CPUTime(os.Getpid())
	pprof.StopCPUProfile()
	after := used()
	if err := writeHeap(profiles); err != nil {
		return err
	}
	now, err := api.Writes(ctx, "pods")
	if err != nil {
		return err
	}
	for call, count := range now.Minus(writes) {
		fmt.Printf("%s %.2f %s for each pod, of all programs\n", name, count/float64(pods), call)
	}
	fmt.Printf("%s %d pods ran after %.1f s; heap %.1f MiB before and %.1f MiB after; peak of resident memory %.1f MiB\n",
		name, pods, took.Seconds(), float64(before.heap)/(1<<20), float64(after.heap)/(1<<20), after.peakMiB)
	lines := figures.New(os.Stdout)
	lines.Time(name, float64(after.heap-before.heap)/float64(pods)/(1<<10), "KiB/pod", fmt.Sprintf("<= %d", aimKiB))
	lines.Time(name+"_cpu", (busy-before.cpu).Seconds()*1000/float64(pods), "ms/pod", "none")
	return nil
}

func writeHeap(profiles string) error {
	if profiles == "" {
		return nil
	}
	file, err := os.Create(filepath.Join(profiles, "heap.pprof"))
	if err != nil {
		return err
	}
	return errors.Join(pprof.WriteHeapProfile(file), file.Close())
}

// startLoad runs the load in another process, until all pods run.
func startLoad(ctx context.Context, api *cluster.Cluster, pods int) error {
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, binary, "-load="+api.Kubeconfig, fmt.Sprintf("-pods=%d", pods))
	command.Stdout, command.Stderr = os.Stderr, os.Stderr
	return command.Run()
}

func runLoad(ctx context.Context, kubeconfig string, pods int) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	return newLoad(config, pods).run(ctx)
}
