package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// resyncPeriod is the interval after which a deletion of the Node is noticed.
const resyncPeriod = 10 * time.Second

// ErrNotManaged is returned if a Node of the virtual node's name exists that this
// program did not create.
var ErrNotManaged = errors.New("a Node of this name exists that Spillway does not manage; rename or delete it")

// Controller keeps one Node object and its lease.
type Controller struct {
	client  kubernetes.Interface
	clock   clock.Clock
	log     logr.Logger
	address Address

	mu     sync.Mutex
	config nodeconfig.Config
	health Health
	notify func(*corev1.Node)
	// changed requests a reconcile.
	changed chan struct{}
	// notified is the Node last passed to notify; only Run uses it.
	notified *corev1.Node
}

// NewController returns a controller that does nothing before Run.
func NewController(client kubernetes.Interface, config nodeconfig.Config, address Address, clock clock.Clock, log logr.Logger) *Controller {
	return &Controller{
		client: client, clock: clock, log: log, address: address, config: config, changed: make(chan struct{}, 1),
		health: Health{Reason: ReasonConnecting, Message: "The provider has not been probed yet.", Since: clock.Now()},
	}
}

// SetConfig replaces the configuration.
func (c *Controller) SetConfig(config nodeconfig.Config) {
	c.mu.Lock()
	c.config = config
	c.mu.Unlock()
	c.enqueue()
}

// SetHealth replaces the observed state of the provider.
func (c *Controller) SetHealth(h Health) {
	c.mu.Lock()
	before := c.health
	c.health = h
	c.mu.Unlock()
	if before.Ready != h.Ready {
		c.log.Info("Provider reachability changed", "ready", h.Ready, "reason", h.Reason, "message", h.Message)
	}
	c.enqueue()
}

// Health returns the observed state of the provider.
func (c *Controller) Health() Health {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.health
}

// restoreHealth keeps a Node Ready after a restart of this program until the
// provider has been probed: its pods must not be marked as not ready meanwhile.
func (c *Controller) restoreHealth(existing *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.health.Reason != ReasonConnecting {
		return
	}
	for _, condition := range existing.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
			c.health = Health{Ready: true, Reason: condition.Reason, Message: condition.Message, Since: condition.LastTransitionTime.Time}
		}
	}
}

func (c *Controller) desired() *corev1.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Desired(c.config, c.health, c.address)
}

func (c *Controller) enqueue() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// Run keeps the Node until ctx ends; the object is not deleted then. Run returns
// an error if the Node cannot be registered (ErrNotManaged: never) or was deleted;
// the caller may run it again.
func (c *Controller) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	desired := c.desired()
	existing, err := c.client.CoreV1().Nodes().Get(ctx, desired.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return fmt.Errorf("reading node %s: %w", desired.Name, err)
	case !IsManaged(existing):
		return fmt.Errorf("node %s: %w", desired.Name, ErrNotManaged)
	case existing.DeletionTimestamp != nil:
		return fmt.Errorf("node %s is being deleted", desired.Name)
	default:
		c.restoreHealth(existing)
		desired = c.desired()
	}
	c.notified = nil
	// The defaults are a kubelet's: a lease of 40 s, a status update each minute.
	controller, err := vknode.NewNodeController(c, desired, c.client.CoreV1().Nodes(),
		vknode.WithNodeEnableLeaseV1(leases{nodeutil.NodeLeaseV1Client(c.client), desired.Labels[broker.LabelProvider]}, vknode.DefaultLeaseDuration))
	if err != nil {
		return fmt.Errorf("setting up node %s: %w", desired.Name, err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- controller.Run(ctx) }()
	defer func() {
		cancel()
		<-controller.Done()
	}()
	select {
	case <-controller.Ready():
	case err := <-stopped:
		return fmt.Errorf("registering node %s: %w", desired.Name, err)
	}
	for {
		if err := c.reconcile(ctx); err != nil {
			if apierrors.IsNotFound(err) {
				return fmt.Errorf("node %s was deleted: %w", desired.Name, err)
			}
			if ctx.Err() == nil {
				c.log.Error(err, "Failed to update the node; retrying", "node", desired.Name)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-stopped:
			return err
		case <-c.changed:
		case <-c.clock.After(resyncPeriod):
		}
	}
}

// reconcile passes labels and status to virtual-kubelet, which writes them. The spec is set once,
// when the Node is created: an administrator may cordon it.
func (c *Controller) reconcile(ctx context.Context) error {
	desired := c.desired()
	if _, err := c.client.CoreV1().Nodes().Get(ctx, desired.Name, metav1.GetOptions{}); err != nil {
		return err
	}
	if equality.Semantic.DeepEqual(desired, c.notified) {
		return nil
	}
	c.mu.Lock()
	notify := c.notify
	c.mu.Unlock()
	// notify blocks while virtual-kubelet is busy, and forever once it stopped.
	done := make(chan struct{})
	go func() {
		defer close(done)
		notify(desired.DeepCopy())
	}()
	select {
	case <-done:
		c.notified = desired
	case <-ctx.Done():
	}
	return nil
}

// Ping implements vknode.NodeProvider. It reports on this program; the provider's
// state is in the conditions.
func (c *Controller) Ping(context.Context) error { return nil }

// NotifyNodeStatus implements vknode.NodeProvider.
func (c *Controller) NotifyNodeStatus(_ context.Context, notify func(*corev1.Node)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notify = notify
}
