package direct

import (
	"strings"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

func samples() map[session.Kind]*message {
	expires := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	out := map[session.Kind]*message{
		session.Hello: {}, session.Teardown: {}, session.Gone: {}, session.Refusal: {},
		session.Grant: {
			Namespace: "spillway-guests-rome", Token: "eyJh.bGci.x-_1",
			Seconds: 3600, Expires: &expires, Endpoint: "https://192.0.2.1:6443", CA: []byte("PEM"),
		},
	}
	for kind, m := range out {
		m.Kind, m.Session = kind, 7
		if kind == session.Hello || kind == session.Grant || kind == session.Refusal {
			m.RequestID = 3
		}
	}
	out[session.Refusal].Reason, out[session.Refusal].Text, out[session.Refusal].Current = session.ReasonStale, "no", 9
	return out
}

func TestMessages(t *testing.T) {
	grant := func(old, new string) string {
		raw, err := codec.Encode(samples()[session.Grant])
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(raw), old) {
			t.Fatalf("no %s in %s", old, raw)
		}
		return strings.Replace(string(raw), old, new, 1)
	}
	contract.Messages(t, codec, samples(), map[string]string{
		"message of another driver":  `{"kind":"Hello","session":7,"requestID":3}`,
		"no request ID":              `{"driver":"direct","kind":"Hello","session":7}`,
		"request ID where none is":   `{"driver":"direct","kind":"Gone","session":7,"requestID":3}`,
		"field of another kind":      `{"driver":"direct","kind":"Hello","session":7,"requestID":3,"token":"x"}`,
		"namespace is a path":        grant("spillway-guests-rome", "../kube-system"),
		"endpoint without TLS":       grant("https://", "http://"),
		"endpoint with a path":       grant(":6443", ":6443/api"),
		"endpoint with a password":   grant("https://", "https://me:pw@"),
		"token with a line break":    grant("eyJh.", `eyJh.\n`),
		"token that does not expire": grant("3600", "36000000"),
		"token without a lifetime":   grant("3600", "0"),
		"no CA":                      grant(`,"ca":"UEVN"`, ""),
		"session that cannot grow":   `{"driver":"direct","kind":"Gone","session":9223372036854775807}`,
		"size of the message":        `{"driver":"direct","kind":"Gone","session":7}` + strings.Repeat(" ", codec.MaxSize),
	})
}

func FuzzDecode(f *testing.F) { contract.FuzzMessages(f, codec, samples()) }
