package controller

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	spillwayevents "github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/virtual-node/internal/node"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const (
	reconcileTimeout = time.Minute
	// drainInterval is how often a terminating virtual node is reconciled.
	drainInterval = time.Second
)

var providerReachable = prometheus.NewGaugeVec(prometheus.GaugeOpts{
	Name: "virtual_node_provider_reachable",
	Help: "Whether the provider is reachable and authorizes this cluster (1 or 0), by provider.",
}, []string{"provider"})

func init() { metrics.Registry.MustRegister(providerReachable) }

// Options of a Controller. All but Port, Certificate, DNS and Networks are required.
type Options struct {
	// Namespace of the Secrets.
	Namespace string
	// Client is the client of this cluster.
	Client   kubernetes.Interface
	Recorder events.EventRecorder
	// Address is the IP address at which the API server reaches this program.
	Address string
	// Port is the first port for kubelet APIs; 0 is any port.
	Port int
	// Certificate is the serving certificate of the kubelet APIs; if nil, each has a
	// self-signed one.
	Certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	DNS         translate.Options
	// Networks of the providers' pods, in which guests have addresses.
	Networks []netip.Prefix
	Clock    clock.WithTicker
	Log      logr.Logger
}

// Controller reconciles the Secrets with running virtual nodes.
type Controller struct {
	Options
	secrets client.Reader
	queue   chan event.GenericEvent

	mu    sync.Mutex
	nodes map[string]*virtualNode
}

// New returns a controller without virtual nodes.
func New(o Options) *Controller {
	o.Recorder = spillwayevents.NewRecorder(o.Recorder)
	return &Controller{Options: o, queue: make(chan event.GenericEvent, 64), nodes: map[string]*virtualNode{}}
}

// SetupWithManager adds the controller to a manager, whose cache must contain the
// Secrets.
func (c *Controller) SetupWithManager(mgr ctrl.Manager) error {
	c.secrets = mgr.GetClient()
	err := ctrl.NewControllerManagedBy(mgr).Named("virtual-nodes").
		For(&corev1.Secret{}).
		WatchesRawSource(source.Channel(c.queue, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(reconcile.Func(c.reconcile))
	if err != nil {
		return fmt.Errorf("setting up the controller: %w", err)
	}
	return mgr.Add(manager.RunnableFunc(c.run))
}

// run enqueues the Nodes whose Secret may have been deleted while this program was
// not running, and stops the virtual nodes when ctx ends.
func (c *Controller) run(ctx context.Context) error {
	list, err := c.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: nodeconfig.LabelComponent + "=" + node.Component})
	if err != nil {
		return fmt.Errorf("listing virtual nodes: %w", err)
	}
	for i := range list.Items {
		if provider := list.Items[i].Labels[broker.LabelProvider]; provider != "" {
			c.enqueue(provider)
		}
	}
	<-ctx.Done()
	c.mu.Lock()
	nodes := slices.Collect(maps.Values(c.nodes))
	clear(c.nodes)
	c.mu.Unlock()
	var stopping sync.WaitGroup
	for _, n := range nodes {
		stopping.Go(n.stop)
	}
	stopping.Wait()
	return nil
}

func (c *Controller) enqueue(provider string) {
	c.queue <- event.GenericEvent{Object: &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: nodeconfig.SecretName(provider), Labels: map[string]string{broker.LabelProvider: provider}}}}
}

// recordFailure records a Warning on the provider's Secret.
func (c *Controller) recordFailure(provider string, err error) {
	secret := &corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Namespace: c.Namespace, Name: nodeconfig.SecretName(provider)}
	c.Recorder.Eventf(secret, nil, corev1.EventTypeWarning, reasonFailed, "Run", "%s", err)
}

func (c *Controller) reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	var secret corev1.Secret
	err := c.secrets.Get(ctx, request.NamespacedName, &secret)
	provider := nodeconfig.ProviderOf(request.Name)
	switch {
	case apierrors.IsNotFound(err):
		return reconcile.Result{}, c.delete(ctx, provider)
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("reading Secret %s: %w", request.Name, err)
	}
	config, err := nodeconfig.FromSecret(&secret)
	if err != nil {
		// A retry would not help: the next change of the Secret enqueues it.
		c.recordFailure(provider, err)
		c.Log.Error(err, "Failed to read the configuration of a virtual node", "provider", provider)
		return reconcile.Result{}, nil
	}
	n := c.running(config.Provider)
	if n != nil && !n.update(config) {
		c.stop(config.Provider)
		n = nil
	}
	if n == nil {
		if config.Terminating {
			if _, err := c.Client.CoreV1().Nodes().Get(ctx, broker.VirtualNodeName(config.Provider), metav1.GetOptions{}); apierrors.IsNotFound(err) {
				return reconcile.Result{}, nil
			}
		}
		if n, err = c.start(ctx, config); err != nil {
			c.recordFailure(config.Provider, err)
			return reconcile.Result{}, fmt.Errorf("starting the virtual node for %s: %w", config.Provider, err)
		}
		c.mu.Lock()
		c.nodes[config.Provider] = n
		c.mu.Unlock()
	}
	if !config.Terminating {
		return reconcile.Result{}, nil
	}
	if drained, err := n.drain(ctx); err != nil || !drained {
		return reconcile.Result{RequeueAfter: drainInterval}, err
	}
	return reconcile.Result{}, c.delete(ctx, config.Provider)
}

// running returns the running virtual node for a provider, or nil.
func (c *Controller) running(provider string) *virtualNode {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[provider]
}

// stop stops a virtual node; its Node object is not deleted.
func (c *Controller) stop(provider string) {
	c.mu.Lock()
	n := c.nodes[provider]
	delete(c.nodes, provider)
	c.mu.Unlock()
	if n != nil {
		n.stop()
	}
}

// delete stops a virtual node and deletes its Node object. Pods still bound to it
// are left to Kubernetes' pod garbage collection.
func (c *Controller) delete(ctx context.Context, provider string) error {
	c.stop(provider)
	name := broker.VirtualNodeName(provider)
	existing, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading node %s: %w", name, err)
	}
	if !node.IsManaged(existing) {
		return nil
	}
	err = c.Client.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(existing.UID))})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting node %s: %w", name, err)
	}
	c.Log.Info("Deleted a virtual node", "provider", provider, "node", name)
	return nil
}
