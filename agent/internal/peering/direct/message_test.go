package direct

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

var expires = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

var samples = map[kind]message{
	kindHello:    {Driver: driverName, Kind: kindHello, Session: 7, Ask: 3},
	kindTeardown: {Driver: driverName, Kind: kindTeardown, Session: 7},
	kindGone:     {Driver: driverName, Kind: kindGone, Session: 7},
	kindGrant: {
		Driver: driverName, Kind: kindGrant, Session: 7, Ask: 3, Namespace: "spillway-guests-rome", Token: "eyJh.bGci.x-_1",
		Seconds: 3600, Expires: &expires, Endpoint: "https://192.0.2.1:6443", CA: []byte("PEM"),
	},
	kindRefusal: {Driver: driverName, Kind: kindRefusal, Session: 7, Ask: 3, Reason: reasonStale, Text: "no", Current: 9},
}

func TestMessagesTravel(t *testing.T) {
	for kind, m := range samples {
		raw, err := encode(m)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		got, err := decode(raw, kind)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		if diff := cmp.Diff(m, got); diff != "" {
			t.Errorf("%s changed on the way:\n%s", kind, diff)
		}
	}
}

func TestMalformedMessagesAreRefused(t *testing.T) {
	grant := func(old, new string) string {
		raw, err := encode(samples[kindGrant])
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(raw), old) {
			t.Fatalf("no %s in %s", old, raw)
		}
		return strings.Replace(string(raw), old, new, 1)
	}
	all := []kind{kindHello, kindTeardown, kindGrant, kindGone, kindRefusal}
	for name, raw := range map[string]string{
		"nothing":                  ``,
		"no JSON":                  `hello`,
		"another driver's":         `{"kind":"Hello","session":7,"ask":3}`,
		"an unknown field":         `{"driver":"direct","kind":"Hello","session":7,"ask":3,"extra":1}`,
		"an unknown kind":          `{"driver":"direct","kind":"Hallo","session":7}`,
		"no session":               `{"driver":"direct","kind":"Hello","ask":3}`,
		"no number":                `{"driver":"direct","kind":"Hello","session":7}`,
		"a number of what is none": `{"driver":"direct","kind":"Gone","session":7,"ask":3}`,
		"something behind it":      `{"driver":"direct","kind":"Gone","session":7}{}`,
		"another kind's field":     `{"driver":"direct","kind":"Hello","session":7,"ask":3,"token":"x"}`,
		"a namespace that is none": grant("spillway-guests-rome", "../kube-system"),
		"no TLS":                   grant("https://", "http://"),
		"a path":                   grant(":6443", ":6443/api"),
		"a password":               grant("https://", "https://me:pw@"),
		"a token with a line":      grant("eyJh.", `eyJh.\n`),
		"a token for ever":         grant("3600", "36000000"),
		"a token for never":        grant("3600", "0"),
		"no CA":                    grant(`,"ca":"UEVN"`, ""),
		"a session without end":    fmt.Sprintf(`{"driver":"direct","kind":"Gone","session":%d}`, int64(math.MaxInt64)),
		"a last session":           fmt.Sprintf(`{"driver":"direct","kind":"Refusal","session":7,"ask":3,"reason":"StaleSession","current":%d}`, int64(math.MaxInt64)),
		"a reason in words":        `{"driver":"direct","kind":"Refusal","session":7,"ask":3,"reason":"no way"}`,
		"a text that goes on":      `{"driver":"direct","kind":"Refusal","session":7,"ask":3,"reason":"No","text":"` + strings.Repeat("x", maxText+1) + `"}`,
		"too much of everything":   `{"driver":"direct","kind":"Gone","session":7}` + strings.Repeat(" ", maxMessage),
	} {
		if m, err := decode([]byte(raw), all...); !errors.Is(err, errMalformed) {
			t.Errorf("%s was read as %+v, %v", name, m, err)
		}
	}
}

// A text of the longest kind is cut between two characters.
func TestRefusalsFit(t *testing.T) {
	m := refusal("No", strings.Repeat("ä", maxText))
	m.Session, m.Ask = 7, 3
	if _, err := encode(*m); err != nil {
		t.Error(err)
	}
}

// FuzzDecode checks that whatever is taken for a message is one: within the
// bounds, the same again after another trip, and not what a driver says to all
// others.
func FuzzDecode(f *testing.F) {
	kinds := []kind{}
	for kind, m := range samples {
		raw, err := encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
		kinds = append(kinds, kind)
	}
	f.Add(peering.Unreadable("liqo"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := decode(raw, kinds...)
		if err != nil {
			if !errors.Is(err, errMalformed) {
				t.Fatalf("an error of another sort: %v", err)
			}
			return
		}
		if other, ok := peering.ReadsOnly(raw); ok {
			t.Fatalf("%+v is also the word of driver %s", m, other)
		}
		again, err := encode(m)
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", m, err)
		}
		got, err := decode(again, m.Kind)
		if err != nil {
			t.Fatalf("%s cannot be read again: %v", again, err)
		}
		if diff := cmp.Diff(m, got); diff != "" {
			t.Fatalf("changed:\n%s", diff)
		}
	})
}
