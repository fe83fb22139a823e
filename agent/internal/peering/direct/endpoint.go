package direct

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"
)

// probeTimeout bounds the connection to this cluster's own endpoint.
const probeTimeout = 2 * time.Second

// verifyEndpoint checks that the endpoint's certificate is valid for the CA, as
// consumers will. An endpoint that cannot be reached from here is not an error: it
// may be reachable from other clusters only.
func (p *Provider) verifyEndpoint(ctx context.Context, ca []byte) error {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return errors.New("the CA contains no PEM certificate")
	}
	key := p.Endpoint + "\n" + string(ca)
	p.mu.Lock()
	known := p.verified == key
	p.mu.Unlock()
	if known {
		return nil
	}
	endpoint, err := url.Parse(p.Endpoint)
	if err != nil {
		return fmt.Errorf("endpoint %q is not a URL: %w", p.Endpoint, err)
	}
	port := cmp.Or(endpoint.Port(), "443")
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	dialer := &tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: endpoint.Hostname(), MinVersion: tls.VersionTLS12}}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(endpoint.Hostname(), port))
	var refused *tls.CertificateVerificationError
	switch {
	case errors.As(err, &refused):
		return refused
	case err != nil:
		p.Log.V(1).Info("This cluster's endpoint is not reachable from here; skipping its verification", "endpoint", p.Endpoint, "reason", err.Error())
		return nil
	}
	if err := conn.Close(); err != nil {
		p.Log.V(1).Info("Closing the connection to this cluster's endpoint", "reason", err.Error())
	}
	p.mu.Lock()
	p.verified = key
	p.mu.Unlock()
	return nil
}
