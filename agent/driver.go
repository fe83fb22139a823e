package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/direct"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
)

// What --driver may say.
const (
	driverLiqo   = "liqo"
	driverDirect = "direct"
)

// recognizer knows guests and virtual nodes of every driver: those of another one
// than --driver may still run here.
var recognizer = inventory.Recognizer{
	Guest:       inventory.AnyOf(direct.RecognizeGuest, liqo.RecognizeGuest),
	VirtualNode: liqo.RecognizeVirtualNode,
}

// addDriverToScheme adds the types of the chosen driver: Liqo's are unknown in a
// cluster without it.
func addDriverToScheme(scheme *runtime.Scheme, o options) error {
	if o.driver == driverLiqo {
		return liqo.AddToScheme(scheme)
	}
	return nil
}

// driverCache is what the chosen driver has the manager's cache keep.
func driverCache(o options) (map[client.Object]cache.ByObject, error) {
	if o.driver == driverDirect {
		return direct.CacheByObject(o.virtualNodeNamespace)
	}
	return map[client.Object]cache.ByObject{}, nil
}

// ground is what any driver stands on.
type ground struct {
	// client reads and writes at the API server itself.
	client    client.Client
	config    *rest.Config
	clusterID string
	messenger peering.Messenger
	// enqueueConsumer and enqueueProvider are told of which cluster there is news.
	enqueueConsumer, enqueueProvider func(clusterID string)
}

// chosenDriver is both sides of the driver that --driver names.
type chosenDriver struct {
	driver   peering.Driver
	receiver peering.Receiver
	lender   peering.Provider
	setup    []func(ctrl.Manager) error
}

// SetupWithManager adds what the driver watches.
func (c chosenDriver) SetupWithManager(mgr ctrl.Manager) error {
	var failed error
	for _, setup := range c.setup {
		failed = errors.Join(failed, setup(mgr))
	}
	return failed
}

func newDriver(o options, g ground) (chosenDriver, error) {
	account := types.NamespacedName{Namespace: o.namespace, Name: o.serviceAccount}
	if o.driver == driverDirect {
		options := direct.Options{
			Client: g.client, ClusterID: g.clusterID, ServiceAccount: account, Log: ctrl.Log.WithName("direct"),
			Messenger: g.messenger, LinkNamespace: o.virtualNodeNamespace,
			Endpoint: o.apiServerEndpoint, CA: func() ([]byte, error) { return apiServerCA(o.apiServerCAFile, g.config) },
			AgentRole: o.directAgentRole, TokenTTL: o.directTokenTTL,
			UnreachableAfter: min(o.providerLostAfter, 3*time.Minute),
			AllowIngressFrom: o.allowIngressFrom, AllowEgressTo: o.allowEgressTo,
		}
		options.Enqueue = g.enqueueConsumer
		driver, err := direct.NewDriver(options)
		if err != nil {
			return chosenDriver{}, err
		}
		options.Enqueue = g.enqueueProvider
		lender, err := direct.NewProvider(options)
		if err != nil {
			return chosenDriver{}, err
		}
		return chosenDriver{driver, driver, lender, []func(ctrl.Manager) error{driver.SetupWithManager, lender.SetupWithManager}}, nil
	}
	options := liqo.Options{
		Client: g.client, ClusterID: g.clusterID, Messenger: g.messenger,
		LiqoNamespace: o.liqoNamespace, PodCIDRs: o.podCIDRs,
		TenantRole: o.liqoTenantRole, ServiceAccount: account, Log: ctrl.Log.WithName("liqo"),
	}
	options.Enqueue = g.enqueueConsumer
	driver, err := liqo.NewDriver(options)
	if err != nil {
		return chosenDriver{}, err
	}
	options.Enqueue = g.enqueueProvider
	lender, err := liqo.NewProvider(options)
	if err != nil {
		return chosenDriver{}, err
	}
	return chosenDriver{driver, driver, lender, []func(ctrl.Manager) error{driver.SetupWithManager, lender.SetupWithManager}}, nil
}

// apiServerCA is what consumers check this cluster's API server with: the file's,
// or else that by which this agent knows it. Read anew each time, since it may
// be renewed.
func apiServerCA(file string, config *rest.Config) ([]byte, error) {
	if file == "" && len(config.CAData) > 0 {
		return config.CAData, nil
	}
	if file == "" {
		file = config.CAFile
	}
	if file == "" {
		return nil, errors.New("this agent's own configuration has no CA: give --api-server-ca-file")
	}
	ca, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's CA: %w", err)
	}
	return ca, nil
}
