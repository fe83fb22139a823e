package direct

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestRenewal checks that a token is renewed in time, without interrupting the
// peering, and requested again where that was not possible.
func TestRenewal(t *testing.T) {
	e := newEnvironment(t)
	e.grant(expect.Resources("cpu", "1"), 1)
	e.until("Peered", e.peering)
	parked := e.capacity(peering.Capacity{})
	e.until("Ready", parked)
	token := func() string { return e.stored().Connection.Token }
	first, sent := token(), e.Sent()
	e.Clock.Advance(29 * time.Minute)
	e.until("Ready", parked)
	if e.Sent() != sent {
		t.Error("a token was renewed before half of its lifetime")
	}

	// The parked peering sends Hello, and stays as it is meanwhile.
	e.Clock.Advance(2 * time.Minute)
	e.Disconnect(true)
	for range 3 {
		if progress, err := parked(); err != nil || !progress.Done {
			t.Fatalf("during the renewal: %+v, %v", progress, err)
		}
		e.Clock.Advance(e.options.ResendAfter)
	}
	if e.Sent() == sent {
		t.Error("no token is requested after half of the lifetime")
	}
	e.Disconnect(false)
	expect.Eventually(t, "the renewal", func() (bool, string) {
		progress, err := parked()
		if err != nil || !progress.Done {
			t.Fatalf("the renewal interrupted the peering: %+v, %v", progress, err)
		}
		return token() != first, progress.Message
	})

	// A refusal changes nothing while the token is valid, and is reported afterwards.
	e.SetHolds(false)
	e.Clock.Advance(31 * time.Minute)
	expect.Eventually(t, "the refusal is reported", func() (bool, string) {
		progress, err := e.peering()
		if err != nil || !progress.Done {
			t.Fatalf("a refused renewal interrupted the peering: %+v, %v", progress, err)
		}
		return strings.Contains(progress.Message, "rome holds no capacity here"), progress.Message
	})
	e.Clock.Advance(30 * time.Minute)
	if progress := e.until("PeeringRefused", e.peering); !strings.Contains(progress.Message, "provider paris refused the peering: NoHold: rome holds no capacity here") {
		t.Errorf("the consumer reports %q", progress.Message)
	}
	if peerings, err := e.Driver().Observe(t.Context()); err != nil || !slices.Equal(peerings, []string{"paris"}) {
		t.Errorf("peerings: %+v, %v", peerings, err)
	}
	e.SetHolds(true)
	e.until("Peered", e.peering)
}

// handle sends a message to the provider and returns its reply.
func (e *environment) handle(header session.Header) *message {
	e.t.Helper()
	raw, err := codec.Encode(&message{Header: header})
	expect.NoError(e.t, err)
	reply, err := e.ProviderSide().Handle(e.t.Context(), peering.Peer{ClusterID: "rome", Holds: true}, raw)
	expect.NoError(e.t, err)
	decoded, err := codec.Decode(reply, session.Grant, session.Gone, session.Refusal)
	expect.NoError(e.t, err)
	return decoded
}

// TestReplayedMessages checks that old messages have no effect.
func TestReplayedMessages(t *testing.T) {
	e := newEnvironment(t)
	ctx := t.Context()
	e.grant(expect.Resources("cpu", "1"), 1)
	e.until("Peered", e.peering)
	e.until("Ready", e.capacity(peering.Capacity{}))
	driver, _ := e.Sides()
	r, _, err := driver.load(ctx, "paris")
	expect.NoError(t, err)
	number, token := r.session, r.Connection.Token

	// At the provider: messages of an earlier session.
	if reply := e.handle(session.Header{Kind: session.Teardown, Session: number - 1}); reply.Kind != session.Gone || reply.Session != number-1 {
		t.Errorf("an old Teardown: %+v", reply)
	}
	if reply := e.handle(session.Header{Kind: session.Hello, Session: number - 1, RequestID: 1}); reply.Reason != session.ReasonStale || reply.Current != number {
		t.Errorf("an old Hello: %+v", reply)
	}
	var namespace corev1.Namespace
	if err := e.paris.Get(ctx, client.ObjectKey{Name: guestNamespace}, &namespace); err != nil || !namespace.DeletionTimestamp.IsZero() {
		t.Errorf("the namespace of the later session: %v", err)
	}

	// At the consumer: a Grant that was not requested, and one of an old request.
	raw, err := codec.Encode(e.handle(session.Header{Kind: session.Hello, Session: number, RequestID: 1}))
	expect.NoError(t, err)
	e.Reply(raw)
	e.Disconnect(true)
	e.Clock.Advance(31 * time.Minute)
	e.until("Peered", e.peering) // sends Hello
	e.Reply(raw)
	e.Reply([]byte(`{"driver":"direct","kind":"Grant"`))
	e.until("Peered", e.peering)
	if e.stored().Connection.Token != token {
		t.Error("an old Grant replaced a newer one")
	}

	// After this cluster's clock was set back, the provider's session is continued.
	e.Disconnect(false)
	expect.NoError(t, e.rome.Delete(ctx, r.secret))
	e.Clock.Advance(-2 * time.Hour)
	e.until("Peered", e.peering)
	if r, _, err = driver.load(ctx, "paris"); err != nil || r.session <= number {
		t.Errorf("the session is %d, after %d: %v", r.session, number, err)
	}
}

// TestDriverMismatch checks that clusters with different drivers report it, and that
// the peering can be torn down nevertheless.
func TestDriverMismatch(t *testing.T) {
	e := newEnvironment(t)
	reply, err := e.ProviderSide().Handle(t.Context(), peering.Peer{ClusterID: "rome", Holds: true}, []byte(`{"kind":"Hello","session":7}`))
	if other, ok := session.ReadsOnly(reply); err != nil || !ok || other != "direct" {
		t.Errorf("the provider replies %q, %v", reply, err)
	}
	e.Disconnect(true)
	_, err = e.peering()
	expect.NoError(t, err)
	e.Reply(session.Unreadable("other"))
	progress := e.until("DriverMismatch", e.peering)
	if !strings.HasPrefix(progress.Message, "provider paris uses driver other, this cluster uses direct") {
		t.Errorf("the consumer reports %q", progress.Message)
	}
	e.until("Removed", func() (peering.Progress, error) {
		progress, err := e.teardown()
		e.Reply(session.Unreadable("other"))
		return progress, err
	})
	e.ExpectNothingLeft()
}
