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
	"os"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/spillway-dev/spillway/agent/internal/identity"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/transport/kubernetes"
	"github.com/spillway-dev/spillway/agent/internal/transport/mtls"
	"github.com/spillway-dev/spillway/agent/internal/usage/copier"
	"github.com/spillway-dev/spillway/agent/program"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/election"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/exposition"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// leaseName is the Lease for the leader election of a cluster's agents.
const leaseName = "spillway-agent"

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
	options := election.Options(restConfig, o.leaderElect, o.namespace, leaseName)
	options.Scheme = scheme
	options.Metrics, options.HealthProbeBindAddress = exposition.Options(o.metrics, o.metricsSecure), o.probes
	// It starts if the driver registers a webhook.
	options.WebhookServer = webhook.NewServer(webhook.Options{Port: guestsWebhookPort, CertDir: o.guestsWebhookCertDir})
	return program.NewManager(restConfig, options, program.Cached{InstructionNamespace: o.instructionNamespace, Prices: o.prices(), Driver: byObject})
}

// setup adds every part of the agent to the manager.
func setup(ctx context.Context, mgr ctrl.Manager, o options) error {
	// Keys, pins and the state that a driver depends on are read without a cache.
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("creating a client: %w", err)
	}
	if err := errors.Join(checkDriver(mgr.GetRESTMapper(), o), ensureNamespaces(ctx, live, o)); err != nil {
		return err
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

	communicator, err := connect(mgr, live, o, clusterID)
	if err != nil {
		return err
	}
	pins := sealing.NewPins(live, o.namespace, o.fingerprints)
	if err := pins.Prepare(ctx); err != nil {
		return err
	}
	// Transport kubernetes carries no usage.
	if asked, ok := communicator.(copier.Broker); ok {
		copies := &copier.Copier{Broker: asked, Client: live, Namespace: o.namespace, Clock: clock.RealClock{}, Log: ctrl.Log.WithName("usage")}
		if err := mgr.Add(copies); err != nil {
			return err
		}
	}
	messages := sealing.NewMessenger(clusterID, key, pins, communicator)
	return program.Add(ctx, mgr, program.Parts{
		Namespace: o.namespace, InstructionNamespace: o.instructionNamespace, Broker: communicator,
		Driver: func(enqueueConsumer, enqueueProvider func(clusterID string)) (program.Driver, error) {
			return newDriver(o, driverOptions{
				client: live, config: mgr.GetConfig(), clusterID: clusterID, messenger: messages, enqueueConsumer: enqueueConsumer, enqueueProvider: enqueueProvider,
			})
		},
		Messages: messages, Refused: warningRecorder(mgr, "ConfigMap", o.namespace, sealing.PinsConfigMap, "PeerRefused", "Open"),
		Recognizer: recognizerOf(o),
		Terms: inventory.Terms{
			ClusterID: clusterID, ClusterName: cmp.Or(o.clusterName, clusterID), EndpointURL: o.apiServerEndpoint, PeerKey: key.Public(),
			Lending: o.lending, Headroom: o.headroom, Region: o.region, Zone: o.zone,
		},
		Tariff: o.tariff, Prices: o.prices(),
		AdvertisementInterval: o.advertisementInterval, AdvertisementCopy: types.NamespacedName{Namespace: o.advertisementNamespace, Name: o.advertisementName},
		Placeholders: o.placeholders, ProofTimeout: o.proofTimeout, LeaveWithin: o.leaveWithin, Priority: o.priority,
		SchedulerName: o.schedulerName, OwnerKinds: o.ownerKinds, FinishedPodRetention: o.finishedPodRetention,
		ReleaseGrace: o.releaseGrace, ProviderLostAfter: o.providerLostAfter, PeeringIdleTime: o.peeringIdleTime, Clock: clock.RealClock{},
	})
}

var _ copier.Broker = (*mtls.Client)(nil)

// connect returns the connection to the broker, by the transport that is set.
func connect(mgr ctrl.Manager, live client.Client, o options, clusterID string) (transport.BrokerCommunicator, error) {
	logger := ctrl.Log.WithName("transport")
	if o.transport == transportKubernetes {
		hub, namespace, err := kubernetes.Access(o.brokerKubeconfig)
		if err != nil {
			return nil, err
		}
		if namespace = cmp.Or(o.brokerNamespace, namespace); namespace != objects.Namespace(clusterID) {
			return nil, fmt.Errorf("namespace %s of the hub is not that of cluster %s, which is %s: set --cluster-id, or have the kubeconfig made for this cluster", namespace, clusterID, objects.Namespace(clusterID))
		}
		return kubernetes.New(hub, namespace, clusterID, logger)
	}
	keeper := identity.New(identity.Options{
		ClusterID: clusterID, CertPath: o.certPath,
		Client: live, Namespace: o.namespace, BrokerURL: o.url, CAHash: o.caHash, TokenFile: o.tokenFile,
		Report: warningRecorder(mgr, "Secret", o.namespace, identity.Secret, "IdentityUnavailable", "Join"), Log: ctrl.Log.WithName("identity"),
	})
	return mtls.New(o.url, keeper, o.pollInterval, logger), errors.Join(mgr.AddReadyzCheck("identity", keeper.Check), mgr.Add(keeper))
}

// ensureNamespaces creates the namespaces of an agent that is run by hand: the chart's has them, and
// no permission to do it.
func ensureNamespaces(ctx context.Context, live client.Client, o options) error {
	for _, name := range []string{o.namespace, o.instructionNamespace, o.advertisementNamespace} {
		err := live.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
		if err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsForbidden(err) {
			return fmt.Errorf("creating namespace %s: %w", name, err)
		}
	}
	return nil
}

// prices names the ConfigMap with the prices, none where empty.
func (o *options) prices() types.NamespacedName {
	return types.NamespacedName{Namespace: o.namespace, Name: o.costConfigMap}
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
