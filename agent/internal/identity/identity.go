// Package identity keeps the client certificate that identifies this cluster to
// the broker: one that another program (such as cert-manager) keeps in a
// directory, or one that the agent requests from the broker with a join token.
//
// To join, the agent generates a private key and stores it in a Secret before it
// sends the certificate request; the key never leaves the cluster. An interrupted
// attempt, a restart or a second replica continues with the same key. With that key
// it renews the certificate at two thirds of its lifetime, and needs no token any more.
package identity

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Secret is the name of the Secret with the key and certificate of an agent that
// has joined.
const Secret = "spillway-agent-tls"

// The files of a certificate directory, and the keys of the Secret.
const (
	fileCertificate = corev1.TLSCertKey
	filePrivateKey  = corev1.TLSPrivateKeyKey
	fileCA          = corev1.ServiceAccountRootCAKey
)

const (
	// refreshInterval is how often the directory or the Secret is read.
	refreshInterval = 10 * time.Second
	// callTimeout bounds one attempt to read the identity and to join.
	callTimeout = 30 * time.Second
	// renewalRetryAfter is when to retry a failed renewal while the certificate is
	// still valid, and earlier with a short one.
	renewalRetryAfter = 10 * time.Minute
)

// Options of a Keeper.
type Options struct {
	// ClusterID is the required common name of the certificate.
	ClusterID string
	// CertPath is a directory with tls.crt, tls.key and ca.crt. If it is set, the
	// agent does not join, and the options for that are not used.
	CertPath string

	// Client reads and writes the Secret, without a cache.
	Client    client.Client
	Namespace string
	// BrokerURL, CAHash and TokenFile are used to join.
	BrokerURL, CAHash, TokenFile string

	// Report, if set, is called with each new reason why there is no identity; a
	// readiness probe does not show it.
	Report func(reason error)

	// Clock defaults to the real clock.
	Clock clock.Clock
	Log   logr.Logger
}

// Keeper holds the current identity. It is safe for concurrent use.
type Keeper struct {
	options Options

	mu      sync.Mutex
	current *credentials
	lastErr error
	changed chan struct{}
	// renewal is the time of the last attempt to renew.
	renewal time.Time
}

type credentials struct {
	key, certificate, ca []byte
	pair                 tls.Certificate
}

// New returns a Keeper without an identity; Start obtains one.
func New(options Options) *Keeper {
	options.Clock = cmp.Or[clock.Clock](options.Clock, clock.RealClock{})
	return &Keeper{options: options, lastErr: errors.New("the agent is starting"), changed: make(chan struct{})}
}

// CommonName returns the cluster ID in the certificate of a directory.
func CommonName(certPath string) (string, error) {
	read, err := readDirectory(certPath)
	if err != nil {
		return "", err
	}
	return read.pair.Leaf.Subject.CommonName, nil
}

// NeedLeaderElection makes the manager start a Keeper on standby replicas, too.
func (k *Keeper) NeedLeaderElection() bool { return false }

// Start obtains the identity and refreshes it until ctx ends.
func (k *Keeper) Start(ctx context.Context) error {
	backoff := firstBackoff
	for {
		pause := refreshInterval
		attempt, cancel := context.WithTimeout(ctx, callTimeout)
		obtained, err := k.obtain(attempt)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			pause = min(backoff.Step(), refreshInterval)
		} else {
			backoff = firstBackoff
		}
		k.set(obtained, err)
		select {
		case <-ctx.Done():
			return nil
		case <-k.options.Clock.After(pause):
		}
	}
}

// firstBackoff is that after a success.
var firstBackoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 10}

// set records the outcome of an attempt. An identity obtained earlier remains in
// use when an attempt fails.
func (k *Keeper) set(obtained *credentials, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil {
		if k.lastErr == nil || k.lastErr.Error() != err.Error() {
			k.options.Log.Error(err, "Failed to obtain a certificate from the broker", "hasIdentity", k.current != nil)
			if k.options.Report != nil {
				k.options.Report(err)
			}
		}
		k.lastErr = err
		return
	}
	k.lastErr = nil
	if k.current != nil && bytes.Equal(k.current.certificate, obtained.certificate) &&
		bytes.Equal(k.current.key, obtained.key) && bytes.Equal(k.current.ca, obtained.ca) {
		return
	}
	k.options.Log.Info("Obtained a certificate from the broker", "clusterID", k.options.ClusterID, "notAfter", obtained.pair.Leaf.NotAfter)
	k.current = obtained
	close(k.changed)
	k.changed = make(chan struct{})
}

// Certificate returns the current client certificate.
func (k *Keeper) Certificate() (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return nil, k.lastErr
	}
	return &k.current.pair, nil
}

// CA returns the broker's certificate authority in PEM. The channel is closed when
// the identity changes.
func (k *Keeper) CA() (pem []byte, changed <-chan struct{}, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return nil, k.changed, k.lastErr
	}
	return k.current.ca, k.changed, nil
}

// Check is a readiness check; its error is the reason why there is no valid identity.
func (k *Keeper) Check(*http.Request) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return fmt.Errorf("no identity for the broker: %w", k.lastErr)
	}
	if k.options.Clock.Now().After(k.current.pair.Leaf.NotAfter) {
		return fmt.Errorf("the certificate expired at %s: %w", k.current.pair.Leaf.NotAfter.Format(time.RFC3339), k.lastErr)
	}
	return nil
}

func (k *Keeper) obtain(ctx context.Context) (*credentials, error) {
	if k.options.CertPath == "" {
		return k.join(ctx)
	}
	read, err := readDirectory(k.options.CertPath)
	if err != nil {
		return nil, err
	}
	if reason := k.invalidReason(read); reason != "" {
		return nil, fmt.Errorf("the certificate in %s %s", k.options.CertPath, reason)
	}
	return read, nil
}

func readDirectory(dir string) (*credentials, error) {
	var files [3][]byte
	for i, name := range []string{filePrivateKey, fileCertificate, fileCA} {
		var err error
		if files[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return nil, fmt.Errorf("reading --broker-cert-path: %w", err)
		}
	}
	read, err := parse(files[0], files[1], files[2])
	if err != nil {
		return nil, fmt.Errorf("reading --broker-cert-path %s: %w", dir, err)
	}
	return read, nil
}

func parse(key, certificate, ca []byte) (*credentials, error) {
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	if _, err := cert.ParseCertsPEM(ca); err != nil {
		return nil, fmt.Errorf("parsing the CA: %w", err)
	}
	return &credentials{key: key, certificate: certificate, ca: ca, pair: pair}, nil
}

// invalidReason returns why a certificate cannot be used, "" if it can.
func (k *Keeper) invalidReason(c *credentials) string {
	leaf := c.pair.Leaf
	switch {
	case leaf.Subject.CommonName != k.options.ClusterID:
		return fmt.Sprintf("is for %q, not for cluster %q: the broker knows a cluster by its certificate, so correct --cluster-id, or give this cluster a certificate of its own", leaf.Subject.CommonName, k.options.ClusterID)
	case k.options.Clock.Now().After(leaf.NotAfter):
		return "expired at " + leaf.NotAfter.Format(time.RFC3339) + ": renew it"
	}
	return ""
}

// join returns the identity stored in the Secret and joins the broker if there is
// none or if it is due for renewal.
func (k *Keeper) join(ctx context.Context) (*credentials, error) {
	secret, err := k.ensureKey(ctx)
	if err != nil {
		return nil, err
	}
	stored, reason := k.stored(secret)
	if stored != nil && (reason == "" || k.options.Clock.Since(k.renewal) < min(renewalRetryAfter, lifetime(stored)/20)) {
		return stored, nil
	}
	k.renewal = k.options.Clock.Now()
	k.options.Log.V(1).Info("Joining the broker", "url", k.options.BrokerURL, "clusterID", k.options.ClusterID, "reason", reason)
	joined, err := k.requestCertificate(ctx, secret)
	if err != nil && stored != nil {
		k.options.Log.Error(err, "Failed to renew the certificate, which is used until it expires",
			"notAfter", stored.pair.Leaf.NotAfter)
		return stored, nil
	}
	return joined, err
}

// stored returns the identity in a Secret. Reason is why to join: the Secret has
// no usable identity (nil), or the one it has is due for renewal.
func (k *Keeper) stored(secret *corev1.Secret) (stored *credentials, reason string) {
	if len(secret.Data[fileCertificate]) == 0 {
		return nil, "there is no certificate yet"
	}
	stored, err := parse(secret.Data[filePrivateKey], secret.Data[fileCertificate], secret.Data[fileCA])
	if err != nil {
		return nil, "the certificate cannot be used: " + err.Error()
	}
	if reason := k.invalidReason(stored); reason != "" {
		return nil, "the certificate " + reason
	}
	// The broker's CAs: an earlier one has signed the newest.
	cas, err := cert.ParseCertsPEM(stored.ca)
	pinned := func(ca *x509.Certificate) bool { return protocol.CAHash(ca) == k.options.CAHash }
	if err != nil || (k.options.CAHash != "" && !slices.ContainsFunc(cas, pinned)) {
		return nil, "the certificate is from another broker than --broker-ca-hash identifies"
	}
	if due := stored.pair.Leaf.NotBefore.Add(lifetime(stored) / 3 * 2); k.options.Clock.Now().After(due) {
		return stored, "two thirds of the certificate's lifetime have passed"
	}
	return stored, ""
}

func lifetime(c *credentials) time.Duration {
	return c.pair.Leaf.NotAfter.Sub(c.pair.Leaf.NotBefore)
}

// Stored returns the TLS configuration of the identity that an agent has in a directory or, if
// that is empty, keeps in its Secret, for one call to the broker.
func Stored(ctx context.Context, c client.Client, namespace, certPath string) (*tls.Config, error) {
	if certPath != "" {
		read, err := readDirectory(certPath)
		if err != nil {
			return nil, err
		}
		return read.tlsConfig()
	}
	name := types.NamespacedName{Namespace: namespace, Name: Secret}
	secret := &corev1.Secret{}
	if err := c.Get(ctx, name, secret); err != nil {
		return nil, fmt.Errorf("reading Secret %s: %w", name, err)
	}
	stored, err := parse(secret.Data[filePrivateKey], secret.Data[fileCertificate], secret.Data[fileCA])
	if err != nil {
		return nil, fmt.Errorf("the certificate in Secret %s cannot be used: %w", name, err)
	}
	return stored.tlsConfig()
}

func (c *credentials) tlsConfig() (*tls.Config, error) {
	return protocol.TLSConfig(c.ca, func() (*tls.Certificate, error) { return &c.pair, nil })
}

// ensureKey returns the Secret and generates the private key in it if needed.
func (k *Keeper) ensureKey(ctx context.Context) (*corev1.Secret, error) {
	name := types.NamespacedName{Namespace: k.options.Namespace, Name: Secret}
	secret := &corev1.Secret{}
	err := k.options.Client.Get(ctx, name, secret)
	if err == nil && len(secret.Data[filePrivateKey]) > 0 {
		return secret, nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("reading Secret %s: %w", name, err)
	}
	key, keyErr := keyutil.MakeEllipticPrivateKeyPEM()
	if keyErr != nil {
		return nil, keyErr
	}
	if err == nil {
		if secret.Data == nil {
			secret.Data = map[string][]byte{}
		}
		secret.Data[filePrivateKey] = key
		err = k.options.Client.Update(ctx, secret)
	} else {
		secret = &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: name.Namespace, Name: name.Name,
				Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
			},
			Data: map[string][]byte{filePrivateKey: key},
		}
		if err = k.options.Client.Create(ctx, secret); apierrors.IsAlreadyExists(err) {
			// Another replica has created it: its key counts.
			err = k.options.Client.Get(ctx, name, secret)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("storing a private key in Secret %s: %w", name, err)
	}
	return secret, nil
}

// requestCertificate joins the broker with the Secret's key and stores the
// certificate in the Secret.
func (k *Keeper) requestCertificate(ctx context.Context, secret *corev1.Secret) (*credentials, error) {
	if k.options.CAHash == "" {
		return nil, errors.New("joining requires --broker-ca-hash (chart value broker.caHash): read it from ConfigMap spillway-broker-ca in the hub")
	}
	// The broker needs no token for a key that has joined.
	token, err := os.ReadFile(k.options.TokenFile)
	if err != nil && len(secret.Data[fileCertificate]) == 0 {
		return nil, fmt.Errorf("joining requires a token (chart value join.token): %w", err)
	}
	csr, err := certificateRequest(secret.Data[filePrivateKey], k.options.ClusterID)
	if err != nil {
		return nil, fmt.Errorf("the private key in Secret %s/%s cannot be used (%w): delete the Secret and, in the hub, this cluster's ClusterRegistration", secret.Namespace, secret.Name, err)
	}
	response, err := protocol.Join(ctx, k.options.BrokerURL, k.options.CAHash, k.options.ClusterID, strings.TrimSpace(string(token)), csr)
	if err != nil {
		return nil, fmt.Errorf("joining the broker at %s: %w", k.options.BrokerURL, err)
	}
	joined, err := parse(secret.Data[filePrivateKey], []byte(response.Certificate), []byte(response.CA))
	if err != nil {
		return nil, fmt.Errorf("joining the broker at %s: reading its response: %w", k.options.BrokerURL, err)
	}
	secret.Data[fileCertificate], secret.Data[fileCA] = joined.certificate, joined.ca
	if err := k.options.Client.Update(ctx, secret); err != nil && !apierrors.IsConflict(err) {
		return nil, fmt.Errorf("storing the certificate in Secret %s/%s: %w", secret.Namespace, secret.Name, err)
	}
	// On a conflict another replica has joined with the same key: both certificates
	// are valid, and the next attempt reads the stored one.
	return joined, nil
}

func certificateRequest(key []byte, clusterID string) ([]byte, error) {
	private, err := keyutil.ParsePrivateKeyPEM(key)
	if err != nil {
		return nil, err
	}
	return cert.MakeCSR(private, &pkix.Name{CommonName: clusterID}, nil, nil)
}
