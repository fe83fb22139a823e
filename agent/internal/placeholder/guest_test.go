package placeholder_test

import (
	"testing"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestPlaces(t *testing.T) {
	anywhere := func(string) bool { return true }
	one, two := set(1, "cpu", "1"), set(2, "cpu", "2")
	part := placeholder.Part{Hold: "a", Shape: placeholder.ShapeOf(two)}
	c := &cluster{}
	c.apply(held("a", one, two), held("b", set(1, "cpu", "4")))
	if _, ok := placeholder.NewPlaces(c.pods).Take(expect.Resources("cpu", "2"), part, anywhere); ok {
		t.Error("before any has a place: ok")
	}
	c.bind("n1")
	places := placeholder.NewPlaces(c.pods)
	if _, ok := places.Take(expect.Resources("cpu", "2"), part, func(string) bool { return false }); ok {
		t.Error("a place where the guest may not run")
	}
	taken := map[string]bool{}
	for i, want := range []string{"2", "2", "4", ""} {
		place, ok := places.Take(expect.Resources("cpu", "2"), part, anywhere)
		got := ""
		if ok {
			got = place.Placeholders[0].Spec.Containers[0].Resources.Requests.Cpu().String()
			if name := place.Placeholders[0].Name; place.Node != "n1" || len(place.Placeholders) != 1 || taken[name] {
				t.Errorf("guest %d: %+v", i, place)
			} else {
				taken[name] = true
			}
		}
		if got != want {
			t.Errorf("guest %d takes a place of %q CPUs, want %q: those of its shape, then one with room", i, got, want)
		}
	}
}

// A guest of a divisible total takes as many parts of one node as it needs, and only if they do
// not suffice the place of another hold.
func TestPlaceInTotal(t *testing.T) {
	c := &cluster{fits: fitsOf(4)}
	c.apply(total("a", "cpu", "4"))
	other := placeholder.Make(placeholder.Input{Holds: []placeholder.Hold{held("b", set(1, "cpu", "8"))}, Options: options}).Create
	c.bind("n1", c.pods[0].Name)
	c.bind("n2", c.pods[1].Name, c.pods[2].Name, c.pods[3].Name)
	other[0].Spec.NodeName = "n3"
	places, part := placeholder.NewPlaces(append(c.pods, other...)), placeholder.Part{Hold: "a", Divisible: true}
	place, ok := places.Take(expect.Resources("cpu", "3"), part, func(string) bool { return true })
	if !ok || place.Node != "n2" || len(place.Placeholders) != 3 {
		t.Errorf("ok %t, %+v", ok, place)
	}
	if place, ok = places.Take(expect.Resources("cpu", "1"), part, func(string) bool { return true }); !ok || place.Node != "n1" {
		t.Errorf("what is left: ok %t, %+v", ok, place)
	}
	if place, ok = places.Take(expect.Resources("cpu", "1"), part, func(string) bool { return true }); !ok || place.Node != "n3" {
		t.Errorf("the place of another hold: ok %t, %+v", ok, place)
	}
	if place, ok = places.Take(expect.Resources("cpu", "1"), part, func(string) bool { return true }); ok {
		t.Errorf("all is taken: %+v", place)
	}
}
