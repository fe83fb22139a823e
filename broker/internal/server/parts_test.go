package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestMailIsKeptForAWhile(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(start)
	mail := newMailboxes(clock)
	post := func(id string) bool { return mail.post(protocol.RelayMessage{To: "paris", ID: id}) }
	for i := range maxMail {
		if !post(fmt.Sprint(i)) {
			t.Fatalf("no room for message %d", i)
		}
	}
	if post("more") {
		t.Fatal("want a full box to refuse")
	}
	clock.SetTime(start.Add(mailLife))
	if !post("later") {
		t.Fatal("want expired messages to make room")
	}
	got := mail.take("paris")
	if len(got) != 1 || got[0].ID != "later" {
		t.Fatalf("want the message that has not expired, got %v", got)
	}
	if got := mail.take("paris"); got != nil {
		t.Fatalf("want each message once, got %v again", got)
	}
}

func TestRatesAreEachCallersOwn(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(start)
	limits := newLimiters(clock, 1, 2)
	for i, want := range []bool{true, true, false} {
		if got := limits.allow("rome"); got != want {
			t.Fatalf("call %d of rome: %v", i, got)
		}
	}
	if !limits.allow("paris") {
		t.Fatal("paris pays for rome")
	}
	clock.SetTime(start.Add(time.Second))
	if !limits.allow("rome") {
		t.Fatal("rome got nothing back after a second")
	}
	for i := range 2 * maxLimiters {
		limits.allow(fmt.Sprint(i))
	}
	if len(limits.byKey) > maxLimiters+1 {
		t.Fatalf("%d callers are told apart", len(limits.byKey))
	}
	clock.SetTime(start.Add(time.Hour))
	if !limits.allow("new") || len(limits.byKey) != 1 {
		t.Fatalf("%d callers are remembered after an hour", len(limits.byKey))
	}
}

func TestReceipts(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(start)
	receipts := NewReceipts(clock)
	receipts.note("paris")()
	if _, known := receipts.ReceivedAt("paris"); known {
		t.Fatal("what was undone still counts")
	}
	receipts.note("paris")
	clock.SetTime(start.Add(time.Minute))
	undo := receipts.note("paris")
	if at, _ := receipts.ReceivedAt("paris"); !at.Equal(start.Add(time.Minute)) {
		t.Fatalf("got %s", at)
	}
	undo()
	if at, _ := receipts.ReceivedAt("paris"); !at.Equal(start) {
		t.Fatalf("want the receipt before, got %s", at)
	}
}

func TestOldStreamsMakeRoom(t *testing.T) {
	h := newHub()
	oldest := h.subscribe("rome", "")
	youngest := oldest
	for range maxStreams {
		youngest = h.subscribe("rome", "")
	}
	select {
	case <-oldest.dropped:
	default:
		t.Fatal("the oldest stream was not dropped")
	}
	h.unsubscribe(oldest)
	if h.newest(oldest) || !h.newest(youngest) || len(h.subscriptions["rome"]) != maxStreams {
		t.Fatal("the youngest stream does not count as such")
	}
}

func TestAmountsBelowZero(t *testing.T) {
	request := newRequest("home")
	request.Spec.PodSets[0].Requests.Extended = map[corev1.ResourceName]resource.Quantity{"example.com/fpga": resource.MustParse("-1")}
	if err := checkAsk(&request.Spec); !protocol.HasCode(err, protocol.CodeInvalid) {
		t.Fatalf("a negative ask passed: %v", err)
	}
	for name, spoil := range map[string]func(*broker.ClusterAdvertisementSpec){
		"allocated": func(spec *broker.ClusterAdvertisementSpec) { spec.Resources.Allocated.CPU = quantity("-8") },
		"used": func(spec *broker.ClusterAdvertisementSpec) {
			spec.ObservedHolds = []broker.ObservedHold{{Used: broker.ResourceQuantities{Memory: quantity("-1Gi")}}}
		},
		"nodes": func(spec *broker.ClusterAdvertisementSpec) { spec.NodeClasses[0].FreeShapes[0].Nodes = -1 },
	} {
		spec := newAdvertisement("paris")
		if err := checkOffer(&spec); err != nil {
			t.Fatalf("a good offer was refused: %v", err)
		}
		if spoil(&spec); !protocol.HasCode(checkOffer(&spec), protocol.CodeInvalid) {
			t.Errorf("%s below zero passed", name)
		}
	}
}

// FuzzBodies feeds bodies of any kind to what reads them.
func FuzzBodies(f *testing.F) {
	for _, seed := range []string{
		``, `null`, `{}`, `{}{}`, `[`, `{"clusterID":"rome","sequence":1e400}`, `{"spec":{"podSets":[{"requests":{"cpu":"1e1000000000"}}]}}`,
		`{"sourceUID":"4c6a0c5e-6f0d-4c2f-9a38-8f6a2a0d1c11","sourceNamespace":"a","sourceName":"b","sourceGeneration":1,"spec":{"podSets":[{"name":"pods","count":2,"requests":{"cpu":"300m"}}]},"allocations":{"paris":1}}`,
		`{"from":"rome","to":"paris","id":"1","sealed":"eA=="}`, `{"attempt":1,"accepted":true}`, `{"timestamp":"x"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, into := range []any{&protocol.ReservationRequest{}, &broker.ClusterAdvertisementSpec{}, &protocol.RelayMessage{}, &protocol.ProviderAck{}, &protocol.RequesterAck{}, &protocol.JoinRequest{}} {
			if err := decodeJSON(bytes.NewReader(body), into); err != nil {
				var refusal *protocol.Error
				if !errors.As(err, &refusal) || refusal.Status() != http.StatusBadRequest {
					t.Fatalf("%T: not a refusal: %v", into, err)
				}
				continue
			}
			if _, err := json.Marshal(into); err != nil {
				t.Fatalf("%T was read but cannot be written: %v", into, err)
			}
			if request, ok := into.(*protocol.ReservationRequest); ok && checkRequest(request, "rome") == nil {
				want := wanted("hub", "rome", *request)
				if want.Spec.RequesterID != "rome" || len(want.Name) > 63 {
					t.Fatalf("got %+v", want)
				}
			}
		}
	})
}
