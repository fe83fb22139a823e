package liqo_test

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

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// keySecret is a Secret with keys as Liqo creates it.
func keySecret(t testing.TB, key crypto.Signer) *corev1.Secret {
	t.Helper()
	private, err := x509.MarshalPKCS8PrivateKey(key)
	expect.NoError(t, err)
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	expect.NoError(t, err)
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
	expect.NoError(t, err)
	return key
}

func TestProof(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	expect.NoError(t, err)
	ecKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	nonce := []byte(rand.Text())
	answer := func(t *testing.T, key crypto.Signer, clusterID string) *liqo.Message {
		t.Helper()
		m := &liqo.Message{Header: session.Header{Kind: session.Request, Session: 1}}
		expect.NoError(t, m.Prove(keySecret(t, key), clusterID, nonce))
		return m
	}
	edKey := newEd25519(t)
	for name, key := range map[string]crypto.Signer{"Ed25519": edKey, "RSA": rsaKey, "ECDSA": ecKey} {
		t.Run(name, func(t *testing.T) {
			m := answer(t, key, "rome")
			if err := m.CheckProof("rome", nonce); err != nil {
				t.Fatalf("refused: %v", err)
			}
			if _, err := liqo.Codec.Encode(m); err != nil {
				t.Fatalf("cannot be encoded: %v", err)
			}
			if err := m.CheckProof("rome", []byte(rand.Text())); err == nil || !strings.Contains(err.Error(), "signature") {
				t.Fatalf("accepted for another nonce: %v", err)
			}
			if err := m.CheckProof("paris", nonce); err == nil || !strings.Contains(err.Error(), "CN=paris") {
				t.Fatalf("accepted for another cluster: %v", err)
			}
		})
	}
	mixed := answer(t, edKey, "rome")
	mixed.CSR = answer(t, ecKey, "rome").CSR
	if err := mixed.CheckProof("rome", nonce); err == nil || !strings.Contains(err.Error(), "another key") {
		t.Fatalf("a certificate signing request for another key was accepted: %v", err)
	}
}

// FuzzProof reads arbitrary keys, signatures and certificate signing requests of a peer.
func FuzzProof(f *testing.F) {
	nonce := []byte("nonce")
	proof := &liqo.Message{Header: session.Header{Kind: session.Request, Session: 1}}
	expect.NoError(f, proof.Prove(keySecret(f, newEd25519(f)), "rome", nonce))
	f.Add([]byte(proof.PublicKey), []byte(proof.Signature), []byte(proof.CSR))
	f.Add([]byte("-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----\n"), []byte(""), []byte("x"))
	f.Fuzz(func(t *testing.T, publicKey, signature, csr []byte) {
		m := &liqo.Message{Header: proof.Header, PublicKey: publicKey, Signature: signature, CSR: csr}
		_ = m.CheckProof("rome", nonce)
		if m.CheckProof("paris", nonce) == nil {
			t.Fatal("the proof of rome is one of paris")
		}
	})
}
