package session

import (
	"strings"
	"testing"
)

func TestUnreadable(t *testing.T) {
	if driver, ok := ReadsOnly(Unreadable("other")); !ok || driver != "other" {
		t.Errorf("got %q, %t", driver, ok)
	}
	for _, raw := range []string{
		``, `{}`, `{"readsOnly":""}`, `{"readsOnly":"Other!"}`, `{"readsOnly":"other","kind":"Grant"}`, `{"readsOnly":"other"}{}`,
		`{"readsOnly":"other"}` + strings.Repeat(" ", 300), `{"kind":"Refusal","session":7}`,
	} {
		if driver, ok := ReadsOnly([]byte(raw)); ok {
			t.Errorf("%q was decoded as %q", raw, driver)
		}
	}
	for theirs, want := range map[string]string{"other": "provider paris uses driver other, this cluster uses direct; set the same driver on both clusters", "direct": "the same release"} {
		if got := Mismatch("paris", theirs, "direct"); got.Done || got.Reason != "DriverMismatch" || !strings.Contains(got.Message, want) {
			t.Errorf("provider uses %s: %+v", theirs, got)
		}
	}
}
