package hold

import (
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Fit exposes what a decision checks: whether a wanted capacity fits into slots beside
// what is promised and not used yet. The rejection is nil if it does.
func Fit(slots []capacity.Slot, promised []broker.HeldCapacity, wanted broker.HeldCapacity) *capacity.Rejection {
	return place(reserved(nodes{slots: slots}, promised), wanted)
}

// AnswerOf exposes what the result of a dry run says about the pod.
func AnswerOf(err error) string { return string(answerOf(err)) }
