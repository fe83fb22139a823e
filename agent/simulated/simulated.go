// Package simulated is the agent, as package program builds it, with a driver in memory and
// guests that a label marks: for the simulation, and for tests of the whole chain.
package simulated

import (
	"cmp"
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	"github.com/spillway-dev/spillway/agent/program"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// LabelConsumer marks a guest in the simulation with its consumer.
const LabelConsumer = "simulation.example.com/consumer"

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
	// Endpoint of the API server; that of no server where empty.
	Endpoint string
	Broker   transport.BrokerCommunicator
	Grants   *Grants
	Clock    clock.WithTicker
	// Interval of the advertisements.
	Interval time.Duration
	Lending  bool
	// VirtualNodes makes the virtual nodes; something else does where nil, and no lease is renewed.
	VirtualNodes peering.Driver
	// IgnoreGuests makes the agent recognize no guest: a planted fault.
	IgnoreGuests bool
	// Deaf makes the agent advertise and never decide on a hold.
	Deaf bool
}

// Add adds the agent to a manager.
func Add(ctx context.Context, mgr manager.Manager, o Options) error {
	return program.Add(ctx, mgr, program.Parts{
		Namespace: o.Namespace, InstructionNamespace: o.Namespace, Broker: o.Broker,
		Driver: func(func(string), func(string)) (program.Driver, error) {
			return program.Driver{Consumer: o.VirtualNodes, Provider: o.Grants.provider, GuestNamespaces: fake.GuestNamespaces{}}, nil
		},
		Recognizer: inventory.Recognizer{Guest: func(pod *corev1.Pod, _ func(string) map[string]string) (string, bool) {
			if o.IgnoreGuests {
				return "", false
			}
			consumer, ok := pod.Labels[LabelConsumer]
			return consumer, ok
		}},
		Terms: inventory.Terms{
			ClusterID: o.ClusterID, ClusterName: o.ClusterID, EndpointURL: cmp.Or(o.Endpoint, "https://"+o.ClusterID+":6443"), Lending: broker.Lending{Enabled: o.Lending},
		},
		AdvertisementInterval: o.Interval, PeeringIdleTime: time.Minute, FinishedPodRetention: time.Second,
		ReleaseGrace: time.Minute, ProviderLostAfter: time.Minute, Deaf: o.Deaf, Clock: o.Clock,
		// Without goroutines of its own, the schedule decides the order of all calls.
		Writers: 1,
	})
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
