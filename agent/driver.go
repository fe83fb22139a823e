package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/direct"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	liqoconsumer "github.com/spillway-dev/spillway/agent/internal/peering/liqo/consumer"
	liqoprovider "github.com/spillway-dev/spillway/agent/internal/peering/liqo/provider"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	"github.com/spillway-dev/spillway/agent/program"
)

// Values of --driver.
const (
	driverLiqo   = "liqo"
	driverDirect = "direct"
)

// recognizer knows guests and virtual nodes of every driver: those of another one
// than --driver may still run here.
var recognizer = inventory.Recognizer{
	Guest:       inventory.AnyOf(direct.RecognizeGuest, liqoprovider.RecognizeGuest),
	VirtualNode: liqoconsumer.RecognizeVirtualNode,
}

// recognizerOf is recognizer with what depends on the driver: Liqo does not copy node
// selectors and affinities to guests.
func recognizerOf(o options) inventory.Recognizer {
	r := recognizer
	r.DropsSelection = o.driver == driverLiqo
	r.Placeholder = func(pod *corev1.Pod) (consumer string, ok bool) {
		// Those that are left of a former setting hold no place either, and soon end.
		return placeholder.ConsumerOf(pod, cmp.Or(o.placeholders.Namespace, placeholder.DefaultNamespace))
	}
	return r
}

// addDriverToScheme adds the types of the driver: Liqo's do not exist in a cluster
// without it.
func addDriverToScheme(scheme *runtime.Scheme, o options) error {
	if o.driver == driverLiqo {
		return liqo.AddToScheme(scheme)
	}
	return nil
}

// checkDriver returns an error if the cluster lacks what the driver needs: the agent would wait for
// it without a word.
func checkDriver(mapper meta.RESTMapper, o options) error {
	if o.driver == driverLiqo {
		return liqo.Installed(mapper)
	}
	return nil
}

// guestNetworks are the networks that guests may exchange traffic with.
func (o *options) guestNetworks() confine.Networks {
	return confine.Networks{IngressFrom: o.allowIngressFrom, EgressTo: o.allowEgressTo}
}

// driverCache is what the driver limits the manager's cache to.
func driverCache(o options) (map[client.Object]cache.ByObject, error) {
	if o.driver == driverDirect {
		return direct.CacheByObject(o.virtualNodeNamespace)
	}
	return map[client.Object]cache.ByObject{}, nil
}

// driverOptions are what every driver needs.
type driverOptions struct {
	// client reads from and writes to the API server, not a cache.
	client    client.Client
	config    *rest.Config
	clusterID string
	messenger peering.Messenger
	// enqueueConsumer and enqueueProvider reconcile a cluster's peering with this one
	// as the consumer and as the provider.
	enqueueConsumer, enqueueProvider func(clusterID string)
}

func newDriver(o options, d driverOptions) (program.Driver, error) {
	consumer := session.Options{
		Client: d.client, ClusterID: d.clusterID, Messenger: d.messenger, Enqueue: d.enqueueConsumer,
		ServiceAccount: types.NamespacedName{Namespace: o.namespace, Name: o.serviceAccount}, Log: ctrl.Log.WithName(o.driver),
	}
	if o.driver == driverDirect {
		consumer.UnreachableAfter = min(o.providerLostAfter, 3*time.Minute)
	}
	networks := o.guestNetworks()
	provider := consumer
	provider.Enqueue = d.enqueueProvider
	if o.driver == driverDirect {
		options := direct.Options{
			Options: consumer, VirtualNodeNamespace: o.virtualNodeNamespace,
			Endpoint: o.apiServerEndpoint, CA: func() ([]byte, error) { return apiServerCA(o.apiServerCAFile, d.config) },
			AgentRole: o.guestsRole, TokenTTL: o.directTokenTTL, Networks: networks,
			PodSecurity: o.lending.PodSecurity, HandOver: o.placeholders.Namespace != "",
		}
		driver, err := direct.NewDriver(options)
		if err != nil {
			return program.Driver{}, err
		}
		options.Options = provider
		offered, err := direct.NewProvider(options)
		return program.Driver{Consumer: driver, Receiver: driver, Provider: offered, GuestNamespaces: offered, Watches: []program.Controller{driver, offered}}, err
	}
	options := liqo.Options{
		Options: consumer, PodCIDRs: o.podCIDRs, OpenKubelets: o.liqoOpenKubelets, TenantRole: o.liqoTenantRole, Webhook: o.guestsWebhookCertDir != "",
	}
	forConsumer := liqoconsumer.Options{
		Options: options, LiqoNamespace: o.liqoNamespace, NamespaceRole: o.liqoNamespaceRole,
		ReflectAll: o.liqoReflectAll, ServiceAccountTokens: o.liqoServiceAccountTokens,
	}
	if o.schedulerName != "" { // pods can overflow
		forConsumer.ProviderNetworks = liqoconsumer.NewProviderNetworks(d.client, o.namespace, o.providerNetworks)
	}
	driver, err := liqoconsumer.New(forConsumer)
	if err != nil {
		return program.Driver{}, err
	}
	options.Options = provider
	offered, err := liqoprovider.New(liqoprovider.Options{
		Options: options, GuestsRole: o.guestsRole, Networks: networks, PodSecurity: o.lending.PodSecurity, HandOver: o.placeholders.Namespace != "",
	})
	return program.Driver{Consumer: driver, Receiver: driver, Provider: offered, GuestNamespaces: offered, Watches: []program.Controller{driver, offered}}, err
}

// apiServerCA is the CA that consumers verify this cluster's API server with: the
// file's, or else that of the agent's own configuration. It is read each time,
// because it may be renewed.
func apiServerCA(file string, config *rest.Config) ([]byte, error) {
	if file == "" && len(config.CAData) > 0 {
		return config.CAData, nil
	}
	file = cmp.Or(file, config.CAFile)
	if file == "" {
		return nil, errors.New("the agent's own configuration has no CA; set --api-server-ca-file")
	}
	ca, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's CA: %w", err)
	}
	return ca, nil
}
