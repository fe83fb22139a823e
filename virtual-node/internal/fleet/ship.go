package fleet

import (
	"context"
	"crypto/tls"
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
	"k8s.io/client-go/rest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/internal/hosting"
	"github.com/spillway-dev/spillway/virtual-node/internal/kubelet"
	"github.com/spillway-dev/spillway/virtual-node/internal/vnode"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// portsTried is how many ports from the base on are tried.
const portsTried = 50

// ship is one virtual node at work: the Node, its pods, its kubelet API.
type ship struct {
	fleet  *Fleet
	log    logr.Logger
	remote *remote
	host   *hosting.Host
	node   *vnode.Node
	probe  *vnode.Probe
	server *http.Server
	socket net.Listener

	cancel context.CancelFunc
	done   sync.WaitGroup

	mu   sync.Mutex
	link nodeconfig.Config
	last error
}

// launch starts a virtual node. It works until halt.
func (f *Fleet) launch(ctx context.Context, l nodeconfig.Config) (*ship, error) {
	s := &ship{fleet: f, log: f.Log.WithValues("provider", l.Provider), link: l}
	name := broker.VirtualNodeName(l.Provider)
	var err error
	if s.remote, err = newRemote(l.Connection); err != nil {
		return nil, err
	}
	if s.host, err = hosting.New(hosting.Options{
		Provider: l.Provider, Namespace: l.Connection.Namespace, Remote: s.remote.set, Home: f.Home,
		DNS: f.DNS, Recorder: f.Recorder, Clock: f.Clock, Log: s.log.WithName("hosting"),
	}); err != nil {
		return nil, err
	}
	ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	auth, err := kubelet.NewAuth(ctx, f.Home, name)
	if err != nil {
		s.cancel()
		return nil, fmt.Errorf("setting up authentication: %w", err)
	}
	handler, err := kubelet.New(kubelet.Options{NodeName: name, Auth: auth, Guests: s, Clock: f.Clock, Log: s.log.WithName("kubelet")})
	if err != nil {
		s.cancel()
		return nil, err
	}
	if s.socket, err = f.listen(ctx, name); err != nil {
		s.cancel()
		return nil, err
	}
	certificate := f.Certificate
	if certificate == nil {
		made, err := kubelet.Certificate(name, f.Address)
		if err != nil {
			s.cancel()
			s.socket.Close()
			return nil, err
		}
		certificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &made, nil }
	}
	s.server = &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate, ClientAuth: tls.RequestClientCert},
	}
	at := vnode.Address{IP: f.Address, Port: int32(s.socket.Addr().(*net.TCPAddr).Port)}
	s.node = vnode.New(f.Home, l, at, f.Clock, s.log.WithName("node"))
	s.probe = &vnode.Probe{Provider: l.Provider, Namespace: l.Connection.Namespace, Client: s.remote.set, Clock: f.Clock, Tell: s.learn}

	s.log.Info("Starting a virtual node", "endpoint", l.Connection.Endpoint, "guestNamespace", l.Connection.Namespace, "kubeletPort", at.Port)
	s.done.Go(func() { s.probe.Run(ctx) })
	s.done.Go(func() { s.keepUp(ctx, "keeping the node", s.node.Run) })
	s.done.Go(func() {
		if err := s.host.Run(ctx); err != nil && ctx.Err() == nil {
			s.fail(fmt.Errorf("looking after the pods: %w", err))
		}
	})
	s.done.Go(func() {
		if err := s.server.ServeTLS(s.socket, "", ""); !errors.Is(err, http.ErrServerClosed) {
			s.fail(fmt.Errorf("serving the kubelet API: %w", err))
		}
	})
	return s, nil
}

// keepUp runs a part again when it ends early.
func (s *ship) keepUp(ctx context.Context, what string, run func(context.Context) error) {
	for {
		err := run(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.log.Error(err, "A part of a virtual node ended; it is started again", "part", what)
			if errors.Is(err, vnode.ErrTaken) {
				s.fleet.warn(s.link.Provider, err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-s.fleet.Clock.After(time.Second):
		}
	}
}

// fail records that the ship cannot go on: the next look launches another.
func (s *ship) fail(err error) {
	s.log.Error(err, "A virtual node failed; it is started anew")
	s.mu.Lock()
	s.last = err
	s.mu.Unlock()
	s.fleet.wake(s.link.Provider)
}

func (s *ship) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func (s *ship) learn(h vnode.Health) {
	reachable := 0.0
	if h.Ready {
		reachable = 1
	}
	providerReachable.WithLabelValues(s.link.Provider).Set(reachable)
	s.node.SetHealth(h)
	s.host.SetReachable(h.Ready)
}

// halt ends the work. Node, pods and guests stay as they are.
func (s *ship) halt() {
	s.cancel()
	s.server.Close()
	s.done.Wait()
	providerReachable.DeleteLabelValues(s.link.Provider)
}

// fits reports whether a changed link can be taken over without a new start.
func (s *ship) fits(l nodeconfig.Config) bool {
	have := s.remote.connection.Load()
	return have.Endpoint == l.Connection.Endpoint && have.Namespace == l.Connection.Namespace && string(have.CA) == string(l.Connection.CA) && s.failed() == nil
}

// steer takes a changed link over.
func (s *ship) steer(l nodeconfig.Config) {
	s.remote.connection.Store(&l.Connection)
	s.node.SetLink(l)
}

// end lets go of the pods that are still there, and reports whether none is.
func (s *ship) end(ctx context.Context) (done bool, err error) {
	if health := s.node.Health(); !s.host.Listed() || health.Reason == vnode.ReasonConnecting {
		return false, nil // a new start, which has not looked yet
	}
	pods := s.host.HomePods()
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil {
			continue
		}
		err := s.fleet.Home.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return false, fmt.Errorf("deleting pod %s/%s of a node that ends: %w", pod.Namespace, pod.Name, err)
		}
		s.fleet.Recorder.Eventf(pod, nil, corev1.EventTypeNormal, "VirtualNodeEnds", "End", "the virtual node for %s is taken down", s.link.Provider)
	}
	// Of a provider that cannot be reached nothing more will be known.
	return len(pods) == 0 && (s.host.Idle() || !s.node.Health().Ready), nil
}

// Locate implements kubelet.Guests.
func (s *ship) Locate(namespace, pod string) (string, string, bool) {
	return s.host.Locate(namespace, pod)
}

// Provider implements kubelet.Guests.
func (s *ship) Provider() (*rest.Config, error) { return s.remote.config(), nil }

// Pods implements kubelet.Guests.
func (s *ship) Pods() []*corev1.Pod { return s.host.HomePods() }

// listen opens the port that the Node had before, or else the first free one.
func (f *Fleet) listen(ctx context.Context, nodeName string) (net.Listener, error) {
	open := func(port int) (net.Listener, error) {
		var config net.ListenConfig
		return config.Listen(ctx, "tcp", net.JoinHostPort(f.Address, strconv.Itoa(port)))
	}
	if have, err := f.Home.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{}); err == nil && vnode.IsOurs(have) {
		if port := int(have.Status.DaemonEndpoints.KubeletEndpoint.Port); port != 0 {
			if socket, err := open(port); err == nil {
				return socket, nil
			}
		}
	}
	if f.Port == 0 {
		return open(0)
	}
	var last error
	for port := f.Port; port < f.Port+portsTried; port++ {
		socket, err := open(port)
		if err == nil {
			return socket, nil
		}
		last = err
	}
	return nil, fmt.Errorf("no port from %d to %d of %s can be had for the kubelet API of %s: %w", f.Port, f.Port+portsTried-1, f.Address, nodeName, last)
}
