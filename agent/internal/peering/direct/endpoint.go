package direct

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"
)

// probeTimeout ends the look at this cluster's own endpoint.
const probeTimeout = 2 * time.Second

// verify checks that the endpoint's certificate goes with the CA, as consumers
// will. An endpoint that cannot be reached from here is left to them: it may
// well be reached from elsewhere only.
func (l *Provider) verify(ctx context.Context, ca []byte) error {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return errors.New("the CA is not PEM with certificates")
	}
	key := l.Endpoint + "\n" + string(ca)
	l.mu.Lock()
	known := l.verified == key
	l.mu.Unlock()
	if known {
		return nil
	}
	endpoint, err := url.Parse(l.Endpoint)
	if err != nil {
		return fmt.Errorf("%q is no address: %w", l.Endpoint, err)
	}
	port := endpoint.Port()
	if port == "" {
		port = "443"
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	dialer := &tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: endpoint.Hostname(), MinVersion: tls.VersionTLS12}}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(endpoint.Hostname(), port))
	var refused *tls.CertificateVerificationError
	switch {
	case errors.As(err, &refused):
		return refused
	case err != nil:
		l.Log.V(1).Info("This cluster's own endpoint is not reached from here", "endpoint", l.Endpoint, "reason", err.Error())
		return nil
	}
	if err := conn.Close(); err != nil {
		l.Log.V(1).Info("Closing a probe", "reason", err.Error())
	}
	l.mu.Lock()
	l.verified = key
	l.mu.Unlock()
	return nil
}
