package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Authority signs the certificates of one cluster.
type Authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	// PEM is its certificate.
	PEM []byte
}

// NewAuthority makes an authority that lives as long as the playground might.
func NewAuthority(name string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:  pkix.Name{CommonName: name},
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, IsCA: true, BasicConstraintsValid: true,
	}
	a := &Authority{key: key}
	if a.cert, a.PEM, err = sign(template, template, &key.PublicKey, key); err != nil {
		return nil, fmt.Errorf("making authority %s: %w", name, err)
	}
	return a, nil
}

// Issue makes a certificate and its key, both PEM: a client's, and a server's
// where hosts are given.
func (a *Authority) Issue(user string, groups, hosts []string) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, host := range hosts {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	if _, cert, err = sign(template, a.cert, &private.PublicKey, a.key); err != nil {
		return nil, nil, fmt.Errorf("making a certificate for %s: %w", user, err)
	}
	key, err = keyPEM(private)
	return cert, key, err
}

// issueFiles is Issue into <dir>/<name>.crt and <dir>/<name>.key.
func (a *Authority) issueFiles(dir, name, user string, groups, hosts []string) error {
	cert, key, err := a.Issue(user, groups, hosts)
	if err != nil {
		return err
	}
	return writeFiles(dir, map[string][]byte{name + ".crt": cert, name + ".key": key})
}

func sign(template, parent *x509.Certificate, public *ecdsa.PublicKey, with *ecdsa.PrivateKey) (*x509.Certificate, []byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, err
	}
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(30*24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, with)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), err
}

func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), err
}

// writeServiceAccountKeys writes the pair that signs and checks ServiceAccounts'
// tokens.
func writeServiceAccountKeys(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	// The API server wants this older form.
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	return writeFiles(dir, map[string][]byte{
		"sa.key": pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}),
		"sa.pub": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
	})
}

func writeFiles(dir string, files map[string][]byte) error {
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}
