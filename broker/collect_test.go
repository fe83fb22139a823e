package main

import "testing"

// TestGCPercent: a small heap doubles between collections, a larger one grows by a bounded
// amount, and a large one by half.
func TestGCPercent(t *testing.T) {
	for name, tc := range map[string]struct {
		used uint64
		want int
	}{
		"nothing in use yet": {0, 100},
		"small":              {20 << 20, 100},
		"as the bound":       {64 << 20, 100},
		"larger":             {80 << 20, 80},
		"twice the bound":    {128 << 20, 50},
		"very large":         {4 << 30, 50},
	} {
		if got := gcPercent(tc.used); got != tc.want {
			t.Errorf("%s: %d%%, want %d%%", name, got, tc.want)
		}
	}
}
