package events_test

import (
	"strings"
	"testing"

	clientgoevents "k8s.io/client-go/tools/events"

	"github.com/spillway-dev/spillway/broker/events"
)

func TestRecorderTruncates(t *testing.T) {
	fake := clientgoevents.NewFakeRecorder(1)
	events.NewRecorder(fake).Eventf(nil, nil, "Normal", "ReservationQueued", "Place", "100%% of %s", strings.Repeat("é", events.MaxMessage))
	got, _ := strings.CutPrefix(<-fake.Events, "Normal ReservationQueued ")
	if len(got) > events.MaxMessage || !strings.HasPrefix(got, "100% of é") || !strings.HasSuffix(got, "é…") {
		t.Errorf("got %d bytes: %q", len(got), got)
	}
}
