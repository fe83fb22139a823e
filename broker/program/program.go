package program

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/exposition"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/undecoded"
)

// leaseName is the name of the leader election lease.
const leaseName = "spillway-broker"

// workers is the number of concurrent reconciles of each controller: a reconcile waits for the
// API server most of its time, and those that wait for the same ledger share its write.
const workers = 128

// undecodable is the metric of the objects that the broker cannot decode.
var undecodable = undecoded.NewGauge("broker")

func init() { metrics.Registry.MustRegister(undecodable) }

// Options of a Broker.
type Options struct {
	// Namespace of the broker's objects.
	Namespace string
	// Listen, Metrics and Probes are bind addresses; "0" for none, except for Listen.
	Listen, Metrics, Probes string
	// MetricsSecure has the API server decide who may read the metrics.
	MetricsSecure bool
	// Names are those in the serving certificate, besides the Service's.
	Names []string
	// ClientValidity is how long the certificates of agents are valid. CertPath is the directory
	// with the certificates of another authority, empty with the broker's own.
	ClientValidity time.Duration
	CertPath       string
	// Page is the bind address of the page for people; "0" or empty for none. At another address
	// than that of this machine itself, it is served with TLS: with the certificate in PageCertPath
	// or, if that is empty, the broker's.
	Page, PageCertPath string
	// Namespaces is as in Parts.
	Namespaces  bool
	LeaderElect bool
	History     HistoryOptions
	// Lease, RenewDeadline and RetryPeriod are of the leader election, CatchUp is the
	// deadline of a new leader's caches.
	Lease, RenewDeadline, RetryPeriod, CatchUp time.Duration
}

// Broker is a broker for one API server. Start runs it.
type Broker struct {
	ctrl.Manager
	// Address of the REST interface, and the hash of the CA with which agents recognize it.
	Address net.Addr
	CAHash  string
	// PageAddress is nil without a page, also if it could not be set up.
	PageAddress net.Addr
}

// New returns a Broker that listens, and does not serve yet.
func New(ctx context.Context, config *rest.Config, o Options) (*Broker, error) {
	config = rest.CopyConfig(config)
	// The API server limits its clients by itself (API priority and fairness).
	config.QPS = -1
	// Within a cluster, compressing costs the API server more than it saves.
	config.DisableCompression = true
	if o.LeaderElect {
		config.Wrap((&fence{lease: o.Lease, clock: clock.RealClock{}}).wrap)
	}
	objects := undecoded.New(ctrl.Log.WithName("undecoded"), undecodable, clock.RealClock{})
	mgr, err := newManager(config, o, objects)
	if err != nil {
		return nil, err
	}
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return nil, fmt.Errorf("creating the client: %w", err)
	}
	// Of a broker that is run by hand: the chart's has it, and no permission to do it.
	err = live.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.Namespace}})
	if err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("creating namespace %s: %w", o.Namespace, err)
	}
	authority, err := identity.New(ctx, identity.Options{
		Client: live, Cache: mgr.GetClient(), Namespace: o.Namespace, Names: o.Names,
		ClientValidity: o.ClientValidity, CertPath: o.CertPath, Log: ctrl.Log.WithName("identity"),
	})
	if err != nil {
		return nil, err
	}
	if err := mgr.Add(authority); err != nil {
		return nil, fmt.Errorf("adding the certificate authority: %w", err)
	}
	kept, err := o.History.Open()
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return nil, fmt.Errorf("listening for agents: %w", err)
	}
	https, err := Add(mgr, Parts{
		Namespace: o.Namespace, Identity: authority, Listener: listener, CatchUp: o.CatchUp, Clock: clock.RealClock{}, Workers: workers, History: kept,
		Namespaces: o.Namespaces, undecoded: objects, Log: ctrl.Log.WithName("server"),
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(mgr.AddHealthzCheck("ping", healthz.Ping), mgr.AddReadyzCheck("leader", https.Ready)); err != nil {
		return nil, fmt.Errorf("setting up the probes: %w", err)
	}
	b := &Broker{Manager: mgr, Address: listener.Addr(), CAHash: authority.CAHash()}
	if o.Page != "" && o.Page != "0" {
		if b.PageAddress, err = addPage(mgr, o, live, https, authority, kept); err != nil {
			// Clusters need the broker, not its page.
			ctrl.Log.Error(err, "Failed to set up the page: there is none until the broker starts again")
		}
	}
	ctrl.Log.Info("Starting the broker", "namespace", o.Namespace, "caHash", authority.CAHash())
	return b, nil
}

func newManager(config *rest.Config, o Options, objects *undecoded.Objects) (ctrl.Manager, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme,
		Cache: cache.Options{
			DefaultNamespaces: map[string]cache.Config{o.Namespace: {}},
			// Nothing reads them, and they are larger than many of the objects.
			DefaultTransform: cache.TransformStripManagedFields(),
			NewInformer:      objects.NewInformer,
		},
		MapperProvider:                newMapper,
		Metrics:                       exposition.Options(o.Metrics, o.MetricsSecure),
		HealthProbeBindAddress:        o.Probes,
		LeaderElection:                o.LeaderElect,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       o.Namespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 ptr.To(o.Lease),
		RenewDeadline:                 ptr.To(o.RenewDeadline),
		RetryPeriod:                   ptr.To(o.RetryPeriod),
		// The priority queue of controller-runtime v0.23 can deadlock when a manager stops.
		Controller: ctrlconfig.Controller{UsePriorityQueue: ptr.To(false)},
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the manager: %w", err)
	}
	return mgr, mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		objects.Run(ctx, mgr.GetEventRecorder("spillway-broker"))
		return nil
	}))
}
