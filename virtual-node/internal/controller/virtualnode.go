package controller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/internal/kubelet"
	"github.com/spillway-dev/spillway/virtual-node/internal/node"
	"github.com/spillway-dev/spillway/virtual-node/internal/pods"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const (
	// maxPorts is the number of ports from Options.Port that are tried.
	maxPorts = 50
	// restartDelay is the time from a failure of the Node controller to its restart.
	restartDelay = time.Second
	// guestsEndWithin is how long a terminating virtual node without pods waits for guests that
	// its provider still reports. No guest may terminate for more than an hour.
	guestsEndWithin = 70 * time.Minute
)

// virtualNode is one running virtual node.
type virtualNode struct {
	controller *Controller
	name       string
	// providerID is the provider's cluster ID.
	providerID string
	log        logr.Logger
	provider   *provider
	pods       *pods.Handler
	node       *node.Controller
	server     *http.Server

	cancel  context.CancelFunc
	running sync.WaitGroup

	// guestsSince is since when drain waits for guests only. Only drain uses it.
	guestsSince time.Time

	mu sync.Mutex
	// failed is whether the virtual node has to be started again.
	failed bool
}

// guests implements kubelet.Guests.
type guests struct {
	*pods.Handler
	*provider
}

// start starts a virtual node, which runs until stop.
func (c *Controller) start(ctx context.Context, config nodeconfig.Config) (n *virtualNode, err error) {
	n = &virtualNode{
		controller: c, name: broker.VirtualNodeName(config.Provider), providerID: config.Provider,
		log: c.Log.WithValues("provider", config.Provider),
	}
	if n.provider, err = newProvider(config.Connection); err != nil {
		return nil, err
	}
	if n.pods, err = pods.New(pods.Options{
		Provider: n.providerID, GuestNamespace: config.Connection.Namespace, ProviderClient: n.provider.client, ConsumerClient: c.Client,
		DNS: c.DNS, Networks: c.Networks, Recorder: c.Recorder, Clock: c.Clock, Log: n.log.WithName("pods"),
	}); err != nil {
		return nil, err
	}
	n.pods.SetTerminating(config.Terminating)
	ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	listener, err := n.setupServer(ctx)
	if err != nil {
		n.cancel()
		return nil, err
	}
	address := node.Address{IP: c.Address, Port: int32(listener.Addr().(*net.TCPAddr).Port)}
	n.node = node.NewController(c.Client, config, address, c.Clock, n.log.WithName("node"))
	prober := &node.Prober{Provider: n.providerID, Namespace: config.Connection.Namespace, Client: n.provider.client, Clock: c.Clock, Report: n.setHealth}

	n.log.Info("Starting a virtual node", "node", n.name, "endpoint", config.Connection.Endpoint, "guestNamespace", config.Connection.Namespace, "kubeletPort", address.Port)
	n.running.Go(func() { prober.Run(ctx) })
	n.running.Go(func() { n.runNode(ctx) })
	n.running.Go(func() { n.pods.Run(ctx) })
	n.running.Go(func() {
		if err := n.server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			n.fail(fmt.Errorf("serving the kubelet API: %w", err))
		}
	})
	return n, nil
}

// setupServer creates the server of the kubelet API, and its listener.
func (n *virtualNode) setupServer(ctx context.Context) (net.Listener, error) {
	c := n.controller
	auth, err := kubelet.NewAuth(ctx, c.Client, n.name)
	if err != nil {
		return nil, fmt.Errorf("setting up authentication: %w", err)
	}
	handler, err := kubelet.New(kubelet.Options{NodeName: n.name, Auth: auth, Guests: guests{n.pods, n.provider}, Clock: c.Clock, Log: n.log.WithName("kubelet")})
	if err != nil {
		return nil, err
	}
	certificate := c.Certificate
	if certificate == nil {
		if certificate, err = kubelet.SelfSignedCertificate(n.name, net.ParseIP(c.Address)); err != nil {
			return nil, err
		}
	}
	n.server = &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		TLSConfig: kubelet.TLSConfig(certificate),
	}
	return c.listen(ctx, n.name)
}

// listen opens the port that the Node had before, else the first free one.
func (c *Controller) listen(ctx context.Context, nodeName string) (net.Listener, error) {
	open := func(port int) (net.Listener, error) {
		var config net.ListenConfig
		return config.Listen(ctx, "tcp", net.JoinHostPort(c.Address, strconv.Itoa(port)))
	}
	if existing, err := c.Client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{}); err == nil && node.IsManaged(existing) {
		if port := int(existing.Status.DaemonEndpoints.KubeletEndpoint.Port); port != 0 {
			if listener, err := open(port); err == nil {
				return listener, nil
			}
		}
	}
	if c.Port == 0 {
		return open(0)
	}
	var lastErr error
	for port := c.Port; port < c.Port+maxPorts; port++ {
		listener, err := open(port)
		if err == nil {
			return listener, nil
		}
		lastErr = err
	}
	return nil, fmt.Errorf("listening for the kubelet API of %s: no free port from %d to %d on %s: %w", nodeName, c.Port, c.Port+maxPorts-1, c.Address, lastErr)
}

// runNode keeps the Node object, and registers it again after an error.
func (n *virtualNode) runNode(ctx context.Context) {
	for {
		err := n.node.Run(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			n.log.Error(err, "Node controller stopped; restarting", "node", n.name)
			if errors.Is(err, node.ErrNotManaged) {
				n.controller.recordFailure(n.providerID, err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-n.controller.Clock.After(restartDelay):
		}
	}
}

// fail makes the next reconcile start the virtual node again.
func (n *virtualNode) fail(err error) {
	n.log.Error(err, "Virtual node failed; restarting", "node", n.name)
	n.mu.Lock()
	n.failed = true
	n.mu.Unlock()
	n.controller.enqueue(n.providerID)
}

func (n *virtualNode) setHealth(h node.Health) {
	reachable := 0.0
	if h.Ready {
		reachable = 1
	}
	providerReachable.WithLabelValues(n.providerID).Set(reachable)
	n.node.SetHealth(h)
	n.pods.SetReachable(h.Ready)
}

// stop stops the virtual node. The Node object, pods and guests are not deleted.
func (n *virtualNode) stop() {
	n.cancel()
	n.server.Close()
	n.running.Wait()
	providerReachable.DeleteLabelValues(n.providerID)
}

// update applies a changed configuration. It returns false if the virtual node has
// to be started again.
func (n *virtualNode) update(config nodeconfig.Config) bool {
	n.mu.Lock()
	failed := n.failed
	n.mu.Unlock()
	if failed || !n.provider.update(config.Connection) {
		return false
	}
	n.pods.SetTerminating(config.Terminating)
	n.node.SetConfig(config)
	return true
}

// drain deletes the pods of the virtual node, and reports whether none is left.
func (n *virtualNode) drain(ctx context.Context) (drained bool, err error) {
	if !n.pods.PodsSynced() || n.node.Health().Reason == node.ReasonConnecting {
		return false, nil // just started
	}
	remaining := 0
	for pod := range n.pods.Pods() {
		remaining++
		if pod.DeletionTimestamp != nil {
			continue
		}
		err := n.controller.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return false, fmt.Errorf("draining %s: deleting pod %s/%s: %w", n.name, pod.Namespace, pod.Name, err)
		}
		n.controller.Recorder.Eventf(pod, nil, corev1.EventTypeNormal, reasonTerminating, "Drain", "Deleted the pod because virtual node %s is terminating.", n.name)
	}
	return n.drained(remaining, !n.pods.HasNoGuests(), n.node.Health().Ready), nil
}

// drained reports whether a virtual node with a number of pods has nothing left that is waited
// for: guests that its provider still reports must not keep it for too long, and those at an
// unreachable provider are not waited for.
func (n *virtualNode) drained(pods int, guests, reachable bool) bool {
	if pods > 0 || !guests || !reachable {
		n.guestsSince = time.Time{}
		return pods == 0
	}
	now := n.controller.Clock.Now()
	if n.guestsSince.IsZero() {
		n.guestsSince = now
	}
	if now.Sub(n.guestsSince) < guestsEndWithin {
		return false
	}
	n.controller.recordFailure(n.providerID, fmt.Errorf("provider %s still reports guests %s after their pods have ended; the virtual node is removed without waiting for them", n.providerID, guestsEndWithin))
	return true
}
