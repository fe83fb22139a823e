package histories

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/anishathalye/porcupine"
	"k8s.io/apimachinery/pkg/types"
)

// kind of an operation on the capacity of one provider.
type kind string

const (
	// granted: a consumer changed what is granted to its Reservation to an amount, 0 for a
	// deletion, and has seen that it is. The provider must hold it.
	granted kind = "granted"
	// holds: the provider began to hold exactly that amount for a Reservation. It must have
	// room for it, and must not hold less than is granted.
	holds kind = "holds"
	// reads: the broker answered to a consumer that an amount is granted.
	reads kind = "reads"
	// ledger: the ledger had these charges. They cover what is granted and what is held, and
	// do not exceed the provider's room.
	ledger kind = "ledger"
)

// step is the input of an operation. There is no output besides: the outcome is known.
type step struct {
	kind     kind
	provider string
	uid      types.UID
	pods     int32
	charges  map[types.UID]int32
}

func (s step) String() string {
	if s.kind != ledger {
		return fmt.Sprintf("%s %s: %s %d pods", s.provider, s.kind, s.uid, s.pods)
	}
	var charges []string
	for _, uid := range slices.Sorted(maps.Keys(s.charges)) {
		charges = append(charges, fmt.Sprintf("%s %d", uid, s.charges[uid]))
	}
	return fmt.Sprintf("%s %s: %s", s.provider, s.kind, strings.Join(charges, ", "))
}

// amounts are the pods of one Reservation at one provider.
type amounts struct{ granted, held int32 }

// state is a provider's capacity: what is granted and held, by Reservation.
type state map[types.UID]amounts

// model of the capacity of each provider, which has room for a number of pods.
func model(room int32) porcupine.Model {
	return porcupine.Model{
		Partition: byProvider,
		Init:      func() any { return state{} },
		Step: func(before, input, _ any) (bool, any) {
			return before.(state).apply(input.(step), room)
		},
		Equal:             func(a, b any) bool { return maps.Equal(a.(state), b.(state)) },
		DescribeOperation: func(input, _ any) string { return input.(step).String() },
	}
}

func byProvider(history []porcupine.Operation) (parts [][]porcupine.Operation) {
	of := map[string][]porcupine.Operation{}
	for _, operation := range history {
		provider := operation.Input.(step).provider
		of[provider] = append(of[provider], operation)
	}
	for _, provider := range slices.Sorted(maps.Keys(of)) {
		parts = append(parts, of[provider])
	}
	return parts
}

// apply returns the state after a step, and whether the step is possible.
func (s state) apply(step step, room int32) (bool, state) {
	now := s[step.uid]
	switch step.kind {
	case reads:
		return now.granted == step.pods, s
	case ledger:
		var sum int32
		for _, charged := range step.charges {
			sum += charged
		}
		for uid, a := range s {
			if max(a.granted, a.held) > step.charges[uid] {
				return false, s
			}
		}
		return sum <= room, s
	case granted:
		if step.pods > now.held {
			return false, s
		}
		now.granted = step.pods
	case holds:
		sum := step.pods - now.held
		for _, a := range s {
			sum += a.held
		}
		if sum > room || step.pods < now.granted {
			return false, s
		}
		now.held = step.pods
	}
	after := maps.Clone(s)
	after[step.uid] = now
	if now == (amounts{}) {
		delete(after, step.uid)
	}
	return true, after
}

// TestModel checks the model itself on short histories.
func TestModel(t *testing.T) {
	// at is an operation from one time to another.
	at := func(from, to int64, s step) porcupine.Operation {
		s.provider = "paris"
		return porcupine.Operation{Input: s, Call: from, Return: to}
	}
	hold := func(uid types.UID, pods int32) step { return step{kind: holds, uid: uid, pods: pods} }
	grant := func(uid types.UID, pods int32) step { return step{kind: granted, uid: uid, pods: pods} }
	read := func(uid types.UID, pods int32) step { return step{kind: reads, uid: uid, pods: pods} }
	charge := func(charges map[types.UID]int32) step { return step{kind: ledger, charges: charges} }
	for name, test := range map[string]struct {
		history []porcupine.Operation
		want    bool
	}{
		"a life": {[]porcupine.Operation{
			at(1, 4, grant("a", 2)), at(2, 3, hold("a", 2)), at(5, 6, read("a", 2)), at(7, 10, grant("a", 0)), at(8, 9, hold("a", 0)), at(11, 12, read("a", 0)),
		}, true},
		"capacity is used again after its release": {[]porcupine.Operation{
			at(1, 4, grant("a", 3)), at(2, 3, hold("a", 3)), at(5, 8, grant("a", 0)), at(6, 7, hold("a", 0)), at(5, 12, grant("b", 3)), at(9, 10, hold("b", 3)),
		}, true},
		"granted without being held":              {[]porcupine.Operation{at(1, 4, grant("a", 2))}, false},
		"granted before it is held":               {[]porcupine.Operation{at(1, 2, grant("a", 2)), at(3, 4, hold("a", 2))}, false},
		"held twice":                              {[]porcupine.Operation{at(1, 2, hold("a", 2)), at(3, 4, hold("b", 2))}, false},
		"released while granted":                  {[]porcupine.Operation{at(1, 4, grant("a", 2)), at(2, 3, hold("a", 2)), at(5, 6, hold("a", 0))}, false},
		"a write is lost":                         {[]porcupine.Operation{at(1, 4, grant("a", 2)), at(2, 3, hold("a", 2)), at(5, 6, read("a", 0))}, false},
		"a read during a write":                   {[]porcupine.Operation{at(1, 6, grant("a", 2)), at(2, 3, hold("a", 2)), at(4, 5, read("a", 0))}, true},
		"the ledger covers what is held":          {[]porcupine.Operation{at(1, 2, hold("a", 2)), at(3, 4, charge(map[types.UID]int32{"a": 2, "b": 1}))}, true},
		"the ledger has lost a hold":              {[]porcupine.Operation{at(1, 2, hold("a", 2)), at(3, 4, charge(map[types.UID]int32{"b": 1}))}, false},
		"the ledger promises more than there is":  {[]porcupine.Operation{at(1, 2, charge(map[types.UID]int32{"a": 2, "b": 2}))}, false},
		"the ledger is read while a hold changes": {[]porcupine.Operation{at(1, 6, hold("a", 2)), at(2, 3, charge(nil)), at(4, 5, charge(map[types.UID]int32{"a": 2}))}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := porcupine.CheckOperations(model(3), test.history); got != test.want {
				t.Errorf("linearizable: %v, want %v", got, test.want)
			}
		})
	}
}
