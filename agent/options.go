package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/spillway-dev/spillway/agent/internal/peering/direct"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

type options struct {
	transport, url, certPath, caHash, tokenFile string

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
	cost                   *broker.Cost

	driver         string
	liqoNamespace  string
	liqoTenantRole string
	serviceAccount string
	podCIDRs       list
	fingerprints   map[string]string

	linkNamespace    string
	guestAgentRole   string
	guestTokenTTL    time.Duration
	allowIngressFrom list
	allowEgressTo    list
	apiServerCAFile  string

	releaseGrace         time.Duration
	peeringIdleTime      time.Duration
	finishedPodRetention time.Duration
	providerLostAfter    time.Duration

	metrics, probes string
	leaderElect     bool
	zap             zap.Options
}

// list is a flag that takes several values, with commas or repeated.
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
	var cost broker.Cost
	flags := flag.NewFlagSet("spillway-agent", flag.ContinueOnError)

	flags.StringVar(&o.transport, "broker-transport", "", `How the broker is reached: "http", or nothing, and the agent stands idle.`)
	flags.StringVar(&o.url, "broker-url", "", "The broker's URL, https://<host>[:<port>].")
	flags.StringVar(&o.certPath, "broker-cert-path", "", "Directory with tls.crt, tls.key and ca.crt that somebody else keeps current. The agent joins by itself where it is not given.")
	flags.StringVar(&o.caHash, "broker-ca-hash", "", "What to know the broker by when joining: sha256:<hex>, the hash of its CA's public key.")
	flags.StringVar(&o.tokenFile, "join-token-file", "", "File with the token for joining.")

	flags.StringVar(&o.clusterID, "cluster-id", "", "This cluster's ID. By default the common name of the certificate in --broker-cert-path, or else the UID of namespace kube-system.")
	flags.StringVar(&o.clusterName, "cluster-name", "", "A name for people; the cluster ID by default.")
	flags.StringVar(&o.namespace, "namespace", cmp.Or(os.Getenv("POD_NAMESPACE"), ownNamespace(), broker.SystemNamespace), "Namespace for the agent's Secrets and its lease. By default $POD_NAMESPACE, or the one the agent runs in.")
	flags.StringVar(&o.instructionNamespace, "instruction-namespace", "", "Namespace for ReservationInstructions and ProviderInstructions; that of the advertisement by default.")
	flags.StringVar(&o.advertisementName, "advertisement-name", "cluster-advertisement", "Name of the copy of the advertisement that is kept here for people; none where empty.")
	flags.StringVar(&o.advertisementNamespace, "advertisement-namespace", "default", "Namespace of that copy.")
	flags.DurationVar(&o.advertisementInterval, "advertisement-requeue-interval", 30*time.Second, "How often the cluster advertises when nothing changes.")

	flags.StringVar(&o.apiServerEndpoint, "api-server-endpoint", "", "Where consumers reach this cluster's API server, https://<host>:<port>. Needed for lending.")
	flags.StringVar(&o.region, "region", "", "Where the cluster stands; by default what its nodes' labels agree on.")
	flags.StringVar(&o.zone, "zone", "", "The same, more closely.")
	flags.BoolVar(&o.lending.Enabled, "lend-enabled", true, "Lend what is free.")
	flags.Var(&consumers, "lend-consumers", "Cluster IDs that may borrow, with commas; everybody by default.")
	flags.Func("lend-headroom", "What is kept free for this cluster's own pods, as cpu=500m,memory=1Gi.", func(text string) (err error) {
		o.headroom, err = parseResources(text)
		return err
	})
	price := func(target *string, name, unit string) {
		flags.Func("cost-"+name, "Price of "+unit+" for an hour, a decimal number; unknown by default.", func(text string) error {
			if !decimal.MatchString(text) {
				return errors.New("not a decimal number")
			}
			*target = text
			return nil
		})
	}
	price(&cost.CPUCost, "cpu", "a core")
	price(&cost.MemoryCost, "memory", "a GiB of memory")
	price(&cost.GPUCost, "gpu", "a GPU")
	price(&cost.StorageCost, "storage", "a GiB of ephemeral storage")
	flags.StringVar(&cost.Currency, "cost-currency", "EUR", "Currency of the prices, an ISO 4217 code.")

	flags.StringVar(&o.driver, "driver", driverLiqo, "How clusters are linked and virtual nodes made: liqo, or direct, which needs nothing else in the cluster.")
	flags.StringVar(&o.liqoNamespace, "liqo-namespace", "liqo", "Where Liqo is installed.")
	flags.StringVar(&o.liqoTenantRole, "liqo-tenant-role", "spillway-agent-tenant", "ClusterRole that the agent binds to itself in the namespace of each peer; none where empty.")
	flags.StringVar(&o.linkNamespace, "link-namespace", "", "With driver direct, the namespace for the Secrets that spillway-virtual-node reads; the agent's own by default.")
	flags.StringVar(&o.guestAgentRole, "guest-agent-role", "spillway-agent-guests", "With driver direct, the ClusterRole that the agent binds to itself in the namespaces for guests; none where empty.")
	flags.DurationVar(&o.guestTokenTTL, "guest-token-ttl", time.Hour, "With driver direct, how long a token is good for that a consumer gets; at least 10m. It is renewed when half of that is over.")
	flags.Var(&o.allowIngressFrom, "guest-allow-ingress-from", "With driver direct, networks that may talk to guests, with commas; none by default.")
	flags.Var(&o.allowEgressTo, "guest-allow-egress-to", "With driver direct, networks that guests may talk to, with commas; none by default.")
	flags.StringVar(&o.apiServerCAFile, "api-server-ca-file", "", "With driver direct, file with the CA (PEM) that consumers check --api-server-endpoint with; the cluster's own by default.")
	flags.StringVar(&o.serviceAccount, "service-account", "spillway-agent", "The agent's own ServiceAccount, in its own namespace.")
	flags.Var(&o.podCIDRs, "pod-cidrs", "This cluster's pod networks, with commas. Where given, a NetworkPolicy keeps pods away from the virtual kubelets.")
	flags.Func("peer-fingerprints", "Keys that certain peers must have, as <cluster ID>=sha256:<hex>, with commas. Others are pinned at first contact.", func(text string) (err error) {
		o.fingerprints, err = sealing.ParseFingerprints(text)
		return err
	})

	flags.DurationVar(&o.releaseGrace, "release-grace", 30*time.Second, "How long capacity must have been unneeded before it is given back.")
	flags.DurationVar(&o.peeringIdleTime, "peering-idle-time", 10*time.Minute, "How long the link to a provider is kept without a grant there.")
	flags.DurationVar(&o.finishedPodRetention, "finished-pod-retention", 5*time.Minute, "How long finished pods keep the link to their provider, for their logs.")

	flags.DurationVar(&o.providerLostAfter, "provider-lost-after", 10*time.Minute, "How long a provider must have been out of reach before pods that are to end there are given up.")

	flags.StringVar(&o.metrics, "metrics-bind-address", ":8080", "Address of the metrics; 0 turns them off.")
	flags.StringVar(&o.probes, "health-probe-bind-address", ":8081", "Address of the probes.")
	flags.BoolVar(&o.leaderElect, "leader-elect", false, "Let one of several replicas lead. Needed with more than one.")
	o.zap.BindFlags(flags)

	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	o.lending.Consumers = consumers
	if cost != (broker.Cost{Currency: cost.Currency}) {
		o.cost = &cost
	}
	o.instructionNamespace = cmp.Or(o.instructionNamespace, o.advertisementNamespace)
	o.linkNamespace = cmp.Or(o.linkNamespace, o.namespace)
	return o, o.validate(flags.Args())
}

func (o *options) validate(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.transport == "kubernetes":
		return errors.New("--broker-transport=kubernetes is not in this release: use http")
	case o.transport != "" && o.transport != "http":
		return fmt.Errorf("--broker-transport=%s is not known: it is http, or empty", o.transport)
	case o.transport == "http" && o.url == "":
		return errors.New("--broker-transport=http needs --broker-url")
	case o.driver != driverLiqo && o.driver != driverDirect:
		return fmt.Errorf("--driver=%s is not known: it is liqo or direct", o.driver)
	case o.driver == driverDirect && o.guestTokenTTL < direct.MinTokenTTL:
		return fmt.Errorf("--guest-token-ttl=%s is too short: at least %s", o.guestTokenTTL, direct.MinTokenTTL)
	case o.clusterID != "" && !protocol.ValidClusterID(o.clusterID):
		return fmt.Errorf("--cluster-id=%q must be at most %d lower-case letters, digits and dashes, with no dash at either end", o.clusterID, protocol.MaxClusterID)
	case o.cost != nil && !currency.MatchString(o.cost.Currency):
		return fmt.Errorf("--cost-currency=%q is not an ISO 4217 code, such as EUR", o.cost.Currency)
	case o.advertisementInterval <= 0:
		return errors.New("--advertisement-requeue-interval must be more than 0")
	}
	return nil
}

var (
	decimal  = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)
	currency = regexp.MustCompile(`^[A-Z]{3}$`)
)

// parseResources reads "cpu=500m,memory=1Gi".
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
			return nil, fmt.Errorf("the amount of %s: %w", name, err)
		}
		if quantity.Sign() < 0 {
			return nil, fmt.Errorf("the amount of %s is negative", name)
		}
		out[corev1.ResourceName(name)] = quantity
	}
	return out, nil
}

// ownNamespace is the one of the pod that this program runs in.
func ownNamespace() string {
	text, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
