package sealing

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"golang.org/x/crypto/nacl/box"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

func newKey(t testing.TB) *Key {
	t.Helper()
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func seal(t testing.TB, key *Key, from, to, peerKey string, payload string) protocol.RelayMessage {
	t.Helper()
	message, err := key.Seal(from, to, peerKey, KindRequest, []byte(payload))
	if err != nil {
		t.Fatal(err)
	}
	return message
}

func TestOpen(t *testing.T) {
	rome, paris, berlin := newKey(t), newKey(t), newKey(t)
	good := seal(t, rome, "rome", "paris", paris.Public(), "hello")
	with := func(change func(*protocol.RelayMessage)) protocol.RelayMessage {
		m := good
		m.Sealed = bytes.Clone(good.Sealed)
		change(&m)
		return m
	}
	raw := func(plain string) protocol.RelayMessage {
		var nonce [nonceSize]byte
		return protocol.RelayMessage{From: "rome", To: "paris", ID: "1", Sealed: box.Seal(nonce[:], []byte(plain), &nonce, &paris.public, &rome.private)}
	}
	cases := map[string]struct {
		reason  string
		message protocol.RelayMessage
		self    string
		peerKey string
		ok      bool
	}{
		"good":           {"what rome sealed for paris opens in paris", good, "paris", rome.Public(), true},
		"tampered":       {"one flipped bit is noticed", with(func(m *protocol.RelayMessage) { m.Sealed[len(m.Sealed)-1] ^= 1 }), "paris", rome.Public(), false},
		"nonce tampered": {"the nonce is authenticated too", with(func(m *protocol.RelayMessage) { m.Sealed[0] ^= 1 }), "paris", rome.Public(), false},
		"wrong sender":   {"rome's message is not taken for berlin's", with(func(m *protocol.RelayMessage) { m.From = "berlin" }), "paris", berlin.Public(), false},
		"renamed sender": {"a broker cannot say that another sent it, even one with the same key", with(func(m *protocol.RelayMessage) { m.From = "berlin" }), "paris", rome.Public(), false},
		"wrong receiver": {"a message for paris is not for berlin, even with the same key", good, "berlin", rome.Public(), false},
		"reflected":      {"a box opens with either key: our own message is not the peer's", protocol.RelayMessage{From: "paris", To: "rome", ID: good.ID, Sealed: good.Sealed}, "rome", paris.Public(), false},
		"other ID":       {"the ID by which repetitions are told is sealed", with(func(m *protocol.RelayMessage) { m.ID = "other" }), "paris", rome.Public(), false},
		"empty":          {"nothing is not a message", with(func(m *protocol.RelayMessage) { m.Sealed = nil }), "paris", rome.Public(), false},
		"too large":      {"size is bounded", with(func(m *protocol.RelayMessage) { m.Sealed = make([]byte, protocol.MaxSealed+1) }), "paris", rome.Public(), false},
		"bad key":        {"a key that is none opens nothing", good, "paris", "!", false},
		"not JSON":       {"malformed", raw("hello"), "paris", rome.Public(), false},
		"unknown kind":   {"a kind that is not known", raw(`{"from":"rome","to":"paris","id":"1","kind":"order"}`), "paris", rome.Public(), false},
		"unknown field":  {"fields are known", raw(`{"from":"rome","to":"paris","id":"1","kind":"reply","sudo":true}`), "paris", rome.Public(), false},
		"two values":     {"one value", raw(`{"from":"rome","to":"paris","id":"1","kind":"reply"}{}`), "paris", rome.Public(), false},
		"by hand":        {"the same without any of these faults", raw(`{"from":"rome","to":"paris","id":"1","kind":"reply"}`), "paris", rome.Public(), true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			key := paris
			if tc.self == "rome" {
				key = rome
			}
			envelope, err := key.Open(tc.self, tc.peerKey, tc.message)
			if (err == nil) != tc.ok {
				t.Fatalf("%s: got %+v, %v", tc.reason, envelope, err)
			}
			if err != nil && !errors.Is(err, ErrMessageRefused) {
				t.Fatalf("%s: not marked as refused: %v", tc.reason, err)
			}
		})
	}
}

func TestSealBoundsTheSize(t *testing.T) {
	rome, paris := newKey(t), newKey(t)
	if _, err := rome.Seal("rome", "paris", paris.Public(), KindRequest, make([]byte, protocol.MaxSealed)); err == nil {
		t.Fatal("sealed more than the broker relays")
	}
}

func TestSeenIsBounded(t *testing.T) {
	s := newSeen(2)
	for _, id := range []string{"a", "b", "c"} {
		if !s.add(id) {
			t.Fatalf("%s is new", id)
		}
	}
	if s.add("c") || s.add("b") || !s.add("a") || len(s.ids) != 2 {
		t.Fatalf("want the last two remembered, have %v", s.order)
	}
}

func TestParseFingerprints(t *testing.T) {
	digits := strings.Repeat("0a", 32)
	got, err := ParseFingerprints(" paris=sha256:" + digits + ", berlin=sha256:" + strings.ToUpper(digits))
	if err != nil || len(got) != 2 || got["berlin"] != "sha256:"+digits {
		t.Fatalf("got %v, %v", got, err)
	}
	for _, bad := range []string{"paris", "paris=" + digits, "paris=sha256:12", "=sha256:" + digits, "paris=sha256:" + strings.Repeat("zz", 32)} {
		if _, err := ParseFingerprints(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// FuzzOpen checks that whatever a broker relays is either refused or exactly what
// the peer sealed. It sees the bytes in two ways: as a message, and sealed by the
// peer as an envelope.
func FuzzOpen(f *testing.F) {
	rome, paris := newKey(f), newKey(f)
	good := seal(f, rome, "rome", "paris", paris.Public(), "hello")
	f.Add(good.Sealed, good.ID)
	f.Add([]byte(`{"from":"rome","to":"paris","id":"1","kind":"reply","payload":"aGk="}`), "1")
	f.Add([]byte(`{"from":"paris","to":"rome","id":"1"}`), "1")
	f.Add([]byte(`[`), "")
	f.Fuzz(func(t *testing.T, data []byte, id string) {
		if envelope, err := paris.Open("paris", rome.Public(), protocol.RelayMessage{From: "rome", To: "paris", ID: id, Sealed: data}); err == nil &&
			!(bytes.Equal(data, good.Sealed) && string(envelope.Payload) == "hello") {
			t.Fatalf("opened what rome never sealed: %+v", envelope)
		}
		var nonce [nonceSize]byte
		sealed := box.Seal(nonce[:], data, &nonce, &paris.public, &rome.private)
		envelope, err := paris.Open("paris", rome.Public(), protocol.RelayMessage{From: "rome", To: "paris", ID: id, Sealed: sealed})
		if err != nil {
			return
		}
		var plain map[string]any
		if json.Unmarshal(data, &plain) != nil || envelope.From != "rome" || envelope.To != "paris" || envelope.ID != id || id == "" {
			t.Fatalf("took %q for %+v", data, envelope)
		}
	})
}

// lender answers "ping" with "pong", and notes who asked.
type lender struct {
	peering.Provider
	mu    sync.Mutex
	asked []string
}

func (l *lender) Handle(_ context.Context, consumer peering.Peer, message []byte) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = append(l.asked, consumer.ClusterID+":"+string(message))
	return []byte("pong"), nil
}

func (l *lender) questions() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.asked)
}

type receiver chan string

func (r receiver) Receive(provider string, message []byte) { r <- provider + ":" + string(message) }

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("did not happen: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestPeersTalk has two agents exchange messages through brokers in memory, with
// keys and pins kept on a real API server.
func TestPeersTalk(t *testing.T) {
	c, err := client.New(controlplane.Start(t), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	for _, name := range []string{"rome", "paris"} {
		if err := c.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
			t.Fatal(err)
		}
	}

	// Many replicas agree on one key.
	keys := make([]*Key, 5)
	var wait sync.WaitGroup
	for i := range keys {
		wait.Go(func() {
			key, err := LoadKey(ctx, c, "rome")
			if err != nil {
				t.Error(err)
			}
			keys[i] = key
		})
	}
	wait.Wait()
	if t.Failed() {
		return
	}
	t.Cleanup(wait.Wait)
	for _, key := range keys {
		if key.Public() != keys[0].Public() {
			t.Fatal("replicas made different keys")
		}
	}
	romeKey := keys[0]
	parisKey, err := LoadKey(ctx, c, "paris")
	if err != nil {
		t.Fatal(err)
	}

	romeBroker, parisBroker := transporttest.New("rome"), transporttest.New("paris")
	romePins, parisPins := NewPins(c, "rome", nil), NewPins(c, "paris", nil)
	for range 2 { // two replicas
		if err := romePins.Prepare(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var record corev1.ConfigMap
	if err := c.Get(t.Context(), romePins.name(), &record); err != nil {
		t.Fatal(err)
	}
	asked, replies := &lender{}, make(receiver, 10)
	holds := func(_ context.Context, cluster string) (string, bool, error) {
		return romeKey.Public(), cluster == "rome", nil
	}
	nobody := func(context.Context, string) (string, bool, error) { return "", false, nil }
	rome := NewMessenger("rome", romeKey, romePins, romeBroker)
	start := func(d *Dispatcher) {
		wait.Go(func() {
			if err := d.Start(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	refused := make(chan error, 10)
	start(NewDispatcher(rome, DispatcherOptions{Receiver: replies, Consumer: nobody, Log: testr.New(t)}))
	start(NewDispatcher(NewMessenger("paris", parisKey, parisPins, parisBroker), DispatcherOptions{
		Provider: asked, Consumer: holds, Log: testr.New(t), Refused: func(_ string, err error) { refused <- err },
	}))
	// relay hands on what one side sent last, like the broker does. A stream that
	// is not connected yet loses it, so it is offered until it shows.
	relay := func(from, to *transporttest.Broker) protocol.RelayMessage {
		t.Helper()
		var sent []transporttest.Call
		eventually(t, "a message is handed to the broker", func() bool { sent = from.Calls("Relay", ""); return len(sent) > 0 })
		message := sent[len(sent)-1].Argument.(protocol.RelayMessage)
		to.Deliver(message)
		return message
	}

	peer := peering.Peer{ClusterID: "paris", PeerKey: parisKey.Public()}
	if err := rome.Send(ctx, peer, []byte("ping")); err != nil {
		t.Fatal(err)
	}
	var ping protocol.RelayMessage
	eventually(t, "paris is asked", func() bool { ping = relay(romeBroker, parisBroker); return len(asked.questions()) > 0 })
	if got := asked.questions(); got[0] != "rome:ping" {
		t.Fatalf("paris was asked %q", got)
	}
	eventually(t, "rome gets the answer", func() bool { relay(parisBroker, romeBroker); return len(replies) > 0 })
	if got := <-replies; got != "paris:pong" {
		t.Fatalf("rome got %q", got)
	}

	t.Run("a repeated message is handled once", func(t *testing.T) {
		before := len(asked.questions())
		parisBroker.Deliver(ping)
		next := seal(t, romeKey, "rome", "paris", parisKey.Public(), "again")
		parisBroker.Deliver(next)
		eventually(t, "the next message is handled", func() bool { return len(asked.questions()) > before })
		if got := asked.questions(); len(got) != before+1 || got[before] != "rome:again" {
			t.Fatalf("paris was asked %q", got)
		}
	})
	t.Run("a stranger is not listened to", func(t *testing.T) {
		before, moscow := len(asked.questions()), newKey(t)
		parisBroker.Deliver(seal(t, moscow, "moscow", "paris", parisKey.Public(), "ping"))
		if err := <-refused; !errors.Is(err, ErrMessageRefused) || len(asked.questions()) != before {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("another key than the pinned one is refused, and the message says what to do", func(t *testing.T) {
		other := newKey(t)
		parisBroker.Deliver(seal(t, other, "rome", "paris", parisKey.Public(), "ping"))
		if err := <-refused; !errors.Is(err, ErrMessageRefused) {
			t.Fatalf("got %v", err)
		}
		err := rome.Send(ctx, peering.Peer{ClusterID: "paris", PeerKey: other.Public()}, []byte("ping"))
		if !errors.Is(err, ErrKeyRefused) || !strings.Contains(err.Error(), `delete the entry "paris" from ConfigMap rome/`+PinsConfigMap) {
			t.Fatalf("got %v", err)
		}
		var pins corev1.ConfigMap
		if err := c.Get(ctx, romePins.name(), &pins); err != nil {
			t.Fatal(err)
		}
		delete(pins.Data, "paris")
		if err := c.Update(ctx, &pins); err != nil {
			t.Fatal(err)
		}
		if err := rome.Send(ctx, peering.Peer{ClusterID: "paris", PeerKey: other.Public()}, []byte("ping")); err != nil {
			t.Fatalf("refused after a person had removed the pin: %v", err)
		}
	})
	t.Run("a fingerprint given beforehand refuses the first key", func(t *testing.T) {
		right, wrong := newKey(t), newKey(t)
		fingerprint, err := Fingerprint(right.Public())
		if err != nil {
			t.Fatal(err)
		}
		pins := NewPins(c, "rome", map[string]string{"berlin": fingerprint})
		if _, err := pins.Resolve(ctx, "berlin", wrong.Public()); !errors.Is(err, ErrKeyRefused) {
			t.Fatalf("got %v", err)
		}
		if _, err := pins.Resolve(ctx, "berlin", ""); err == nil {
			t.Fatal("a key from nowhere")
		}
		if got, err := pins.Resolve(ctx, "berlin", right.Public()); err != nil || got != right.Public() {
			t.Fatalf("got %v, %v", got, err)
		}
		if got, err := pins.Resolve(ctx, "berlin", ""); err != nil || got != right.Public() {
			t.Fatalf("not pinned: %v, %v", got, err)
		}
	})
	t.Run("what is no key is not pinned", func(t *testing.T) {
		if _, err := romePins.Resolve(ctx, "oslo", base64.StdEncoding.EncodeToString([]byte("short"))); !errors.Is(err, ErrKeyRefused) {
			t.Fatalf("got %v", err)
		}
	})
}
