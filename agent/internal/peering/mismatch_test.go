package peering_test

import (
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

func TestUnreadable(t *testing.T) {
	if driver, ok := peering.ReadsOnly(peering.Unreadable("liqo")); !ok || driver != "liqo" {
		t.Errorf("read as %q, %t", driver, ok)
	}
	for _, raw := range []string{
		``, `{}`, `{"readsOnly":""}`, `{"readsOnly":"Liqo!"}`, `{"readsOnly":"liqo","kind":"Grant"}`, `{"readsOnly":"liqo"}{}`,
		`{"readsOnly":"liqo"}` + strings.Repeat(" ", 300), `{"kind":"Refusal","session":7}`,
	} {
		if driver, ok := peering.ReadsOnly([]byte(raw)); ok {
			t.Errorf("%q was read as %q", raw, driver)
		}
	}
	for theirs, want := range map[string]string{"liqo": "paris uses another driver: liqo, and this cluster direct", "direct": "the same release"} {
		if got := peering.Mismatched("paris", theirs, "direct"); got.Done || got.Reason != "OtherDriver" || !strings.Contains(got.Message, want) {
			t.Errorf("theirs is %s: %+v", theirs, got)
		}
	}
}
