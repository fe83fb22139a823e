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
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr/testr"
	"golang.org/x/crypto/nacl/box"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

func newKey(t testing.TB) *Key {
	t.Helper()
	key, err := NewKey()
	expect.NoError(t, err)
	return key
}

func seal(t testing.TB, key *Key, from, to, peerKey string, payload string) protocol.RelayMessage {
	t.Helper()
	message, err := key.Seal(from, to, peerKey, kindRequest, []byte(payload))
	expect.NoError(t, err)
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
		"wrong sender":   {"a message of rome is not accepted from berlin", with(func(m *protocol.RelayMessage) { m.From = "berlin" }), "paris", berlin.Public(), false},
		"renamed sender": {"a broker cannot change the sender, even to one with the same key", with(func(m *protocol.RelayMessage) { m.From = "berlin" }), "paris", rome.Public(), false},
		"wrong receiver": {"a message for paris is not for berlin, even with the same key", good, "berlin", rome.Public(), false},
		"reflected":      {"a box opens with either key: our own message is not the peer's", protocol.RelayMessage{From: "paris", To: "rome", ID: good.ID, Sealed: good.Sealed}, "rome", paris.Public(), false},
		"other ID":       {"the ID, which detects repetitions, is sealed", with(func(m *protocol.RelayMessage) { m.ID = "other" }), "paris", rome.Public(), false},
		"empty":          {"an empty message", with(func(m *protocol.RelayMessage) { m.Sealed = nil }), "paris", rome.Public(), false},
		"too large":      {"size is bounded", with(func(m *protocol.RelayMessage) { m.Sealed = make([]byte, protocol.MaxSealed+1) }), "paris", rome.Public(), false},
		"bad key":        {"an invalid key opens nothing", good, "paris", "!", false},
		"not JSON":       {"malformed", raw("hello"), "paris", rome.Public(), false},
		"unknown kind":   {"unknown kinds are refused", raw(`{"from":"rome","to":"paris","id":"1","kind":"order"}`), "paris", rome.Public(), false},
		"unknown field":  {"unknown fields are refused", raw(`{"from":"rome","to":"paris","id":"1","kind":"reply","sudo":true}`), "paris", rome.Public(), false},
		"two values":     {"exactly one value", raw(`{"from":"rome","to":"paris","id":"1","kind":"reply"}{}`), "paris", rome.Public(), false},
		"by hand":        {"the same without any of these errors", raw(`{"from":"rome","to":"paris","id":"1","kind":"reply"}`), "paris", rome.Public(), true},
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
			if err != nil && !errors.Is(err, errMessageRefused) {
				t.Fatalf("%s: not ErrMessageRefused: %v", tc.reason, err)
			}
		})
	}
}

func TestSealBoundsTheSize(t *testing.T) {
	rome, paris := newKey(t), newKey(t)
	if _, err := rome.Seal("rome", "paris", paris.Public(), kindRequest, make([]byte, protocol.MaxSealed)); err == nil {
		t.Fatal("sealed a message that exceeds the limit")
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
		t.Fatalf("want the last two IDs, have %v", s.order)
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
			t.Errorf("%q was accepted", bad)
		}
	}
}

// FuzzOpen checks that whatever a broker relays is either refused or exactly what the
// peer sealed. The input is used as a message, and as an envelope that the peer
// seals.
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
			t.Fatalf("opened a message that rome did not seal: %+v", envelope)
		}
		var nonce [nonceSize]byte
		sealed := box.Seal(nonce[:], data, &nonce, &paris.public, &rome.private)
		envelope, err := paris.Open("paris", rome.Public(), protocol.RelayMessage{From: "rome", To: "paris", ID: id, Sealed: sealed})
		if err != nil {
			return
		}
		var plain map[string]any
		if json.Unmarshal(data, &plain) != nil || envelope.From != "rome" || envelope.To != "paris" || envelope.ID != id || id == "" {
			t.Fatalf("opened %q as %+v", data, envelope)
		}
	})
}

// FuzzPeerKeys checks that a peer's key has a fingerprint if and only if messages can be
// sealed for it.
func FuzzPeerKeys(f *testing.F) {
	rome := newKey(f)
	for _, seed := range []string{rome.Public(), "", "AA==", rome.Public() + "=", rome.Public()[1:]} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, key string) {
		_, err := Fingerprint(key)
		if _, sealErr := rome.Seal("rome", "paris", key, kindRequest, nil); (err == nil) != (sealErr == nil) {
			t.Fatalf("%q: the fingerprint gives %v, sealing %v", key, err, sealErr)
		}
	})
}

// ponger is a Provider that replies "pong" and records the requests.
type ponger struct {
	peering.Provider
	mu       sync.Mutex
	requests []string
}

func (p *ponger) Handle(_ context.Context, consumer peering.Peer, message []byte) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = append(p.requests, consumer.ClusterID+":"+string(message))
	return []byte("pong"), nil
}

func (p *ponger) received() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.requests)
}

type receiver chan string

func (r receiver) Receive(provider string, message []byte) { r <- provider + ":" + string(message) }

// exchange is two agents with brokers in memory, and keys and pins on a real API
// server: rome sends requests, paris replies.
type exchange struct {
	t                       *testing.T
	client                  client.Client
	romeKey, parisKey       *Key
	romePins                *Pins
	romeBroker, parisBroker *transporttest.Broker
	rome                    *Messenger
	provider                *ponger
	replies                 receiver
	refused                 chan error
	// osloKey is that of oslo, which holds capacity in paris from when osloHolds is set.
	// osloAsked counts how often paris has looked.
	osloKey   *Key
	osloHolds atomic.Bool
	osloAsked atomic.Int32
}

// loadKey loads rome's key in several replicas, which must agree on it.
func (e *exchange) loadKey() *Key {
	keys := make([]*Key, 5)
	var wait sync.WaitGroup
	for i := range keys {
		wait.Go(func() {
			var err error
			if keys[i], err = LoadKey(e.t.Context(), e.client, "rome"); err != nil {
				e.t.Error(err)
			}
		})
	}
	wait.Wait()
	for _, key := range keys {
		if key == nil || key.Public() != keys[0].Public() {
			e.t.Fatal("replicas have different keys")
		}
	}
	return keys[0]
}

func newExchange(t *testing.T) *exchange {
	c, err := client.New(controlplane.Start(t), client.Options{})
	expect.NoError(t, err)
	ctx := t.Context()
	for _, name := range []string{"rome", "paris"} {
		expect.NoError(t, c.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	}
	e := &exchange{
		t: t, client: c, romePins: NewPins(c, "rome", nil), romeBroker: transporttest.New("rome"), parisBroker: transporttest.New("paris"),
		osloKey: newKey(t), provider: &ponger{}, replies: make(receiver, 10), refused: make(chan error, 10),
	}
	e.romeKey = e.loadKey()
	e.parisKey, err = LoadKey(ctx, c, "paris")
	expect.NoError(t, err)
	for range 2 { // two replicas
		expect.NoError(t, e.romePins.Prepare(ctx))
	}
	expect.NoError(t, c.Get(ctx, e.romePins.name(), &corev1.ConfigMap{}))

	e.rome = NewMessenger("rome", e.romeKey, e.romePins, e.romeBroker)
	paris := NewMessenger("paris", e.parisKey, NewPins(c, "paris", nil), e.parisBroker)
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	for messenger, options := range map[*Messenger]DispatcherOptions{
		e.rome: {Receiver: e.replies, Consumer: func(context.Context, string) (string, bool, error) { return "", false, nil }},
		paris: {
			Provider: e.provider, Refused: func(_ string, err error) { e.refused <- err },
			Consumer: func(_ context.Context, cluster string) (string, bool, error) {
				if cluster == "oslo" {
					e.osloAsked.Add(1)
					return e.osloKey.Public(), e.osloHolds.Load(), nil
				}
				return e.romeKey.Public(), cluster == "rome", nil
			},
		},
	} {
		options.Log = testr.New(t)
		running.Go(func() {
			if err := NewDispatcher(messenger, options).Start(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	return e
}

// relay delivers what one side sent last, as the broker does. A stream that is not
// connected yet loses it, so it is repeated until done.
func (e *exchange) relay(what string, from, to *transporttest.Broker, done func() bool) (message protocol.RelayMessage) {
	e.t.Helper()
	expect.Eventually(e.t, what, func() (bool, string) {
		sent := from.Calls("Relay", "")
		if len(sent) == 0 {
			return false, "nothing was sent"
		}
		message = sent[len(sent)-1].Argument.(protocol.RelayMessage)
		to.Deliver(message)
		return done(), "sent"
	})
	return message
}

// TestExchange sends messages between two agents through their brokers.
func TestExchange(t *testing.T) {
	e := newExchange(t)
	ctx := t.Context()
	expect.NoError(t, e.rome.Send(ctx, peering.Peer{ClusterID: "paris", PeerKey: e.parisKey.Public()}, []byte("ping")))
	ping := e.relay("the request arrives", e.romeBroker, e.parisBroker, func() bool { return len(e.provider.received()) > 0 })
	if got := e.provider.received(); got[0] != "rome:ping" {
		t.Fatalf("paris received %q", got)
	}
	e.relay("the reply arrives", e.parisBroker, e.romeBroker, func() bool { return len(e.replies) > 0 })
	if got := <-e.replies; got != "paris:pong" {
		t.Fatalf("rome received %q", got)
	}

	t.Run("a repeated message is handled once", func(t *testing.T) {
		before := len(e.provider.received())
		e.parisBroker.Deliver(ping)
		e.parisBroker.Deliver(seal(t, e.romeKey, "rome", "paris", e.parisKey.Public(), "again"))
		expect.Eventually(t, "the next message", func() (bool, string) {
			return len(e.provider.received()) > before, strings.Join(e.provider.received(), " ")
		})
		if got := e.provider.received(); len(got) != before+1 || got[before] != "rome:again" {
			t.Fatalf("paris received %q", got)
		}
	})
	t.Run("a message may be faster than the news of the hold", func(t *testing.T) {
		for tries := 1; !e.isFasterThanItsHold(t); tries++ {
			if tries == 10 {
				t.Fatal("it is refused each time")
			}
		}
	})
	t.Run("an unknown cluster is refused", func(t *testing.T) {
		before := len(e.provider.received())
		e.parisBroker.Deliver(seal(t, newKey(t), "moscow", "paris", e.parisKey.Public(), "ping"))
		if err := <-e.refused; !errors.Is(err, errMessageRefused) || len(e.provider.received()) != before {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("another key than the pinned one is refused until the pin is removed", func(t *testing.T) {
		other := newKey(t)
		e.parisBroker.Deliver(seal(t, other, "rome", "paris", e.parisKey.Public(), "ping"))
		if err := <-e.refused; !errors.Is(err, errMessageRefused) {
			t.Fatalf("got %v", err)
		}
		peer := peering.Peer{ClusterID: "paris", PeerKey: other.Public()}
		err := e.rome.Send(ctx, peer, []byte("ping"))
		if !errors.Is(err, errKeyRefused) || !strings.Contains(err.Error(), `delete the entry "paris" from ConfigMap rome/`+PinsConfigMap) {
			t.Fatalf("got %v", err)
		}
		var pins corev1.ConfigMap
		expect.NoError(t, e.client.Get(ctx, e.romePins.name(), &pins))
		delete(pins.Data, "paris")
		expect.NoError(t, e.client.Update(ctx, &pins))
		expect.NoError(t, e.rome.Send(ctx, peer, []byte("ping")))
	})
	t.Run("pins", func(t *testing.T) { testPins(t, e) })
}

// isFasterThanItsHold has oslo send a message before the news of its hold is there. It reports
// whether paris has waited for that: it does for holdTimeout only, which a busy machine may
// take for what is before.
func (e *exchange) isFasterThanItsHold(t *testing.T) (waited bool) {
	t.Helper()
	before, asked := len(e.provider.received()), e.osloAsked.Load()
	e.osloHolds.Store(false)
	e.parisBroker.Deliver(seal(t, e.osloKey, "oslo", "paris", e.parisKey.Public(), "ping"))
	expect.Eventually(t, "paris to look for the hold", func() (bool, string) { return e.osloAsked.Load() > asked, "it has not looked" })
	// It delays the messages of no other cluster.
	e.parisBroker.Deliver(seal(t, e.romeKey, "rome", "paris", e.parisKey.Public(), "meanwhile"))
	expect.Eventually(t, "the message of rome", func() (bool, string) {
		got := e.provider.received()[before:]
		return slices.Equal(got, []string{"rome:meanwhile"}), strings.Join(got, " ")
	})
	e.osloHolds.Store(true)
	expect.Eventually(t, "the message of oslo, or its refusal", func() (bool, string) {
		got := e.provider.received()[before:]
		waited = slices.Contains(got, "oslo:ping")
		select {
		case err := <-e.refused:
			t.Logf("refused: %v", err)
			return true, ""
		default:
			return waited, strings.Join(got, " ")
		}
	})
	return waited
}

func testPins(t *testing.T, e *exchange) {
	ctx := t.Context()
	right, wrong := newKey(t), newKey(t)
	fingerprint, err := Fingerprint(right.Public())
	expect.NoError(t, err)
	pins := NewPins(e.client, "rome", map[string]string{"berlin": fingerprint})
	if _, err := pins.Resolve(ctx, "berlin", wrong.Public()); !errors.Is(err, errKeyRefused) {
		t.Fatalf("a first key without the expected fingerprint: %v", err)
	}
	if _, err := pins.Resolve(ctx, "berlin", ""); err == nil {
		t.Fatal("a key although none is known")
	}
	for _, announced := range []string{right.Public(), ""} {
		if got, err := pins.Resolve(ctx, "berlin", announced); err != nil || got != right.Public() {
			t.Fatalf("announced %q: got %v, %v", announced, got, err)
		}
	}
	if _, err := e.romePins.Resolve(ctx, "oslo", base64.StdEncoding.EncodeToString([]byte("short"))); !errors.Is(err, errKeyRefused) {
		t.Fatalf("an invalid key: %v", err)
	}
}
