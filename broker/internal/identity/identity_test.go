package identity

import (
	"bytes"
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
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

const namespace = "default"

func TestAuthority(t *testing.T) {
	config := controlplane.Start(t)
	all := runtime.NewScheme()
	must(t, errors.Join(scheme.AddToScheme(all), broker.AddToScheme(all)))
	api, err := client.New(config, client.Options{Scheme: all})
	must(t, err)
	now := time.Now()
	clock := clocktesting.NewFakePassiveClock(now)
	options := Options{Client: api, Cache: api, Namespace: namespace, Names: []string{"hub.test", "192.0.2.7"}, Clock: clock}

	// Several replicas start at once.
	replicas := make([]*Authority, 4)
	var starting errgroup.Group
	for i := range replicas {
		starting.Go(func() (err error) {
			replicas[i], err = New(t.Context(), options)
			return err
		})
	}
	must(t, starting.Wait())
	a := replicas[0]
	for _, other := range replicas {
		if other.CAHash() != a.CAHash() {
			t.Fatal("two replicas made two authorities")
		}
	}
	published := &corev1.ConfigMap{}
	must(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: CAName}, published))
	if published.Data["caHash"] != a.CAHash() || published.Data["ca.crt"] != string(a.CAPEM()) {
		t.Fatalf("ConfigMap %s does not tell of the authority: %v", CAName, published.Data)
	}
	kept := &corev1.Secret{}
	must(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: CAName}, kept))
	if kept.Type != corev1.SecretTypeTLS {
		t.Fatalf("Secret %s has type %s", CAName, kept.Type)
	}
	secret := &corev1.Secret{}
	must(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: TokenName}, secret))
	token := string(secret.Data[TokenKey])

	t.Run("serving certificate", func(t *testing.T) {
		serving := func() *x509.Certificate {
			certificate, err := a.TLSConfig().GetCertificate(nil)
			must(t, err)
			if len(certificate.Certificate) != 2 || !bytes.Equal(certificate.Certificate[1], a.ca.Raw) {
				t.Fatal("the authority does not go with the serving certificate")
			}
			return certificate.Leaf
		}
		first := serving()
		for _, name := range []string{"spillway-broker.default.svc", "hub.test", "192.0.2.7", "localhost"} {
			must(t, first.VerifyHostname(name))
		}
		clock.SetTime(now.Add(servingLife / 2))
		if !serving().Equal(first) {
			t.Fatal("it was made anew at half of its life")
		}
		clock.SetTime(now.Add(servingLife * 3 / 4))
		if serving().Equal(first) {
			t.Fatal("it was not made anew at three quarters of its life")
		}
		clock.SetTime(now)
	})

	t.Run("a certificate names its cluster and nothing else", func(t *testing.T) {
		key := newKey(t)
		answer, err := a.Join(t.Context(), protocol.JoinRequest{ClusterID: "greedy", Token: token, CSR: newCSR(t, key, func(csr *x509.CertificateRequest) {
			csr.Subject = pkix.Name{CommonName: "greedy", Organization: []string{"system:masters"}}
			csr.DNSNames = []string{"spillway-broker", "localhost"}
		})})
		must(t, err)
		leaf := parse(t, answer.Certificate)
		if leaf.IsCA || len(leaf.DNSNames) > 0 || len(leaf.Subject.Organization) > 0 || len(leaf.URIs) != 1 || leaf.URIs[0].String() != "spiffe://spillway/cluster/greedy" {
			t.Fatalf("got a certificate of %v for %v %v", leaf.Subject, leaf.DNSNames, leaf.URIs)
		}
		state := &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{{leaf, a.ca}}}
		id, err := a.Authenticate(t.Context(), state)
		if err != nil || id != "greedy" {
			t.Fatalf("got %q, %v", id, err)
		}
		clock.SetTime(leaf.NotAfter.Add(time.Second))
		_, err = a.Authenticate(t.Context(), state)
		expectRefusal(t, err, protocol.CodeUnauthorized, "ended")
		clock.SetTime(now)
		registration := &broker.ClusterRegistration{}
		must(t, api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "greedy"}, registration))
		if registration.Status.Phase != broker.RegistrationApproved || registration.Status.NotAfter == nil || registration.Status.CertificateFingerprint == "" {
			t.Fatalf("the registration does not tell of the certificate: %+v", registration.Status)
		}
	})

	t.Run("of many first keys one wins", func(t *testing.T) {
		var joining errgroup.Group
		won := make(chan struct{}, 16)
		for i := range cap(won) {
			request := protocol.JoinRequest{ClusterID: "contended", Token: token, CSR: newCSR(t, newKey(t), named("contended"))}
			replica := replicas[i%len(replicas)]
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
		must(t, joining.Wait())
		if len(won) != 1 {
			t.Fatalf("%d keys joined as one cluster", len(won))
		}
	})

	t.Run("a token that is changed counts at once", func(t *testing.T) {
		secret.Data[TokenKey] = []byte("another-token-of-enough-length\n")
		must(t, api.Update(t.Context(), secret))
		request := protocol.JoinRequest{ClusterID: "new", Token: token, CSR: newCSR(t, newKey(t), named("new"))}
		_, err := a.Join(t.Context(), request)
		expectRefusal(t, err, protocol.CodeUnauthorized, TokenName)
		request.Token = "another-token-of-enough-length"
		_, err = a.Join(t.Context(), request)
		must(t, err)
	})

	t.Run("an empty token lets nobody in", func(t *testing.T) {
		secret.Data[TokenKey] = nil
		must(t, api.Update(t.Context(), secret))
		_, err := a.Join(t.Context(), protocol.JoinRequest{ClusterID: "nobody", CSR: newCSR(t, newKey(t), named("nobody"))})
		expectRefusal(t, err, protocol.CodeUnauthorized, TokenName)
		if _, err := New(t.Context(), options); err == nil {
			t.Fatal("want a broker with an empty token not to start")
		}
	})
}

func TestCertificateRequests(t *testing.T) {
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	must(t, err)
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
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
		"too long":           {id: "rome", csr: good + strings.Repeat("\n", maxCSR), code: protocol.CodeTooLarge, want: "are enough"},
		"nothing":            {id: "rome", code: protocol.CodeInvalid, want: "exactly one"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseCSR(tc.id, tc.csr)
			if tc.code == "" {
				must(t, err)
				return
			}
			expectRefusal(t, err, tc.code, tc.want)
		})
	}
}

// FuzzCertificates feeds DER and PEM of any kind to what parses them.
func FuzzCertificates(f *testing.F) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "rome"}}, key)
	if err != nil {
		f.Fatal(err)
	}
	ca, _, err := newCA(time.Now())
	if err != nil {
		f.Fatal(err)
	}
	block, _ := pem.Decode(ca)
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
		if id, err := certifiedID(leaf); err == nil && !protocol.ValidClusterID(id) {
			t.Fatalf("a certificate names cluster %q", id)
		}
	})
}

func newKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
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
	must(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
}

func parse(t *testing.T, text string) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		t.Fatal("not PEM")
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	must(t, err)
	return certificate
}

func expectRefusal(t *testing.T, err error, code, sentence string) {
	t.Helper()
	if !protocol.HasCode(err, code) || !strings.Contains(err.Error(), sentence) {
		t.Fatalf("want %s with %q, got %v", code, sentence, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
