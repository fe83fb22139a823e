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

// TestNewerBroker reads responses and a stream with fields, codes and event types that
// this version does not have.
func TestNewerBroker(t *testing.T) {
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get(HeaderVersion); got != Version {
			t.Errorf("the client states %q", got)
		}
		w.Header().Set(HeaderVersion, "2") // of no interest to a client: the broker refuses what it does not speak
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
	if len(list) != 1 || list[0].ID != "a" {
		t.Fatalf("got %v", list)
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
