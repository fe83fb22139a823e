// Command spillway-agent runs in each cluster. It advertises the cluster's
// capacity, synchronizes its Reservations with the broker, sets capacity aside for
// consumers, and peers with providers so that pods can run on virtual nodes. This
// file is wiring.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/identity"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	"github.com/spillway-dev/spillway/agent/internal/pods"
	"github.com/spillway-dev/spillway/agent/internal/reachability"
	"github.com/spillway-dev/spillway/agent/internal/reservation"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/mtls"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/election"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/exposition"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

// Durations that have no flag.
const (
	// virtualNodeReadyTimeout is how long a virtual node may take to become ready
	// before an event reports it.
	virtualNodeReadyTimeout = 2 * time.Minute
	// shrinkDelay is the time after which no pod can be on its way any more to
	// capacity that a virtual node has lost.
	shrinkDelay = 2 * time.Second
	// podStartTimeout is how long a provider may take to start a pod, or another one
	// meanwhile, before the pod is evicted.
	podStartTimeout = time.Minute
)

// leaseName is the Lease for the leader election of a cluster's agents.
const leaseName = "spillway-agent"

// undecodable is the metric of the objects that the agent cannot decode.
var undecodable = undecoded.NewGauge("agent")

func init() { metrics.Registry.MustRegister(undecodable) }

func main() {
	if len(os.Args) > 1 && os.Args[1] == commandDecision {
		err := printDecision(ctrl.SetupSignalHandler(), ctrl.GetConfig, os.Args[2:], os.Stdout)
		if err != nil && !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintf(os.Stderr, "spillway-agent %s: %v\n", commandDecision, err)
			os.Exit(1)
		}
		return
	}
	o, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "spillway-agent:", err)
		os.Exit(2)
	}
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&o.zap)))
	restConfig, err := ctrl.GetConfig()
	if err != nil {
		err = fmt.Errorf("finding the API server (outside of a cluster, set --kubeconfig or KUBECONFIG): %w", err)
	} else {
		err = run(ctrl.SetupSignalHandler(), restConfig, o)
	}
	if err != nil {
		ctrl.Log.Error(err, "Failed to run the agent")
		os.Exit(1)
	}
}

// run runs the agent until ctx ends.
func run(ctx context.Context, restConfig *rest.Config, o options) error {
	restConfig.QPS, restConfig.Burst = 200, 400
	mgr, err := newManager(restConfig, o)
	if err != nil {
		return err
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return fmt.Errorf("adding the liveness probe: %w", err)
	}
	if o.transport == "" {
		ctrl.Log.Info("The agent is idle: --broker-transport is not set")
	} else if err := setup(ctx, mgr, o); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

func newManager(restConfig *rest.Config, o options) (ctrl.Manager, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme), addDriverToScheme(scheme, o)); err != nil {
		return nil, err
	}
	byObject, err := driverCache(o)
	if err != nil {
		return nil, err
	}
	instructions := cache.ByObject{Namespaces: map[string]cache.Config{o.instructionNamespace: {}}}
	maps.Copy(byObject, inventory.CacheByObject())
	if o.costConfigMap != "" {
		byObject[&corev1.ConfigMap{}] = cache.ByObject{Namespaces: map[string]cache.Config{
			o.namespace: {FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, o.costConfigMap)},
		}}
	}
	objects := undecoded.New(ctrl.Log.WithName("undecoded"), undecodable, clock.RealClock{})
	byObject[&broker.ReservationInstruction{}], byObject[&broker.ProviderInstruction{}] = instructions, instructions
	options := election.Options(restConfig, o.leaderElect, o.namespace, leaseName)
	options.Scheme = scheme
	options.Cache = cache.Options{ByObject: byObject, DefaultTransform: cache.TransformStripManagedFields(), NewInformer: objects.NewInformer}
	options.Metrics, options.HealthProbeBindAddress = exposition.Options(o.metrics, o.metricsSecure), o.probes
	// It starts if the driver registers a webhook.
	options.WebhookServer = webhook.NewServer(webhook.Options{Port: guestsWebhookPort, CertDir: o.guestsWebhookCertDir})
	// The priority queue of controller-runtime v0.23 can deadlock when a manager
	// stops ("failed waiting for all runnables to end within grace period of 30s").
	options.Controller.UsePriorityQueue = ptr.To(false)
	mgr, err := ctrl.NewManager(restConfig, options)
	if err != nil {
		return nil, fmt.Errorf("creating the manager: %w", err)
	}
	return mgr, mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		objects.Run(ctx, mgr.GetEventRecorder("spillway-agent"))
		return nil
	}))
}

// controller is a part of the agent that sets itself up with a manager.
type controller interface {
	SetupWithManager(mgr ctrl.Manager) error
}

// setup adds every part of the agent to the manager.
func setup(ctx context.Context, mgr ctrl.Manager, o options) error {
	// Keys, pins and the state that a driver depends on are read without a cache.
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("creating a client: %w", err)
	}
	clusterID, err := findClusterID(ctx, live, o)
	if err != nil {
		return err
	}
	key, err := sealing.LoadKey(ctx, live, o.namespace)
	if err != nil {
		return err
	}
	fingerprint, err := sealing.Fingerprint(key.Public())
	if err != nil {
		return err
	}
	o.findEndpoint(ctx, live, mgr.GetConfig())
	ctrl.Log.Info("Starting the agent", "clusterID", clusterID, "namespace", o.namespace, "peerFingerprint", fingerprint)

	keeper := identity.New(identity.Options{
		ClusterID: clusterID, CertPath: o.certPath,
		Client: live, Namespace: o.namespace, BrokerURL: o.url, CAHash: o.caHash, TokenFile: o.tokenFile,
		Report: warningRecorder(mgr, "Secret", o.namespace, identity.Secret, "IdentityUnavailable", "Join"), Log: ctrl.Log.WithName("identity"),
	})
	brokerClient := mtls.New(o.url, keeper, ctrl.Log.WithName("transport"))
	consumers, providers := transport.NewConsumerMirror(brokerClient), transport.NewProviderMirror(brokerClient)

	pins := sealing.NewPins(live, o.namespace, o.fingerprints)
	if err := pins.Prepare(ctx); err != nil {
		return err
	}
	messenger := sealing.NewMessenger(clusterID, key, pins, brokerClient)
	var consumer *virtualnode.Reconciler
	var provider *hold.Reconciler
	driver, err := newDriver(o, driverOptions{
		client: live, config: mgr.GetConfig(), clusterID: clusterID, messenger: messenger,
		enqueueConsumer: func(cluster string) { consumer.Enqueue(cluster) },
		enqueueProvider: func(cluster string) { provider.Enqueue(cluster) },
	})
	if err != nil {
		return err
	}
	recorder := events.NewRecorder(mgr.GetEventRecorder("spillway-agent"))
	lookup, err := owners.New(ctrl.Log.WithName("owners"), clock.RealClock{}, mgr.GetConfig(), o.ownerKinds)
	if err != nil {
		return err
	}
	consumer = virtualnode.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, driver.driver, virtualnode.Options{
		InstructionNamespace: o.instructionNamespace, SchedulerName: o.schedulerName,
		PeeringIdleTime: o.peeringIdleTime, FinishedPodRetention: o.finishedPodRetention,
		ReadyTimeout: virtualNodeReadyTimeout, ShrinkDelay: shrinkDelay, Owners: lookup.Resolve,
		Asked: func(provider string) (peering.Peer, bool) { return instruction.Asked(consumers, provider) },
	})
	consumers.Subscribe(instruction.OnAsked(consumer.EnqueueAsked))
	consumerPods := pods.New(consumer, driver.driver, pods.Options{
		ReleaseGrace: o.releaseGrace, StartTimeout: podStartTimeout, ProviderLostAfter: o.providerLostAfter,
	})
	tracker := inventory.NewTracker(recognizerOf(o))
	tracker.GuestEnded = func(consumer string) { provider.Enqueue(consumer) }
	tracker.PlaceChanged = func(consumer string) { provider.PlaceChanged(consumer) }
	provider = hold.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, driver.provider, hold.Options{
		Namespace: o.instructionNamespace, Lending: o.lending, Headroom: o.headroom, PeeringIdleTime: o.peeringIdleTime,
		Recognizer: recognizerOf(o), Placeholders: o.placeholders, ProofTimeout: o.proofTimeout, LeaveWithin: o.leaveWithin, Priority: o.priority, GuestNamespaces: driver.provider,
		Observe: func(ctx context.Context) (hold.Observed, error) { return tracker, tracker.WaitSynced(ctx) },
	})
	refused := warningRecorder(mgr, "ConfigMap", o.namespace, sealing.PinsConfigMap, "PeerRefused", "Open")
	dispatcher := sealing.NewDispatcher(messenger, sealing.DispatcherOptions{
		Provider: driver.provider, Receiver: driver.driver,
		Consumer: instruction.ConsumerPeerKey(mgr.GetClient(), o.instructionNamespace),
		Refused:  func(_ string, err error) { refused(err) },
		Log:      ctrl.Log.WithName("sealing"),
	})
	provided := instruction.NewProvider(mgr.GetClient(), o.instructionNamespace, brokerClient, providers, clock.RealClock{})
	var advertiser *advertise.Publisher
	prober := reachability.New(mgr.GetClient(), o.instructionNamespace, clock.RealClock{}, func() { advertiser.Connected() })
	advertiser = newAdvertiser(o, clusterID, key, brokerClient, providers, tracker, provided, prober)
	err = errors.Join(
		mgr.AddReadyzCheck("identity", keeper.Check), instruction.SetupIndex(ctx, mgr),
		mgr.Add(keeper), mgr.Add(consumers), mgr.Add(providers), mgr.Add(dispatcher),
		mgr.Add(manager.RunnableFunc(func(ctx context.Context) error { lookup.Run(ctx, func() {}); return nil })),
	)
	for _, c := range []controller{
		instruction.NewConsumer(mgr.GetClient(), o.instructionNamespace, consumers, clock.RealClock{}),
		provided,
		reservation.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, consumer.InUse, reservation.Options{
			ClusterID: clusterID, InstructionNamespace: o.instructionNamespace, Namespace: o.namespace, Broker: brokerClient, Mirror: consumers,
			Unmappable: driver.driver.Unmappable,
		}),
		tracker, advertiser, prober, driver, consumer, consumerPods, provider,
	} {
		err = errors.Join(err, c.SetupWithManager(mgr))
	}
	return err
}

// newAdvertiser makes what advertises the tracked capacity on the provider's terms.
func newAdvertiser(o options, clusterID string, key *sealing.Key, transport advertise.Broker, connections advertise.Connections, tracker *inventory.Tracker, provided *instruction.Provider, prober *reachability.Prober) *advertise.Publisher {
	return advertise.New(transport, connections, advertise.Options{
		Terms: inventory.Terms{
			ClusterID: clusterID, ClusterName: cmp.Or(o.clusterName, clusterID), EndpointURL: o.apiServerEndpoint, PeerKey: key.Public(),
			Lending: o.lending, Headroom: o.headroom, Cost: o.cost, Region: o.region, Zone: o.zone,
		},
		Interval: o.advertisementInterval, Recognizer: recognizerOf(o), Inventory: tracker, Unlisted: provided.Unlisted, Unreachable: prober.Unreachable,
		CopyName: o.advertisementName, CopyNamespace: o.advertisementNamespace,
		Prices: types.NamespacedName{Namespace: o.namespace, Name: o.costConfigMap}, Currency: o.currency,
	})
}

// findClusterID returns the ID from --cluster-id, or else the one in the certificate
// of --broker-cert-path, or else the UID of namespace kube-system.
func findClusterID(ctx context.Context, live client.Client, o options) (string, error) {
	id := o.clusterID
	if id == "" && o.certPath != "" {
		var err error
		if id, err = identity.CommonName(o.certPath); err != nil {
			return "", err
		}
	}
	if id == "" {
		var system corev1.Namespace
		if err := live.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &system); err != nil {
			return "", fmt.Errorf("determining the cluster ID (--cluster-id is not set): %w", err)
		}
		id = string(system.UID)
	}
	if !protocol.ValidClusterID(id) {
		return "", fmt.Errorf("cluster ID %q is not valid: use at most %d lower-case letters, digits and dashes, and no dash at the start or end", id, protocol.MaxClusterID)
	}
	return id, nil
}

// warningRecorder returns a function that records an error as a warning event about
// an object in the agent's namespace.
func warningRecorder(mgr ctrl.Manager, kind, namespace, name, reason, action string) func(error) {
	recorder := events.NewRecorder(mgr.GetEventRecorder("spillway-agent"))
	about := &corev1.ObjectReference{APIVersion: "v1", Kind: kind, Namespace: namespace, Name: name}
	return func(err error) {
		recorder.Eventf(about, nil, corev1.EventTypeWarning, reason, action, "%s", err)
	}
}
