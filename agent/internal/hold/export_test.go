package hold

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/hold/usage"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Fit exposes what a decision checks: whether a wanted capacity fits into slots beside
// what is promised and not used yet. The rejection is nil if it does.
func Fit(slots []capacity.Slot, promised []broker.HeldCapacity, wanted broker.HeldCapacity) *capacity.Rejection {
	return place(reserved(nodes{slots: slots}, promised), wanted)
}

// MaxMoved is the number of guests that are given a place at a time.
const MaxMoved = maxMoved

// PartOf exposes how much of a divisible total fits into slots.
func PartOf(slots []capacity.Slot, total broker.HeldCapacity) broker.HeldCapacity {
	return partOf(total, capacity.NewPacker(slots))
}

// ProofChanged exposes whether a status is written because of what placeholders prove, as they
// have for a time.
func ProofChanged(in *broker.ProviderInstruction, proof placeholder.Verdict, since time.Duration) bool {
	return decision{instruction: in, proof: proof, proofTakes: since}.proofChanged()
}

// AnswerOf exposes what the result of a dry run says about the pod.
func AnswerOf(err error) string { return string(answerOf(err)) }

// LeavingGuests exposes which guests must leave.
var LeavingGuests = leaving

// PlanPlaces exposes what is planned for the places of a consumer with one hold: how many
// places are handed over, and how many placeholders are created and removed.
func (r *Reconciler) PlanPlaces(observed Observed, in *broker.ProviderInstruction, held broker.HeldCapacity) (handOvers, created, removed int) {
	consumer := in.Spec.RequesterClusterID
	places := observed.Places(consumer)
	moves, plan := r.planPlaces(input{consumer: consumer, observed: observed}, []holding{{in, held}}, places, r.places.placeholders(places.Placeholders, consumer, r.Clock.Now()), metav1.OwnerReference{})
	return len(moves.handOvers), len(plan.Create), len(plan.Remove)
}

// Waiting exposes how many guests of a consumer with one hold are let go without a place, and of
// how many that wait an event is to say so.
func (r *Reconciler) Waiting(observed Observed, in *broker.ProviderInstruction, held broker.HeldCapacity) (ungated, reported int) {
	s := situation{
		consumer: in.Spec.RequesterClusterID, holdings: []holding{{in, held}}, usage: usage.New([]usage.Promise{usage.PromiseOf(in, held)}),
		expected: map[string]int{}, node: observed.Node,
	}
	moves := r.match(&s, observed.Places(s.consumer))
	return len(moves.ungate), len(moves.unplaced)
}

// Enqueued takes the consumers that were enqueued, in order.
func (r *Reconciler) Enqueued() (consumers []string) {
	for {
		select {
		case e := <-r.enqueue:
			consumers = append(consumers, e.Object.GetName())
		default:
			return consumers
		}
	}
}
