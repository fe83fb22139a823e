//go:build e2e

// Package scenarios shows, on the lab's real clusters, what Spillway does for its
// users: Deployments, Jobs and pods that do not fit at home overflow.
package scenarios

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/env"
	"sigs.k8s.io/e2e-framework/pkg/envconf"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/cluster"
	"github.com/spillway-dev/spillway/e2e/lab/install"
)

// remote is one cluster of the lab.
type remote struct {
	cluster.Cluster
	client.Client
	config    *rest.Config
	set       kubernetes.Interface
	metadata  metadata.Interface
	discovery discovery.DiscoveryInterface
}

var (
	testenv env.Environment
	// hub runs the broker; rome is the home of the scenarios' pods.
	hub, rome, paris, berlin *remote
	everywhere               []*remote
	workloadImage            string
	kubeconfig               string
	// steeredTo is the scheduler of pods that may overflow.
	steeredTo = broker.SchedulerName
	// namespaces are those that each test has made.
	namespaces = map[*testing.T][]*corev1.Namespace{}
)

func TestMain(m *testing.M) {
	flag.Parse()
	testenv = env.NewWithConfig(envconf.New())
	testenv.Setup(func(ctx context.Context, _ *envconf.Config) (context.Context, error) { return ctx, connect(ctx) })
	os.Exit(testenv.Run(m))
}

func connect(ctx context.Context) error {
	root, err := binaries.Root()
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, broker.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	kubeconfig = filepath.Join(root, ".work", "kubeconfig")
	named := map[string]**remote{"hub": &hub, "rome": &rome, "paris": &paris, "berlin": &berlin}
	for _, c := range cluster.Topology {
		config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig},
			&clientcmd.ConfigOverrides{CurrentContext: c.Context()}).ClientConfig()
		if err != nil {
			return fmt.Errorf("%w (make lab brings the clusters up)", err)
		}
		config.QPS, config.Burst = 500, 1000
		config.WarningHandler = rest.NoWarnings{} // discovery returns deprecated kinds
		r := &remote{Cluster: c, config: config}
		if r.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
			return err
		}
		if r.set, err = kubernetes.NewForConfig(config); err != nil {
			return err
		}
		if r.metadata, err = metadata.NewForConfig(config); err != nil {
			return err
		}
		r.discovery = r.set.Discovery()
		*named[c.Name] = r
		everywhere = append(everywhere, r)
	}
	images, err := install.Images(ctx, func(string, ...any) {})
	if err != nil {
		return err
	}
	for _, i := range images {
		if i.Program == install.Workload {
			workloadImage = i.Name
		}
	}
	return nil
}

// liqoOnly skips a scenario with driver direct in a run with both drivers (.ci/e2e), and says why.
func liqoOnly(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("BOTH_DRIVERS") != "" && driver(t.Context(), t) == "direct" {
		t.Skip("only with Liqo in a run with both drivers: " + why)
	}
}

// deadlineFactor extends every deadline. Machines are slow at times, and Liqo, after
// many quick rounds with one provider, waits for minutes before it tries the end of
// a virtual node again.
const deadlineFactor = 3

// eventually waits until check is satisfied, or fails the test with what it saw
// last.
func eventually(ctx context.Context, t *testing.T, what string, timeout time.Duration, check func(ctx context.Context) (bool, string)) time.Duration {
	t.Helper()
	start := time.Now()
	timeout *= deadlineFactor
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for last := "nothing yet"; ; {
		began := time.Now()
		done, saw := check(ctx)
		if done {
			return time.Since(start)
		}
		if ctx.Err() == nil {
			last = saw
		}
		select {
		case <-ctx.Done():
			dump(t)
			t.Fatalf("waited %s until %s; last seen: %s", timeout, what, last)
		case <-time.After(max(200*time.Millisecond, 2*time.Since(began))): // an expensive check runs less often
		}
	}
}

// timing logs a measured figure; it never decides whether a test passes.
func timing(t *testing.T, what string, d time.Duration) {
	t.Helper()
	t.Logf("timing: %-60s %6.2fs", what, d.Seconds())
}

// namespace makes a namespace in rome for one scenario and removes it afterwards.
func namespace(ctx context.Context, t *testing.T, name string, overflow bool) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if overflow {
		ns.Labels = map[string]string{broker.LabelOverflow: broker.OverflowEnabled}
	}
	deleteNamespace(ctx, t, rome, ns.DeepCopy()) // left by a run that was cut off
	if err := rome.Create(ctx, ns); err != nil {
		t.Fatal(err)
	}
	last := len(namespaces[t]) == 0 // cleanups run in reverse order
	namespaces[t] = append(namespaces[t], ns)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		beginDeletion(ctx, t, rome, ns)
		if last {
			for _, ns := range namespaces[t] {
				waitUntilGone(ctx, t, rome, ns)
			}
			delete(namespaces, t)
		}
	})
	// The ServiceAccount controller works beside us.
	eventually(ctx, t, "namespace "+name+" has its ServiceAccount", time.Minute, func(ctx context.Context) (bool, string) {
		err := rome.Get(ctx, client.ObjectKey{Namespace: name, Name: "default"}, &corev1.ServiceAccount{})
		return err == nil, fmt.Sprint(err)
	})
	if overflow {
		waitForSteering(ctx, t, name)
	}
	return name
}

// waitForSteering waits until pods of a namespace are steered: those that are created while no
// scheduler leads stay in their cluster, and after TestOnlyScheduler a replica that terminates may
// still name the other scheduler.
func waitForSteering(ctx context.Context, t *testing.T, namespace string) {
	t.Helper()
	eventually(ctx, t, "pods of namespace "+namespace+" are steered", 3*time.Minute, func(ctx context.Context) (bool, string) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "steered"}, Spec: podSpec(requests("cpu", "1m"), "serve")}
		err := rome.Create(ctx, pod, client.DryRunAll)
		steered := slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool { return t.Key == broker.TaintOverflow })
		return err == nil && steered && pod.Spec.SchedulerName == steeredTo, fmt.Sprintf("%v, scheduler %s, tolerations %v", err, pod.Spec.SchedulerName, pod.Spec.Tolerations)
	})
}

// deleteNamespace deletes a namespace and waits until nothing of it is left.
func deleteNamespace(ctx context.Context, t *testing.T, r *remote, ns *corev1.Namespace) {
	t.Helper()
	beginDeletion(ctx, t, r, ns)
	waitUntilGone(ctx, t, r, ns)
}

func beginDeletion(ctx context.Context, t *testing.T, r *remote, ns *corev1.Namespace) {
	t.Helper()
	if err := client.IgnoreNotFound(r.Delete(ctx, ns)); err != nil {
		t.Errorf("deleting namespace %s: %v", ns.Name, err)
	}
}

func waitUntilGone(ctx context.Context, t *testing.T, r *remote, ns *corev1.Namespace) {
	t.Helper()
	eventually(ctx, t, "namespace "+ns.Name+" is gone", 4*time.Minute, func(ctx context.Context) (bool, string) {
		var now corev1.Namespace
		err := r.Get(ctx, client.ObjectKeyFromObject(ns), &now)
		return apierrors.IsNotFound(err), fmt.Sprintf("%v %v", now.Status.Conditions, err)
	})
}

// dump logs the objects that explain most failures.
func dump(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var reservations broker.ReservationList
	for _, r := range []*remote{hub, rome} {
		if err := r.List(ctx, &reservations); err != nil {
			t.Logf("%s: %v", r.Name, err)
		}
		for _, v := range reservations.Items {
			t.Logf("%s reservation %s/%s: %s %q", r.Name, v.Namespace, v.Name, v.Status.Phase, v.Status.Summary)
			for _, c := range v.Status.Conditions {
				t.Logf("    %s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message)
			}
		}
	}
	var instructions broker.ReservationInstructionList
	if err := rome.List(ctx, &instructions); err == nil {
		for _, v := range instructions.Items {
			t.Logf("rome instruction %s", v.Name)
			for _, c := range v.Status.Conditions {
				t.Logf("    %s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message)
			}
		}
	}
	var nodes corev1.NodeList
	if err := rome.List(ctx, &nodes); err == nil {
		for _, n := range nodes.Items {
			t.Logf("rome node %s: allocatable %v unschedulable %v taints %v", n.Name, n.Status.Allocatable, n.Spec.Unschedulable, n.Spec.Taints)
		}
	}
	var pods corev1.PodList
	if err := rome.List(ctx, &pods); err == nil {
		for _, p := range pods.Items {
			if p.Spec.SchedulerName == broker.SchedulerName || p.Status.Phase == corev1.PodPending {
				t.Logf("rome pod %s/%s: %s on %q by %s: %v", p.Namespace, p.Name, p.Status.Phase, p.Spec.NodeName, p.Spec.SchedulerName, p.Status.Conditions)
			}
		}
	}
}
