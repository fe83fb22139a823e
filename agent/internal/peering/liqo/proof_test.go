package liqo

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
)

// keySecret is a Secret as Liqo makes it.
func keySecret(t testing.TB, key crypto.Signer) *corev1.Secret {
	t.Helper()
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{Data: map[string][]byte{
		consts.PrivateKeyField: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
		consts.PublicKeyField:  pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
	}}
	secret.Namespace, secret.Name = "liqo", consts.AuthKeysSecretName
	return secret
}

func newEd25519(t testing.TB) crypto.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestProof(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	ecKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	nonce := newNonce()
	answer := func(t *testing.T, key crypto.Signer, clusterID string) message {
		t.Helper()
		m := message{Kind: kindRequest, Session: 1}
		if m.PublicKey, m.CSR, m.Signature, err = prove(keySecret(t, key), clusterID, nonce); err != nil {
			t.Fatal(err)
		}
		return m
	}
	edKey := newEd25519(t)
	for name, key := range map[string]crypto.Signer{"Ed25519": edKey, "RSA": rsaKey, "ECDSA": ecKey} {
		t.Run(name, func(t *testing.T) {
			m := answer(t, key, "rome")
			if err := checkProof(m, "rome", nonce); err != nil {
				t.Fatalf("refused: %v", err)
			}
			if _, err := encode(m); err != nil {
				t.Fatalf("does not fit a message: %v", err)
			}
			if err := checkProof(m, "rome", newNonce()); err == nil || !strings.Contains(err.Error(), "signature") {
				t.Fatalf("accepted for another nonce: %v", err)
			}
			if err := checkProof(m, "paris", nonce); err == nil || !strings.Contains(err.Error(), "CN=paris") {
				t.Fatalf("accepted for another cluster: %v", err)
			}
		})
	}
	mixed := answer(t, edKey, "rome")
	mixed.CSR = answer(t, ecKey, "rome").CSR
	if err := checkProof(mixed, "rome", nonce); err == nil || !strings.Contains(err.Error(), "another key") {
		t.Fatalf("a request for another key was accepted: %v", err)
	}
}

func TestClusterIDs(t *testing.T) {
	for id, good := range map[string]bool{
		"rome": true, "rome-2": true, "1": true, "": false, "Rome": false, "rome.example": false, "-rome": false, "rome\n": false,
		"system:masters": false, strings.Repeat("a", 40): true, strings.Repeat("a", 41): false,
	} {
		if err := validateClusterID(id); (err == nil) != good {
			t.Errorf("%q: %v", id, err)
		}
	}
}
