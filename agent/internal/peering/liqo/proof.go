package liqo

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// organization in a certificate is the group of all clients that replicate objects
// to a provider.
const organization = "liqo.io"

// Prove completes a Request for a nonce with Liqo's key pair of this cluster: the
// public key, a certificate signing request for the cluster, and the nonce's
// signature.
func (m *Message) Prove(keys *corev1.Secret, clusterID string, nonce []byte) error {
	parsed, err := keyutil.ParsePrivateKeyPEM(keys.Data[consts.PrivateKeyField])
	if err != nil {
		return fmt.Errorf("reading Liqo's private key: %w", err)
	}
	key, ok := parsed.(crypto.Signer)
	if !ok {
		return fmt.Errorf("Liqo's private key is a %T, which cannot sign", parsed)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return fmt.Errorf("encoding Liqo's public key: %w", err)
	}
	m.PublicKey = pem.EncodeToMemory(&pem.Block{Type: keyutil.PublicKeyBlockType, Bytes: der})
	if m.CSR, err = cert.MakeCSR(key, &pkix.Name{CommonName: clusterID, Organization: []string{organization}}, nil, nil); err != nil {
		return fmt.Errorf("creating a certificate signing request: %w", err)
	}
	digest, hash := toSign(key.Public(), nonce)
	if m.Signature, err = key.Sign(rand.Reader, digest, hash); err != nil {
		return fmt.Errorf("signing the nonce: %w", err)
	}
	return nil
}

// toSign is what a key signs for a nonce: an Ed25519 key the nonce itself, others
// its SHA-256 digest.
func toSign(public crypto.PublicKey, nonce []byte) ([]byte, crypto.Hash) {
	if _, ok := public.(ed25519.PublicKey); ok {
		return nonce, crypto.Hash(0)
	}
	digest := sha256.Sum256(nonce)
	return digest[:], crypto.SHA256
}

// CheckProof checks a consumer's Request as Liqo will: the key signed the nonce, and
// the certificate signing request is for that key and exactly this consumer.
func (m *Message) CheckProof(consumer string, nonce []byte) error {
	publicDER, err := onePEM("public key", m.PublicKey)
	if err != nil {
		return err
	}
	public, err := x509.ParsePKIXPublicKey(publicDER)
	if err != nil {
		return fmt.Errorf("reading the public key: %w", err)
	}
	digest, hash := toSign(public, nonce)
	valid := false
	switch key := public.(type) {
	case ed25519.PublicKey:
		valid = ed25519.Verify(key, digest, m.Signature)
	case *rsa.PublicKey:
		valid = rsa.VerifyPKCS1v15(key, hash, digest, m.Signature) == nil
	case *ecdsa.PublicKey:
		valid = ecdsa.VerifyASN1(key, digest, m.Signature)
	}
	if !valid {
		return errors.New("the signature of the nonce does not match the public key")
	}
	csrDER, err := onePEM("certificate signing request", m.CSR)
	if err != nil {
		return err
	}
	request, err := x509.ParseCertificateRequest(csrDER)
	if err != nil {
		return fmt.Errorf("reading the certificate signing request: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return fmt.Errorf("the certificate signing request is not signed by its key: %w", err)
	}
	der, err := x509.MarshalPKIXPublicKey(request.PublicKey)
	if err != nil || !bytes.Equal(der, publicDER) {
		return errors.New("the certificate signing request is for another key")
	}
	subject := request.Subject
	if subject.CommonName != consumer || len(subject.Organization) != 1 || subject.Organization[0] != organization || len(subject.Names) != 2 {
		return fmt.Errorf("the certificate signing request is for %q, not for CN=%s,O=%s", subject, consumer, organization)
	}
	return nil
}

// onePEM returns the content of the only PEM block in raw.
func onePEM(what string, raw []byte) ([]byte, error) {
	block, rest := pem.Decode(raw)
	if block == nil || len(bytes.TrimSpace(rest)) > 0 {
		return nil, fmt.Errorf("the %s is not exactly one PEM block", what)
	}
	return block.Bytes, nil
}
