// Command spillway-virtual-node is a virtual kubelet for providers of driver
// direct: it runs all virtual nodes of a cluster. This file is wiring.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

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

	"github.com/spillway-dev/spillway/broker/election"
	"github.com/spillway-dev/spillway/broker/exposition"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/virtual-node/internal/controller"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// program is the name of the binary, of the leader election's Lease, and of the
// reporter of Events.
const program = "spillway-virtual-node"

type options struct {
	namespace, address, certDir, metrics, probes string
	port                                         int
	leaderElect, metricsSecure                   bool
	dns                                          translate.Options
	networks                                     []netip.Prefix
	zap                                          zap.Options
}

func main() {
	o, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, err)
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
		ctrl.Log.Error(err, "Failed to run the virtual kubelet")
		os.Exit(1)
	}
}

func parse(arguments []string) (options, error) {
	var o options
	flags := flag.NewFlagSet(program, flag.ContinueOnError)
	if kubeconfig := flag.Lookup("kubeconfig"); kubeconfig != nil {
		flags.Var(kubeconfig.Value, kubeconfig.Name, kubeconfig.Usage)
	}
	flags.StringVar(&o.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "Namespace of the Secrets in which the agent configures virtual nodes. Defaults to $POD_NAMESPACE.")
	flags.StringVar(&o.address, "kubelet-address", os.Getenv("POD_IP"), "IP address at which the API server reaches the kubelet APIs. Defaults to $POD_IP.")
	flags.IntVar(&o.port, "kubelet-port", 10250, "First port for kubelet APIs; each further virtual node uses the next free port. 0 chooses any free port.")
	flags.StringVar(&o.certDir, "tls-cert-dir", "", "Directory with tls.crt and tls.key for the kubelet APIs, for API servers with --kubelet-certificate-authority. Defaults to self-signed certificates.")
	flags.Func("cluster-dns", "IP addresses of this cluster's DNS servers, if guests can reach them. Comma-separated. If empty, guests use the provider's DNS and cannot resolve this cluster's Services.", o.parseClusterDNS)
	flags.StringVar(&o.dns.ClusterDomain, "cluster-domain", "cluster.local", "DNS domain of this cluster.")
	flags.Func("provider-networks", "Networks (CIDR) of the providers' pods, as this cluster reaches them. Comma-separated. A guest whose provider reports an address outside of them has no address here.", func(value string) (err error) {
		o.networks, err = guest.ParseNetworks(value)
		return err
	})
	flags.StringVar(&o.metrics, "metrics-bind-address", ":8080", "Bind address of the metrics endpoint. 0 disables it.")
	flags.BoolVar(&o.metricsSecure, "metrics-secure", false, exposition.Secure)
	flags.StringVar(&o.probes, "health-probe-bind-address", ":8081", "Bind address of the health probe endpoint. 0 disables it.")
	flags.BoolVar(&o.leaderElect, "leader-elect", false, "Enable leader election; required with more than one replica.")
	o.zap.BindFlags(flags)
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.namespace == "":
		return o, errors.New("--namespace is required outside of a pod")
	case net.ParseIP(o.address) == nil:
		return o, fmt.Errorf("--kubelet-address=%q is not an IP address", o.address)
	case o.port < 0 || o.port > 65000:
		return o, fmt.Errorf("--kubelet-port=%d is not a port from 0 to 65000", o.port)
	}
	return o, nil
}

func (o *options) parseClusterDNS(value string) error {
	for item := range strings.SplitSeq(value, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		if net.ParseIP(item) == nil {
			return fmt.Errorf("%q is not an IP address", item)
		}
		o.dns.ClusterDNS = append(o.dns.ClusterDNS, item)
	}
	return nil
}

// run runs the program until ctx ends.
func run(ctx context.Context, config *rest.Config, o options) error {
	config = controller.HomeConfig(config)
	managed := election.Options(config, o.leaderElect, o.namespace, program)
	managed.Scheme = clientgoscheme.Scheme
	managed.Cache.ByObject = map[client.Object]cache.ByObject{
		&corev1.Secret{}: {
			Namespaces: map[string]cache.Config{o.namespace: {}},
			Label:      labels.SelectorFromSet(labels.Set{nodeconfig.LabelComponent: nodeconfig.Component}),
		},
	}
	managed.Metrics, managed.HealthProbeBindAddress = exposition.Options(o.metrics, o.metricsSecure), o.probes
	mgr, err := ctrl.NewManager(config, managed)
	if err != nil {
		return fmt.Errorf("setting up the manager: %w", err)
	}
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("creating a client: %w", err)
	}
	nodes := controller.Options{
		Namespace: o.namespace, Client: clientset, Recorder: mgr.GetEventRecorder(program),
		Address: o.address, Port: o.port, DNS: o.dns, Networks: o.networks, Clock: clock.RealClock{}, Log: ctrl.Log.WithName("controller"),
	}
	if o.certDir != "" {
		certificates, err := certwatcher.New(filepath.Join(o.certDir, "tls.crt"), filepath.Join(o.certDir, "tls.key"))
		if err != nil {
			return fmt.Errorf("reading the certificate in %s: %w", o.certDir, err)
		}
		if err := mgr.Add(certificates); err != nil {
			return err
		}
		nodes.Certificate = certificates.GetCertificate
	}
	if err := errors.Join(
		controller.New(nodes).SetupWithManager(mgr),
		mgr.AddHealthzCheck("ping", healthz.Ping),
		mgr.AddReadyzCheck("ping", healthz.Ping),
	); err != nil {
		return fmt.Errorf("setting up: %w", err)
	}
	return mgr.Start(ctx)
}
