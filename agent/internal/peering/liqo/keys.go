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
)

// organization in a certificate is the group of everything that replicates
// objects to a provider.
const organization = "liqo.io"

// prove answers a nonce with Liqo's own key pair of this cluster: its public
// key and a request for a certificate in its name (both PEM), and the nonce's
// signature.
func prove(keys *corev1.Secret, clusterID string, nonce []byte) (publicKey, csr, signature []byte, err error) {
	block, _ := pem.Decode(keys.Data[consts.PrivateKeyField])
	if block == nil {
		return nil, nil, nil, errors.New("Liqo's private key is not PEM")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("reading Liqo's private key: %w", err)
	}
	key, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, nil, nil, fmt.Errorf("Liqo's private key is a %T, which cannot sign", parsed)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, nil, fmt.Errorf("encoding Liqo's public key: %w", err)
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: clusterID, Organization: []string{organization}}}
	request, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("making a certificate request: %w", err)
	}
	digest, hash := toSign(key.Public(), nonce)
	if signature, err = key.Sign(rand.Reader, digest, hash); err != nil {
		return nil, nil, nil, fmt.Errorf("signing the nonce: %w", err)
	}
	publicKey = pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	csr = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request})
	return publicKey, csr, signature, nil
}

// toSign is what a key signs for a nonce: Ed25519 the nonce itself, the others
// its SHA-256.
func toSign(public crypto.PublicKey, nonce []byte) ([]byte, crypto.Hash) {
	if _, ok := public.(ed25519.PublicKey); ok {
		return nonce, crypto.Hash(0)
	}
	digest := sha256.Sum256(nonce)
	return digest[:], crypto.SHA256
}

// checkProof checks a consumer's answer to a nonce, as Liqo will again: that the
// key signed the nonce, and that the request is for that key and for nobody but
// this consumer.
func checkProof(m message, consumer string, nonce []byte) error {
	block, rest := pem.Decode(m.PublicKey)
	if block == nil || len(bytes.TrimSpace(rest)) > 0 {
		return errors.New("the public key is not one PEM block")
	}
	public, err := x509.ParsePKIXPublicKey(block.Bytes)
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
		return errors.New("the signature of the nonce is not that of the key")
	}
	csrBlock, rest := pem.Decode(m.CSR)
	if csrBlock == nil || len(bytes.TrimSpace(rest)) > 0 {
		return errors.New("the certificate request is not one PEM block")
	}
	request, err := x509.ParseCertificateRequest(csrBlock.Bytes)
	if err != nil {
		return fmt.Errorf("reading the certificate request: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return fmt.Errorf("the certificate request is not signed by its key: %w", err)
	}
	der, err := x509.MarshalPKIXPublicKey(request.PublicKey)
	if err != nil || !bytes.Equal(der, block.Bytes) {
		return errors.New("the certificate request is for another key")
	}
	subject := request.Subject
	if subject.CommonName != consumer || len(subject.Organization) != 1 || subject.Organization[0] != organization || len(subject.Names) != 2 {
		return fmt.Errorf("the certificate request is for %q, not for CN=%s,O=%s", subject, consumer, organization)
	}
	return nil
}

// newNonce makes a nonce of the form that Liqo makes itself where none is given.
func newNonce() []byte { return []byte(rand.Text() + rand.Text() + rand.Text()) }
