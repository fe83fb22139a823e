// Command spillway-broker receives the advertisements of the clusters, chooses providers
// for Reservations, keeps the ledger of holds, and relays the messages with which two
// clusters establish a peering. This file is its flags; package program is the rest.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/exposition"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/program"
)

// The defaults of the leader election: short, because nothing is placed meanwhile.
// A standby looks at the lease after 1 to 2.2 retry periods, which counts twice: the
// lease runs from when the standby has seen it renewed.
const leaseDuration, renewDeadline, retryPeriod = 3 * time.Second, 2500 * time.Millisecond, 300 * time.Millisecond

// The values of --broker-interface.
const interfaceHTTP, interfaceKubernetes = "http", "kubernetes"

type options struct {
	program.Options
	names     list
	transport string
	zap       zap.Options
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
	flags.StringVar(&o.Namespace, "namespace", defaultNamespace(), "Namespace of the broker's objects. Defaults to $POD_NAMESPACE if set.")
	flags.StringVar(&o.Listen, "listen", ":8443", "Bind address of the REST API for agents.")
	flags.Var(&o.names, "tls-san", "DNS names and IP addresses to add to the serving certificate, which has those of the Service already. Comma-separated; can be repeated.")
	flags.DurationVar(&o.ClientValidity, "client-certificate-duration", identity.DefaultClientValidity, "How long the certificates that the broker issues to agents are valid, 10m or more. Agents renew them at two thirds of that.")
	flags.StringVar(&o.CertPath, "tls-cert-path", "", "Directory with tls.crt, tls.key and ca.crt, which another program (such as cert-manager) creates and renews. If set, the broker issues no certificates: it serves with that one, and the common name of a client certificate of that CA is a cluster's ID.")
	flags.StringVar(&o.Page, "page-bind-address", "0", "Bind address of the page for people, such as 127.0.0.1:8444, which kubectl port-forward reaches. At any other address than a loopback one, it is served with TLS. 0 disables it.")
	flags.StringVar(&o.PageCertPath, "page-cert-path", "", "Directory with tls.crt and tls.key for the page, which another program creates and renews. If empty, the page has the certificate of the REST API.")
	flags.StringVar(&o.transport, "broker-interface", interfaceHTTP, "Interface for agents: http, the REST interface, or kubernetes, with which each cluster that an operator has approved has a namespace in the hub besides.")
	flags.StringVar(&o.Metrics, "metrics-bind-address", ":8080", "Bind address of the metrics endpoint. 0 disables it.")
	flags.BoolVar(&o.MetricsSecure, "metrics-secure", false, exposition.Secure)
	flags.StringVar(&o.Probes, "health-probe-bind-address", ":8081", "Bind address of the health probe endpoint. 0 disables it.")
	flags.BoolVar(&o.LeaderElect, "leader-elect", false, "Enable leader election; required with more than one replica.")
	flags.DurationVar(&o.Lease, "leader-elect-lease-duration", leaseDuration, "Time after which a leader that does not renew its lease is replaced, in whole seconds.")
	flags.DurationVar(&o.RenewDeadline, "leader-elect-renew-deadline", renewDeadline, "Time after which a leader that cannot renew its lease exits.")
	flags.DurationVar(&o.RetryPeriod, "leader-elect-retry-period", retryPeriod, "Interval of renewing the lease, and of trying to get it.")
	flags.DurationVar(&o.CatchUp, "leader-elect-catch-up-deadline", program.DefaultCatchUp, "Time after which a new leader exits whose caches are still older than the API server's state.")
	flags.StringVar(&o.History.Path, "history-path", "", "File of the SQLite database in which the history of Reservations is kept. Empty for no history, unless --history-postgres-url-file is set.")
	flags.StringVar(&o.History.URLFile, "history-postgres-url-file", "", "File with the URL of the PostgreSQL database in which the history is kept instead. It is read again for each connection.")
	flags.DurationVar(&o.History.Retention, "history-retention", program.DefaultRetention, "How long the history is kept, 24h or more.")
	flags.StringVar(&o.History.ReferencePrices, "history-reference-prices", "", "Prices of an hour that usage is compared with, such as cpu=0.04,memory=0.005,currency=EUR: of a core, a GiB, a gpu and a GiB of storage.")
	o.zap.BindFlags(flags)
	return flags
}

func defaultNamespace() string {
	return cmp.Or(os.Getenv("POD_NAMESPACE"), broker.SystemNamespace)
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
	if o.transport != interfaceHTTP && o.transport != interfaceKubernetes {
		return o, fmt.Errorf("--broker-interface=%s is not supported: use http or kubernetes", o.transport)
	}
	o.Namespaces = o.transport == interfaceKubernetes
	for _, name := range o.names {
		if net.ParseIP(name) == nil && strings.ContainsAny(name, "[]:/") {
			return o, fmt.Errorf("--tls-san=%s is no DNS name and no IP address: write it without a scheme, brackets and a port", name)
		}
	}
	if o.ClientValidity < 10*time.Minute {
		return o, fmt.Errorf("--client-certificate-duration=%s is too short: set 10m or more", o.ClientValidity)
	}
	return o, nil
}

func main() {
	if len(os.Args) > 1 && commands[os.Args[1]] != nil {
		err := commands[os.Args[1]](ctrl.SetupSignalHandler(), ctrl.GetConfig, os.Args[2:], os.Stdout)
		if err != nil && !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintf(os.Stderr, "spillway-broker %s: %v\n", os.Args[1], err)
			os.Exit(1)
		}
		return
	}
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
	o.Names = o.names
	b, err := program.New(ctx, config, o.Options)
	if err != nil {
		return err
	}
	return b.Start(ctx)
}
