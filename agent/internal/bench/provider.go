package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/program"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/kubelet"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

const (
	consumer        = "rome"
	guestsNamespace = "guests-of-" + consumer
	localNamespace  = "local"
	holdsNamespace  = placeholder.DefaultNamespace
	poll            = 10 * time.Millisecond
	// timeout of a step that does not fail.
	timeout = 2 * time.Minute
)

// provider is an API server with Kubernetes' own scheduler and the provider's side of an
// agent. Unless StartKubelets is called, the nodes have no kubelet: what is measured ends
// when a pod is bound.
type provider struct {
	dir     string
	cluster *cluster.Cluster
	api     client.Client
	// scheduler is the path of kube-scheduler.
	scheduler string
	// writes of the agent, and of what does its work here.
	writes    atomic.Int64
	counted   client.Client
	stopAgent func() error
}

// withProviders runs a measurement until it ends or is interrupted.
func withProviders(measure func(ctx context.Context) error) {
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := measure(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// startProvider starts a provider that holds with placeholders, or not. It returns what has
// to be stopped, also with an error.
func startProvider(ctx context.Context, placeholders bool) (p *provider, err error) {
	p = &provider{stopAgent: func() error { return nil }}
	if p.dir, err = os.MkdirTemp("", "spillway-bench-"); err != nil {
		return p, err
	}
	if p.scheduler, err = binaries.Program(ctx, "kube-scheduler", controlplane.Log); err != nil {
		return p, err
	}
	if p.cluster, err = controlplane.Run(ctx, "paris", p.dir); err != nil {
		return p, err
	}
	p.api = p.cluster.Client
	counted := rest.CopyConfig(p.cluster.Admin)
	counted.Wrap(p.count)
	if p.counted, err = client.New(counted, client.Options{Scheme: p.cluster.Client.Scheme()}); err != nil {
		return p, err
	}
	if err := p.prepare(ctx); err != nil {
		return p, err
	}
	if err := p.startScheduler(corev1.DefaultSchedulerName); err != nil {
		return p, err
	}
	return p, p.startAgent(ctx, counted, placeholders)
}

// prepare creates the priorities and namespaces that the chart and a peering do.
func (p *provider) prepare(ctx context.Context) error {
	var errs []error
	for _, class := range []string{placeholder.PriorityClass, guest.PriorityClass} {
		errs = append(errs, p.api.Create(ctx, &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: class}, PreemptionPolicy: ptr.To(corev1.PreemptNever)}))
	}
	for name, labels := range map[string]map[string]string{broker.SystemNamespace: nil, holdsNamespace: nil, localNamespace: nil, guestsNamespace: {broker.LabelGuestsOf: consumer}} {
		errs = append(errs,
			p.api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}),
			p.api.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "default"}}))
	}
	return errors.Join(errs...)
}

// startScheduler starts kube-scheduler with its defaults, for the pods that name it.
func (p *provider) startScheduler(name string) error {
	return p.runScheduler(p.scheduler, name, "")
}

// startSpillwayScheduler starts Spillway's scheduler beside that of the cluster.
func (p *provider) startSpillwayScheduler(ctx context.Context) error {
	if err := binaries.Own(ctx, controlplane.Log, p.dir, "./scheduler-plugin"); err != nil {
		return err
	}
	return p.runScheduler(filepath.Join(p.dir, "scheduler-plugin"), broker.SchedulerName,
		", plugins: {multiPoint: {enabled: [{name: Overflow, weight: 20}]}, filter: {enabled: [{name: Overflow}]}, bind: {enabled: [{name: Overflow}]}}", "--steering-listen=")
}

// runScheduler runs the program of a scheduler with one profile.
func (p *provider) runScheduler(program, name, plugins string, flags ...string) error {
	file := filepath.Join(p.cluster.Dir(), name+".yaml")
	config := fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: %q, qps: 1000, burst: 2000}
leaderElection: {leaderElect: false}
profiles: [{schedulerName: %s%s}]
`, p.cluster.Kubeconfig, name, plugins)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return err
	}
	_, err := p.cluster.Run(process.Spec{Name: name, Path: program, Dir: p.cluster.Dir(), Args: append(flags, "--config="+file, "--secure-port=0")})
	return err
}

// startAgent runs the agent, without a broker.
func (p *provider) startAgent(ctx context.Context, config *rest.Config, placeholders bool) error {
	options := ctrl.Options{Scheme: p.cluster.Client.Scheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true)}}
	mgr, err := program.NewManager(config, options, program.Cached{InstructionNamespace: broker.SystemNamespace})
	if err != nil {
		return err
	}
	known := recognizer
	known.Placeholder = func(pod *corev1.Pod) (string, bool) { return placeholder.ConsumerOf(pod, holdsNamespace) }
	parts := program.Parts{
		Namespace: broker.SystemNamespace, InstructionNamespace: broker.SystemNamespace, Broker: offline{}, Recognizer: known, Clock: clock.RealClock{},
		Driver: func(func(string), func(string)) (program.Driver, error) {
			return program.Driver{Consumer: fake.NewDriver(), Provider: fake.NewProvider(), GuestNamespaces: fake.GuestNamespaces{Trial: guestsNamespace}}, nil
		},
		Terms: inventory.Terms{ClusterID: "paris", Lending: broker.Lending{Enabled: true}}, AdvertisementInterval: 30 * time.Second,
		PeeringIdleTime: time.Hour, FinishedPodRetention: time.Minute, ReleaseGrace: time.Minute, ProviderLostAfter: time.Minute,
	}
	if placeholders {
		parts.Placeholders = placeholder.Options{Namespace: holdsNamespace, Image: placeholder.DefaultImage}
	}
	if err := program.Add(ctx, mgr, parts); err != nil {
		return err
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(running) }()
	p.stopAgent = func() error {
		cancel()
		return <-ended
	}
	return nil
}

// offline is a connection on which nothing arrives: only advertisements are sent.
type offline struct{ transport.BrokerCommunicator }

// Watch implements transport.BrokerCommunicator.
func (offline) Watch(ctx context.Context, _ protocol.Role, _ func(protocol.Event)) { <-ctx.Done() }

// PublishAdvertisement implements transport.BrokerCommunicator.
func (offline) PublishAdvertisement(context.Context, broker.ClusterAdvertisementSpec) error {
	return nil
}

// Beat implements transport.BrokerCommunicator.
func (offline) Beat(context.Context, protocol.Beat) (known bool, err error) { return true, nil }

func (p *provider) stop() error {
	err := p.stopAgent()
	if p.cluster != nil {
		p.cluster.Kill()
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// count counts the writes of a client.
func (p *provider) count(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Method != http.MethodGet {
			p.writes.Add(1)
		}
		return next.RoundTrip(r)
	})
}

// addNode adds a node that is Ready, with a number of millicores.
func (p *provider) addNode(ctx context.Context, name string, milli int64) error {
	amount := corev1.ResourceList{
		corev1.ResourceCPU: *resource.NewMilliQuantity(milli, resource.DecimalSI), corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("500"),
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Annotations: map[string]string{kubelet.Simulated: "true"},
			Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelArchStable: guest.Arch, corev1.LabelOSStable: guest.OS},
		},
		Status: corev1.NodeStatus{Capacity: amount, Allocatable: amount, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
	if err := p.api.Create(ctx, node); err != nil {
		return fmt.Errorf("creating node %s: %w", name, err)
	}
	// The API server has tainted it as not ready.
	node.Spec.Taints = nil
	return p.api.Update(ctx, node)
}

func podOf(namespace, name string, milli int64) *corev1.Pod {
	requests := corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(milli, resource.DecimalSI)}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false), TerminationGracePeriodSeconds: ptr.To[int64](0),
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: requests}}},
		},
	}
}

// createGuest creates a guest; gated: it waits for the place that is handed over to it.
func (p *provider) createGuest(ctx context.Context, name string, milli int64, gated bool) (*corev1.Pod, error) {
	pod := podOf(guestsNamespace, name, milli)
	pod.Spec.PriorityClassName = guest.PriorityClass
	if gated {
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	}
	return pod, p.api.Create(ctx, pod)
}

// ask creates a hold of pods and waits for the decision.
func (p *provider) ask(ctx context.Context, name string, count int32, milli int64) (accepted bool, err error) {
	in := &broker.ProviderInstruction{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: name},
		Spec: broker.ProviderInstructionSpec{ReservationName: name, RequesterClusterID: consumer, Attempt: 1, PodSets: []broker.PodSet{{
			Name: "pods", Count: count, Requests: broker.FromList(corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(milli, resource.DecimalSI)}),
		}}},
	}
	if err := p.api.Create(ctx, in); err != nil {
		return false, err
	}
	err = eventually(ctx, timeout, "a decision about hold "+name, func() (bool, error) {
		err := p.api.Get(ctx, client.ObjectKeyFromObject(in), in)
		return in.Status.ObservedAttempt == 1, err
	})
	return in.Status.Enforced, err
}

// bound returns how many pods of a namespace have a node.
func (p *provider) bound(ctx context.Context, namespace string) (n int, err error) {
	var list corev1.PodList
	err = p.api.List(ctx, &list, client.InNamespace(namespace))
	for i := range list.Items {
		if list.Items[i].Spec.NodeName != "" {
			n++
		}
	}
	return n, err
}

// clear removes all pods and holds.
func (p *provider) clear(ctx context.Context) error {
	if err := p.api.DeleteAllOf(ctx, &broker.ProviderInstruction{}, client.InNamespace(broker.SystemNamespace)); err != nil {
		return err
	}
	return eventually(ctx, timeout, "all pods to be gone", func() (bool, error) {
		left := 0
		for _, namespace := range []string{localNamespace, guestsNamespace, holdsNamespace} {
			if err := p.api.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(namespace), client.GracePeriodSeconds(0)); err != nil {
				return false, err
			}
			var list corev1.PodList
			if err := p.api.List(ctx, &list, client.InNamespace(namespace)); err != nil {
				return false, err
			}
			left += len(list.Items)
		}
		return left == 0, nil
	})
}

// eventually waits until done reports true.
func eventually(ctx context.Context, within time.Duration, what string, done func() (bool, error)) error {
	err := wait.PollUntilContextTimeout(ctx, poll, within, true, func(context.Context) (bool, error) { return done() })
	if err != nil {
		return fmt.Errorf("waiting for %s: %w", what, err)
	}
	return nil
}
