package protocol

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestNegotiate(t *testing.T) {
	for name, tc := range map[string]struct {
		broker VersionRange
		client string
		want   int
		err    string
	}{
		"the same":                           {VersionRange{1, 2}, "1-2", 2, ""},
		"a client without the header":        {VersionRange{1, 2}, "", 1, ""},
		"a newer client":                     {VersionRange{1, 2}, "1-7", 2, ""},
		"an older client":                    {VersionRange{1, 7}, "2-3", 3, ""},
		"a client that is too old":           {VersionRange{2, 3}, "", 0, "upgrade the client's agent"},
		"a client that is too new":           {VersionRange{1, 2}, "3-4", 0, "upgrade the broker"},
		"a single version":                   {VersionRange{1, 2}, "2", 2, ""},
		"a range that ends before it begins": {VersionRange{1, 2}, "2-1", 0, "must be a range"},
		"not a number":                       {VersionRange{1, 2}, "x", 0, "must be a range"},
		"version 0":                          {VersionRange{1, 2}, "0-2", 0, "must be a range"},
	} {
		t.Run(name, func(t *testing.T) {
			peer, err := ParseVersions(tc.client)
			got := 0
			if err == nil {
				got, err = tc.broker.Negotiate(peer)
			}
			if got != tc.want || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Fatalf("got %d, %v, want %d, %q", got, err, tc.want, tc.err)
			}
		})
	}
}

// TestOlderBroker calls a broker of version 1, which has neither header nor renewals.
func TestOlderBroker(t *testing.T) {
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/renew") {
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"code":"NotFound","message":"there is no POST"}`)
		}
	})
	expect.NoError(t, client.Renew(t.Context(), "some", "uid"))
	if client.Version() != 1 {
		t.Fatalf("the broker is taken for version %d", client.Version())
	}
}

// TestNewerBroker reads responses and a stream with fields, codes and event types that
// this version does not have.
func TestNewerBroker(t *testing.T) {
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get(HeaderVersion); got != Versions.String() {
			t.Errorf("the client states %q", got)
		}
		w.Header().Set(HeaderVersion, "2")
		switch {
		case r.URL.Query().Get("watch") == "true":
			for _, line := range []string{`{"type":"Relist","newer":1,"consumer":[{"id":"a","newer":{}}]}`, `{"type":"Newer","newer":[]}`, `{"type":"Put","consumer":[{"id":"b"}]}`} {
				_, _ = io.WriteString(w, line+"\n")
			}
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		case strings.HasSuffix(r.URL.Path, "/renew"):
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"code":"NotFound","message":"no such reservation","newer":true}`)
		case r.Method == http.MethodDelete:
			w.WriteHeader(http.StatusPaymentRequired)
			_, _ = io.WriteString(w, `{"code":"Newer","message":"a code of a newer version"}`)
		default:
			_, _ = io.WriteString(w, `{"items":[{"id":"a","newer":1}],"newer":2}`)
		}
	})
	list, err := client.ConsumerReservations(t.Context())
	expect.NoError(t, err)
	if len(list) != 1 || list[0].ID != "a" || client.Version() != 2 {
		t.Fatalf("got %v, version %d", list, client.Version())
	}
	if err := client.Renew(t.Context(), "some", "uid"); !HasCode(err, CodeNotFound) {
		t.Fatalf("want the broker's NotFound, got %v", err)
	}
	if err := client.DeleteReservation(t.Context(), "some"); !HasCode(err, "Newer") {
		t.Fatalf("want the broker's code, got %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), expect.Deadline)
	defer cancel()
	var got []string
	client.Watch(ctx, RoleRequester, func(event Event) {
		encoded, err := json.Marshal(event)
		expect.NoError(t, err)
		got = append(got, string(event.Type)+" "+event.Consumer[0].ID)
		if len(got) == 2 {
			cancel()
		} else if strings.Contains(string(encoded), "newer") {
			t.Errorf("unknown fields are kept: %s", encoded)
		}
	})
	if !slices.Equal(got, []string{"Relist a", "Put b"}) {
		t.Fatalf("got %v", got)
	}
}
