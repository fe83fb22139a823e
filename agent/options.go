package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/peering/direct"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/exposition"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

// schedulerNone is the value of --scheduler-name in a cluster without Spillway's scheduler.
const schedulerNone = "none"

// guestsWebhookPort is where the webhook for guests is served.
const guestsWebhookPort = 9443

// The values of --broker-transport.
const transportHTTP, transportKubernetes = "http", "kubernetes"

type options struct {
	transport, url, certPath, caHash, tokenFile string
	pollInterval                                time.Duration
	brokerKubeconfig, brokerNamespace           string

	clusterID, clusterName string
	namespace              string
	instructionNamespace   string
	advertisementName      string
	advertisementNamespace string
	advertisementInterval  time.Duration
	apiServerEndpoint      string
	region, zone           string
	lending                broker.Lending
	headroom               corev1.ResourceList
	leaveWithin            time.Duration
	priority               int32
	placeholders           placeholder.Options
	proofTimeout           time.Duration
	tariff                 advertise.Tariff
	costConfigMap          string

	driver         string
	liqoNamespace  string
	liqoTenantRole string
	// liqoOpenKubelets leaves the port of Liqo's virtual kubelets open.
	liqoOpenKubelets bool
	// liqoNamespaceRole, liqoReflectAll and liqoServiceAccountTokens say what goes along
	// with overflowed pods, and what the agent needs for it.
	liqoNamespaceRole                        string
	liqoReflectAll, liqoServiceAccountTokens bool
	serviceAccount                           string
	podCIDRs                                 list
	providerNetworks                         []netip.Prefix
	fingerprints                             map[string]string

	virtualNodeNamespace string
	guestsWebhookCertDir string
	guestsRole           string
	directTokenTTL       time.Duration
	allowIngressFrom     list
	allowEgressTo        list
	apiServerCAFile      string

	releaseGrace         time.Duration
	peeringIdleTime      time.Duration
	finishedPodRetention time.Duration
	providerLostAfter    time.Duration
	ownerKinds           []owners.Kind
	// schedulerName is empty in a cluster without Spillway's scheduler.
	schedulerName string

	metrics, probes string
	leaderElect     bool
	metricsSecure   bool
	zap             zap.Options
}

// list is a flag with several values, separated by commas or given by repeating the
// flag.
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
	var consumers list
	flags := flag.NewFlagSet("spillway-agent", flag.ContinueOnError)
	if kubeconfig := flag.Lookup("kubeconfig"); kubeconfig != nil {
		flags.Var(kubeconfig.Value, kubeconfig.Name, kubeconfig.Usage)
	}

	brokerFlags(flags, &o)
	flags.StringVar(&o.clusterID, "cluster-id", "", "ID of this cluster. Defaults to the common name of the certificate in --broker-cert-path, or else to the UID of namespace kube-system.")
	flags.StringVar(&o.clusterName, "cluster-name", "", "Display name of this cluster. Defaults to the cluster ID.")
	flags.StringVar(&o.namespace, "namespace", defaultNamespace(), "Namespace of the agent's Secrets and Lease. Defaults to $POD_NAMESPACE, or else to the namespace of the agent's pod.")
	flags.StringVar(&o.instructionNamespace, "instruction-namespace", "", "Namespace of ReservationInstructions and ProviderInstructions. Defaults to --advertisement-namespace.")
	flags.StringVar(&o.advertisementName, "advertisement-name", "cluster-advertisement", "Name of the local copy of the advertisement. If empty, no copy is kept.")
	flags.StringVar(&o.advertisementNamespace, "advertisement-namespace", "default", "Namespace of the local copy of the advertisement.")
	flags.DurationVar(&o.advertisementInterval, "advertisement-requeue-interval", 30*time.Second, "Interval at which the broker hears from this cluster when nothing changes.")

	flags.StringVar(&o.apiServerEndpoint, "api-server-endpoint", "", "Address at which consumers reach this cluster's API server, https://<host>:<port>. If empty, the agent looks for it in its kubeconfig, ConfigMap kube-public/cluster-info and the API server's EndpointSlice.")
	flags.StringVar(&o.apiServerCAFile, "api-server-ca-file", "", "Driver direct: file with the CA (PEM) of --api-server-endpoint. Defaults to the cluster's own CA.")
	flags.StringVar(&o.region, "region", "", "Region of this cluster. Defaults to the value of label topology.kubernetes.io/region if all nodes have the same.")
	flags.StringVar(&o.zone, "zone", "", "Zone of this cluster. Defaults to the value of label topology.kubernetes.io/zone if all nodes have the same.")
	flags.BoolVar(&o.lending.Enabled, "lend-enabled", true, "Offer free capacity to other clusters.")
	flags.Var(&consumers, "lend-consumers", "IDs of the consumers that may use this cluster's capacity. Comma-separated; can be repeated. Empty means all.")
	flags.Func("lend-headroom", "Capacity that is never offered to other clusters, such as cpu=500m,memory=1Gi. Empty means none.", func(text string) (err error) {
		o.headroom, err = parseResources(text)
		return err
	})
	flags.Func("lend-priority", "Priority of guests and placeholders: the value of PriorityClasses spillway-guest and spillway-hold. Pending pods of a higher one take their place. Defaults to 0.", func(text string) error {
		priority, err := strconv.ParseInt(text, 10, 32)
		o.priority = int32(priority)
		return err
	})
	flags.DurationVar(&o.leaveWithin, "lend-leave-within", 10*time.Minute, fmt.Sprintf("Time within which guests must leave that use what this cluster withdraws of its promises, at most %s.", protocol.MaxLeaveWithin))
	// Benches set none: promises are only accounted for then.
	flags.StringVar(&o.placeholders.Namespace, "placeholders-namespace", placeholder.DefaultNamespace, "Namespace of placeholders.")
	flags.StringVar(&o.placeholders.Image, "placeholders-image", placeholder.DefaultImage, "Image of placeholders.")
	flags.DurationVar(&o.proofTimeout, "placeholders-timeout", 20*time.Second, "Time in which the scheduler must find a place for each placeholder.")
	price := func(name, unit string) {
		flags.Func("cost-"+name, "Price of "+unit+" per hour, a decimal number. Unknown if empty.", func(text string) error {
			return advertise.SetPrice(&o.tariff.Base, name, text)
		})
	}
	price("cpu", "a CPU core")
	price("memory", "a GiB of memory")
	price("gpu", "a GPU")
	price("storage", "a GiB of ephemeral storage")
	o.tariff.Base.Currency = "EUR"
	flags.Func("cost-currency", "Currency of the prices, an ISO 4217 code. Defaults to EUR.", func(text string) error {
		return advertise.SetPrice(&o.tariff.Base, "currency", text)
	})
	flags.Func("cost-rates", `Prices of some nodes, or at some times, as JSON: [{"nodeSelector":{"spot":"true"},"cpu":"0.01"},{"from":"22:00","to":"06:00","days":["Sat"],"timeZone":"Europe/Paris","gpu":"0.5"}]. The first one that applies counts, with the other prices where it has none.`, func(text string) (err error) {
		o.tariff.Rates, err = advertise.ParseRates(text)
		return err
	})
	flags.StringVar(&o.costConfigMap, "cost-config-map", "", "ConfigMap in --namespace with the prices, at keys cpu, memory, gpu, storage, currency and rates. Changes take effect at once. While it exists, it replaces the other --cost flags.")

	flags.StringVar(&o.driver, "driver", driverLiqo, "Driver of peerings and virtual nodes: liqo, or direct, which requires no other software.")
	flags.StringVar(&o.serviceAccount, "service-account", "spillway-agent", "ServiceAccount of the agent, in its own namespace.")
	flags.Func("peer-fingerprints", "Expected key fingerprints of peers, as <cluster ID>=sha256:<hex>. Comma-separated. The keys of other peers are pinned at first contact.", func(text string) (err error) {
		o.fingerprints, err = sealing.ParseFingerprints(text)
		return err
	})
	driverFlags(flags, &o)

	flags.DurationVar(&o.releaseGrace, "release-grace", 30*time.Second, "Time for which capacity must be unused before it is released.")
	flags.DurationVar(&o.peeringIdleTime, "peering-idle-time", 10*time.Minute, "Time for which a peering is kept without a grant.")
	flags.DurationVar(&o.finishedPodRetention, "peering-finished-pod-retention", 5*time.Minute, "Time for which a finished pod keeps the peering, so that its logs remain available.")
	flags.DurationVar(&o.providerLostAfter, "peering-provider-lost-after", 10*time.Minute, "Time for which a provider must be unreachable before terminating pods on its virtual node are force-deleted.")

	flags.Func("owner-kinds", "Kinds of objects whose controllers are looked up to find the root owner of a pod, beside ReplicaSets, StatefulSets and Jobs, as <kind>=<resource>.<group>. Comma-separated; can be repeated. The scheduler needs the same.", func(text string) error {
		for item := range strings.SplitSeq(text, ",") {
			kind, err := owners.ParseKind(item)
			if err != nil {
				return err
			}
			o.ownerKinds = append(o.ownerKinds, kind)
		}
		return nil
	})

	flags.StringVar(&o.schedulerName, "scheduler-name", broker.SchedulerName, "Profile of Spillway's scheduler in this cluster: capacity is kept for pending pods with this schedulerName only. none if it does not run here.")

	flags.StringVar(&o.metrics, "metrics-bind-address", ":8080", "Bind address of the metrics endpoint. 0 disables it.")
	flags.BoolVar(&o.metricsSecure, "metrics-secure", false, exposition.Secure)
	flags.StringVar(&o.probes, "health-probe-bind-address", ":8081", "Bind address of the health probe endpoint. 0 disables it.")
	flags.BoolVar(&o.leaderElect, "leader-elect", false, "Enable leader election; required with more than one replica.")
	o.zap.BindFlags(flags)

	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	o.lending.Consumers = consumers
	o.complete()
	return o, o.validate(flags.Args())
}

// complete sets what depends on several flags, and what a flag's value stands for.
func (o *options) complete() {
	if o.transport == "" && o.brokerKubeconfig != "" {
		o.transport = transportKubernetes
	}
	o.instructionNamespace = cmp.Or(o.instructionNamespace, o.advertisementNamespace)
	o.virtualNodeNamespace = cmp.Or(o.virtualNodeNamespace, o.namespace)
	if !o.lending.Enabled {
		o.placeholders.Namespace = ""
	}
	if o.schedulerName == schedulerNone {
		o.schedulerName = ""
	}
}

// brokerFlags defines how the broker is reached.
func brokerFlags(flags *flag.FlagSet, o *options) {
	flags.StringVar(&o.transport, "broker-transport", "", `Transport to the broker: "http", its REST interface, "kubernetes", a namespace of the hub, or empty to leave the agent idle. Defaults to kubernetes if --broker-kubeconfig is set.`)
	flags.StringVar(&o.url, "broker-url", "", "URL of the broker, https://<host>[:<port>].")
	flags.StringVar(&o.certPath, "broker-cert-path", "", "Directory with tls.crt, tls.key and ca.crt, which another program creates and renews. If empty, the agent joins the broker and renews its certificate itself.")
	flags.StringVar(&o.caHash, "broker-ca-hash", "", "Hash of the public key of the broker's CA, sha256:<hex>. Required for joining.")
	flags.StringVar(&o.tokenFile, "join-token-file", "", "File with the join token. Required for joining.")
	flags.StringVar(&o.brokerKubeconfig, "broker-kubeconfig", "", "Transport kubernetes: kubeconfig of the hub, as spillway-broker kubeconfig prints it. It is read again when its token is renewed.")
	flags.StringVar(&o.brokerNamespace, "broker-namespace", "", "Transport kubernetes: namespace of this cluster in the hub. Defaults to that of the kubeconfig.")
	flags.DurationVar(&o.pollInterval, "broker-poll-interval", protocol.DefaultPollInterval, fmt.Sprintf("Interval at which the broker is asked for news where something on the way cuts the agent's streams again and again, from %s to %s.", protocol.MinPollInterval, protocol.MaxPollInterval))
}

// driverFlags defines what the drivers need, and what limits guests.
func driverFlags(flags *flag.FlagSet, o *options) {
	flags.Func("provider-networks", "Driver liqo: networks (CIDR) of the providers' pods, as this cluster reaches them, besides those that Liqo has connected. Comma-separated; can be repeated. An overflowed pod whose provider reports an address outside of them has no address.", func(value string) error {
		networks, err := guest.ParseNetworks(value)
		o.providerNetworks = append(o.providerNetworks, networks...)
		return err
	})
	flags.StringVar(&o.liqoNamespace, "liqo-namespace", "liqo", "Driver liqo: namespace of the Liqo installation.")
	flags.StringVar(&o.liqoTenantRole, "liqo-tenant-role", "spillway-agent-tenant", "Driver liqo: ClusterRole that the agent binds to itself in each peer's namespace. If empty, it binds none.")
	flags.StringVar(&o.liqoNamespaceRole, "liqo-namespace-role", "spillway-agent-namespace", "Driver liqo: ClusterRole that the agent binds to itself in namespaces with overflowed pods, to mark the ConfigMaps and Secrets that they refer to. If empty, it binds none.")
	flags.BoolVar(&o.liqoReflectAll, "liqo-reflect-all", false, "Driver liqo: copy all ConfigMaps and Secrets of a namespace with overflowed pods to their provider. If false, only those that the pods refer to, and those with annotation liqo.io/allow-reflection.")
	flags.BoolVar(&o.liqoServiceAccountTokens, "liqo-service-account-tokens", false, "Driver liqo: give overflowed pods tokens of their ServiceAccounts in this cluster, which their provider can read.")
	flags.Var(&o.podCIDRs, "liqo-pod-cidrs", "Driver liqo: pod networks (CIDR) of this cluster. Comma-separated; can be repeated. A NetworkPolicy denies connections from them to Liqo's virtual kubelets. If empty, they are those of the nodes (spec.podCIDRs); without any, only control plane nodes may connect.")
	flags.BoolVar(&o.liqoOpenKubelets, "liqo-open-kubelets", false, "Driver liqo: make no such NetworkPolicy.")
	flags.StringVar(&o.guestsRole, "guests-role", "spillway-agent-guests", "ClusterRole that the agent binds to itself in the namespaces of guests. If empty, it binds none.")
	flags.DurationVar(&o.directTokenTTL, "direct-token-ttl", time.Hour, fmt.Sprintf("Driver direct: lifetime of a consumer's token, at least %s. It is renewed after half of that.", direct.MinTokenTTL))
	flags.Var(&o.allowIngressFrom, "guests-allow-ingress-from", "Networks (CIDR) that may connect to guests. Comma-separated; can be repeated. Empty means none.")
	flags.Var(&o.allowEgressTo, "guests-allow-egress-to", "Networks (CIDR) that guests may connect to. Comma-separated; can be repeated. Empty means none.")
	flags.StringVar(&o.guestsWebhookCertDir, "guests-webhook-cert-dir", "", fmt.Sprintf("Driver liqo: directory with tls.crt and tls.key of the webhook for guests, which is served at port %d. If empty, it is not served.", guestsWebhookPort))
	flags.StringVar(&o.lending.PodSecurity, "guests-pod-security", broker.PodSecurityRestricted, "Pod Security Standard that guests must comply with, restricted or baseline.")
	flags.StringVar(&o.virtualNodeNamespace, "virtual-node-namespace", "", "Driver direct: namespace of the Secrets that spillway-virtual-node reads. Defaults to --namespace.")
}

func (o *options) validate(rest []string) error {
	guestNetworks := o.guestNetworks().Validate()
	_, errPodCIDRs := guest.ParseNetworks(o.podCIDRs.String())
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.transport != "" && o.transport != transportHTTP && o.transport != transportKubernetes:
		return fmt.Errorf("--broker-transport=%s is unknown: use http or kubernetes, or leave it empty", o.transport)
	case o.transport == transportKubernetes && o.brokerKubeconfig == "":
		return errors.New("--broker-transport=kubernetes requires --broker-kubeconfig")
	case o.transport == transportHTTP && o.url == "":
		return errors.New("--broker-transport=http requires --broker-url")
	case o.pollInterval < protocol.MinPollInterval || o.pollInterval > protocol.MaxPollInterval:
		return fmt.Errorf("--broker-poll-interval=%s must be from %s to %s: a provider has to answer within the broker's proofDeadline", o.pollInterval, protocol.MinPollInterval, protocol.MaxPollInterval)
	case o.driver != driverLiqo && o.driver != driverDirect:
		return fmt.Errorf("--driver=%s is unknown: use liqo or direct", o.driver)
	case o.driver == driverDirect && o.directTokenTTL < direct.MinTokenTTL:
		return fmt.Errorf("--direct-token-ttl=%s is too short: use at least %s", o.directTokenTTL, direct.MinTokenTTL)
	case o.lending.PodSecurity != broker.PodSecurityRestricted && o.lending.PodSecurity != broker.PodSecurityBaseline:
		return fmt.Errorf("--guests-pod-security=%s is unknown: use restricted or baseline", o.lending.PodSecurity)
	case o.clusterID != "" && !protocol.ValidClusterID(o.clusterID):
		return fmt.Errorf("--cluster-id=%q is not valid: use at most %d lower-case letters, digits and dashes, and no dash at the start or end", o.clusterID, protocol.MaxClusterID)
	case o.apiServerEndpoint != "" && !session.IsURL(o.apiServerEndpoint, "https"):
		return fmt.Errorf("--api-server-endpoint=%q must be https://<host>:<port>, with an IPv6 address in brackets", o.apiServerEndpoint)
	case o.proofTimeout <= 0:
		return errors.New("--placeholders-timeout must be greater than 0")
	case o.leaveWithin <= 0 || o.leaveWithin > protocol.MaxLeaveWithin:
		return fmt.Errorf("--lend-leave-within=%s must be greater than 0 and at most %s", o.leaveWithin, protocol.MaxLeaveWithin)
	case errPodCIDRs != nil:
		return fmt.Errorf("--liqo-pod-cidrs=%s is not valid: %w", &o.podCIDRs, errPodCIDRs)
	case guestNetworks != nil:
		return fmt.Errorf("--guests-allow-ingress-from=%s or --guests-allow-egress-to=%s is not valid: %w", &o.allowIngressFrom, &o.allowEgressTo, guestNetworks)
	case o.advertisementInterval <= 0:
		return errors.New("--advertisement-requeue-interval must be greater than 0")
	}
	return nil
}

// parseResources parses resources such as "cpu=500m,memory=1Gi".
func parseResources(text string) (corev1.ResourceList, error) {
	out := corev1.ResourceList{}
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		name, amount, ok := strings.Cut(item, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%q is not <resource>=<amount>", item)
		}
		quantity, err := resource.ParseQuantity(amount)
		if err != nil {
			return nil, fmt.Errorf("parsing the amount of %s: %w", name, err)
		}
		if quantity.Sign() < 0 {
			return nil, fmt.Errorf("the amount of %s is negative", name)
		}
		out[corev1.ResourceName(name)] = quantity
	}
	return out, nil
}

// defaultNamespace is the default of --namespace.
func defaultNamespace() string {
	return cmp.Or(os.Getenv("POD_NAMESPACE"), ownNamespace(), broker.SystemNamespace)
}

// ownNamespace returns the namespace of the pod that the agent runs in, "" outside
// of a cluster.
func ownNamespace() string {
	text, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
