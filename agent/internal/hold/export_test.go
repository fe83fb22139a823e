package hold

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/hold/usage"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// MaxMoved is the number of guests that are given a place at a time.
const MaxMoved = maxMoved

// AnswerOf exposes what the result of a dry run says about the pod.
func AnswerOf(err error) string { return string(answerOf(err)) }

// LeavingGuests exposes which guests must leave.
var LeavingGuests = leaving

// PlanPlaces exposes what is planned for the places of a consumer with one hold: how many
// places are handed over, and how many placeholders are created and removed.
func (r *Reconciler) PlanPlaces(observed Observed, in *broker.ProviderInstruction, held broker.HeldCapacity) (handOvers, created, removed int) {
	consumer := in.Spec.RequesterClusterID
	places := observed.Places(consumer)
	moves, plan := r.planPlaces(input{Input: verdict.Input{Consumer: consumer}, observed: observed}, []usage.Promise{usage.PromiseOf(in, held)}, places, r.places.placeholders(places.Placeholders, consumer, r.Clock.Now()), metav1.OwnerReference{})
	return len(moves.handOvers), len(plan.Create), len(plan.Remove)
}

// Waiting exposes how many guests of a consumer with one hold are let go without a place, and of
// how many that wait an event is to say so.
func (r *Reconciler) Waiting(observed Observed, in *broker.ProviderInstruction, held broker.HeldCapacity) (ungated, reported int) {
	promises := []usage.Promise{usage.PromiseOf(in, held)}
	s := situation{consumer: in.Spec.RequesterClusterID, promises: promises, usage: usage.New(promises), expected: map[string]int{}, node: observed.Node}
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
