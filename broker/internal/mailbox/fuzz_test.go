package mailbox

import (
	"net/http"
	"testing"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// FuzzRequests reads what a cluster may have written to its objects.
func FuzzRequests(f *testing.F) {
	f.Add(`{"id":"1","version":"1","method":"POST","path":"/api/v1/reservations","body":{"sourceUID":"x"}}`, `{"id":"1"}`)
	f.Add(`{"id":"1","method":"POST","path":"/api/v1/reservations","body":null}`, `{"id":"2"}`)
	f.Add(`{"id":"1","path":"/api/v1/advertisements"}`, `[`)
	f.Add(`{"id":""}`, ``)
	f.Fuzz(func(t *testing.T, requested, answered string) {
		request, open := pending(map[string]string{objects.AnnotationRequest: requested, objects.AnnotationAnswer: answered})
		if open && request.ID == "" {
			t.Fatal("a request without an ID is open")
		}
		for _, kind := range []string{kindAdvertisement, kindReservation, kindInstruction} {
			carrier := object(kind, "spillway-cluster-rome", "rome")
			carrier.Object["spec"] = map[string]any{"clusterID": "rome"}
			body, err := bodyOf(carrier, request)
			if err == nil && kind == kindAdvertisement && request.Path == protocol.PathAdvertisements && string(body) != `{"clusterID":"rome"}` {
				t.Fatalf("the body of an advertisement is %s", body)
			}
		}
	})
}

// TestOnlyCallsThatEnd: a stream, and a list, is no call of an object.
func TestOnlyCallsThatEnd(t *testing.T) {
	m := &Mailbox{Options: Options{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it was called") })}}
	for _, method := range []string{http.MethodGet, http.MethodHead, "", "get"} {
		answer, err := m.answer(t.Context(), "rome", object(kindReservation, "spillway-cluster-rome", "one"), objects.Request{ID: "1", Method: method, Path: protocol.PathReservations + "?watch=true&role=requester"})
		if err != nil || answer.Error == nil || answer.Error.Code != protocol.CodeInvalid {
			t.Errorf("%s: %+v, %v", method, answer, err)
		}
	}
}
