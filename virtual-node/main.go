// Command spillway-virtual-node is a virtual kubelet for providers that are
// linked without Liqo: it serves all of a cluster's direct virtual nodes. This
// file is wiring.
package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/spillway-dev/spillway/virtual-node/internal/fleet"
	"github.com/spillway-dev/spillway/virtual-node/internal/guest"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// leaseName is the lease that decides which of several processes serves.
const leaseName = "spillway-virtual-node"

type options struct {
	namespace, address, certDir, metrics, probes string
	port                                         int
	leaderElect                                  bool
	dns                                          guest.Options
	zap                                          zap.Options
}

func main() {
	o, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "spillway-virtual-node:", err)
		os.Exit(2)
	}
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&o.zap)))
	config, err := ctrl.GetConfig()
	if err == nil {
		err = run(ctrl.SetupSignalHandler(), config, o)
	}
	if err != nil {
		ctrl.Log.Error(err, "The virtual node program ended")
		os.Exit(1)
	}
}

func parse(arguments []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("spillway-virtual-node", flag.ContinueOnError)
	if kubeconfig := flag.Lookup("kubeconfig"); kubeconfig != nil {
		flags.Var(kubeconfig.Value, kubeconfig.Name, kubeconfig.Usage)
	}
	flags.StringVar(&o.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "Namespace of the links that the agent writes; by default $POD_NAMESPACE.")
	flags.StringVar(&o.address, "kubelet-address", os.Getenv("POD_IP"), "IP address at which the API server reaches this program; by default $POD_IP.")
	flags.IntVar(&o.port, "kubelet-port", 10250, "First port of the kubelet APIs: each virtual node has its own, the next free one. 0 for any.")
	flags.StringVar(&o.certDir, "tls-cert-dir", "", "Directory with tls.crt and tls.key for the kubelet APIs, for API servers that check them (--kubelet-certificate-authority). Self-signed ones are made where empty.")
	flags.Func("cluster-dns", "IP addresses of this cluster's DNS, with commas, where pods at providers reach them. Otherwise guests use the provider's resolver and know no Service of this cluster by name.", func(text string) error {
		for item := range strings.SplitSeq(text, ",") {
			if item = strings.TrimSpace(item); item == "" {
				continue
			}
			if net.ParseIP(item) == nil {
				return fmt.Errorf("%q is not an IP address", item)
			}
			o.dns.ClusterDNS = append(o.dns.ClusterDNS, item)
		}
		return nil
	})
	flags.StringVar(&o.dns.ClusterDomain, "cluster-domain", "cluster.local", "This cluster's DNS domain.")
	flags.StringVar(&o.metrics, "metrics-bind-address", ":8080", "Address of the metrics; 0 turns them off.")
	flags.StringVar(&o.probes, "health-probe-bind-address", ":8081", "Address of the probes.")
	flags.BoolVar(&o.leaderElect, "leader-elect", false, "Let one of several processes serve.")
	o.zap.BindFlags(flags)
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.namespace == "":
		return o, errors.New("--namespace is needed outside of a pod")
	case net.ParseIP(o.address) == nil:
		return o, fmt.Errorf("--kubelet-address=%q is not an IP address", o.address)
	case o.port < 0 || o.port > 65000:
		return o, fmt.Errorf("--kubelet-port=%d is not a port from 0 to 65000", o.port)
	}
	return o, nil
}

// run serves until ctx ends.
func run(ctx context.Context, config *rest.Config, o options) error {
	config.QPS, config.Burst = 200, 400
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: clientgoscheme.Scheme,
		Cache: cache.Options{ByObject: map[client.Object]cache.ByObject{
			&corev1.Secret{}: {
				Namespaces: map[string]cache.Config{o.namespace: {}},
				Label:      labels.SelectorFromSet(labels.Set{nodeconfig.LabelComponent: nodeconfig.Component}),
			},
		}},
		Metrics:                       metricsserver.Options{BindAddress: o.metrics},
		HealthProbeBindAddress:        o.probes,
		LeaderElection:                o.leaderElect,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       o.namespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return fmt.Errorf("setting up the manager: %w", err)
	}
	home, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	var certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	if o.certDir != "" {
		watcher, err := certwatcher.New(filepath.Join(o.certDir, "tls.crt"), filepath.Join(o.certDir, "tls.key"))
		if err != nil {
			return fmt.Errorf("reading the certificate in %s: %w", o.certDir, err)
		}
		if err := mgr.Add(watcher); err != nil {
			return err
		}
		certificate = watcher.GetCertificate
	}
	o.dns.ClusterDomain = cmp.Or(o.dns.ClusterDomain, "cluster.local")
	ships := fleet.New(fleet.Options{
		Namespace: o.namespace, Home: home, Recorder: mgr.GetEventRecorder("spillway-virtual-node"),
		Address: o.address, Port: o.port, Certificate: certificate, DNS: o.dns,
		Clock: clock.RealClock{}, Log: ctrl.Log.WithName("fleet"),
	})
	if err := errors.Join(
		mgr.AddHealthzCheck("ping", healthz.Ping),
		mgr.AddReadyzCheck("ping", healthz.Ping),
		ships.SetupWithManager(mgr),
	); err != nil {
		return fmt.Errorf("setting up: %w", err)
	}
	return mgr.Start(ctx)
}
