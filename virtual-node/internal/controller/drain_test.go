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
	clock, recorder := testingclock.NewFakeClock(time.Unix(10_000, 0)), events.NewFakeRecorder(1)
	n := &virtualNode{providerID: "paris", controller: &Controller{Options: Options{Clock: clock, Recorder: recorder, Log: testr.New(t)}}}
	for _, step := range []struct {
		after time.Duration
		want  bool
	}{{0, false}, {guestsEndWithin - time.Second, false}, {time.Second, true}} {
		clock.Step(step.after)
		if got := n.guestsOverdue(); got != step.want {
			t.Errorf("after another %s: overdue %t", step.after, got)
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
