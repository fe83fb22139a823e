package mtls

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// selfSigned is a certificate that is its own authority.
func selfSigned(t *testing.T) (tls.Certificate, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// credentials can be replaced.
type credentials struct {
	mu      sync.Mutex
	ca      []byte
	changed chan struct{}
}

func (c *credentials) Certificate() (*tls.Certificate, error) { return &tls.Certificate{}, nil }

func (c *credentials) CA() ([]byte, <-chan struct{}, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ca == nil {
		return nil, c.changed, errors.New("not joined")
	}
	return c.ca, c.changed, nil
}

func (c *credentials) set(ca []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ca = ca
	close(c.changed)
	c.changed = make(chan struct{})
}

// TestWatchFollowsTheIdentity checks that streams wait for an identity, and that
// they and calls trust the CA of the day.
func TestWatchFollowsTheIdentity(t *testing.T) {
	first, firstCA := selfSigned(t)
	second, secondCA := selfSigned(t)
	var serving atomic.Pointer[tls.Certificate]
	serving.Store(&first)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, protocol.PathReadyz) {
			return
		}
		if err := json.NewEncoder(w).Encode(protocol.Event{Type: protocol.EventRelist}); err != nil {
			return
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	server.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return &tls.Config{Certificates: []tls.Certificate{*serving.Load()}}, nil
	}}
	server.StartTLS()
	defer server.Close()
	defer server.CloseClientConnections()

	identity := &credentials{changed: make(chan struct{})}
	c := New(server.URL, identity, testr.New(t))
	if err := c.Ping(t.Context()); err == nil || !strings.Contains(err.Error(), "not joined") {
		t.Fatalf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	relists, done := make(chan struct{}, 10), make(chan struct{})
	go func() {
		defer close(done)
		c.Watch(ctx, protocol.RoleRequester, func(protocol.Event) { relists <- struct{}{} })
	}()
	relisted := func(what string) {
		t.Helper()
		select {
		case <-relists:
		case <-time.After(20 * time.Second):
			t.Fatalf("no stream %s", what)
		}
	}
	identity.set(firstCA)
	relisted("with the first CA")
	if err := c.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The same CA again is no reason to connect anew.
	identity.set(firstCA)
	serving.Store(&second)
	identity.set(secondCA)
	relisted("with the second CA")
	if err := c.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("the stream did not end")
	}
}
