package main

import (
	"slices"
	"testing"
)

// TestChoose: each name runs one benchmark, and all together measure each figure once.
func TestChoose(t *testing.T) {
	all, err := choose("")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range benches {
		one, err := choose(b.name)
		if err != nil || len(one) != 1 || one[0].name != b.name {
			t.Errorf("%s runs %v: %v", b.name, one, err)
		}
		measures := slices.ContainsFunc(all, func(other bench) bool {
			return other.name == b.name || other.name == b.with && slices.Equal(other.run, b.run)
		})
		if !measures {
			t.Errorf("no benchmark measures %s", b.name)
		}
	}
	if slices.ContainsFunc(all, func(b bench) bool { return b.name == "hold_cost_ratio" }) {
		t.Error("hold_cost_ratio runs beside overflow_warm_seconds, which measures it")
	}
	if _, err := choose("none"); err == nil {
		t.Error("a name that does not exist runs")
	}
}
