package session

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestServer checks which messages reach the driver, and the replies to the others.
func TestServer(t *testing.T) {
	cases := map[string]struct {
		reason   string
		request  Header
		recorded int64
		holdsNot bool
		// teardown is what the driver's Teardown returns.
		teardown peering.Progress
		want     Header // RequestID and Session aside
		answered bool
		torn     bool
	}{
		"first session":       {request: Header{Kind: Hello, Session: 7, RequestID: 3}, want: Header{Kind: Grant}, answered: true},
		"same session":        {request: Header{Kind: Hello, Session: 7, RequestID: 3}, recorded: 7, want: Header{Kind: Grant}, answered: true},
		"no hold":             {reason: "only consumers with a hold are peered", request: Header{Kind: Hello, Session: 7, RequestID: 3}, holdsNot: true, want: Header{Kind: Refusal, Reason: ReasonNoHold}},
		"stale session":       {reason: "a delayed message does not affect a later session", request: Header{Kind: Hello, Session: 7, RequestID: 3}, recorded: 9, want: Header{Kind: Refusal, Reason: ReasonStale, Current: 9}},
		"later session":       {reason: "the old peering is removed first", request: Header{Kind: Hello, Session: 7, RequestID: 3}, recorded: 5, teardown: peering.Done("Removed", ""), want: Header{Kind: Grant}, answered: true, torn: true},
		"teardown":            {request: Header{Kind: Teardown, Session: 7}, recorded: 7, teardown: peering.Done("Removed", ""), want: Header{Kind: Gone}, torn: true},
		"teardown of nothing": {request: Header{Kind: Teardown, Session: 7}, teardown: peering.Done("Removed", ""), want: Header{Kind: Gone}, torn: true},
		"stale teardown":      {reason: "the later session stays", request: Header{Kind: Teardown, Session: 7}, recorded: 9, want: Header{Kind: Gone}},
		"teardown, no hold":   {reason: "a consumer may end its peering after its holds", request: Header{Kind: Teardown, Session: 7}, recorded: 7, holdsNot: true, teardown: peering.Done("Removed", ""), want: Header{Kind: Gone}, torn: true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			codec := testCodec(false)
			var answered, torn bool
			server := Server[*testMessage]{
				Codec: codec, Requests: []Kind{Hello, Teardown}, PollInterval: time.Millisecond, Log: testr.New(t),
				Recorded: func(context.Context, string) (int64, error) { return tc.recorded, nil },
				Teardown: func(context.Context, string) (peering.Progress, error) { torn = true; return tc.teardown, nil },
				Answer: func(_ context.Context, _ string, recorded int64, m *testMessage) (*testMessage, error) {
					answered = true
					if recorded != 0 && recorded != m.Session {
						t.Errorf("session %d is answered while %d is recorded", m.Session, recorded)
					}
					return &testMessage{Header: Header{Kind: Grant}, Token: "t"}, nil
				},
			}
			raw, err := codec.Encode(&testMessage{Header: tc.request})
			expect.NoError(t, err)
			reply, err := server.Handle(t.Context(), peering.Peer{ClusterID: "rome", Holds: !tc.holdsNot}, raw)
			expect.NoError(t, err)
			got, err := codec.Decode(reply, Grant, Gone, Refusal)
			expect.NoError(t, err)
			if got.Kind != tc.want.Kind || got.Reason != tc.want.Reason || got.Current != tc.want.Current || got.Session != tc.request.Session || got.RequestID != tc.request.RequestID {
				t.Errorf("%s: got %+v, want %+v", tc.reason, got.Header, tc.want)
			}
			if answered != tc.answered || torn != tc.torn {
				t.Errorf("%s: answered %t, torn down %t", tc.reason, answered, torn)
			}
		})
	}
}

func TestServerDoesNotReply(t *testing.T) {
	failed := errors.New("failed")
	for name, tc := range map[string]struct {
		consumer string
		answer   error
		want     error
	}{
		"not yet": {"rome", ErrNoReply, nil},
		"failure": {"rome", failed, failed},
		"invalid": {"../kube-system", nil, nil},
	} {
		codec := testCodec(false)
		server := Server[*testMessage]{
			Codec: codec, Requests: []Kind{Hello}, Log: testr.New(t),
			Recorded: func(context.Context, string) (int64, error) { return 0, nil },
			Answer:   func(context.Context, string, int64, *testMessage) (*testMessage, error) { return nil, tc.answer },
		}
		raw, err := codec.Encode(&testMessage{Header: Header{Kind: Hello, Session: 7, RequestID: 3}})
		expect.NoError(t, err)
		reply, err := server.Handle(t.Context(), peering.Peer{ClusterID: tc.consumer, Holds: true}, raw)
		if reply != nil || tc.consumer == "rome" && !errors.Is(err, tc.want) || tc.consumer != "rome" && err == nil {
			t.Errorf("%s: replied %q, %v", name, reply, err)
		}
	}
	server := Server[*testMessage]{Codec: testCodec(false), Requests: []Kind{Hello}, Log: testr.New(t)}
	reply, err := server.Handle(t.Context(), peering.Peer{ClusterID: "rome"}, []byte(`{"kind":"Grant"`))
	if driver, ok := ReadsOnly(reply); err != nil || !ok || driver != "test" {
		t.Errorf("to a message that cannot be decoded: %q, %v", reply, err)
	}
}

// messenger records the kinds of sent messages and can fail.
type messenger struct {
	sent []Kind
	err  error
}

func (m *messenger) Send(_ context.Context, _ peering.Peer, raw []byte) error {
	decoded, err := testCodec(false).Decode(raw, Hello, Teardown)
	if err == nil && m.err == nil {
		m.sent = append(m.sent, decoded.Kind)
	}
	return errors.Join(err, m.err)
}

func TestClient(t *testing.T) {
	const interval = 3 * time.Second
	clock, sent := clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), &messenger{}
	var enqueued []string
	client := NewClient(testCodec(false), Options{Clock: clock, Log: testr.New(t), Messenger: sent, Enqueue: func(id string) { enqueued = append(enqueued, id) }}, Grant, Gone, Refusal)
	paris := peering.Peer{ClusterID: "paris"}
	hello := func() error {
		return client.Send(t.Context(), paris, &testMessage{Header: Header{Kind: Hello, Session: 7, RequestID: client.RequestID("paris")}})
	}
	receive := func(m *testMessage) {
		t.Helper()
		raw, err := testCodec(false).Encode(m)
		expect.NoError(t, err)
		client.Receive("paris", raw)
	}
	due := func(want bool, what string) {
		t.Helper()
		if got := client.Exchange("paris").HelloDue(7, clock.Now(), interval); got != want {
			t.Errorf("%s: Hello due is %t", what, got)
		}
	}
	advance := func(by time.Duration) { clock.SetTime(clock.Now().Add(by)) }

	receive(&testMessage{Header: Header{Kind: Gone, Session: 7}})
	if len(enqueued) > 0 {
		t.Error("a message of an unknown provider is accepted")
	}
	due(true, "at first")
	sent.err = errors.New("unreachable")
	if hello() == nil {
		t.Error("no error from Send")
	}
	due(true, "after a failed send")
	sent.err = nil
	expect.NoError(t, hello())
	due(false, "just sent")
	advance(interval)
	due(true, "without a reply")

	id := client.RequestID("paris")
	receive(&testMessage{Header: Header{Kind: Grant, Session: 7, RequestID: id + 1}, Token: "tx"})
	if _, ok := client.Exchange("paris").Reply(Grant, 7); ok {
		t.Error("a reply to another request is accepted")
	}
	receive(&testMessage{Header: Header{Kind: Refusal, Session: 7, RequestID: id, Reason: ReasonNoHold, Text: "none"}})
	due(true, "after a refusal that passes")
	expect.NoError(t, hello())
	due(false, "just sent again")
	advance(interval / 2)
	due(true, "without a hold, of which the provider may not have heard yet")
	receive(&testMessage{Header: Header{Kind: Refusal, Session: 7, RequestID: id, Reason: "NoEndpoint", Text: "none"}})
	due(false, "after a refusal")
	if refused := client.Exchange("paris").Refused(7, "paris", "test"); refused == nil || refused.Message != "provider paris refused the peering: NoEndpoint: none" {
		t.Errorf("refused: %+v", refused)
	}
	if refused := client.Exchange("paris").Refused(8, "paris", "test"); refused != nil {
		t.Errorf("a later session is refused: %+v", refused)
	}
	advance(refusedFactor * interval)
	due(true, "long after a refusal")
	receive(&testMessage{Header: Header{Kind: Grant, Session: 7, RequestID: id}, Token: "t"})
	if _, ok := client.Exchange("paris").Reply(Grant, 8); ok {
		t.Error("a Grant counts for a later session")
	}
	if client.Exchange("paris").Refused(7, "paris", "test") != nil {
		t.Error("still refused after a Grant")
	}

	client.Receive("paris", Unreadable("other"))
	if refused := client.Exchange("paris").Refused(7, "paris", "test"); refused == nil || refused.Reason != "DriverMismatch" || !client.Exchange("paris").Removed(7) {
		t.Errorf("another driver: %+v", refused)
	}
	receive(&testMessage{Header: Header{Kind: Gone, Session: 7}})
	if e := client.Exchange("paris"); !e.Removed(7) || e.Removed(8) || e.OtherDriver != "" {
		t.Errorf("after Gone: %+v", e)
	}
	if want := slices.Repeat([]string{"paris"}, 6); !slices.Equal(enqueued, want) {
		t.Errorf("enqueued %v", enqueued)
	}

	client.Waited("paris", "Node")
	advance(time.Minute)
	if waited := client.Waited("paris", "Node"); waited != time.Minute || client.Waiting("paris", "Pods") != 0 {
		t.Errorf("waited %s", waited)
	}
	client.StopWaiting("paris", "Node")
	if waiting := client.Waiting("paris", "Node"); waiting != 0 {
		t.Errorf("still waiting, for %s", waiting)
	}
	client.Reset("paris")
	if client.RequestID("paris") == id || len(client.Exchange("paris").Received) > 0 {
		t.Error("an exchange outlives Reset")
	}
}

func TestNumbers(t *testing.T) {
	if Next(7, 0) != 8 || Next(7, 9) != 10 || Next(FirstNumber(time.Unix(1000, 0)), 0) != 1000001 {
		t.Error("numbers must grow")
	}
}
