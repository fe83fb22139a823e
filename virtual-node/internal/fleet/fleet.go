// Package fleet runs one virtual node for each link that the agent has written
// down, and ends it with the link.
package fleet

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
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
	"github.com/spillway-dev/spillway/virtual-node/internal/guest"
	"github.com/spillway-dev/spillway/virtual-node/internal/vnode"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// endingEvery is how often an ending node is looked at.
const endingEvery = time.Second

var providerReachable = prometheus.NewGaugeVec(prometheus.GaugeOpts{
	Name: "virtual_node_provider_reachable",
	Help: "1 where a provider answers and lets this cluster in, 0 where not.",
}, []string{"provider"})

func init() { metrics.Registry.MustRegister(providerReachable) }

// Options of a Fleet.
type Options struct {
	// Namespace of the links.
	Namespace string
	Home      kubernetes.Interface
	Recorder  events.EventRecorder
	// Address is where the API server reaches this program, Port the first port
	// of the kubelet APIs, any where 0.
	Address string
	Port    int
	// Certificate for the kubelet APIs; self-signed ones are made where nil.
	Certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	DNS         guest.Options
	Clock       clock.WithTicker
	Log         logr.Logger
}

// Fleet is all virtual nodes of a cluster.
type Fleet struct {
	Options
	client client.Client
	woken  chan event.GenericEvent

	mu    sync.Mutex
	ships map[string]*ship
}

// New makes a Fleet without a ship.
func New(o Options) *Fleet {
	return &Fleet{Options: o, woken: make(chan event.GenericEvent, 64), ships: map[string]*ship{}}
}

// SetupWithManager adds it to a manager, whose cache must hold the links.
func (f *Fleet) SetupWithManager(mgr ctrl.Manager) error {
	f.client = mgr.GetClient()
	err := ctrl.NewControllerManagedBy(mgr).Named("links").
		For(&corev1.Secret{}).
		WatchesRawSource(source.Channel(f.woken, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(reconcile.Func(f.reconcile))
	if err != nil {
		return fmt.Errorf("watching links: %w", err)
	}
	return mgr.Add(manager.RunnableFunc(f.run))
}

// run sweeps Nodes whose link has gone while nobody looked, and halts the ships
// at the end.
func (f *Fleet) run(ctx context.Context) error {
	nodes, err := f.Home.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: nodeconfig.LabelComponent + "=" + vnode.Component})
	if err != nil {
		return fmt.Errorf("listing virtual nodes: %w", err)
	}
	for i := range nodes.Items {
		if provider := nodes.Items[i].Labels[broker.LabelProvider]; provider != "" {
			f.wake(provider)
		}
	}
	<-ctx.Done()
	f.mu.Lock()
	ships := slices.Collect(maps.Values(f.ships))
	clear(f.ships)
	f.mu.Unlock()
	var halting sync.WaitGroup
	for _, s := range ships {
		halting.Go(s.halt)
	}
	halting.Wait()
	return nil
}

// wake has a provider's link looked at.
func (f *Fleet) wake(provider string) {
	f.woken <- event.GenericEvent{Object: &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: f.Namespace, Name: nodeconfig.SecretName(provider), Labels: map[string]string{broker.LabelProvider: provider}}}}
}

// warn tells people of trouble with a link.
func (f *Fleet) warn(provider string, err error) {
	about := &corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Namespace: f.Namespace, Name: nodeconfig.SecretName(provider)}
	f.Recorder.Eventf(about, nil, corev1.EventTypeWarning, "VirtualNodeTrouble", "Run", "%.900s", err.Error())
}

func (f *Fleet) reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var secret corev1.Secret
	err := f.client.Get(ctx, request.NamespacedName, &secret)
	provider := nodeconfig.ProviderOf(request.Name)
	switch {
	case apierrors.IsNotFound(err):
		return reconcile.Result{}, f.scuttle(ctx, provider)
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("reading link %s: %w", request.Name, err)
	}
	l, err := nodeconfig.FromSecret(&secret)
	if err != nil {
		f.warn(provider, err)
		f.Log.Error(err, "A link cannot be read")
		return reconcile.Result{}, nil
	}
	s := f.ship(l.Provider)
	if s != nil && !s.fits(l) {
		f.drop(l.Provider)
		s = nil
	}
	if s == nil {
		if l.Terminating && !f.stands(ctx, l.Provider) {
			return reconcile.Result{}, nil
		}
		if s, err = f.launch(ctx, l); err != nil {
			f.warn(l.Provider, err)
			return reconcile.Result{}, fmt.Errorf("starting the virtual node for %s: %w", l.Provider, err)
		}
		f.mu.Lock()
		f.ships[l.Provider] = s
		f.mu.Unlock()
	}
	s.steer(l)
	if !l.Terminating {
		return reconcile.Result{}, nil
	}
	done, err := s.end(ctx)
	if err != nil || !done {
		return reconcile.Result{RequeueAfter: endingEvery}, err
	}
	return reconcile.Result{}, f.scuttle(ctx, l.Provider)
}

func (f *Fleet) ship(provider string) *ship {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ships[provider]
}

// drop halts a ship. Its Node stays.
func (f *Fleet) drop(provider string) {
	f.mu.Lock()
	s := f.ships[provider]
	delete(f.ships, provider)
	f.mu.Unlock()
	if s != nil {
		s.halt()
	}
}

// stands reports whether a provider's Node is there.
func (f *Fleet) stands(ctx context.Context, provider string) bool {
	_, err := f.Home.CoreV1().Nodes().Get(ctx, broker.VirtualNodeName(provider), metav1.GetOptions{})
	return !apierrors.IsNotFound(err)
}

// scuttle halts a ship and removes its Node. Pods that are still bound to it go
// the way of every pod whose node is gone.
func (f *Fleet) scuttle(ctx context.Context, provider string) error {
	f.drop(provider)
	name := broker.VirtualNodeName(provider)
	have, err := f.Home.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading node %s: %w", name, err)
	}
	if !vnode.IsOurs(have) {
		return nil
	}
	err = f.Home.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(have.UID))})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting node %s: %w", name, err)
	}
	f.Log.Info("Removed a virtual node", "provider", provider)
	return nil
}
