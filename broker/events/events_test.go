package events_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	clientgoevents "k8s.io/client-go/tools/events"

	"github.com/spillway-dev/spillway/broker/events"
)

func TestTruncateTo(t *testing.T) {
	for name, tc := range map[string]struct {
		reason, message, want string
		limit                 int
	}{
		"short":         {reason: "a message within the limit is not changed", message: "grüße", limit: 7, want: "grüße"},
		"long":          {reason: "the ellipsis is within the limit", message: "capacity", limit: 7, want: "capa…"},
		"in a rune":     {reason: "no character is cut in half", message: "ab世界", limit: 6, want: "ab…"},
		"between runes": {reason: "a character that fits stays", message: "ab世界世", limit: 8, want: "ab世…"},
		"invalid":       {reason: "the API accepts valid UTF-8 only", message: "a\xff", limit: 9, want: "a�"},
	} {
		t.Run(name, func(t *testing.T) {
			got := events.TruncateTo(tc.message, tc.limit)
			if got != tc.want || len(got) > tc.limit || !utf8.ValidString(got) {
				t.Errorf("%s: want %q, got %q", tc.reason, tc.want, got)
			}
		})
	}
}

func TestRecorderTruncates(t *testing.T) {
	fake := clientgoevents.NewFakeRecorder(1)
	events.NewRecorder(fake).Eventf(nil, nil, "Normal", "ReservationQueued", "Place", "100%% of %s", strings.Repeat("é", events.MaxMessage))
	got, _ := strings.CutPrefix(<-fake.Events, "Normal ReservationQueued ")
	if len(got) > events.MaxMessage || !strings.HasPrefix(got, "100% of é") || !strings.HasSuffix(got, "é…") {
		t.Errorf("got %d bytes: %q", len(got), got)
	}
}
