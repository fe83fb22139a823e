package program

import (
	"context"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clientevents "k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	"github.com/spillway-dev/spillway/agent/internal/pods"
	"github.com/spillway-dev/spillway/agent/internal/reachability"
	"github.com/spillway-dev/spillway/agent/internal/reservation"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/protocol"
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

// Controller is a part of the agent that sets itself up with a manager.
type Controller interface {
	SetupWithManager(mgr ctrl.Manager) error
}

// Driver is both sides of a driver.
type Driver struct {
	// Consumer is nil in a cluster of which something else makes the virtual nodes.
	Consumer        peering.Driver
	Receiver        peering.Receiver
	Provider        peering.Provider
	GuestNamespaces hold.GuestNamespaces
	// Watches enqueue what the driver observes.
	Watches []Controller
}

// Parts are what the controllers of an agent depend on.
type Parts struct {
	// Namespace of the agent's own objects, and of the instructions.
	Namespace, InstructionNamespace string
	Broker                          transport.BrokerCommunicator
	// Driver makes the driver. With enqueueConsumer and enqueueProvider it has a cluster's peering
	// with this one reconciled as the consumer and as the provider.
	Driver func(enqueueConsumer, enqueueProvider func(clusterID string)) (Driver, error)
	// Messages are those of the driver, nil if it sends none. Refused is called for a message
	// that is refused.
	Messages *sealing.Messenger
	Refused  func(error)
	// Recognizer of guests and virtual nodes.
	Recognizer inventory.Recognizer
	// Terms on which this cluster provides capacity, and its identity.
	Terms inventory.Terms
	// Tariff and Prices are as in advertise.Options.
	Tariff advertise.Tariff
	Prices types.NamespacedName
	// AdvertisementInterval and AdvertisementCopy are as Interval and Copy of advertise.Options.
	AdvertisementInterval time.Duration
	AdvertisementCopy     types.NamespacedName

	// As the provider: see hold.Options.
	Placeholders              placeholder.Options
	ProofTimeout, LeaveWithin time.Duration
	Priority                  int32
	Writers                   int

	// As the consumer: see virtualnode.Options and pods.Options.
	SchedulerName        string
	OwnerKinds           []owners.Kind
	FinishedPodRetention time.Duration
	ReleaseGrace         time.Duration
	ProviderLostAfter    time.Duration

	// PeeringIdleTime is how long a peering is kept without a grant.
	PeeringIdleTime time.Duration
	// Deaf makes the agent decide on no hold: a planted fault.
	Deaf  bool
	Clock clock.WithTicker
}

// Add adds all that the agent runs to a manager.
func Add(ctx context.Context, mgr manager.Manager, p Parts) error {
	var nodes *virtualnode.Reconciler
	var holds *hold.Reconciler
	driver, err := p.Driver(func(provider string) { nodes.Enqueue(provider) }, func(consumer string) { holds.Enqueue(consumer) })
	if err != nil {
		return err
	}
	recorder := events.NewRecorder(mgr.GetEventRecorder("spillway-agent"))
	consumers, providers := transport.NewConsumerMirror(p.Broker), transport.NewProviderMirror(p.Broker)
	tracker := inventory.NewTracker(p.Recognizer)
	holds = hold.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, driver.Provider, hold.Options{
		Namespace: p.InstructionNamespace, Lending: p.Terms.Lending, Headroom: p.Terms.Headroom, PeeringIdleTime: p.PeeringIdleTime, Recognizer: p.Recognizer,
		Placeholders: p.Placeholders, ProofTimeout: p.ProofTimeout, LeaveWithin: p.LeaveWithin, Priority: p.Priority, Writers: p.Writers, Clock: p.Clock,
		GuestNamespaces: driver.GuestNamespaces, Observe: func(ctx context.Context) (hold.Observed, error) { return tracker, tracker.WaitSynced(ctx) },
	})
	tracker.GuestEnded, tracker.PlaceChanged = holds.Enqueue, holds.PlaceChanged
	provided := instruction.NewProvider(mgr.GetClient(), p.InstructionNamespace, p.Broker, providers, p.Clock)
	advertisement := advertise.Options{
		Terms: p.Terms, Interval: p.AdvertisementInterval, Recognizer: p.Recognizer, Inventory: tracker, Unlisted: provided.Unlisted,
		CopyName: p.AdvertisementCopy.Name, CopyNamespace: p.AdvertisementCopy.Namespace, Tariff: p.Tariff, Prices: p.Prices, Clock: p.Clock,
	}
	reservations := reservation.Options{
		ClusterID: p.Terms.ClusterID, InstructionNamespace: p.InstructionNamespace, Namespace: p.Namespace, Broker: p.Broker, Mirror: consumers, Clock: p.Clock,
	}
	var inUse reservation.InUse
	var advertiser *advertise.Publisher
	controllers := append([]Controller{tracker, instruction.NewConsumer(mgr.GetClient(), p.InstructionNamespace, consumers, p.Clock)}, driver.Watches...)
	if driver.Consumer != nil {
		if nodes, err = p.virtualNodes(mgr, recorder, driver.Consumer, consumers); err != nil {
			return err
		}
		prober := reachability.New(mgr.GetClient(), p.InstructionNamespace, p.Clock, func() { advertiser.Connected() })
		inUse, reservations.Unmappable, advertisement.Unreachable = nodes.InUse, driver.Consumer.Unmappable, prober.Unreachable
		advertisement.Latencies = prober.Latencies
		controllers = append(controllers, prober, nodes, pods.New(nodes, driver.Consumer, pods.Options{
			ReleaseGrace: p.ReleaseGrace, StartTimeout: podStartTimeout, ProviderLostAfter: p.ProviderLostAfter,
		}))
	}
	advertiser = advertise.New(p.Broker, providers, advertisement)
	controllers = append(controllers, advertiser, reservation.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, inUse, reservations))
	if !p.Deaf {
		controllers = append(controllers, provided, holds)
	}
	err = errors.Join(instruction.SetupIndex(ctx, mgr), mgr.Add(consumers), mgr.Add(providers))
	if p.Messages != nil {
		err = errors.Join(err, mgr.Add(sealing.NewDispatcher(p.Messages, sealing.DispatcherOptions{
			Provider: driver.Provider, Receiver: driver.Receiver, Consumer: instruction.ConsumerPeerKey(mgr.GetClient(), p.InstructionNamespace),
			Refused: func(_ string, err error) { p.Refused(err) }, Log: ctrl.Log.WithName("sealing"),
		})))
	}
	for _, c := range controllers {
		err = errors.Join(err, c.SetupWithManager(mgr))
	}
	return err
}

// virtualNodes returns what keeps the virtual nodes, with the owners of their pods.
func (p Parts) virtualNodes(mgr manager.Manager, recorder clientevents.EventRecorder, driver peering.Driver, consumers *transport.Mirror[protocol.ConsumerView]) (*virtualnode.Reconciler, error) {
	lookup, err := owners.New(ctrl.Log.WithName("owners"), p.Clock, mgr.GetConfig(), p.OwnerKinds)
	if err != nil {
		return nil, err
	}
	nodes := virtualnode.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, driver, virtualnode.Options{
		InstructionNamespace: p.InstructionNamespace, SchedulerName: p.SchedulerName,
		PeeringIdleTime: p.PeeringIdleTime, FinishedPodRetention: p.FinishedPodRetention,
		ReadyTimeout: virtualNodeReadyTimeout, ShrinkDelay: shrinkDelay, Owners: lookup.Resolve, Clock: p.Clock,
		Asked: func(provider string) (peering.Peer, bool) { return instruction.Asked(consumers, provider) },
	})
	consumers.Subscribe(instruction.OnAsked(nodes.EnqueueAsked))
	return nodes, mgr.Add(manager.RunnableFunc(func(ctx context.Context) error { lookup.Run(ctx, func() {}); return nil }))
}
