// Package simulated builds the parts of the agent that talk with the broker for the
// simulation, and for tests of the whole chain: the production controllers over any manager
// and any connection.
package simulated

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/reservation"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
)

// LabelConsumer marks a guest in the simulation with its consumer.
const LabelConsumer = "simulation.example.com/consumer"

// Connection is the agent's connection to the broker.
type Connection interface {
	transport.Watcher
	reservation.Broker
	instruction.Broker
	advertise.Broker
}

// Grants is what a provider lets its consumers use. It outlives the agent.
type Grants struct{ provider *fake.Provider }

// NewGrants returns the grants of a provider without consumers.
func NewGrants() *Grants { return &Grants{fake.NewProvider()} }

// Of returns the number of pods that a consumer may run.
func (g *Grants) Of(consumer string) (resources corev1.ResourceList, pods int32) {
	capacity := g.provider.Granted(consumer)
	return capacity.Resources, capacity.Pods
}

// Options of an agent.
type Options struct {
	ClusterID, Namespace string
	Connection           Connection
	Grants               *Grants
	Clock                clock.WithTicker
	// Interval of the advertisements.
	Interval time.Duration
	Lending  bool
	// IgnoreGuests makes the agent recognize no guest: a planted fault.
	IgnoreGuests bool
	// InUse reports whether pods use a Reservation, by its UID. Where nil, no lease is renewed.
	InUse func(uid types.UID) (inUse, known bool)
	// Deaf makes the agent advertise and never decide on a hold.
	Deaf bool
}

// Add adds the agent's controllers to a manager.
func Add(ctx context.Context, mgr manager.Manager, o Options) error {
	recognizer := inventory.Recognizer{Guest: func(pod *corev1.Pod, _ func(string) map[string]string) (string, bool) {
		consumer, ok := pod.Labels[LabelConsumer]
		return consumer, ok && !o.IgnoreGuests
	}}
	recorder := events.NewRecorder(mgr.GetEventRecorder("spillway-agent"))
	lending := broker.Lending{Enabled: o.Lending}
	consumers, providers := transport.NewConsumerMirror(o.Connection), transport.NewProviderMirror(o.Connection)
	err := errors.Join(instruction.SetupIndex(ctx, mgr), mgr.Add(consumers), mgr.Add(providers))
	provided := instruction.NewProvider(mgr.GetClient(), o.Namespace, o.Connection, providers, o.Clock)
	advertiser := advertise.New(o.Connection, providers, advertise.Options{
		Terms:    inventory.Terms{ClusterID: o.ClusterID, ClusterName: o.ClusterID, EndpointURL: "https://" + o.ClusterID + ":6443", Lending: lending},
		Interval: o.Interval, Recognizer: recognizer, Unlisted: provided.Unlisted, Clock: o.Clock,
	})
	controllers := []interface {
		SetupWithManager(mgr manager.Manager) error
	}{
		instruction.NewConsumer(mgr.GetClient(), o.Namespace, consumers, o.Clock),
		reservation.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, o.InUse, reservation.Options{
			ClusterID: o.ClusterID, InstructionNamespace: o.Namespace, Namespace: o.Namespace, Broker: o.Connection, Mirror: consumers, Clock: o.Clock,
		}),
		advertiser,
	}
	if !o.Deaf {
		controllers = append(controllers,
			provided,
			hold.New(mgr.GetClient(), mgr.GetAPIReader(), recorder, o.Grants.provider, hold.Options{
				Namespace: o.Namespace, Lending: lending, Recognizer: recognizer, PeeringIdleTime: time.Minute, Clock: o.Clock,
				// Without goroutines of its own, the schedule decides the order of all calls.
				Writers: 1,
			}))
	}
	for _, c := range controllers {
		if err = errors.Join(err, c.SetupWithManager(mgr)); err != nil {
			return fmt.Errorf("setting up the agent: %w", err)
		}
	}
	return nil
}

// Held returns what a provider has set aside for an instruction, nil for nothing.
func Held(of *broker.ProviderInstruction) *broker.HeldCapacity { return instruction.Held(of) }

// GaveUp reports whether the provider has given up a part of a hold that it had
// accepted, because it no longer fits the nodes, and the broker has not lowered its promise
// yet.
func GaveUp(of *broker.ProviderInstruction) bool {
	enforced := meta.FindStatusCondition(of.Status.Conditions, broker.ConditionEnforced)
	return enforced != nil && enforced.Status == metav1.ConditionFalse && enforced.Reason == verdict.ReasonCapacityLost
}
