// Command spillway-agent runs in each cluster. It says what the cluster can lend,
// takes the cluster's Reservations to the broker and brings the answers back,
// sets aside what is lent, and links up with providers so that pods can run on
// what is borrowed. This file is wiring.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/identity"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	"github.com/spillway-dev/spillway/agent/internal/reservation"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/mtls"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// leaseName is the lease that agents of one cluster lead by.
const leaseName = "spillway-agent"

func main() {
	o, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "spillway-agent:", err)
		os.Exit(2)
	}
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&o.zap)))
	config, err := ctrl.GetConfig()
	if err == nil {
		err = run(ctrl.SetupSignalHandler(), config, o)
	}
	if err != nil {
		ctrl.Log.Error(err, "The agent ended")
		os.Exit(1)
	}
}

// run is the agent until ctx ends.
func run(ctx context.Context, config *rest.Config, o options) error {
	config.QPS, config.Burst = 200, 400
	mgr, err := newManager(config, o)
	if err != nil {
		return err
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return fmt.Errorf("setting up the probes: %w", err)
	}
	if o.transport == "" {
		ctrl.Log.Info("No --broker-transport is given: nothing is advertised, asked for or lent")
	} else if err := setup(ctx, mgr, o); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

func newManager(config *rest.Config, o options) (ctrl.Manager, error) {
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
	byObject[&broker.ReservationInstruction{}], byObject[&broker.ProviderInstruction{}] = instructions, instructions
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme,
		Cache: cache.Options{
			ByObject:         byObject,
			DefaultTransform: cache.TransformStripManagedFields(),
		},
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

// setup adds every part of the agent to the manager.
func setup(ctx context.Context, mgr ctrl.Manager, o options) error {
	// Keys, pins and what a driver's steps depend on are read from the API server
	// itself.
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
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
	ctrl.Log.Info("Starting", "clusterID", clusterID, "namespace", o.namespace, "peerFingerprint", fingerprint)

	// The broker: who we are to it, how it is reached, what it says.
	keeper := identity.New(identity.Options{
		ClusterID: clusterID, CertPath: o.certPath,
		Client: live, Namespace: o.namespace, BrokerURL: o.url, CAHash: o.caHash, TokenFile: o.tokenFile,
		Tell: warnings(mgr, "Secret", o.namespace, identity.Secret, "NoIdentity", "Join"), Log: ctrl.Log.WithName("identity"),
	})
	communicator := mtls.New(o.url, keeper, ctrl.Log.WithName("transport"))
	consumers, providers := transport.NewConsumerMirror(communicator), transport.NewProviderMirror(communicator)

	// Peers: sealed messages, and the driver whose messages they are.
	pins := sealing.NewPins(live, o.namespace, o.fingerprints)
	if err := pins.Prepare(ctx); err != nil {
		return err
	}
	messenger := sealing.NewMessenger(clusterID, key, pins, communicator)
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
	consumer = virtualnode.New(driver.driver, virtualnode.Options{
		InstructionNamespace: o.instructionNamespace, ReleaseGrace: o.releaseGrace,
		PeeringIdleTime: o.peeringIdleTime, FinishedPodRetention: o.finishedPodRetention, ProviderLostAfter: o.providerLostAfter,
	})
	provider = hold.New(driver.provider, hold.Options{
		Namespace: o.instructionNamespace, Lending: o.lending, Headroom: o.headroom, PeeringIdleTime: o.peeringIdleTime,
	})
	refused := warnings(mgr, "ConfigMap", o.namespace, sealing.PinsConfigMap, "PeerRefused", "Open")
	dispatcher := sealing.NewDispatcher(messenger, sealing.DispatcherOptions{
		Provider: driver.provider, Receiver: driver.driver,
		Consumer: instruction.Holder(mgr.GetClient(), o.instructionNamespace),
		Refused:  func(_ string, err error) { refused(err) },
		Log:      ctrl.Log.WithName("sealing"),
	})
	advertiser := advertise.New(communicator, advertise.Options{
		Terms: inventory.Terms{
			ClusterID: clusterID, ClusterName: cmp.Or(o.clusterName, clusterID), EndpointURL: o.apiServerEndpoint, PeerKey: key.Public(),
			Lending: o.lending, Headroom: o.headroom, Cost: o.cost, Region: o.region, Zone: o.zone,
		},
		Interval: o.advertisementInterval,
		CopyName: o.advertisementName, CopyNamespace: o.advertisementNamespace,
	})
	requests := reservation.New(mgr, reservation.Options{
		ClusterID: clusterID, InstructionNamespace: o.instructionNamespace, Broker: communicator, Mirror: consumers,
	})

	return errors.Join(
		mgr.AddReadyzCheck("identity", keeper.Check),
		instruction.SetupIndex(ctx, mgr),
		mgr.Add(keeper), mgr.Add(consumers), mgr.Add(providers), mgr.Add(dispatcher),
		instruction.NewConsumer(mgr.GetClient(), o.instructionNamespace, consumers).SetupWithManager(mgr),
		instruction.NewProvider(mgr.GetClient(), o.instructionNamespace, communicator, providers).SetupWithManager(mgr),
		requests.SetupWithManager(mgr),
		advertiser.SetupWithManager(mgr),
		driver.SetupWithManager(mgr),
		consumer.SetupWithManager(mgr),
		provider.SetupWithManager(mgr),
	)
}

// findClusterID is the ID given, or that of the certificate given, or that which
// every cluster has by itself.
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
			return "", fmt.Errorf("looking for the cluster's ID (--cluster-id is not given): %w", err)
		}
		id = string(system.UID)
	}
	if !protocol.ValidClusterID(id) {
		return "", fmt.Errorf("%q is no cluster ID: it must be at most %d lower-case letters, digits and dashes, with no dash at either end", id, protocol.MaxClusterID)
	}
	return id, nil
}

// warnings makes Events about an object of the agent's namespace, so that people
// need not read logs to learn why nothing happens.
func warnings(mgr ctrl.Manager, kind, namespace, name, reason, action string) func(error) {
	recorder := mgr.GetEventRecorder("spillway-agent")
	about := &corev1.ObjectReference{APIVersion: "v1", Kind: kind, Namespace: namespace, Name: name}
	return func(err error) {
		recorder.Eventf(about, nil, corev1.EventTypeWarning, reason, action, "%.1000s", err)
	}
}
