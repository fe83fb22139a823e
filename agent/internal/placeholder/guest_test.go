package placeholder_test

import (
	"testing"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestPlaceFor(t *testing.T) {
	anywhere := func(string) bool { return true }
	before := []placeholder.Hold{held("a", set(1, "cpu", "1"), set(2, "cpu", "2"))}
	smaller := []placeholder.Hold{held("a", set(1, "cpu", "1"), set(1, "cpu", "2"))}
	c := &cluster{}
	c.apply(before...)
	if _, within, ok := placeholder.PlaceFor(expect.Resources("cpu", "2"), before, smaller, c.pods, anywhere); !within || ok {
		t.Errorf("before any has a place: within %t, ok %t", within, ok)
	}
	c.bind("n1")
	place, _, ok := placeholder.PlaceFor(expect.Resources("cpu", "2"), before, smaller, c.pods, anywhere)
	if !ok || place.Node != "n1" || len(place.Placeholders) != 1 || place.Placeholders[0].Spec.Containers[0].Resources.Requests.Cpu().String() != "2" {
		t.Errorf("not a placeholder of the guest's shape: %+v", place)
	}
	if _, _, ok := placeholder.PlaceFor(expect.Resources("cpu", "2"), before, smaller, c.pods, func(string) bool { return false }); ok {
		t.Error("a place where the guest may not run")
	}
	if _, within, ok := placeholder.PlaceFor(expect.Resources("cpu", "4"), before, before, c.pods, anywhere); within || ok {
		t.Errorf("a guest that is not in the hold: within %t, ok %t", within, ok)
	}
}

// A guest of a divisible total takes as many chunks of one node as it needs.
func TestPlaceInTotal(t *testing.T) {
	before, after := []placeholder.Hold{total("a", "cpu", "4")}, []placeholder.Hold{total("a", "cpu", "1")}
	c := &cluster{pods: placeholder.Make(placeholder.Input{Holds: before, Options: options, Fits: fitsOf(4)}).Create}
	c.bind("n1", c.pods[0].Name)
	c.bind("n2", c.pods[1].Name, c.pods[2].Name, c.pods[3].Name)
	place, within, ok := placeholder.PlaceFor(expect.Resources("cpu", "3"), before, after, c.pods, func(string) bool { return true })
	if !within || !ok || place.Node != "n2" || len(place.Placeholders) != 3 {
		t.Errorf("within %t, ok %t, %+v", within, ok, place)
	}
}
