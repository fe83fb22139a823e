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
	"github.com/spillway-dev/spillway/e2e/expect"
)

// selfSigned returns a certificate that is its own authority, and the same in PEM.
func selfSigned(t *testing.T) (tls.Certificate, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	expect.NoError(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// credentials of which the CA can be replaced.
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

// Streams wait for an identity, and both streams and calls trust the current CA.
func TestClientFollowsTheIdentity(t *testing.T) {
	first, firstCA := selfSigned(t)
	second, secondCA := selfSigned(t)
	var serving atomic.Pointer[tls.Certificate]
	serving.Store(&first)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodDelete {
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
	c := New(server.URL, identity, protocol.DefaultPollInterval, testr.New(t))
	if err := c.DeleteReservation(t.Context(), "rome-1"); err == nil || !strings.Contains(err.Error(), "not joined") {
		t.Fatalf("a call without an identity: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	relists, done := make(chan struct{}, 10), make(chan struct{})
	go func() {
		defer close(done)
		c.Watch(ctx, protocol.RoleRequester, func(protocol.Event) { relists <- struct{}{} })
	}()
	receive := func(what string, from <-chan struct{}) {
		t.Helper()
		select {
		case <-from:
		case <-time.After(expect.Deadline):
			t.Fatalf("timed out waiting for %s", what)
		}
	}
	identity.set(firstCA)
	receive("a stream with the first CA", relists)
	expect.NoError(t, c.DeleteReservation(t.Context(), "rome-1"))
	// Setting the same CA again does not reconnect.
	identity.set(firstCA)
	serving.Store(&second)
	identity.set(secondCA)
	receive("a stream with the second CA", relists)
	expect.NoError(t, c.DeleteReservation(t.Context(), "rome-1"))
	cancel()
	receive("the end of the stream", done)
}
