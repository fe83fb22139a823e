// Command spillway-broker is the hub: it takes in what clusters offer, chooses
// providers for what clusters ask, keeps the ledger of what is promised, and
// relays the messages with which two clusters link up. This file is wiring.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/internal/server"
)

// leaseName is the lease that brokers of one namespace lead by.
const leaseName = "spillway-broker"

type options struct {
	namespace   string
	listen      string
	names       list
	transport   string
	metrics     string
	probes      string
	leaderElect bool
	zap         zap.Options
}

// list is a flag that may be given several times, and takes commas.
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

func parse(arguments []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("spillway-broker", flag.ContinueOnError)
	namespace := os.Getenv("POD_NAMESPACE")
	if namespace == "" {
		namespace = broker.SystemNamespace
	}
	flags.StringVar(&o.namespace, "namespace", namespace, "Namespace of the broker's objects. Taken from $POD_NAMESPACE where that is set.")
	flags.StringVar(&o.listen, "listen", ":8443", "Address that agents connect to.")
	flags.Var(&o.names, "tls-san", "DNS name or IP address by which agents know the broker, besides its Service's. May be repeated, or list several with commas.")
	flags.StringVar(&o.transport, "broker-interface", "http", "How agents reach the broker. This release has http only.")
	flags.StringVar(&o.metrics, "metrics-bind-address", ":8080", "Address of the metrics; 0 turns them off.")
	flags.StringVar(&o.probes, "health-probe-bind-address", ":8081", "Address of the probes.")
	flags.BoolVar(&o.leaderElect, "leader-elect", false, "Let one of several replicas lead. Needed with more than one.")
	o.zap.BindFlags(flags)
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.transport != "http" {
		return o, fmt.Errorf("--broker-interface=%s is not in this release: only http is", o.transport)
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
	if err == nil {
		err = run(ctrl.SetupSignalHandler(), config, o)
	}
	if err != nil {
		ctrl.Log.Error(err, "The broker ended")
		os.Exit(1)
	}
}

// run is the broker until ctx ends.
func run(ctx context.Context, config *rest.Config, o options) error {
	config.QPS, config.Burst = 200, 400
	mgr, err := newManager(config, o)
	if err != nil {
		return err
	}
	// Keys and registrations are read from the API server itself.
	live, err := client.New(config, client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	authority, err := identity.New(ctx, identity.Options{Client: live, Cache: mgr.GetClient(), Namespace: o.namespace, Names: o.names})
	if err != nil {
		return err
	}
	receipts := server.NewReceipts(clock.RealClock{})
	core := reservation.New(mgr, reservation.Options{Namespace: o.namespace, Freshness: receipts})
	if err := core.SetupWithManager(mgr); err != nil {
		return fmt.Errorf("setting up reservations: %w", err)
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listening for agents: %w", err)
	}
	https, err := server.New(mgr, server.Options{
		Listener:  listener,
		Namespace: o.namespace,
		Identity:  authority,
		Core:      core,
		Receipts:  receipts,
		Log:       ctrl.Log.WithName("server"),
	})
	if err != nil {
		return fmt.Errorf("setting up the server: %w", err)
	}
	if err := errors.Join(mgr.AddHealthzCheck("ping", healthz.Ping), mgr.AddReadyzCheck("leads", https.Ready)); err != nil {
		return fmt.Errorf("setting up the probes: %w", err)
	}
	ctrl.Log.Info("Starting", "namespace", o.namespace, "caHash", authority.CAHash())
	return mgr.Start(ctx)
}

func newManager(config *rest.Config, o options) (ctrl.Manager, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                        scheme,
		Cache:                         cache.Options{DefaultNamespaces: map[string]cache.Config{o.namespace: {}}},
		Metrics:                       metricsserver.Options{BindAddress: o.metrics},
		HealthProbeBindAddress:        o.probes,
		LeaderElection:                o.leaderElect,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       o.namespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the manager: %w", err)
	}
	return mgr, nil
}
