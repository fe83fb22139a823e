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
	"fmt"
	"net/url"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// minToken and maxToken bound a join token, in bytes.
	minToken, maxToken = 16, 1024
	// maxCSR bounds a certificate request, in bytes of PEM.
	maxCSR = 16 << 10
	// claimTries is how often a registration that others write is tried.
	claimTries = 5
)

func refuse(code, format string, args ...any) *protocol.Error {
	return &protocol.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Join gives a cluster a certificate. The first key under an ID owns it, and may
// join again whenever it likes. Refusals are *protocol.Error.
func (a *Authority) Join(ctx context.Context, request protocol.JoinRequest) (protocol.JoinResponse, error) {
	if err := a.checkToken(ctx, request.Token); err != nil {
		return protocol.JoinResponse{}, err
	}
	csr, err := parseCSR(request.ClusterID, request.CSR)
	if err != nil {
		return protocol.JoinResponse{}, err
	}
	registration, err := a.claim(ctx, request.ClusterID, protocol.KeyFingerprint(csr.RawSubjectPublicKeyInfo))
	if err != nil {
		return protocol.JoinResponse{}, err
	}
	// Nothing of the request but its name, which has been checked, and its key
	// goes into the certificate.
	leaf, err := a.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: request.ClusterID},
		URIs:        []*url.URL{clusterURI(request.ClusterID)},
		NotAfter:    a.Clock.Now().Add(clientLife),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, csr.PublicKey)
	if err != nil {
		return protocol.JoinResponse{}, fmt.Errorf("issuing a certificate for %s: %w", request.ClusterID, err)
	}
	if err := a.recordCertificate(ctx, registration, leaf); err != nil {
		return protocol.JoinResponse{}, fmt.Errorf("recording the certificate of %s: %w", request.ClusterID, err)
	}
	return protocol.JoinResponse{Certificate: string(certificatePEM(leaf.Raw)), CA: string(a.CAPEM())}, nil
}

// checkToken reads the token each time, so that a new one counts at once.
func (a *Authority) checkToken(ctx context.Context, token string) error {
	secret := &corev1.Secret{}
	if err := a.Client.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: TokenName}, secret); err != nil {
		return fmt.Errorf("reading the join token: %w", err)
	}
	want := bytes.TrimSpace(secret.Data[TokenKey])
	// Hashes have one length, so that comparing them tells nothing of the
	// token's.
	wantSum, gotSum := sha256.Sum256(want), sha256.Sum256([]byte(token))
	if subtle.ConstantTimeCompare(wantSum[:], gotSum[:]) != 1 || len(want) < minToken || len(token) > maxToken {
		return refuse(protocol.CodeUnauthorized, "the join token is not the one in the hub's Secret %s/%s; set the agent chart's value join.token to that", a.Namespace, TokenName)
	}
	return nil
}

// parseCSR checks a certificate request for clusterID.
func parseCSR(clusterID, text string) (*x509.CertificateRequest, error) {
	if !protocol.ValidClusterID(clusterID) {
		return nil, refuse(protocol.CodeInvalid, "a cluster ID has 1 to %d lower-case letters, digits and dashes, and neither begins nor ends with a dash", protocol.MaxClusterID)
	}
	if len(text) > maxCSR {
		return nil, refuse(protocol.CodeTooLarge, "the certificate request has %d bytes; %d are enough", len(text), maxCSR)
	}
	block, rest := pem.Decode([]byte(text))
	if block == nil || block.Type != "CERTIFICATE REQUEST" || strings.TrimSpace(string(rest)) != "" {
		return nil, refuse(protocol.CodeInvalid, "csr must be exactly one PEM block of type CERTIFICATE REQUEST")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, refuse(protocol.CodeInvalid, "the certificate request cannot be parsed: %v", err)
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

// claim binds an ID to a key, or finds it bound to that key. Of two keys at once
// the API server lets one write the registration's status.
func (a *Authority) claim(ctx context.Context, clusterID, fingerprint string) (*broker.ClusterRegistration, error) {
	var lost error
	for range claimTries {
		registration := &broker.ClusterRegistration{}
		err := a.Client.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: clusterID}, registration)
		if apierrors.IsNotFound(err) {
			registration = &broker.ClusterRegistration{ObjectMeta: a.meta(clusterID), Spec: broker.ClusterRegistrationSpec{ClusterID: clusterID}}
			if err = a.Client.Create(ctx, registration); apierrors.IsAlreadyExists(err) {
				lost = err
				continue
			}
		}
		if err != nil {
			return nil, fmt.Errorf("registering %s: %w", clusterID, err)
		}
		if registration.Spec.ClusterID != clusterID {
			return nil, refuse(protocol.CodeConflict, "ClusterRegistration %s/%s is for cluster %s; delete it in the hub", a.Namespace, clusterID, registration.Spec.ClusterID)
		}
		switch registration.Status.KeyFingerprint {
		case fingerprint:
			return registration, nil
		case "":
			registration.Status.KeyFingerprint = fingerprint
			registration.Status.Phase = broker.RegistrationApproved
			if err = a.Client.Status().Update(ctx, registration); err == nil {
				return registration, nil
			}
			if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
				return nil, fmt.Errorf("registering the key of %s: %w", clusterID, err)
			}
			lost = err
		default:
			return nil, refuse(protocol.CodeConflict, "another key has joined as %s; choose another cluster ID, or, if that key is lost, run: kubectl -n %s delete clusterregistration %s", clusterID, a.Namespace, clusterID)
		}
	}
	return nil, refuse(protocol.CodeUnavailable, "somebody else keeps changing the registration of %s (%v); join again", clusterID, lost)
}

// recordCertificate notes the newest certificate, for people. Two joins of one
// key may cross: the later note stands.
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

// Authenticate tells which cluster speaks on a connection: the one in its
// certificate, if the cluster is registered with that certificate's key.
// Refusals are *protocol.Error.
func (a *Authority) Authenticate(ctx context.Context, state *tls.ConnectionState) (string, error) {
	if state == nil || len(state.VerifiedChains) == 0 {
		return "", refuse(protocol.CodeUnauthorized, "this needs the certificate that %s gives to a cluster that joins", protocol.PathJoin)
	}
	leaf := state.PeerCertificates[0]
	clusterID, err := certifiedID(leaf)
	if err != nil {
		return "", err
	}
	// The handshake was long ago on a connection that is kept.
	if a.Clock.Now().After(leaf.NotAfter) {
		return "", refuse(protocol.CodeUnauthorized, "the certificate of %s ended at %s; join again with the same key", clusterID, leaf.NotAfter)
	}
	fingerprint := protocol.KeyFingerprint(leaf.RawSubjectPublicKeyInfo)
	known, err := a.lookUp(ctx, clusterID, func(status broker.ClusterRegistrationStatus) bool {
		return status.Phase == broker.RegistrationApproved && status.KeyFingerprint == fingerprint
	})
	if err != nil {
		return "", err
	}
	if !known {
		return "", refuse(protocol.CodeUnauthorized, "cluster %s is not registered with this key any more; join again", clusterID)
	}
	return clusterID, nil
}

// certifiedID is the cluster that a certificate of this authority names.
func certifiedID(leaf *x509.Certificate) (string, error) {
	clusterID := leaf.Subject.CommonName
	if !protocol.ValidClusterID(clusterID) || len(leaf.URIs) != 1 || leaf.URIs[0].String() != clusterURI(clusterID).String() {
		return "", refuse(protocol.CodeUnauthorized, "the certificate does not name a cluster")
	}
	return clusterID, nil
}

// Known reports whether a cluster of this ID has joined.
func (a *Authority) Known(ctx context.Context, clusterID string) (bool, error) {
	if !protocol.ValidClusterID(clusterID) {
		return false, nil
	}
	return a.lookUp(ctx, clusterID, func(status broker.ClusterRegistrationStatus) bool {
		return status.Phase == broker.RegistrationApproved
	})
}

// lookUp reports whether a cluster's registration is as wanted. What the cache
// does not know is asked of the API server: a cluster may have joined just now.
func (a *Authority) lookUp(ctx context.Context, clusterID string, wanted func(broker.ClusterRegistrationStatus) bool) (bool, error) {
	for _, reader := range []client.Reader{a.Cache, a.Client} {
		registration := &broker.ClusterRegistration{}
		err := reader.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: clusterID}, registration)
		switch {
		case err == nil && registration.Spec.ClusterID == clusterID && wanted(registration.Status):
			return true, nil
		case client.IgnoreNotFound(err) != nil:
			return false, fmt.Errorf("looking up the registration of %s: %w", clusterID, err)
		}
	}
	return false, nil
}
