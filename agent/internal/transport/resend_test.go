package transport

import (
	"testing"
	"time"
)

func TestResend(t *testing.T) {
	var r Resend[[]string]
	start := time.Unix(1000, 0)
	after := func(d time.Duration) time.Time { return start.Add(d) }
	wait := func(what, id string, message []string, at time.Duration, want time.Duration) {
		t.Helper()
		if got := r.Wait(id, message, after(at)); got != want {
			t.Errorf("%s: wait %s, want %s", what, got, want)
		}
	}
	wait("never sent", "a", []string{"x"}, 0, 0)
	if got := r.Sent("a", []string{"x"}, start); got != ResendAfter {
		t.Errorf("after sending: wait %s", got)
	}
	wait("just sent", "a", []string{"x"}, time.Second, ResendAfter-time.Second)
	wait("another message", "a", []string{"y"}, time.Second, 0)
	wait("another reservation", "b", []string{"x"}, time.Second, 0)
	wait("its effect does not show", "a", []string{"x"}, ResendAfter, 0)
	r.Sent("b", nil, after(ResendAfter))
	if len(r.sent) != 1 {
		t.Errorf("messages that are due are not removed: %v", r.sent)
	}
	r.Reset()
	wait("after a Relist", "b", nil, ResendAfter, 0)
}
