package identity

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// minToken and maxToken limit the length of a join token in bytes.
	minToken, maxToken = 16, 1024
	// maxCSR is the maximum size of a certificate request in bytes of PEM.
	maxCSR = 16 << 10
)

func refuse(code, format string, args ...any) *protocol.Error {
	return &protocol.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Join issues a certificate to a cluster. The first key that joins with a cluster ID owns
// the ID, and may join again at any time without a token. Refusals are or wrap *protocol.Error.
func (a *Authority) Join(ctx context.Context, request protocol.JoinRequest) (protocol.JoinResponse, error) {
	if a.files != nil {
		return protocol.JoinResponse{}, refuse(protocol.CodeInvalid, "this broker issues no certificates (--tls-cert-path): give the agent one of the same authority (--broker-cert-path)")
	}
	csr, err := parseCSR(request.ClusterID, request.CSR)
	if err != nil {
		// Who has no token does not learn more.
		if refusal := a.checkToken(ctx, request.Token); refusal != nil {
			err = refusal
		}
		return protocol.JoinResponse{}, err
	}
	key := protocol.KeyFingerprint(csr.RawSubjectPublicKeyInfo)
	registration, err := a.claim(ctx, request.ClusterID, key, func(registration *broker.ClusterRegistration) (bool, error) {
		return a.authorizeJoin(ctx, registration, key, request.Token)
	})
	if err != nil {
		return protocol.JoinResponse{}, err
	}
	// The certificate has only the verified name and the key of the request.
	leaf, err := a.cas.Load().sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: request.ClusterID},
		URIs:        []*url.URL{clusterURI(request.ClusterID)},
		NotAfter:    a.Clock.Now().Add(a.ClientValidity),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, csr.PublicKey, a.Clock.Now())
	if err != nil {
		return protocol.JoinResponse{}, fmt.Errorf("issuing a certificate for %s: %w", request.ClusterID, err)
	}
	a.misses.RemoveAll(func(of any) bool { return of.(miss).clusterID == request.ClusterID })
	certificatesIssued.Inc()
	if err := a.recordCertificate(ctx, registration, leaf); err != nil {
		return protocol.JoinResponse{}, fmt.Errorf("recording the certificate of %s: %w", request.ClusterID, err)
	}
	return protocol.JoinResponse{Certificate: string(certificatePEM(leaf.Raw)), CA: string(a.CAPEM())}, nil
}

// checkToken reads the token each time, so that a changed token applies at once.
func (a *Authority) checkToken(ctx context.Context, token string) error {
	secret := &corev1.Secret{}
	if err := a.Client.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: TokenName}, secret); err != nil {
		return fmt.Errorf("reading the join token: %w", err)
	}
	want := bytes.TrimSpace(secret.Data[TokenKey])
	// Comparing hashes of the same length does not disclose the length of the token.
	wantSum, gotSum := sha256.Sum256(want), sha256.Sum256([]byte(token))
	if subtle.ConstantTimeCompare(wantSum[:], gotSum[:]) != 1 || len(want) < minToken || len(token) > maxToken {
		return refuse(protocol.CodeUnauthorized, "the join token is wrong: set the agent chart's value join.token to the token in the hub's Secret %s/%s", a.Namespace, TokenName)
	}
	return nil
}

// parseCSR parses and validates a certificate request for clusterID.
func parseCSR(clusterID, text string) (*x509.CertificateRequest, error) {
	if !protocol.ValidClusterID(clusterID) {
		return nil, refuse(protocol.CodeInvalid, "a cluster ID must have 1 to %d lower-case letters, digits and dashes, and must not begin or end with a dash", protocol.MaxClusterID)
	}
	if len(text) > maxCSR {
		return nil, refuse(protocol.CodeTooLarge, "the certificate request has %d bytes, the maximum is %d", len(text), maxCSR)
	}
	block, rest := pem.Decode([]byte(text))
	if block == nil || block.Type != "CERTIFICATE REQUEST" || strings.TrimSpace(string(rest)) != "" {
		return nil, refuse(protocol.CodeInvalid, "csr must be exactly one PEM block of type CERTIFICATE REQUEST")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, refuse(protocol.CodeInvalid, "parsing the certificate request: %v", err)
	}
	switch key := csr.PublicKey.(type) {
	case *ecdsa.PublicKey:
		if key.Curve != elliptic.P256() {
			return nil, refuse(protocol.CodeInvalid, "an ECDSA key must be on curve P-256")
		}
	case ed25519.PublicKey:
	default:
		return nil, refuse(protocol.CodeInvalid, "the key must be ECDSA P-256 or Ed25519")
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, refuse(protocol.CodeInvalid, "the certificate request is not signed by its own key: %v", err)
	}
	if csr.Subject.CommonName != clusterID {
		return nil, refuse(protocol.CodeInvalid, "the certificate request's common name must be the cluster ID %s", clusterID)
	}
	return csr, nil
}

// recordCertificate records the newest certificate in the registration's status, for
// information only. Of concurrent joins with one key the later write remains.
func (a *Authority) recordCertificate(ctx context.Context, registration *broker.ClusterRegistration, leaf *x509.Certificate) error {
	sum := sha256.Sum256(leaf.Raw)
	before := registration.DeepCopy()
	registration.Status.CertificateFingerprint = hex.EncodeToString(sum[:])
	registration.Status.NotAfter = &metav1.Time{Time: leaf.NotAfter}
	return a.Client.Status().Patch(ctx, registration, client.MergeFrom(before))
}

func clusterURI(clusterID string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: "spillway", Path: "/cluster/" + clusterID}
}

// Certified returns the cluster ID and the fingerprint of the key in the client
// certificate of a connection. The cluster may be revoked: Certified reads nothing.
// Refusals are *protocol.Error.
func (a *Authority) Certified(_ context.Context, state *tls.ConnectionState) (clusterID, fingerprint string, err error) {
	if state == nil || len(state.VerifiedChains) == 0 {
		return "", "", refuse(protocol.CodeUnauthorized, "a client certificate is required: join with %s to get one", protocol.PathJoin)
	}
	leaf := state.PeerCertificates[0]
	clusterID, err = certifiedID(leaf, a.files == nil)
	if err != nil {
		return "", "", err
	}
	// The certificate may have expired since the handshake.
	if a.Clock.Now().After(leaf.NotAfter) {
		return "", "", refuse(protocol.CodeUnauthorized, "the certificate of %s expired at %s: join again with the same key", clusterID, leaf.NotAfter.Format(time.RFC3339))
	}
	return clusterID, protocol.KeyFingerprint(leaf.RawSubjectPublicKeyInfo), nil
}

// Authenticate returns the cluster ID in the client certificate of a connection, if the
// cluster may use the broker: with the key of its registration or, if another authority has
// issued the certificate, with any. Refusals are *protocol.Error.
func (a *Authority) Authenticate(ctx context.Context, state *tls.ConnectionState) (string, error) {
	clusterID, key, err := a.Certified(ctx, state)
	if err == nil {
		err = a.admitted(ctx, clusterID, key)
	}
	if err != nil {
		return "", err
	}
	return clusterID, nil
}

const (
	// missPeriod is the time for which a registration that did not match is not read live
	// again.
	missPeriod = 5 * time.Second
	// maxMisses is the maximum number of misses that are kept.
	maxMisses = 4096
)

// miss is a registration that did not exist with a key.
type miss struct{ clusterID, key string }

func newMisses(clock clock.PassiveClock) *utilcache.LRUExpireCache {
	return utilcache.NewLRUExpireCacheWithClock(maxMisses, clock)
}

// admitted returns nil if a cluster may use the broker with a key. A registration that does not
// admit it in the cache is read live, because the cluster may have joined just now; if that does
// not either, it is not read live again for missPeriod, or until the cluster joins at this replica.
func (a *Authority) admitted(ctx context.Context, clusterID, key string) error {
	refusal, err := a.refusal(ctx, a.Cache, clusterID, key)
	of := miss{clusterID, key}
	if err != nil || refusal == nil {
		return err
	}
	if _, recent := a.misses.Get(of); recent {
		return refusal
	}
	if a.files != nil {
		// Its certificate is what it joins with.
		_, err = a.claim(ctx, clusterID, "", func(*broker.ClusterRegistration) (bool, error) { return false, nil })
	} else if refusal, err = a.refusal(ctx, a.Client, clusterID, key); err == nil {
		err = refusal
	}
	var refused *protocol.Error
	if errors.As(err, &refused) {
		a.misses.Add(of, nil, missPeriod)
	}
	return err
}

// certifiedID is the cluster ID in a certificate. One of this authority names it twice, and one of
// another is for clients only, so that no other certificate of it counts.
func certifiedID(leaf *x509.Certificate, own bool) (string, error) {
	clusterID := leaf.Subject.CommonName
	if !protocol.ValidClusterID(clusterID) || !own && !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) || own && (len(leaf.URIs) != 1 || leaf.URIs[0].String() != clusterURI(clusterID).String()) {
		return "", refuse(protocol.CodeUnauthorized, "the certificate is not for a cluster: its common name must be a cluster ID, and the broker's own authority must have issued it by joining, or another one with usage client auth only")
	}
	return clusterID, nil
}

// refusal is why a registration does not let a cluster use the broker with a key; nil if it does.
func (a *Authority) refusal(ctx context.Context, reader client.Reader, clusterID, key string) (refusal, err error) {
	registration := &broker.ClusterRegistration{}
	err = reader.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: clusterID}, registration)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return nil, fmt.Errorf("reading the registration of %s: %w", clusterID, err)
	case err != nil, !registration.DeletionTimestamp.IsZero(), registration.Spec.ClusterID != clusterID,
		a.files == nil && registration.Status.KeyFingerprint != key:
		return refuse(protocol.CodeUnauthorized, "cluster %s is not registered with this key: join again", clusterID), nil
	}
	return refusalOf(registration), nil
}
