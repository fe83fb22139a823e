// Command spillway-broker receives the advertisements of the clusters, chooses providers
// for Reservations, keeps the ledger of holds, and relays the messages with which two
// clusters establish a peering. This file is wiring only.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

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
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/internal/leadership"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/internal/server"
	"github.com/spillway-dev/spillway/broker/undecoded"
)

const (
	// leaseName is the name of the leader election lease.
	leaseName = "spillway-broker"
	// The defaults of the leader election: short, because nothing is placed meanwhile.
	// A standby looks at the lease after 1 to 2.2 retry periods, which counts twice: the
	// lease runs from when the standby has seen it renewed.
	leaseDuration, renewDeadline, retryPeriod = 3 * time.Second, 2500 * time.Millisecond, 300 * time.Millisecond
)

// undecodable is the metric of the objects that the broker cannot decode.
var undecodable = undecoded.NewGauge("broker")

func init() { metrics.Registry.MustRegister(undecodable) }

type options struct {
	namespace   string
	listen      string
	names       list
	transport   string
	metrics     string
	probes      string
	leaderElect bool
	// lease, renewDeadline and retryPeriod are of the leader election, catchUp is the
	// deadline of a new leader's caches.
	lease, renewDeadline, retryPeriod, catchUp time.Duration
	zap                                        zap.Options
}

// list is a flag that can be repeated and has comma-separated values.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

func (l *list) Set(value string) error {
	for item := range strings.SplitSeq(value, ",") {
		if item = strings.TrimSpace(item); item != "" {
			*l = append(*l, item)
		}
	}
	return nil
}

// flags are the flags of the program, which set the options.
func (o *options) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("spillway-broker", flag.ContinueOnError)
	if kubeconfig := flag.Lookup("kubeconfig"); kubeconfig != nil {
		flags.Var(kubeconfig.Value, kubeconfig.Name, kubeconfig.Usage)
	}
	namespace := os.Getenv("POD_NAMESPACE")
	if namespace == "" {
		namespace = broker.SystemNamespace
	}
	flags.StringVar(&o.namespace, "namespace", namespace, "Namespace of the broker's objects. Defaults to $POD_NAMESPACE if set.")
	flags.StringVar(&o.listen, "listen", ":8443", "Bind address of the REST API for agents.")
	flags.Var(&o.names, "tls-san", "DNS names and IP addresses to add to the serving certificate, which has those of the Service already. Comma-separated; can be repeated.")
	flags.StringVar(&o.transport, "broker-interface", "http", "Interface for agents. Only http is supported.")
	flags.StringVar(&o.metrics, "metrics-bind-address", ":8080", "Bind address of the metrics endpoint. 0 disables it.")
	flags.StringVar(&o.probes, "health-probe-bind-address", ":8081", "Bind address of the health probe endpoint. 0 disables it.")
	flags.BoolVar(&o.leaderElect, "leader-elect", false, "Enable leader election; required with more than one replica.")
	flags.DurationVar(&o.lease, "leader-elect-lease-duration", leaseDuration, "Time after which a leader that does not renew its lease is replaced, in whole seconds.")
	flags.DurationVar(&o.renewDeadline, "leader-elect-renew-deadline", renewDeadline, "Time after which a leader that cannot renew its lease exits.")
	flags.DurationVar(&o.retryPeriod, "leader-elect-retry-period", retryPeriod, "Interval of renewing the lease, and of trying to get it.")
	flags.DurationVar(&o.catchUp, "leader-elect-catch-up-deadline", leadership.DefaultDeadline, "Time after which a new leader exits whose caches are still older than the API server's state.")
	o.zap.BindFlags(flags)
	return flags
}

func parse(arguments []string) (options, error) {
	var o options
	flags := o.flags()
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.transport != "http" {
		return o, fmt.Errorf("--broker-interface=%s is not supported: use http", o.transport)
	}
	return o, nil
}

func main() {
	o, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "spillway-broker:", err)
		os.Exit(2)
	}
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&o.zap)))
	config, err := ctrl.GetConfig()
	if err != nil {
		err = fmt.Errorf("finding the API server (outside of a cluster, set --kubeconfig or KUBECONFIG): %w", err)
	} else {
		err = run(ctrl.SetupSignalHandler(), config, o)
	}
	if err != nil {
		ctrl.Log.Error(err, "Failed to run the broker")
		os.Exit(1)
	}
}

// run runs the broker until ctx ends.
func run(ctx context.Context, config *rest.Config, o options) error {
	// The API server limits its clients by itself (API priority and fairness).
	config.QPS = -1
	// Within a cluster, compressing costs the API server more than it saves.
	config.DisableCompression = true
	if o.leaderElect {
		config = rest.CopyConfig(config)
		config.Wrap((&fence{lease: o.lease, clock: clock.RealClock{}}).wrap)
	}
	specs, objects := &reservation.Specs{}, undecoded.New(ctrl.Log.WithName("undecoded"), undecodable, clock.RealClock{})
	mgr, err := newManager(config, o, specs, objects)
	if err != nil {
		return err
	}
	if err := addControllers(ctx, mgr, o, specs, objects); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

// addControllers adds everything that the manager runs: the controllers of Reservations
// and ClusterAdvertisements, the REST server, and the probes.
func addControllers(ctx context.Context, mgr ctrl.Manager, o options, specs *reservation.Specs, objects *undecoded.Objects) error {
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("creating the client: %w", err)
	}
	authority, err := identity.New(ctx, identity.Options{Client: live, Cache: mgr.GetClient(), Namespace: o.namespace, Names: o.names})
	if err != nil {
		return err
	}
	leader, err := leadership.New(mgr, o.namespace, o.catchUp, clock.RealClock{})
	if err != nil {
		return fmt.Errorf("setting up the leadership: %w", err)
	}
	objects.Observe(leader.Observe)
	receipts := server.NewReceipts(clock.RealClock{})
	reservations := reservation.New(leader, reservation.Options{Namespace: o.namespace, Freshness: receipts, Specs: specs})
	if err := reservations.SetupWithManager(leader); err != nil {
		return fmt.Errorf("setting up the reservation controllers: %w", err)
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listening for agents: %w", err)
	}
	https, err := server.New(leader, server.Options{
		Listener:   listener,
		Namespace:  o.namespace,
		Identity:   authority,
		Reconciler: reservations,
		Receipts:   receipts,
		Observed:   leader.Observe,
		Log:        ctrl.Log.WithName("server"),
	})
	if err != nil {
		return fmt.Errorf("setting up the server: %w", err)
	}
	if err := errors.Join(mgr.AddHealthzCheck("ping", healthz.Ping), mgr.AddReadyzCheck("leader", https.Ready)); err != nil {
		return fmt.Errorf("setting up the probes: %w", err)
	}
	ctrl.Log.Info("Starting the broker", "namespace", o.namespace, "caHash", authority.CAHash())
	return nil
}

func newManager(config *rest.Config, o options, specs *reservation.Specs, objects *undecoded.Objects) (ctrl.Manager, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme,
		Cache: cache.Options{
			DefaultNamespaces: map[string]cache.Config{o.namespace: {}},
			// Nothing reads them, and they are larger than many of the objects.
			DefaultTransform: specs.Transform(cache.TransformStripManagedFields()),
			NewInformer:      objects.NewInformer,
		},
		MapperProvider:                newMapper,
		Metrics:                       metricsserver.Options{BindAddress: o.metrics},
		HealthProbeBindAddress:        o.probes,
		LeaderElection:                o.leaderElect,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       o.namespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 ptr.To(o.lease),
		RenewDeadline:                 ptr.To(o.renewDeadline),
		RetryPeriod:                   ptr.To(o.retryPeriod),
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
