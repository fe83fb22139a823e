package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// TestBeat: the caller hears whether the content is known; nothing is stored.
func TestBeat(t *testing.T) {
	m := newMemory(t, logr.Discard())
	m.agents.unknown = "other"
	for digest, want := range map[string]string{"other": `{"known":false}`, "same": `{"known":true}`} {
		got := m.call(http.MethodPost, protocol.PathBeat, encode(t, protocol.Beat{Sequence: 7, Digest: digest}), "paris")
		if got.status != http.StatusOK || strings.TrimSpace(string(got.body)) != want {
			t.Errorf("%s: got %d %s", digest, got.status, got.body)
		}
		if last := m.agents.beats[len(m.agents.beats)-1]; last != (protocol.Beat{Sequence: 7, Digest: digest}) {
			t.Errorf("%s arrived as %+v", digest, last)
		}
	}
	if n := len(m.agents.stored); n > 0 {
		t.Errorf("%d advertisements were stored", n)
	}
}

func TestNegativeAmounts(t *testing.T) {
	request := newRequest("home")
	request.Spec.PodSets[0].Requests.Extended = map[corev1.ResourceName]resource.Quantity{"example.com/fpga": resource.MustParse("-1")}
	if err := validateSpec(&request.Spec); !protocol.HasCode(err, protocol.CodeInvalid) {
		t.Fatalf("a negative request was accepted: %v", err)
	}
	for name, spoil := range map[string]func(*broker.ClusterAdvertisementSpec){
		"allocated": func(spec *broker.ClusterAdvertisementSpec) { spec.Resources.Allocated.CPU = quantity("-8") },
		"used": func(spec *broker.ClusterAdvertisementSpec) {
			spec.ObservedHolds = []broker.ObservedHold{{Used: broker.ResourceQuantities{Memory: quantity("-1Gi")}}}
		},
		"nodes": func(spec *broker.ClusterAdvertisementSpec) { spec.NodeClasses[0].FreeShapes[0].Nodes = -1 },
	} {
		spec := newAdvertisement("paris")
		if err := validateAdvertisement(&spec); err != nil {
			t.Fatalf("a valid advertisement was refused: %v", err)
		}
		if spoil(&spec); !protocol.HasCode(validateAdvertisement(&spec), protocol.CodeInvalid) {
			t.Errorf("negative %s were accepted", name)
		}
	}
}

// FuzzBodies decodes arbitrary bodies.
func FuzzBodies(f *testing.F) {
	for _, seed := range []string{
		``, `null`, `{}`, `{}{}`, `[`, `{"clusterID":"rome","sequence":1e400}`, `{"spec":{"podSets":[{"requests":{"cpu":"1e1000000000"}}]}}`,
		`{"sourceUID":"4c6a0c5e-6f0d-4c2f-9a38-8f6a2a0d1c11","sourceNamespace":"a","sourceName":"b","sourceGeneration":1,"spec":{"podSets":[{"name":"pods","count":2,"requests":{"cpu":"300m"}}]},"allocations":{"paris":1}}`,
		`{"from":"rome","to":"paris","id":"1","sealed":"eA=="}`, `{"attempt":1,"accepted":true}`, `{"timestamp":"x"}`, `{"sequence":7,"digest":"e3b0"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, into := range []any{&protocol.ReservationRequest{}, &broker.ClusterAdvertisementSpec{}, &advertisementBody{}, &protocol.Beat{}, &protocol.RelayMessage{}, &protocol.ProviderAck{}, &protocol.RequesterAck{}, &protocol.Renewal{}, &protocol.JoinRequest{}} {
			if err := decodeJSON(bytes.NewReader(body), into, true); err != nil {
				var refusal *protocol.Error
				if !errors.As(err, &refusal) || refusal.Status() != http.StatusBadRequest {
					t.Fatalf("%T: not a refusal: %v", into, err)
				}
				continue
			}
			if _, err := json.Marshal(into); err != nil {
				t.Fatalf("%T was decoded but cannot be encoded: %v", into, err)
			}
			if request, ok := into.(*protocol.ReservationRequest); ok && validateRequest(request, "rome") == nil {
				want := newReservation("hub", "rome", *request)
				if want.Spec.RequesterID != "rome" || len(want.Name) > 63 {
					t.Fatalf("got %+v", want)
				}
			}
		}
	})
}
