package protocol

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"

	"github.com/go-logr/logr"
	"k8s.io/client-go/util/cert"
)

// Join requests a client certificate from the broker at baseURL. The broker must
// present a chain with a CA whose CAHash is caHash, and a serving certificate of that
// CA for the URL's host; the token is not sent to any other server. Join may be
// repeated with the same key.
func Join(ctx context.Context, baseURL, caHash, clusterID, token string, csrPEM []byte) (JoinResponse, error) {
	base, err := parseBase(baseURL)
	if err != nil {
		return JoinResponse{}, err
	}
	block, _ := pem.Decode(csrPEM)
	if block == nil {
		return JoinResponse{}, errors.New("the certificate request is not PEM")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return JoinResponse{}, fmt.Errorf("parsing the certificate request: %w", err)
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12,
		// The CA is known by its hash only: VerifyConnection verifies the chain instead.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			return verifyPresented(state.PeerCertificates, caHash, base.Hostname())
		},
	}
	client, err := NewClient(baseURL, config, logr.Discard())
	if err != nil {
		return JoinResponse{}, err
	}
	defer client.Close()
	body, err := json.Marshal(JoinRequest{ClusterID: clusterID, Token: token, CSR: string(csrPEM)})
	if err != nil {
		return JoinResponse{}, fmt.Errorf("encoding the join request: %w", err)
	}
	var response JoinResponse
	// Without retries: the caller retries, and a wrong hash or token stays wrong.
	if err := client.once(ctx, http.MethodPost, PathJoin, nil, body, &response); err != nil {
		return JoinResponse{}, fmt.Errorf("joining as %s: %w", clusterID, err)
	}
	if err := verifyIssued(response, caHash, clusterID, csr); err != nil {
		return JoinResponse{}, fmt.Errorf("joining as %s: %w", clusterID, err)
	}
	return response, nil
}

// verifyPresented verifies the certificate chain of a broker.
func verifyPresented(chain []*x509.Certificate, caHash, host string) error {
	options, known := trusting(chain, caHash)
	if !known {
		return fmt.Errorf("the broker at %s presents no CA with hash %s: check broker.caHash against ConfigMap spillway-broker-ca in the hub, and that broker.url reaches the broker itself", host, caHash)
	}
	options.DNSName, options.KeyUsages = host, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	_, err := chain[0].Verify(options)
	var name x509.HostnameError
	if errors.As(err, &name) {
		return fmt.Errorf("%w; if this is the broker's address, add it to the broker chart's tls.sans (flag --tls-san=%s)", err, host)
	}
	if err != nil {
		return fmt.Errorf("verifying the broker's certificate: %w", err)
	}
	return nil
}

// trusting trusts the CA with a hash, and what it has signed of the certificates: a newer CA of the
// broker. Known is false if the CA is not among them.
func trusting(certificates []*x509.Certificate, caHash string) (options x509.VerifyOptions, known bool) {
	options = x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool()}
	for _, certificate := range certificates {
		if certificate.IsCA && CAHash(certificate) == caHash {
			options.Roots.AddCert(certificate)
			known = true
		} else {
			options.Intermediates.AddCert(certificate)
		}
	}
	return options, known
}

// verifyIssued verifies that the issued certificate is for the request.
func verifyIssued(response JoinResponse, caHash, clusterID string, csr *x509.CertificateRequest) error {
	cas, err := cert.ParseCertsPEM([]byte(response.CA))
	if err != nil {
		return fmt.Errorf("parsing the broker's CA: %w", err)
	}
	options, known := trusting(cas, caHash)
	if !known {
		return fmt.Errorf("the broker returned a CA with hash %s instead of %s", CAHash(cas[0]), caHash)
	}
	chain, err := cert.ParseCertsPEM([]byte(response.Certificate))
	if err != nil {
		return fmt.Errorf("parsing the certificate: %w", err)
	}
	leaf := chain[0]
	if leaf.Subject.CommonName != clusterID || !bytes.Equal(leaf.RawSubjectPublicKeyInfo, csr.RawSubjectPublicKeyInfo) {
		return errors.New("the certificate is for another name or key than requested")
	}
	options.KeyUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if _, err := leaf.Verify(options); err != nil {
		return fmt.Errorf("verifying the certificate: %w", err)
	}
	return nil
}
