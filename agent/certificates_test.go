package main

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/keyutil"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestCertificatesOfAnotherAuthority runs the broker and an agent with the files that cert-manager
// would mount, and the flags of the original system, in clusters with the CRDs and nothing else. The agent takes its ID
// from its certificate.
func TestCertificatesOfAnotherAuthority(t *testing.T) {
	hubConfig, romeConfig := controlplane.Start(t), controlplane.Start(t)
	hub, rome := newClient(t, hubConfig), newClient(t, romeConfig)
	createNode(t, rome)
	a := newCertAuthority(t)
	program, server := build(t, "agent"), build(t, "broker")
	address := freeAddress(t)
	ended := start(t, server, hubConfig, "--namespace="+broker.SystemNamespace, "--listen="+address, "--broker-interface=http", "--health-probe-bind-address="+freeAddress(t), "--tls-cert-path="+a.directory("spillway-broker", x509.ExtKeyUsageServerAuth))
	certPath := a.directory("rome", x509.ExtKeyUsageClientAuth)
	start(t, program, romeConfig, "--broker-transport=http", "--broker-url=https://"+address, "--broker-cert-path="+certPath,
		"--health-probe-bind-address="+freeAddress(t), "--api-server-endpoint="+romeConfig.Host, "--placeholders-namespace=", "--driver=direct", "--namespace="+broker.SystemNamespace)
	eventually(t, ended, "the advertisement of rome", func() error {
		ad := &broker.ClusterAdvertisement{}
		if err := hub.Get(t.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: "rome"}, ad); err != nil {
			return err
		}
		if !ad.Status.Active {
			return fmt.Errorf("it is not active: %+v", ad.Status)
		}
		return nil
	})
	registration := &broker.ClusterRegistration{}
	expect.NoError(t, hub.Get(t.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: "rome"}, registration))
	if registration.Status.Phase != broker.RegistrationApproved {
		t.Errorf("the registration is %s", registration.Status.Phase)
	}

	reservation := newReservation(t, rome, 2)
	eventually(t, ended, "spillway-agent decision with the certificate", func() error {
		var out strings.Builder
		err := printDecision(t.Context(), func() (*rest.Config, error) { return romeConfig, nil }, []string{"--broker-url=https://" + address, "--broker-cert-path=" + certPath, "--namespace=" + broker.SystemNamespace, client.ObjectKeyFromObject(reservation).String()}, &out)
		if text := out.String(); err != nil || !strings.HasPrefix(text, "CLUSTER") {
			return fmt.Errorf("%v: %s", err, text)
		}
		return nil
	})

	// Revoked, it loses its access, and keeps its name.
	registration.Spec.Approval = broker.ApprovalRevoked
	expect.NoError(t, hub.Update(t.Context(), registration))
	eventually(t, ended, "rome to be revoked", func() error {
		err := hub.Get(t.Context(), client.ObjectKeyFromObject(registration), registration)
		ads := &broker.ClusterAdvertisementList{}
		if err == nil {
			err = hub.List(t.Context(), ads, client.InNamespace(broker.SystemNamespace))
		}
		if err == nil && (registration.Status.Phase != broker.RegistrationRevoked || len(ads.Items) > 0) {
			err = fmt.Errorf("it is %s, with %d advertisements", registration.Status.Phase, len(ads.Items))
		}
		return err
	})
}

// certAuthority issues certificates of the form that cert-manager gives them: RSA keys, a common
// name, and one usage.
type certAuthority struct {
	t           *testing.T
	certificate *x509.Certificate
	key         *rsa.PrivateKey
}

func newCertAuthority(t *testing.T) *certAuthority {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	expect.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "clusters"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	expect.NoError(t, err)
	certificate, err := x509.ParseCertificate(der)
	expect.NoError(t, err)
	return &certAuthority{t, certificate, key}
}

// directory issues a certificate, and returns the directory in which a Secret with it is mounted.
func (a *certAuthority) directory(name string, usage x509.ExtKeyUsage) string {
	a.t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	expect.NoError(a.t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	expect.NoError(a.t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name, Organization: []string{"clusters"}}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment, ExtKeyUsage: []x509.ExtKeyUsage{usage}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}, a.certificate, key.Public(), a.key)
	expect.NoError(a.t, err)
	private, err := keyutil.MarshalPrivateKeyToPEM(key)
	expect.NoError(a.t, err)
	dir := a.t.TempDir()
	for file, content := range map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), "tls.key": private,
		"ca.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.certificate.Raw}),
	} {
		expect.NoError(a.t, os.WriteFile(filepath.Join(dir, file), content, 0o600))
	}
	return dir
}
