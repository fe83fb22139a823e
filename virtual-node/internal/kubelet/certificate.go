package kubelet

import (
	"crypto/tls"
	"fmt"
	"net"
	"time"

	"k8s.io/client-go/util/cert"
)

// certificateLifetime exceeds the life of any process: the certificate is not
// renewed.
const certificateLifetime = 10 * 365 * 24 * time.Hour

// SelfSignedCertificate creates a serving certificate for a node, whose key is
// kept in memory only. API servers do not verify kubelets' certificates by default;
// those that do need a certificate of their CA instead.
func SelfSignedCertificate(nodeName string, ips ...net.IP) (func(*tls.ClientHelloInfo) (*tls.Certificate, error), error) {
	certPEM, keyPEM, err := cert.GenerateSelfSignedCertKeyWithOptions(cert.SelfSignedCertKeyOptions{Host: nodeName, AlternateIPs: ips, MaxAge: certificateLifetime})
	if err != nil {
		return nil, fmt.Errorf("creating a certificate for the kubelet API of %s: %w", nodeName, err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("reading the certificate for the kubelet API of %s: %w", nodeName, err)
	}
	return func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &pair, nil }, nil
}

// TLSConfig returns the configuration of a listener of the kubelet API. Client
// certificates are requested here and verified by Auth, since their CA can change.
func TLSConfig(certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate, ClientAuth: tls.RequestClientCert}
}
