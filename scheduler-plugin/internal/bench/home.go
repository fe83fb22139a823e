package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// Names of what the benchmarks create.
const (
	homePods     = "home"     // namespace of pods that fit in this cluster
	overflowPods = "overflow" // namespace of pods that do not
	fillers      = "fillers"  // namespace of the pods that fill the nodes
	provider     = "paris"
	// device is an extended resource.
	device corev1.ResourceName = "example.com/device"
)

// workers is how many requests the benchmark sends at the same time.
const workers = 16

// home is an API server with nodes. One scheduler at a time runs beside it.
type home struct {
	cluster *cluster.Cluster
	dir     string
	// program is the scheduler, and port where it serves metrics.
	program   string
	port      int
	scheduler *process.Process
	api       client.WithWatch
	// pods is the client for pods, in protobuf.
	pods kubernetes.Interface
}

// startHome starts an API server with nodes and the namespaces of the benchmarks. It
// returns what has to be stopped, also with an error.
func startHome(ctx context.Context, nodes int) (h *home, err error) {
	h = &home{}
	if h.dir, err = os.MkdirTemp("", "spillway-bench-"); err != nil {
		return h, err
	}
	if err := binaries.Own(ctx, controlplane.Log, h.dir, "./scheduler-plugin"); err != nil {
		return h, err
	}
	h.program = filepath.Join(h.dir, "scheduler-plugin")
	if h.cluster, err = controlplane.Run(ctx, "rome", filepath.Join(h.dir, "rome")); err != nil {
		return h, err
	}
	h.api = h.cluster.Client
	config := rest.CopyConfig(h.cluster.Admin)
	config.ContentType = runtime.ContentTypeProtobuf
	if h.pods, err = kubernetes.NewForConfig(config); err != nil {
		return h, err
	}
	for _, name := range []string{homePods, overflowPods, fillers} {
		err := errors.Join(
			h.api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}}),
			h.api.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "default"}}))
		if err != nil {
			return h, err
		}
	}
	return h, h.addNodes(ctx, nodes)
}

// addNodes adds the nodes of this cluster, and a virtual node without capacity.
func (h *home) addNodes(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for i := range n {
		group.Go(func() error {
			return h.addNode(ctx, fmt.Sprintf("node-%d", i), nil, corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("32"),
				corev1.ResourceMemory: resource.MustParse("256Gi"), corev1.ResourcePods: resource.MustParse("110"), device: resource.MustParse("32")})
		})
	}
	group.Go(func() error {
		labels := map[string]string{broker.LabelProvider: provider, broker.LabelNodeType: broker.NodeTypeVirtual}
		return h.addNode(ctx, broker.VirtualNodeName(provider), labels, virtualCapacity(0),
			corev1.Taint{Key: broker.TaintOverflow, Value: provider, Effect: corev1.TaintEffectNoSchedule})
	})
	return group.Wait()
}

// addNode adds a node that is Ready from the beginning.
func (h *home) addNode(ctx context.Context, name string, labels map[string]string, capacity corev1.ResourceList, taints ...corev1.Taint) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Status: corev1.NodeStatus{Capacity: capacity, Allocatable: capacity,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}}}}
	if err := h.api.Create(ctx, node); err != nil {
		return fmt.Errorf("creating node %s: %w", name, err)
	}
	// The API server has tainted it as not ready.
	node.Spec.Taints = taints
	if err := h.api.Update(ctx, node); err != nil {
		return fmt.Errorf("updating the taints of node %s: %w", name, err)
	}
	return nil
}

// arm is a scheduler's configuration.
type arm struct {
	name   string
	plugin bool
}

var (
	plain      = arm{name: "without the plugin"}
	plainAgain = arm{name: "without the plugin, again"}
	withPlugin = arm{name: "with the plugin", plugin: true}
)

// schedulerConfig is that of the chart, but with a rate of requests that does not limit
// what is measured.
const schedulerConfig = `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: %q, qps: 5000, burst: 5000}
leaderElection: {leaderElect: false}
profiles:
- schedulerName: spillway-scheduler
`

const pluginConfig = `  plugins:
    multiPoint: {enabled: [{name: Overflow, weight: 20}]}
    filter: {enabled: [{name: Overflow}]}
    bind: {enabled: [{name: Overflow}]}
`

// startScheduler starts the scheduler of an arm, and stopScheduler ends it.
func (h *home) startScheduler(a arm) error {
	config := fmt.Sprintf(schedulerConfig, h.cluster.Kubeconfig)
	if a.plugin {
		config += pluginConfig
	}
	file := filepath.Join(h.dir, "scheduler.yaml")
	err := os.WriteFile(file, []byte(config), 0o600)
	if err != nil {
		return err
	}
	if h.port, err = cluster.FreePort(); err != nil {
		return err
	}
	h.scheduler, err = h.cluster.Run(process.Spec{Name: "scheduler", Path: h.program, Dir: h.dir, Args: []string{
		"--config=" + file,
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", h.port),
		"--authorization-always-allow-paths=/metrics,/debug/pprof/*",
		"--steering-listen=",
	}})
	return err
}

func (h *home) stopScheduler() {
	if h.scheduler != nil {
		h.scheduler.Stop(10 * time.Second)
		h.scheduler = nil
	}
}

// stop ends what was started.
func (h *home) stop() error {
	h.stopScheduler()
	if h.cluster != nil {
		h.cluster.Stop(10 * time.Second)
	}
	return os.RemoveAll(h.dir)
}
