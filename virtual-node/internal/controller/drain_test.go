package controller

import (
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"k8s.io/client-go/tools/events"
	testingclock "k8s.io/utils/clock/testing"
)

// A provider that reports guests without end does not keep the virtual node.
func TestGuestsOverdue(t *testing.T) {
	clock, recorder := testingclock.NewFakeClock(time.Unix(10_000, 0)), events.NewFakeRecorder(10)
	n := &virtualNode{providerID: "paris", controller: &Controller{Options: Options{Clock: clock, Recorder: recorder, Log: testr.New(t)}}}
	for _, step := range []struct {
		after             time.Duration
		pods              int
		guests, reachable bool
		want              bool
	}{
		{0, 1, true, true, false},
		{0, 0, true, true, false},
		{guestsEndWithin - time.Second, 0, true, true, false},
		// A pod has come back: then its guest is waited for again.
		{time.Second, 1, true, true, false},
		{time.Second, 0, true, true, false},
		{guestsEndWithin - time.Second, 0, true, true, false},
		{0, 0, false, true, true},
		{0, 0, true, false, true},
		{0, 0, true, true, false},
		{guestsEndWithin, 0, true, true, true},
	} {
		clock.Step(step.after)
		if got := n.drained(step.pods, step.guests, step.reachable); got != step.want {
			t.Errorf("%+v: drained %t", step, got)
		}
	}
	select {
	case event := <-recorder.Events:
		if !strings.Contains(event, "provider paris still reports guests") {
			t.Errorf("event %q", event)
		}
	default:
		t.Error("no event says why the virtual node is removed")
	}
}
