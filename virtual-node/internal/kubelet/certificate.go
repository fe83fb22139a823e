package kubelet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"time"
)

// certificateLife is how long a self-signed certificate is good for. A process
// that lives longer than that is restarted long before, with its cluster's nodes.
const certificateLife = 10 * 365 * 24 * time.Hour

// Certificate makes a self-signed serving certificate for a node at addresses, IP
// addresses or names. Its key exists in memory alone. API servers do not check
// kubelets' certificates unless they are told to; those that are need one from
// their CA in its place.
func Certificate(nodeName string, addresses ...string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("making a key for the kubelet API of %s: %w", nodeName, err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("making a serial number for the kubelet API of %s: %w", nodeName, err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "system:node:" + nodeName, Organization: []string{"system:nodes"}},
		DNSNames:     []string{nodeName},
		// The clocks of those who connect may be behind.
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(certificateLife),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	for _, address := range addresses {
		if ip := net.ParseIP(address); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if address != "" && address != nodeName {
			template.DNSNames = append(template.DNSNames, address)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("signing the certificate of the kubelet API of %s: %w", nodeName, err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// ServerTLS is how a listener of the kubelet API speaks TLS. It asks for client
// certificates and leaves it to Auth to judge them: the CA can change.
func ServerTLS(certificate tls.Certificate) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{certificate},
		ClientAuth:   tls.RequestClientCert,
	}
}
