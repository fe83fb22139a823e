package identity

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"testing"

	"k8s.io/client-go/util/keyutil"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// FuzzCredentials reads arbitrary keys and certificates, as of a broker's response or a
// Secret.
func FuzzCredentials(f *testing.F) {
	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	expect.NoError(f, err)
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte{0x30, 0}})
	f.Add(key, certificate, certificate)
	f.Add([]byte(""), []byte("x"), []byte("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"))
	f.Add(bytes.ReplaceAll(key, []byte("PRIVATE"), []byte("PUBLIC")), []byte(nil), key)
	f.Fuzz(func(t *testing.T, key, certificate, ca []byte) {
		if read, err := parse(key, certificate, ca); err == nil && len(read.pair.Certificate) == 0 {
			t.Fatal("credentials without a certificate were accepted")
		}
		text, err := certificateRequest(key, "rome")
		if err != nil {
			return
		}
		block, _ := pem.Decode(text)
		request, err := x509.ParseCertificateRequest(block.Bytes)
		expect.NoError(t, err)
		if request.Subject.CommonName != "rome" {
			t.Fatalf("the request is for %s", request.Subject)
		}
	})
}
