package ledger

import (
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Change is a hold before and after a change, nil for none.
type Change struct{ Was, Now *broker.Hold }

// Changes are the holds that differ.
func Changes(before, after []broker.Hold) (changes []Change) {
	old := map[types.UID]*broker.Hold{}
	// Most holds are where they were, and the same.
	moved := func(i int) bool { return i >= len(before) || i >= len(after) || !SameVersion(&before[i], &after[i]) }
	for i := range before {
		if moved(i) {
			old[before[i].ReservationUID] = &before[i]
		}
	}
	for i := range after {
		if !moved(i) {
			continue
		}
		was := old[after[i].ReservationUID]
		delete(old, after[i].ReservationUID)
		if was == nil || !SameVersion(was, &after[i]) {
			changes = append(changes, Change{was, &after[i]})
		}
	}
	for i := range before {
		if old[before[i].ReservationUID] == &before[i] {
			changes = append(changes, Change{Was: &before[i]})
		}
	}
	return changes
}
