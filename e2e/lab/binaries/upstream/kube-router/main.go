// Command kube-router is kube-router's network policy controller alone: it enforces
// the NetworkPolicies of a node's pods with iptables and ipset. Its original main also
// needs the packages of a router and of a service proxy.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"github.com/spf13/pflag"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kube-router:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := pflag.NewFlagSet("kube-router", pflag.ContinueOnError)
	config := options.NewKubeRouterConfig()
	flags.StringVar(&config.HostnameOverride, "hostname-override", "", "Name of this node.")
	flags.StringSliceVar(&config.ClusterIPCIDRs, "service-cluster-ip-range", nil, "CIDR of Services.")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config.EnableIPv4, config.EnableIPv6, config.NodePortRange = true, false, "30000-32767"
	config.IPTablesSyncPeriod = time.Minute

	access, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(access)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	pods, namespaces := factory.Core().V1().Pods().Informer(), factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), pods.HasSynced, namespaces.HasSynced, policies.HasSynced) {
		return ctx.Err()
	}
	tables, sets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return err
	}
	controller, err := netpol.NewNetworkPolicyController(client, config, pods, policies, namespaces, &sync.Mutex{}, tables, sets)
	if err != nil {
		return err
	}
	_, podsErr := pods.AddEventHandler(controller.PodEventHandler)
	_, namespacesErr := namespaces.AddEventHandler(controller.NamespaceEventHandler)
	_, policiesErr := policies.AddEventHandler(controller.NetworkPolicyEventHandler)
	if err := errors.Join(podsErr, namespacesErr, policiesErr); err != nil {
		return err
	}
	beats := make(chan *healthcheck.ControllerHeartbeat)
	go func() {
		for {
			select {
			case <-beats:
			case <-ctx.Done():
				return
			}
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	controller.Run(beats, ctx.Done(), &running)
	running.Wait()
	return nil
}
