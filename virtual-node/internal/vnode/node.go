package vnode

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/virtual-kubelet/virtual-kubelet/node"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const (
	// leaseSeconds and leaseRenewal are a kubelet's own.
	leaseSeconds = 40
	leaseRenewal = 10 * time.Second
	// statusEvery is how often the status is written with nothing new in it.
	statusEvery = time.Minute
	// repairEvery is how often somebody else's change to the spec is undone.
	repairEvery = 10 * time.Second
)

// ReasonConnecting is that of a provider that has not been asked yet.
const ReasonConnecting = "Connecting"

// ErrTaken says that a Node of the name exists that this program did not make.
var ErrTaken = errors.New("a Node of that name exists that Spillway did not make: rename or remove it")

// Node keeps one Node object.
type Node struct {
	Home  kubernetes.Interface
	Clock clock.Clock
	Log   logr.Logger
	At    Address

	mu     sync.Mutex
	link   nodeconfig.Config
	health Health
	notify func(*corev1.Node)
	// changed has the spec looked at.
	changed chan struct{}
	// told is what the controller was last told; Run's alone.
	told *corev1.Node
}

// New makes the keeper of a link's Node. Nothing happens before Run.
func New(home kubernetes.Interface, l nodeconfig.Config, at Address, clock clock.Clock, log logr.Logger) *Node {
	return &Node{
		Home: home, Clock: clock, Log: log, At: at, link: l, changed: make(chan struct{}, 1),
		health: Health{Reason: ReasonConnecting, Message: "the provider has not been asked yet", Since: clock.Now()},
	}
}

// SetLink takes what the link says now.
func (n *Node) SetLink(l nodeconfig.Config) {
	n.mu.Lock()
	n.link = l
	n.mu.Unlock()
	n.tell()
}

// SetHealth takes what is known of the provider now.
func (n *Node) SetHealth(h Health) {
	n.mu.Lock()
	before := n.health
	n.health = h
	n.mu.Unlock()
	if before.Ready != h.Ready {
		n.Log.Info("The provider's reachability changed", "ready", h.Ready, "reason", h.Reason, "message", h.Message)
	}
	n.tell()
}

// remember takes over what was last known of the provider, until it has been
// asked: a new start of this program is no end of the provider's, and must not
// have the pods there marked as unready.
func (n *Node) remember(have *corev1.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.health.Reason != ReasonConnecting {
		return
	}
	for _, c := range have.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			n.health = Health{Ready: true, Reason: c.Reason, Message: c.Message, Since: c.LastTransitionTime.Time}
		}
	}
}

// Health is what is known of the provider.
func (n *Node) Health() Health {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.health
}

func (n *Node) object() *corev1.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Object(n.link, n.health, n.At)
}

// tell wakes whoever writes.
func (n *Node) tell() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// Run keeps the Node until ctx ends; the object stays. It returns ErrTaken where
// the name is somebody else's, and an error where the Node has been deleted: run
// it again then.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	want := n.object()
	have, err := n.Home.CoreV1().Nodes().Get(ctx, want.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return fmt.Errorf("reading node %s: %w", want.Name, err)
	case !IsOurs(have):
		return fmt.Errorf("node %s: %w", want.Name, ErrTaken)
	case have.DeletionTimestamp != nil:
		return fmt.Errorf("node %s is still going", want.Name)
	}
	if err == nil {
		n.remember(have)
		want = n.object()
	}
	n.told = nil
	controller, err := node.NewNodeController(n, want, n.Home.CoreV1().Nodes(),
		node.WithNodeEnableLeaseV1WithRenewInterval(n.Home.CoordinationV1().Leases(corev1.NamespaceNodeLease), leaseSeconds, leaseRenewal),
		node.WithNodeStatusUpdateInterval(statusEvery),
	)
	if err != nil {
		return fmt.Errorf("setting up node %s: %w", want.Name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- controller.Run(ctx) }()
	defer func() {
		cancel()
		<-controller.Done()
	}()
	select {
	case <-controller.Ready():
	case err := <-ended:
		return fmt.Errorf("registering node %s: %w", want.Name, err)
	}
	for {
		if err := n.write(ctx); err != nil {
			if apierrors.IsNotFound(err) {
				return fmt.Errorf("node %s was deleted: %w", want.Name, err)
			}
			if ctx.Err() == nil {
				n.Log.Error(err, "Writing the node", "node", want.Name)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			return err
		case <-n.changed:
		case <-n.Clock.After(repairEvery):
		}
	}
}

// write brings the spec up to date and passes the status on.
func (n *Node) write(ctx context.Context) error {
	want := n.object()
	have, err := n.Home.CoreV1().Nodes().Get(ctx, want.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if have.Spec.Unschedulable != want.Spec.Unschedulable {
		patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"spec":{"unschedulable":%t}}`, have.UID, want.Spec.Unschedulable)
		if _, err := n.Home.CoreV1().Nodes().Patch(ctx, want.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return fmt.Errorf("cordoning: %w", err)
		}
	}
	if equality.Semantic.DeepEqual(want, n.told) {
		return nil
	}
	n.mu.Lock()
	notify := n.notify
	n.mu.Unlock()
	// It blocks while the controller is busy, and for ever once that has ended.
	done := make(chan struct{})
	go func() {
		defer close(done)
		notify(want.DeepCopy())
	}()
	select {
	case <-done:
		n.told = want
	case <-ctx.Done():
	}
	return nil
}

// Ping implements node.NodeProvider. This program is alive; the provider's
// health stands in the conditions.
func (n *Node) Ping(context.Context) error { return nil }

// NotifyNodeStatus implements node.NodeProvider.
func (n *Node) NotifyNodeStatus(_ context.Context, notify func(*corev1.Node)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.notify = notify
}
