package identity

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/transport/mtls"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

var _ mtls.Credentials = (*Keeper)(nil)

const token = "a-token"

// authority is a broker as far as joining goes.
type authority struct {
	t           testing.TB
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	server      *httptest.Server

	mu     sync.Mutex
	joined []crypto.PublicKey
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{t: t}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.certificate, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.server = httptest.NewUnstartedServer(http.HandlerFunc(a.serve))
	serving, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a.server.TLS = &tls.Config{Certificates: []tls.Certificate{{
		Certificate: [][]byte{a.sign("broker", &serving.PublicKey, time.Hour).Raw, der}, PrivateKey: serving,
	}}}
	a.server.StartTLS()
	t.Cleanup(a.server.Close)
	return a
}

func (a *authority) sign(name string, key crypto.PublicKey, life time.Duration) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		a.t.Error(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		NotBefore:   time.Now().Add(-time.Minute), NotAfter: time.Now().Add(life),
	}, a.certificate, key, a.key)
	if err != nil {
		a.t.Error(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Error(err)
	}
	return certificate
}

func pemOf(certificate *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw})
}

func (a *authority) hash() string { return protocol.CAHash(a.certificate) }

func (a *authority) serve(w http.ResponseWriter, r *http.Request) {
	var request protocol.JoinRequest
	answer := func(status int, body any) {
		w.WriteHeader(status)
		if err := json.NewEncoder(w).Encode(body); err != nil {
			a.t.Error(err)
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil || r.URL.Path != protocol.PathJoin {
		a.t.Errorf("%s %s: %v", r.Method, r.URL, err)
	}
	if request.Token != token {
		answer(http.StatusUnauthorized, protocol.Error{Code: protocol.CodeUnauthorized, Message: "this token is not the broker's: look at Secret join-token"})
		return
	}
	block, _ := pem.Decode([]byte(request.CSR))
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil || csr.CheckSignature() != nil {
		a.t.Errorf("a bad certificate request: %v", err)
		return
	}
	a.mu.Lock()
	a.joined = append(a.joined, csr.PublicKey)
	a.mu.Unlock()
	answer(http.StatusOK, protocol.JoinResponse{
		Certificate: string(pemOf(a.sign(csr.Subject.CommonName, csr.PublicKey, time.Hour))), CA: string(pemOf(a.certificate)),
	})
}

func (a *authority) keys() []crypto.PublicKey {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.joined
}

func eventually(t *testing.T, what string, ok func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// run starts a Keeper and returns a function that stops it.
func run(t *testing.T, k *Keeper) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.Start(ctx) }()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func ready(k *Keeper) func() error { return func() error { return k.Check(nil) } }

// says waits until a Keeper is not ready for a certain reason.
func says(k *Keeper, text string) func() error {
	return func() error {
		if err := k.Check(nil); err == nil || !strings.Contains(err.Error(), text) {
			return fmt.Errorf("want %q, have %v", text, err)
		}
		return nil
	}
}

func TestJoining(t *testing.T) {
	c, err := client.New(controlplane.Start(t), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	a := newAuthority(t)
	file := func(t *testing.T, content string) string {
		path := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	namespaces := 0
	options := func(t *testing.T) Options {
		namespaces++
		name := fmt.Sprintf("agent-%d", namespaces)
		if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
			t.Fatal(err)
		}
		return Options{
			ClusterID: "rome", Client: c, Namespace: name, BrokerURL: a.server.URL, CAHash: a.hash(),
			TokenFile: file(t, token+"\n"), Log: testr.New(t),
		}
	}
	secret := func(t *testing.T, o Options) *corev1.Secret {
		s := &corev1.Secret{}
		if err := c.Get(t.Context(), types.NamespacedName{Namespace: o.Namespace, Name: Secret}, s); err != nil {
			t.Fatal(err)
		}
		return s
	}

	t.Run("replicas agree on one key, and a restart asks for nothing", func(t *testing.T) {
		o, before := options(t), len(a.keys())
		var keepers []*Keeper
		for range 3 {
			k := New(o)
			defer run(t, k)()
			keepers = append(keepers, k)
		}
		for _, k := range keepers {
			eventually(t, "a replica has an identity", ready(k))
		}
		if kept := secret(t, o); len(kept.Data) != 3 {
			t.Fatalf("have %d entries", len(kept.Data))
		}
		joined := a.keys()[before:]
		for _, key := range joined {
			if !key.(*ecdsa.PublicKey).Equal(joined[0]) {
				t.Fatal("replicas joined with different keys")
			}
		}
		before = len(a.keys())
		o.TokenFile = "/nowhere"
		again := New(o)
		defer run(t, again)()
		eventually(t, "a restarted agent has an identity", ready(again))
		if certificate, err := again.Certificate(); err != nil || certificate.Leaf.Subject.CommonName != "rome" {
			t.Fatalf("have %v, %v", certificate, err)
		}
		if n := len(a.keys()); n != before {
			t.Errorf("%d more joined", n-before)
		}
	})

	t.Run("the key is kept before anything is sent", func(t *testing.T) {
		o := options(t)
		o.BrokerURL = "https://127.0.0.1:1"
		k := New(o)
		stop := run(t, k)
		eventually(t, "the problem shows", says(k, "joining the broker at https://127.0.0.1:1"))
		stop()
		key := string(secret(t, o).Data[filePrivateKey])
		o.BrokerURL = a.server.URL
		k = New(o)
		defer run(t, k)()
		eventually(t, "it joins", ready(k))
		if got := string(secret(t, o).Data[filePrivateKey]); key == "" || got != key {
			t.Fatal("another key was made")
		}
	})

	for name, tc := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"wrong hash":   {func(o *Options) { o.CAHash = "sha256:00" }, "check broker.caHash"},
		"no hash":      {func(o *Options) { o.CAHash = "" }, "broker.caHash"},
		"wrong token":  {func(o *Options) { o.TokenFile = file(t, "guess") }, "look at Secret join-token"},
		"no token":     {func(o *Options) { o.TokenFile = "/nowhere" }, "join.token"},
		"not a broker": {func(o *Options) { o.BrokerURL = "http://127.0.0.1:1" }, "https://"},
	} {
		t.Run(name+" is said", func(t *testing.T) {
			o := options(t)
			tc.change(&o)
			k := New(o)
			defer run(t, k)()
			eventually(t, "the problem shows", says(k, tc.want))
		})
	}

	t.Run("past two thirds of its life it joins again, and goes on if it cannot", func(t *testing.T) {
		o := options(t)
		clock := clocktesting.NewFakeClock(time.Now())
		o.Clock = clock
		k := New(o)
		first, err := k.join(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if same, err := k.join(t.Context()); err != nil || string(same.certificate) != string(first.certificate) {
			t.Fatalf("a fresh certificate was replaced: %v", err)
		}
		clock.Step(50 * time.Minute)
		o.TokenFile = "/nowhere"
		if kept, err := New(o).join(t.Context()); err != nil || string(kept.certificate) != string(first.certificate) {
			t.Fatalf("without a token: %v", err)
		}
		second, err := k.join(t.Context())
		if err != nil || string(second.certificate) == string(first.certificate) || string(second.key) != string(first.key) {
			t.Fatalf("want a new certificate for the same key: %v", err)
		}
		clock.Step(time.Hour)
		if _, err := New(o).join(t.Context()); err == nil {
			t.Fatal("an expired certificate was used")
		}
	})

	t.Run("a certificate of another broker or cluster is replaced", func(t *testing.T) {
		o := options(t)
		first, err := New(o).join(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		other := newAuthority(t)
		o.BrokerURL, o.CAHash = other.server.URL, other.hash()
		second, err := New(o).join(t.Context())
		if err != nil || string(second.ca) == string(first.ca) {
			t.Fatalf("still the other broker's: %v", err)
		}
		o.ClusterID = "roma"
		third, err := New(o).join(t.Context())
		if err != nil || third.pair.Leaf.Subject.CommonName != "roma" {
			t.Fatalf("have %v, %v", third, err)
		}
	})
}

func TestCertificateDirectory(t *testing.T) {
	a := newAuthority(t)
	dir := t.TempDir()
	write := func(name string) {
		t.Helper()
		text, err := newKey()
		if err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(text)
		private, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		for file, content := range map[string][]byte{
			fileCA: pemOf(a.certificate), filePrivateKey: text,
			fileCertificate: pemOf(a.sign(name, private.(*ecdsa.PrivateKey).Public(), time.Hour)),
		} {
			if err := os.WriteFile(filepath.Join(dir, file), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	clock := clocktesting.NewFakeClock(time.Now())
	k := New(Options{ClusterID: "rome", CertPath: dir, Clock: clock, Log: testr.New(t)})
	// step lets one beat pass for the Keeper, which waits on the clock.
	step := func() {
		t.Helper()
		eventually(t, "the Keeper waits", func() error {
			if !clock.HasWaiters() {
				return errors.New("busy")
			}
			return nil
		})
		clock.Step(beat)
	}
	defer run(t, k)()
	eventually(t, "missing files are said", says(k, "tls.key"))
	write("berlin")
	step()
	eventually(t, "another's certificate is said", says(k, `is for "berlin", not for cluster "rome"`))
	write("rome")
	_, changed, err := k.CA()
	if err == nil {
		t.Fatal("a CA from nowhere")
	}
	step()
	eventually(t, "the identity is there", ready(k))
	<-changed
	if name, err := CommonName(dir); err != nil || name != "rome" {
		t.Fatalf("have %q, %v", name, err)
	}
	first, err := k.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	write("rome")
	_, changed, err = k.CA()
	if err != nil {
		t.Fatal(err)
	}
	step()
	<-changed
	if second, err := k.Certificate(); err != nil || second.Leaf.Equal(first.Leaf) {
		t.Fatalf("a renewed certificate was not read: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, fileCertificate)); err != nil {
		t.Fatal(err)
	}
	step()
	step()
	if err := k.Check(nil); err != nil {
		t.Fatalf("what was read is forgotten: %v", err)
	}
	clock.Step(2 * time.Hour)
	if err := k.Check(nil); err == nil {
		t.Fatal("ready with a certificate that has ended")
	}
}
