package capacity_test

import (
	"maps"
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestSubtractFromClone: what is taken from a clone of a list is not taken from the list, also
// where an amount is the result of a calculation: quantities that are copied share its digits.
func TestSubtractFromClone(t *testing.T) {
	list := broker.Times(expect.Resources("cpu", "700m"), 1)
	clone := capacity.Subtract(maps.Clone(list), broker.Times(expect.Resources("cpu", "500m"), 1))
	if got := broker.FromList(clone).String(); got != "cpu 200m" {
		t.Errorf("left are %s", got)
	}
	if got := broker.FromList(list).String(); got != "cpu 700m" {
		t.Errorf("the list has become %s", got)
	}
}
