package main

import "testing"

// TestGCPercent: a small heap doubles between collections, a large one grows by a bounded
// amount, and a very large one by a quarter.
func TestGCPercent(t *testing.T) {
	for name, tc := range map[string]struct {
		used uint64
		want int
	}{
		"nothing in use yet": {0, 100},
		"small":              {20 << 20, 100},
		"as the bound":       {64 << 20, 100},
		"twice the bound":    {128 << 20, 50},
		"four times":         {256 << 20, 25},
		"very large":         {4 << 30, 25},
	} {
		if got := gcPercent(tc.used); got != tc.want {
			t.Errorf("%s: %d%%, want %d%%", name, got, tc.want)
		}
	}
}
