package instruction

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// outdatedRetention is how long a view with an earlier attempt than this cluster has
// carried out is ignored. A broker that is behind catches up meanwhile, or another one
// replaces it; a hub that was restored from a backup keeps listing the view.
const outdatedRetention = time.Minute

// outdated remembers which views are outdated. Its zero value is ready to use.
type outdated struct {
	mu sync.Mutex
	// released are the last attempts of Reservations whose release was confirmed.
	released map[reservation]released
	// since is when the first of the outdated views of a Reservation came.
	since map[reservation]time.Time
}

// reservation identifies a Reservation at the broker.
type reservation struct {
	name string
	uid  types.UID
}

type released struct {
	attempt int64
	at      time.Time
}

// removed remembers the attempt of an instruction that is removed, if it was released.
func (o *outdated) removed(instruction *broker.ProviderInstruction, now time.Time) {
	ack, decided := Decision(instruction)
	if !decided || !ack.Accepted || !instruction.Spec.Releasing {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for of, r := range o.released {
		if now.Sub(r.at) >= outdatedRetention {
			delete(o.released, of)
			delete(o.since, of)
		}
	}
	if o.released == nil {
		o.released = map[reservation]released{}
	}
	o.released[reservation{instruction.Name, instruction.Spec.ReservationUID}] = released{ack.Attempt, now}
}

// wait is for how long a view is still to be ignored; 0 if it is to be carried out.
func (o *outdated) wait(existing *broker.ProviderInstruction, view *protocol.ProviderView, now time.Time) time.Duration {
	of := reservation{view.ID, view.Hold.ReservationUID}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.earlier(existing, view) {
		delete(o.since, of)
		return 0
	}
	since, known := o.since[of]
	if !known {
		if o.since == nil {
			o.since = map[reservation]time.Time{}
		}
		since = now
		o.since[of] = now
	}
	left := since.Add(outdatedRetention).Sub(now)
	if left <= 0 {
		delete(o.since, of)
		delete(o.released, of)
		return 0
	}
	return left
}

// earlier reports whether a view is of an earlier attempt than the instruction, or than
// the release of one that was removed, and differs from it.
func (o *outdated) earlier(existing *broker.ProviderInstruction, view *protocol.ProviderView) bool {
	if existing == nil || existing.Spec.ReservationUID != view.Hold.ReservationUID {
		r, known := o.released[reservation{view.ID, view.Hold.ReservationUID}]
		return known && view.Hold.Attempt <= r.attempt && !view.Hold.Promised.Empty()
	}
	if view.Hold.Attempt >= existing.Spec.Attempt {
		return false
	}
	spec := providerInstructionSpec(view)
	spec.Attempt, spec.AnswerWithin = existing.Spec.Attempt, existing.Spec.AnswerWithin
	return !equality.Semantic.DeepEqual(existing.Spec, spec)
}
