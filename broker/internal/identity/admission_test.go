package identity

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/keyutil"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestPhase(t *testing.T) {
	for name, tc := range map[string]struct {
		approval  broker.RegistrationApproval
		before    broker.RegistrationPhase
		admission broker.Admission
		want      broker.RegistrationPhase
	}{
		"automatic":                     {admission: broker.AdmissionAutomatic, want: broker.RegistrationApproved},
		"waits for approval":            {admission: broker.AdmissionApproval, want: broker.RegistrationPending},
		"not invited":                   {admission: broker.AdmissionInvitation, want: broker.RegistrationPending},
		"approved by an operator":       {approval: broker.ApprovalApproved, before: broker.RegistrationPending, admission: broker.AdmissionApproval, want: broker.RegistrationApproved},
		"approved before":               {before: broker.RegistrationApproved, admission: broker.AdmissionInvitation, want: broker.RegistrationApproved},
		"revoked":                       {approval: broker.ApprovalRevoked, before: broker.RegistrationApproved, admission: broker.AdmissionAutomatic, want: broker.RegistrationRevoked},
		"revocation withdrawn":          {before: broker.RegistrationRevoked, admission: broker.AdmissionAutomatic, want: broker.RegistrationApproved},
		"revocation withdrawn, by hand": {before: broker.RegistrationRevoked, admission: broker.AdmissionApproval, want: broker.RegistrationPending},
	} {
		registration := &broker.ClusterRegistration{Spec: broker.ClusterRegistrationSpec{Approval: tc.approval}, Status: broker.ClusterRegistrationStatus{Phase: tc.before}}
		if got := Phase(registration, tc.admission); got != tc.want {
			t.Errorf("%s: got %s, want %s", name, got, tc.want)
		}
	}
}

// configure creates the BrokerConfig for the rest of a test.
func (f *fixture) configure(t *testing.T, joining broker.Joining) {
	t.Helper()
	config := &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: settings.Name}, Spec: broker.BrokerConfigSpec{Joining: &joining}}
	expect.NoError(t, client.IgnoreNotFound(f.api.Delete(t.Context(), config)))
	expect.NoError(t, f.api.Create(t.Context(), config))
	t.Cleanup(func() {
		expect.NoError(t, client.IgnoreNotFound(f.api.Delete(context.WithoutCancel(t.Context()), config)))
	})
}

func (f *fixture) joinAs(t *testing.T, id string, key crypto.Signer, token string) (*tls.ConnectionState, error) {
	t.Helper()
	answer, err := f.Join(t.Context(), protocol.JoinRequest{ClusterID: id, Token: token, CSR: newCSR(t, key, named(id))})
	if err != nil {
		return nil, err
	}
	leaf := parse(t, answer.Certificate)
	return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{{leaf, f.cas.Load().signer()}}}, nil
}

func (f *fixture) registration(t *testing.T, id string) *broker.ClusterRegistration {
	t.Helper()
	registration := &broker.ClusterRegistration{}
	expect.NoError(t, f.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: id}, registration))
	return registration
}

func (f *fixture) decide(t *testing.T, id string, approval broker.RegistrationApproval) {
	t.Helper()
	registration := f.registration(t, id)
	registration.Spec.Approval = approval
	expect.NoError(t, f.api.Update(t.Context(), registration))
}

func (f *fixture) testAdmission(t *testing.T) {
	f.configure(t, broker.Joining{Admission: broker.AdmissionApproval, Allowed: []string{"oslo"}})
	_, err := f.joinAs(t, "riga", newKey(t), f.token)
	expectRefusal(t, err, protocol.CodeForbidden, "spec.joining.allowed")
	if err := f.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "riga"}, &broker.ClusterRegistration{}); !apierrors.IsNotFound(err) {
		t.Errorf("a cluster that may not join has a registration: %v", err)
	}
	key := newKey(t)
	_, err = f.joinAs(t, "oslo", key, f.token)
	expectRefusal(t, err, protocol.CodeForbidden, `patch clusterregistration oslo --type merge -p '{"spec":{"approval":"Approved"}}'`)
	if phase := f.registration(t, "oslo").Status.Phase; phase != broker.RegistrationPending {
		t.Errorf("the phase is %s", phase)
	}
	_, err = f.joinAs(t, "oslo", newKey(t), f.token)
	expectRefusal(t, err, protocol.CodeConflict, "another key")
	f.decide(t, "oslo", broker.ApprovalApproved)
	state, err := f.joinAs(t, "oslo", key, "")
	expect.NoError(t, err)
	_, err = f.Authenticate(t.Context(), state)
	expect.NoError(t, err)

	f.decide(t, "oslo", broker.ApprovalRevoked)
	_, err = f.Authenticate(t.Context(), state)
	expectRefusal(t, err, protocol.CodeForbidden, "revoked")
	for name, by := range map[string]crypto.Signer{"its key": key, "another key": newKey(t)} {
		if _, err = f.joinAs(t, "oslo", by, f.token); !protocol.HasCode(err, protocol.CodeForbidden) {
			t.Errorf("a revoked cluster joins with %s: %v", name, err)
		}
	}
}

func (f *fixture) testInvitation(t *testing.T) {
	f.configure(t, broker.Joining{Admission: broker.AdmissionInvitation, Allowed: []string{"oslo"}})
	_, err := f.joinAs(t, "bern", newKey(t), f.token)
	expectRefusal(t, err, protocol.CodeUnauthorized, "invite bern")
	token, err := Invite(t.Context(), f.api, namespace, "bern", f.now.Add(time.Hour))
	expect.NoError(t, err)
	if hash := f.registration(t, "bern").Spec.Invitation.TokenHash; hash == token || len(hash) != 64 {
		t.Errorf("the registration has %q", hash)
	}
	for name, tc := range map[string]struct{ id, token string }{
		"another cluster": {"nice", token}, "another token": {"bern", token + "x"}, "no token": {"bern", ""}, "the shared token": {"bern", f.token},
	} {
		if _, err := f.joinAs(t, tc.id, newKey(t), tc.token); !protocol.HasCode(err, protocol.CodeUnauthorized) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	f.clock.SetTime(f.now.Add(2 * time.Hour))
	_, err = f.joinAs(t, "bern", newKey(t), token)
	expectRefusal(t, err, protocol.CodeUnauthorized, "expired")
	f.clock.SetTime(f.now)
	key := newKey(t)
	_, err = f.joinAs(t, "bern", key, token)
	expect.NoError(t, err)
	_, err = f.joinAs(t, "bern", newKey(t), token)
	expectRefusal(t, err, protocol.CodeConflict, "another key")
	// It renews its certificate, although it is not in the list.
	_, err = f.joinAs(t, "bern", key, "")
	expect.NoError(t, err)
	if _, err := Invite(t.Context(), f.api, namespace, "bern", f.now.Add(time.Hour)); err == nil {
		t.Error("a cluster that has joined is invited again")
	}
	if _, err := Invite(t.Context(), f.api, namespace, "Bern", f.now.Add(time.Hour)); err == nil {
		t.Error("an invalid name is invited")
	}
}

// external is an authority such as cert-manager's, with RSA keys, which are its default.
type external struct {
	ca  *x509.Certificate
	key *rsa.PrivateKey
}

func newExternal(t *testing.T) external {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	expect.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: mustSerial(t), Subject: pkix.Name{CommonName: "some-ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	expect.NoError(t, err)
	ca, err := x509.ParseCertificate(der)
	expect.NoError(t, err)
	return external{ca, key}
}

// issue returns a certificate as the original system's Certificate objects ask for.
func (e external) issue(t *testing.T, name string, usages ...x509.ExtKeyUsage) tls.Certificate {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	expect.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: mustSerial(t), Subject: pkix.Name{CommonName: name, Organization: []string{"clusters"}}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment, ExtKeyUsage: usages,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, e.ca, key.Public(), e.key)
	expect.NoError(t, err)
	leaf, err := x509.ParseCertificate(der)
	expect.NoError(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// write writes the files of a serving certificate, for clients of some authorities.
func (e external) write(t *testing.T, dir string, clients ...external) {
	t.Helper()
	serving := e.issue(t, "hub.test", x509.ExtKeyUsageServerAuth)
	key, err := keyutil.MarshalPrivateKeyToPEM(serving.PrivateKey)
	expect.NoError(t, err)
	var bundle []byte
	for _, each := range clients {
		bundle = append(bundle, certificatePEM(each.ca.Raw)...)
	}
	for name, content := range map[string][]byte{corev1.TLSCertKey: certificatePEM(serving.Certificate[0]), corev1.TLSPrivateKeyKey: key, corev1.ServiceAccountRootCAKey: bundle} {
		expect.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o600))
	}
}

// dial connects to an authority's listener with a client certificate, and returns the cluster as
// which the broker knows it.
func (e external) dial(t *testing.T, a *Authority, client *tls.Certificate) (id string, err error) {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(e.ca)
	return dial(t, a, roots, client)
}

func dial(t *testing.T, a *Authority, roots *x509.CertPool, client *tls.Certificate) (id string, err error) {
	t.Helper()
	there, here := net.Pipe()
	server := tls.Server(there, a.TLSConfig())
	config := &tls.Config{RootCAs: roots, ServerName: "hub.test", Time: a.Clock.Now}
	if client != nil {
		config.Certificates = []tls.Certificate{*client}
	}
	shaken := make(chan error, 1)
	go func() {
		caller := tls.Client(here, config)
		err := caller.HandshakeContext(t.Context())
		// With TLS 1.3, the server's refusal of a certificate comes after it.
		_, _ = caller.Read(make([]byte, 1))
		shaken <- err
	}()
	if err = server.HandshakeContext(t.Context()); err == nil {
		state := server.ConnectionState()
		id, err = a.Authenticate(t.Context(), &state)
	}
	expect.NoError(t, errors.Join(there.Close(), here.Close()))
	return id, errors.Join(err, <-shaken)
}

func (f *fixture) testFiles(t *testing.T) {
	first, second := newExternal(t), newExternal(t)
	options := f.options
	options.Log, options.CertPath = testr.New(t), t.TempDir()
	if _, err := New(t.Context(), options); err == nil {
		t.Error("a broker without files has started")
	}
	first.write(t, options.CertPath, first)
	a, err := New(t.Context(), options)
	expect.NoError(t, err)
	if a.CAHash() != "" {
		t.Error("agents are to join")
	}
	_, err = a.Join(t.Context(), protocol.JoinRequest{ClusterID: "genoa", Token: f.token, CSR: newCSR(t, newKey(t), named("genoa"))})
	expectRefusal(t, err, protocol.CodeInvalid, "--broker-cert-path")

	genoa := first.issue(t, "genoa", x509.ExtKeyUsageClientAuth)
	if id, err := first.dial(t, a, &genoa); err != nil || id != "genoa" {
		t.Fatalf("got %q, %v", id, err)
	}
	if phase := f.registration(t, "genoa").Status.Phase; phase != broker.RegistrationApproved {
		t.Errorf("the phase is %q", phase)
	}
	for name, certificate := range map[string]*tls.Certificate{
		"none": nil, "a serving one": new(first.issue(t, "genoa", x509.ExtKeyUsageServerAuth)),
		"of no usage": new(first.issue(t, "genoa")), "of two usages": new(first.issue(t, "genoa", x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth)),
		"no cluster ID": new(first.issue(t, "genoa.test", x509.ExtKeyUsageClientAuth)), "of another authority": new(second.issue(t, "genoa", x509.ExtKeyUsageClientAuth)),
	} {
		if id, err := first.dial(t, a, certificate); err == nil {
			t.Errorf("%s: the caller is %s", name, id)
		}
	}

	// The authority changes without a restart, with an overlap; a file that cannot be read changes nothing.
	f.clock.SetTime(f.now.Add(reloadAfter))
	first.write(t, options.CertPath, first, second)
	renewed := second.issue(t, "genoa", x509.ExtKeyUsageClientAuth)
	if id, err := first.dial(t, a, &renewed); err != nil || id != "genoa" {
		t.Errorf("with a new key of the next authority: %q, %v", id, err)
	}
	f.clock.SetTime(f.now.Add(2 * reloadAfter))
	expect.NoError(t, os.WriteFile(filepath.Join(options.CertPath, corev1.TLSCertKey), []byte("half"), 0o600))
	if _, err := first.dial(t, a, &genoa); err != nil {
		t.Errorf("with a broken file: %v", err)
	}
	f.clock.SetTime(f.now.Add(3 * reloadAfter))
	second.write(t, options.CertPath, second)
	if _, err := second.dial(t, a, &renewed); err != nil {
		t.Errorf("of the second authority alone: %v", err)
	}
	if _, err := second.dial(t, a, &genoa); err == nil {
		t.Error("the first authority is still trusted")
	}
	// Where the broker issues certificates again, the approval is not for the first key that comes.
	f.configure(t, broker.Joining{Admission: broker.AdmissionApproval})
	_, err = f.joinAs(t, "genoa", newKey(t), f.token)
	expectRefusal(t, err, protocol.CodeForbidden, "waits for approval")
	f.decide(t, "genoa", broker.ApprovalRevoked)
	_, err = second.dial(t, a, &renewed)
	expectRefusal(t, err, protocol.CodeForbidden, "revoked")
	f.clock.SetTime(f.now)
}

func mustSerial(t *testing.T) *big.Int {
	t.Helper()
	serial, err := newSerial()
	expect.NoError(t, err)
	return serial
}
