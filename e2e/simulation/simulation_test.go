package main

import "testing"

func TestMany(t *testing.T) {
	steps := 0
	for seed := range uint64(60) {
		r := inBubble(t, newSchedule(seed+1), plant{}, nil)
		steps += r.steps
	}
	t.Log(steps)
}
