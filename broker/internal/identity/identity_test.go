package identity

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

const namespace = "default"

func TestAuthority(t *testing.T) {
	f := newFixture(t)
	t.Run("serving certificate", f.testServingCertificate)
	t.Run("a certificate has the cluster ID and nothing else", f.testClientCertificate)
	t.Run("one of many concurrent keys joins", f.testConcurrentKeys)
	t.Run("an unknown cluster costs one read", f.testMisses)
	t.Run("the number of clusters is limited", f.testClusterQuota)
	t.Run("the authority is rotated while clusters call", f.testRotation)
	t.Run("the authority is rotated in time", f.testDueRotation)
	t.Run("an authority of others is not rotated", f.testForeignCA)
	t.Run("operators decide about clusters", f.testAdmission)
	t.Run("an invitation is for one key", f.testInvitation)
	t.Run("certificates of another authority", f.testFiles)
	t.Run("a changed token applies at once", f.testChangedToken)
	t.Run("an empty token admits no cluster", f.testEmptyToken)
}

// fixture is an authority on a real API server, with four replicas.
type fixture struct {
	*Authority
	api      client.Client
	now      time.Time
	clock    *clocktesting.FakePassiveClock
	options  Options
	replicas []*Authority
	secret   *corev1.Secret
	token    string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	config := controlplane.Start(t)
	all := runtime.NewScheme()
	expect.NoError(t, errors.Join(scheme.AddToScheme(all), broker.AddToScheme(all)))
	api, err := client.New(config, client.Options{Scheme: all})
	expect.NoError(t, err)
	f := &fixture{api: api, now: time.Now(), replicas: make([]*Authority, 4), secret: &corev1.Secret{}}
	f.clock = clocktesting.NewFakePassiveClock(f.now)
	f.options = Options{Client: api, Cache: api, Namespace: namespace, Names: []string{"hub.test", "192.0.2.7"}, Clock: f.clock}

	// Several replicas start concurrently.
	var starting errgroup.Group
	for i := range f.replicas {
		starting.Go(func() (err error) {
			f.replicas[i], err = New(t.Context(), f.options)
			return err
		})
	}
	expect.NoError(t, starting.Wait())
	a := f.replicas[0]
	f.Authority = a
	for _, other := range f.replicas {
		if other.CAHash() != a.CAHash() {
			t.Fatal("two replicas have created two authorities")
		}
	}
	published := &corev1.ConfigMap{}
	expect.NoError(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: CAName}, published))
	if published.Data["caHash"] != a.CAHash() || published.Data["ca.crt"] != string(a.CAPEM()) {
		t.Fatalf("ConfigMap %s is not of the authority: %v", CAName, published.Data)
	}
	kept := &corev1.Secret{}
	expect.NoError(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: CAName}, kept))
	if kept.Type != corev1.SecretTypeTLS {
		t.Fatalf("Secret %s has type %s", CAName, kept.Type)
	}
	expect.NoError(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: TokenName}, f.secret))
	f.token = string(f.secret.Data[TokenKey])
	return f
}

func (f *fixture) testServingCertificate(t *testing.T) {
	serving := func() *x509.Certificate {
		certificate, err := f.TLSConfig().GetCertificate(nil)
		expect.NoError(t, err)
		if len(certificate.Certificate) != 2 || !bytes.Equal(certificate.Certificate[1], f.cas.Load().signer().Raw) {
			t.Fatal("the chain does not include the authority")
		}
		return certificate.Leaf
	}
	first := serving()
	for _, name := range []string{"spillway-broker.default.svc", "hub.test", "192.0.2.7", "localhost"} {
		expect.NoError(t, first.VerifyHostname(name))
	}
	f.clock.SetTime(f.now.Add(servingValidity / 2))
	if !serving().Equal(first) {
		t.Fatal("it was renewed at half of its validity")
	}
	f.clock.SetTime(f.now.Add(servingValidity * 3 / 4))
	if serving().Equal(first) {
		t.Fatal("it was not renewed at three quarters of its validity")
	}
	f.clock.SetTime(f.now)
	f.serving = nil // it is of a later time
}

// cacheBehind is a cache that has no registration yet.
type cacheBehind struct{ client.Reader }

func (c cacheBehind) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

func (f *fixture) testClusterQuota(t *testing.T) {
	config := &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}, Spec: broker.BrokerConfigSpec{Quotas: &broker.Quotas{Clusters: ptr.To(int32(0))}}}
	if err := f.api.Create(t.Context(), config); !apierrors.IsInvalid(err) {
		t.Fatalf("a quota of 0 is valid: %v", err)
	}
	var list broker.ClusterRegistrationList
	expect.NoError(t, f.api.List(t.Context(), &list, client.InNamespace(namespace)))
	const more = 2
	for name, tc := range map[string]struct {
		cache client.Reader
		quota int
	}{
		"now":    {f.api, len(list.Items) + more},
		"behind": {cacheBehind{f.api}, more},
	} {
		config.Spec.Quotas.Clusters = ptr.To(int32(tc.quota))
		config.ResourceVersion = ""
		expect.NoError(t, f.api.Create(t.Context(), config))
		options := f.options
		options.Cache = tc.cache
		a, err := New(t.Context(), options)
		expect.NoError(t, err)
		requests := make([]protocol.JoinRequest, 3*more)
		results := make([]error, len(requests))
		var joining errgroup.Group
		for i := range requests {
			id := fmt.Sprintf("one-more-%s-%d", name, i)
			requests[i] = protocol.JoinRequest{ClusterID: id, Token: f.token, CSR: newCSR(t, newKey(t), func(csr *x509.CertificateRequest) { csr.Subject.CommonName = id })}
			joining.Go(func() error {
				_, results[i] = a.Join(t.Context(), requests[i])
				return nil
			})
		}
		expect.NoError(t, joining.Wait())
		joined := 0
		for i, err := range results {
			if err == nil {
				joined++
				// It may join again.
				_, err = a.Join(t.Context(), requests[i])
				expect.NoError(t, err)
			} else if !protocol.HasCode(err, protocol.CodeTooMany) || !strings.Contains(err.Error(), "raise spec.quotas.clusters") {
				t.Errorf("cache %s: got %v", name, err)
			}
		}
		if joined != more {
			t.Errorf("cache %s: %d clusters joined, want %d", name, joined, more)
		}
		expect.NoError(t, f.api.Delete(t.Context(), config))
		for _, request := range requests {
			_, err := a.Join(t.Context(), request)
			expect.NoError(t, err)
			expect.NoError(t, f.api.Delete(t.Context(), &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: request.ClusterID}}))
		}
	}
}

func (f *fixture) testClientCertificate(t *testing.T) {
	key := newKey(t)
	answer, err := f.Join(t.Context(), protocol.JoinRequest{ClusterID: "greedy", Token: f.token, CSR: newCSR(t, key, func(csr *x509.CertificateRequest) {
		csr.Subject = pkix.Name{CommonName: "greedy", Organization: []string{"system:masters"}}
		csr.DNSNames = []string{"spillway-broker", "localhost"}
	})})
	expect.NoError(t, err)
	leaf := parse(t, answer.Certificate)
	if leaf.IsCA || len(leaf.DNSNames) > 0 || len(leaf.Subject.Organization) > 0 || len(leaf.URIs) != 1 || leaf.URIs[0].String() != "spiffe://spillway/cluster/greedy" {
		t.Fatalf("got a certificate of %v for %v %v", leaf.Subject, leaf.DNSNames, leaf.URIs)
	}
	state := &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{{leaf, f.cas.Load().signer()}}}
	id, err := f.Authenticate(t.Context(), state)
	if err != nil || id != "greedy" {
		t.Fatalf("got %q, %v", id, err)
	}
	if validity := leaf.NotAfter.Sub(f.now).Round(time.Minute); validity != DefaultClientValidity {
		t.Errorf("the certificate is valid for %s", validity)
	}
	f.clock.SetTime(leaf.NotAfter.Add(time.Second))
	_, err = f.Authenticate(t.Context(), state)
	expectRefusal(t, err, protocol.CodeUnauthorized, "expired")
	// The key is enough for another one, also now.
	_, err = f.Join(t.Context(), protocol.JoinRequest{ClusterID: "greedy", CSR: newCSR(t, key, named("greedy"))})
	expect.NoError(t, err)
	_, err = f.Join(t.Context(), protocol.JoinRequest{ClusterID: "greedy", CSR: newCSR(t, newKey(t), named("greedy"))})
	expectRefusal(t, err, protocol.CodeUnauthorized, TokenName)
	f.clock.SetTime(f.now)
	registration := &broker.ClusterRegistration{}
	expect.NoError(t, f.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "greedy"}, registration))
	if registration.Status.Phase != broker.RegistrationApproved || registration.Status.NotAfter == nil || registration.Status.CertificateFingerprint == "" {
		t.Fatalf("the registration does not have the certificate: %+v", registration.Status)
	}
}

func (f *fixture) testConcurrentKeys(t *testing.T) {
	var joining errgroup.Group
	won := make(chan struct{}, 16)
	for i := range cap(won) {
		request := protocol.JoinRequest{ClusterID: "contended", Token: f.token, CSR: newCSR(t, newKey(t), named("contended"))}
		replica := f.replicas[i%len(f.replicas)]
		joining.Go(func() error {
			_, err := replica.Join(t.Context(), request)
			if err == nil {
				won <- struct{}{}
			} else if !protocol.HasCode(err, protocol.CodeConflict) && !protocol.HasCode(err, protocol.CodeUnavailable) {
				return err
			}
			return nil
		})
	}
	expect.NoError(t, joining.Wait())
	if len(won) != 1 {
		t.Fatalf("%d keys joined as one cluster", len(won))
	}
}

func (f *fixture) testChangedToken(t *testing.T) {
	f.secret.Data[TokenKey] = []byte("another-token-of-enough-length\n")
	expect.NoError(t, f.api.Update(t.Context(), f.secret))
	request := protocol.JoinRequest{ClusterID: "new", Token: f.token, CSR: newCSR(t, newKey(t), named("new"))}
	_, err := f.Join(t.Context(), request)
	expectRefusal(t, err, protocol.CodeUnauthorized, TokenName)
	request.Token = "another-token-of-enough-length"
	_, err = f.Join(t.Context(), request)
	expect.NoError(t, err)
}

func (f *fixture) testEmptyToken(t *testing.T) {
	f.secret.Data[TokenKey] = nil
	expect.NoError(t, f.api.Update(t.Context(), f.secret))
	_, err := f.Join(t.Context(), protocol.JoinRequest{ClusterID: "oslo", CSR: newCSR(t, newKey(t), named("oslo"))})
	expectRefusal(t, err, protocol.CodeUnauthorized, TokenName)
	if _, err := New(t.Context(), f.options); err == nil {
		t.Fatal("a broker with an empty token has started")
	}
}

func TestCertificateRequests(t *testing.T) {
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	expect.NoError(t, err)
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	expect.NoError(t, err)
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	expect.NoError(t, err)
	good := newCSR(t, newKey(t), named("rome"))
	forged := []byte(good)
	block, _ := pem.Decode(forged)
	block.Bytes[len(block.Bytes)-1] ^= 1
	for name, tc := range map[string]struct {
		id, csr, code, want string
	}{
		"P-256":              {id: "rome", csr: good},
		"Ed25519":            {id: "rome", csr: newCSR(t, edKey, named("rome"))},
		"P-384":              {id: "rome", csr: newCSR(t, p384, named("rome")), code: protocol.CodeInvalid, want: "P-256"},
		"RSA":                {id: "rome", csr: newCSR(t, rsaKey, named("rome")), code: protocol.CodeInvalid, want: "Ed25519"},
		"another name":       {id: "paris", csr: good, code: protocol.CodeInvalid, want: "common name"},
		"an ID with dots":    {id: "rome.test", csr: newCSR(t, newKey(t), named("rome.test")), code: protocol.CodeInvalid, want: "cluster ID"},
		"an ID too long":     {id: strings.Repeat("r", 41), csr: good, code: protocol.CodeInvalid, want: "cluster ID"},
		"two blocks":         {id: "rome", csr: good + good, code: protocol.CodeInvalid, want: "exactly one"},
		"a broken signature": {id: "rome", csr: string(pem.EncodeToMemory(block)), code: protocol.CodeInvalid, want: "signed"},
		"too long":           {id: "rome", csr: good + strings.Repeat("\n", maxCSR), code: protocol.CodeTooLarge, want: "the maximum is"},
		"nothing":            {id: "rome", code: protocol.CodeInvalid, want: "exactly one"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseCSR(tc.id, tc.csr)
			if tc.code == "" {
				expect.NoError(t, err)
				return
			}
			expectRefusal(t, err, tc.code, tc.want)
		})
	}
}

// FuzzCertificates parses arbitrary DER and PEM.
func FuzzCertificates(f *testing.F) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(f, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "rome"}}, key)
	expect.NoError(f, err)
	ca, err := newCA(time.Now(), nil)
	expect.NoError(f, err)
	block, _ := pem.Decode(ca[corev1.TLSCertKey])
	for _, seed := range [][]byte{nil, csr, csr[:len(csr)/2], block.Bytes} {
		f.Add("rome", seed)
	}
	f.Add("", csr)
	f.Fuzz(func(t *testing.T, id string, der []byte) {
		for _, text := range []string{string(der), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))} {
			csr, err := parseCSR(id, text)
			var refusal *protocol.Error
			switch {
			case err != nil && !errors.As(err, &refusal):
				t.Fatalf("not a refusal: %v", err)
			case err == nil && (csr.Subject.CommonName != id || !protocol.ValidClusterID(id)):
				t.Fatalf("a request of %q passed as %q", csr.Subject.CommonName, id)
			}
		}
		leaf, err := x509.ParseCertificate(der)
		if err != nil {
			return
		}
		if id, err := certifiedID(leaf, true); err == nil && !protocol.ValidClusterID(id) {
			t.Fatalf("a certificate is of cluster %q", id)
		}
	})
}

func newKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	return key
}

func named(name string) func(*x509.CertificateRequest) {
	return func(csr *x509.CertificateRequest) { csr.Subject.CommonName = name }
}

func newCSR(t *testing.T, key crypto.Signer, fill func(*x509.CertificateRequest)) string {
	t.Helper()
	template := &x509.CertificateRequest{}
	fill(template)
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	expect.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
}

func parse(t *testing.T, text string) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		t.Fatal("not PEM")
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	expect.NoError(t, err)
	return certificate
}

func expectRefusal(t *testing.T, err error, code, part string) {
	t.Helper()
	if !protocol.HasCode(err, code) || !strings.Contains(err.Error(), part) {
		t.Fatalf("want %s with %q, got %v", code, part, err)
	}
}
