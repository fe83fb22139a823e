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
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/keyutil"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/transport/mtls"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

var _ mtls.Credentials = (*Keeper)(nil)

const token = "a-token"

// authority serves the join endpoint of a broker.
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
	a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	expect.NoError(t, err)
	a.certificate, err = x509.ParseCertificate(der)
	expect.NoError(t, err)
	a.server = httptest.NewUnstartedServer(http.HandlerFunc(a.serve))
	serving, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
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
	respond := func(status int, body any) {
		w.WriteHeader(status)
		if err := json.NewEncoder(w).Encode(body); err != nil {
			a.t.Error(err)
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil || r.URL.Path != protocol.PathJoin {
		a.t.Errorf("%s %s: %v", r.Method, r.URL, err)
	}
	block, _ := pem.Decode([]byte(request.CSR))
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil || csr.CheckSignature() != nil {
		a.t.Errorf("a bad certificate request: %v", err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	known := slices.ContainsFunc(a.joined, func(key crypto.PublicKey) bool { return key.(*ecdsa.PublicKey).Equal(csr.PublicKey) })
	if request.Token != token && !known {
		respond(http.StatusUnauthorized, protocol.Error{Code: protocol.CodeUnauthorized, Message: "the token is not valid: read it from Secret join-token"})
		return
	}
	a.joined = append(a.joined, csr.PublicKey)
	respond(http.StatusOK, protocol.JoinResponse{
		Certificate: string(pemOf(a.sign(csr.Subject.CommonName, csr.PublicKey, time.Hour))), CA: string(pemOf(a.certificate)),
	})
}

func (a *authority) keys() []crypto.PublicKey {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.joined
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

func eventuallyReady(t *testing.T, k *Keeper) {
	t.Helper()
	expect.Eventually(t, "an identity", func() (bool, string) {
		err := k.Check(nil)
		return err == nil, fmt.Sprint(err)
	})
}

// eventuallyNotReady waits until a Keeper has no identity for a reason.
func eventuallyNotReady(t *testing.T, k *Keeper, reason string) {
	t.Helper()
	expect.Eventually(t, "the reason "+reason, func() (bool, string) {
		err := k.Check(nil)
		return err != nil && strings.Contains(err.Error(), reason), fmt.Sprint(err)
	})
}

// joining makes Keepers that join an authority, each with a namespace of its own.
type joining struct {
	c          client.Client
	authority  *authority
	namespaces int
}

func (j *joining) options(t *testing.T) Options {
	t.Helper()
	j.namespaces++
	name := fmt.Sprintf("agent-%d", j.namespaces)
	expect.NoError(t, j.c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	return Options{
		ClusterID: "rome", Client: j.c, Namespace: name, BrokerURL: j.authority.server.URL, CAHash: j.authority.hash(),
		TokenFile: tokenFile(t, token+"\n"), Log: testr.New(t),
	}
}

func (j *joining) secret(t *testing.T, o Options) *corev1.Secret {
	t.Helper()
	s := &corev1.Secret{}
	expect.NoError(t, j.c.Get(t.Context(), types.NamespacedName{Namespace: o.Namespace, Name: Secret}, s))
	return s
}

func tokenFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	expect.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func TestJoining(t *testing.T) {
	c, err := client.New(controlplane.Start(t), client.Options{})
	expect.NoError(t, err)
	j := &joining{c: c, authority: newAuthority(t)}
	t.Run("replicas share one key, and a restart does not join again", j.testReplicas)
	t.Run("the key is stored before anything is sent", j.testKeyIsStored)
	for name, tc := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"wrong hash":   {func(o *Options) { o.CAHash = "sha256:00" }, "check broker.caHash"},
		"no hash":      {func(o *Options) { o.CAHash = "" }, "broker.caHash"},
		"wrong token":  {func(o *Options) { o.TokenFile = tokenFile(t, "guess") }, "read it from Secret join-token"},
		"no token":     {func(o *Options) { o.TokenFile = "/nowhere" }, "join.token"},
		"not a broker": {func(o *Options) { o.BrokerURL = "http://127.0.0.1:1" }, "https://"},
	} {
		t.Run(name+" is reported", func(t *testing.T) {
			o := j.options(t)
			tc.change(&o)
			reported := make(chan error, 10)
			o.Report = func(reason error) { reported <- reason }
			k := New(o)
			defer run(t, k)()
			eventuallyNotReady(t, k, tc.want)
			if reason := <-reported; !strings.Contains(reason.Error(), tc.want) {
				t.Errorf("reported %v", reason)
			}
		})
	}
	t.Run("a certificate is renewed after two thirds of its lifetime", j.testRenewal)
	t.Run("a certificate of another broker or cluster is replaced", j.testReplacement)
}

func (j *joining) testReplicas(t *testing.T) {
	o, before := j.options(t), len(j.authority.keys())
	var keepers []*Keeper
	for range 3 {
		k := New(o)
		defer run(t, k)()
		keepers = append(keepers, k)
	}
	for _, k := range keepers {
		eventuallyReady(t, k)
	}
	if stored := j.secret(t, o); len(stored.Data) != 3 {
		t.Fatalf("the Secret has %d entries", len(stored.Data))
	}
	joined := j.authority.keys()[before:]
	for _, key := range joined {
		if !key.(*ecdsa.PublicKey).Equal(joined[0]) {
			t.Fatal("replicas joined with different keys")
		}
	}
	before = len(j.authority.keys())
	o.TokenFile = "/nowhere"
	restarted := New(o)
	defer run(t, restarted)()
	eventuallyReady(t, restarted)
	if certificate, err := restarted.Certificate(); err != nil || certificate.Leaf.Subject.CommonName != "rome" {
		t.Fatalf("have %v, %v", certificate, err)
	}
	if n := len(j.authority.keys()); n != before {
		t.Errorf("joined %d more times", n-before)
	}
}

func (j *joining) testKeyIsStored(t *testing.T) {
	o := j.options(t)
	o.BrokerURL = "https://127.0.0.1:1"
	k := New(o)
	stop := run(t, k)
	eventuallyNotReady(t, k, "joining the broker at https://127.0.0.1:1")
	stop()
	key := string(j.secret(t, o).Data[filePrivateKey])
	o.BrokerURL = j.authority.server.URL
	k = New(o)
	defer run(t, k)()
	eventuallyReady(t, k)
	if got := string(j.secret(t, o).Data[filePrivateKey]); key == "" || got != key {
		t.Fatal("another key was generated")
	}
}

func (j *joining) testRenewal(t *testing.T) {
	o := j.options(t)
	clock := clocktesting.NewFakeClock(time.Now())
	o.Clock = clock
	k := New(o)
	first, err := k.join(t.Context())
	expect.NoError(t, err)
	if same, err := k.join(t.Context()); err != nil || string(same.certificate) != string(first.certificate) {
		t.Fatalf("a fresh certificate was replaced: %v", err)
	}
	clock.Step(50 * time.Minute)
	// Its key is enough.
	o.TokenFile = "/nowhere"
	second, err := New(o).join(t.Context())
	if err != nil || string(second.certificate) == string(first.certificate) || string(second.key) != string(first.key) {
		t.Fatalf("want a new certificate for the same key: %v", err)
	}
	o.BrokerURL = "https://127.0.0.1:1"
	if stored, err := New(o).join(t.Context()); err != nil || string(stored.certificate) != string(second.certificate) {
		t.Fatalf("without a broker: %v", err)
	}
	clock.Step(time.Hour)
	if _, err := New(o).join(t.Context()); err == nil {
		t.Fatal("an expired certificate was used")
	}
}

func (j *joining) testReplacement(t *testing.T) {
	o := j.options(t)
	first, err := New(o).join(t.Context())
	expect.NoError(t, err)
	other := newAuthority(t)
	o.BrokerURL, o.CAHash = other.server.URL, other.hash()
	second, err := New(o).join(t.Context())
	if err != nil || string(second.ca) == string(first.ca) {
		t.Fatalf("still the former broker's: %v", err)
	}
	o.ClusterID = "roma"
	third, err := New(o).join(t.Context())
	if err != nil || third.pair.Leaf.Subject.CommonName != "roma" {
		t.Fatalf("have %v, %v", third, err)
	}
}

func TestCertificateDirectory(t *testing.T) {
	a := newAuthority(t)
	dir := t.TempDir()
	write := func(name string) {
		t.Helper()
		text, err := keyutil.MakeEllipticPrivateKeyPEM()
		expect.NoError(t, err)
		private, err := keyutil.ParsePrivateKeyPEM(text)
		expect.NoError(t, err)
		for file, content := range map[string][]byte{
			fileCA: pemOf(a.certificate), filePrivateKey: text,
			fileCertificate: pemOf(a.sign(name, private.(*ecdsa.PrivateKey).Public(), time.Hour)),
		} {
			expect.NoError(t, os.WriteFile(filepath.Join(dir, file), content, 0o600))
		}
	}
	clock := clocktesting.NewFakeClock(time.Now())
	k := New(Options{ClusterID: "rome", CertPath: dir, Clock: clock, Log: testr.New(t)})
	// step makes the Keeper, which waits on the clock, read the directory again.
	step := func() {
		t.Helper()
		expect.Eventually(t, "the Keeper to wait", func() (bool, string) { return clock.HasWaiters(), "busy" })
		clock.Step(refreshInterval)
	}
	defer run(t, k)()
	eventuallyNotReady(t, k, "tls.key")
	write("berlin")
	step()
	eventuallyNotReady(t, k, `is for "berlin", not for cluster "rome"`)
	write("rome")
	_, changed, err := k.CA()
	if err == nil {
		t.Fatal("a CA without an identity")
	}
	step()
	eventuallyReady(t, k)
	<-changed
	if name, err := CommonName(dir); err != nil || name != "rome" {
		t.Fatalf("have %q, %v", name, err)
	}
	first, err := k.Certificate()
	expect.NoError(t, err)
	write("rome")
	_, changed, err = k.CA()
	expect.NoError(t, err)
	step()
	<-changed
	if second, err := k.Certificate(); err != nil || second.Leaf.Equal(first.Leaf) {
		t.Fatalf("a renewed certificate was not read: %v", err)
	}
	expect.NoError(t, os.Remove(filepath.Join(dir, fileCertificate)))
	step()
	step()
	if err := k.Check(nil); err != nil {
		t.Fatalf("the identity is lost with the file: %v", err)
	}
	clock.Step(2 * time.Hour)
	if err := k.Check(nil); err == nil {
		t.Fatal("ready with an expired certificate")
	}
}
