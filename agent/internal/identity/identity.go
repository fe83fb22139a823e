// Package identity keeps the certificate by which the broker knows this cluster:
// one that somebody else puts into a directory (cert-manager, say), or one that
// the agent asks the broker for with a join token.
//
// When joining, the private key is made here, kept in a Secret before anything
// is sent, and never leaves the cluster. A broken-off attempt, a restart or a
// second replica goes on with the same key.
package identity

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Secret holds the key and certificate of an agent that has joined.
const Secret = "spillway-agent-tls"

// The files of a certificate directory, and the keys of the Secret.
const (
	fileCertificate = corev1.TLSCertKey
	filePrivateKey  = corev1.TLSPrivateKeyKey
	fileCA          = corev1.ServiceAccountRootCAKey
)

const (
	// beat is how often the directory or the Secret is read again.
	beat = 10 * time.Second
	// callTimeout bounds one round of reading and joining.
	callTimeout = 30 * time.Second
	// renewAgain is how long a failed attempt to join again, with a certificate
	// that still serves, is not repeated.
	renewAgain = 10 * time.Minute
)

// Options of a Keeper.
type Options struct {
	// ClusterID that the certificate must be for.
	ClusterID string
	// CertPath is a directory with tls.crt, tls.key and ca.crt. Nothing below is
	// used where it is given.
	CertPath string

	// Client reads and writes the Secret, without a cache.
	Client    client.Client
	Namespace string
	// BrokerURL, CAHash and TokenFile are what joining takes.
	BrokerURL, CAHash, TokenFile string

	// Tell is told of each new reason why there is no identity; may be nil. (A
	// readiness probe does not pass reasons on.)
	Tell func(reason error)

	// Clock is the real one where nil.
	Clock clock.Clock
	Log   logr.Logger
}

// Keeper holds the current identity. Its methods may be called at any time.
type Keeper struct {
	options Options

	mu      sync.Mutex
	current *credentials
	problem error
	changed chan struct{}
	// renewal is when joining again was last tried.
	renewal time.Time
}

type credentials struct {
	key, certificate, ca []byte
	pair                 tls.Certificate
}

// New makes a Keeper that has nothing until it is started.
func New(options Options) *Keeper {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	return &Keeper{options: options, problem: errors.New("the agent has only just started"), changed: make(chan struct{})}
}

// CommonName reads the cluster ID from the certificate in a directory.
func CommonName(certPath string) (string, error) {
	found, err := readDirectory(certPath)
	if err != nil {
		return "", err
	}
	return found.pair.Leaf.Subject.CommonName, nil
}

// NeedLeaderElection lets standby replicas have their identity ready.
func (k *Keeper) NeedLeaderElection() bool { return false }

// Start obtains the identity and keeps it current until ctx ends.
func (k *Keeper) Start(ctx context.Context) error {
	backoff := newBackoff()
	for {
		pause := beat
		round, cancel := context.WithTimeout(ctx, callTimeout)
		found, err := k.obtain(round)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			pause = min(backoff.Step(), beat)
		} else {
			backoff = newBackoff()
		}
		k.set(found, err)
		select {
		case <-ctx.Done():
			return nil
		case <-k.options.Clock.After(pause):
		}
	}
}

func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 10}
}

// set takes in the outcome of a round. What was there stays in use when a round
// fails: it may well be better than nothing.
func (k *Keeper) set(found *credentials, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil {
		if k.problem == nil || k.problem.Error() != err.Error() {
			k.options.Log.Error(err, "No identity for the broker", "kept", k.current != nil)
			if k.options.Tell != nil {
				k.options.Tell(err)
			}
		}
		k.problem = err
		return
	}
	k.problem = nil
	if k.current != nil && bytes.Equal(k.current.certificate, found.certificate) &&
		bytes.Equal(k.current.key, found.key) && bytes.Equal(k.current.ca, found.ca) {
		return
	}
	k.options.Log.Info("The agent has an identity for the broker", "clusterID", k.options.ClusterID, "notAfter", found.pair.Leaf.NotAfter)
	k.current = found
	close(k.changed)
	k.changed = make(chan struct{})
}

// Certificate is the current client certificate.
func (k *Keeper) Certificate() (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return nil, k.problem
	}
	return &k.current.pair, nil
}

// CA is the broker's certificate authority in PEM. The channel is closed when
// the identity changes.
func (k *Keeper) CA() (pem []byte, changed <-chan struct{}, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return nil, k.changed, k.problem
	}
	return k.current.ca, k.changed, nil
}

// Check is a readiness check: the error says why there is no identity.
func (k *Keeper) Check(*http.Request) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return fmt.Errorf("no identity for the broker: %w", k.problem)
	}
	if k.options.Clock.Now().After(k.current.pair.Leaf.NotAfter) {
		return fmt.Errorf("the certificate ended on %s: %w", k.current.pair.Leaf.NotAfter.Format(time.RFC3339), k.problem)
	}
	return nil
}

func (k *Keeper) obtain(ctx context.Context) (*credentials, error) {
	if k.options.CertPath == "" {
		return k.join(ctx)
	}
	found, err := readDirectory(k.options.CertPath)
	if err != nil {
		return nil, err
	}
	if reason := k.unfit(found); reason != "" {
		return nil, fmt.Errorf("the certificate in %s %s", k.options.CertPath, reason)
	}
	return found, nil
}

func readDirectory(dir string) (*credentials, error) {
	var files [3][]byte
	for i, name := range []string{filePrivateKey, fileCertificate, fileCA} {
		var err error
		if files[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return nil, fmt.Errorf("reading --broker-cert-path: %w", err)
		}
	}
	found, err := parse(files[0], files[1], files[2])
	if err != nil {
		return nil, fmt.Errorf("reading --broker-cert-path %s: %w", dir, err)
	}
	return found, nil
}

func parse(key, certificate, ca []byte) (*credentials, error) {
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	if _, err := parseCA(ca); err != nil {
		return nil, err
	}
	return &credentials{key: key, certificate: certificate, ca: ca, pair: pair}, nil
}

func parseCA(text []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, errors.New("the CA is not a PEM certificate")
	}
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("parsing the CA: %w", err)
	}
	return ca, nil
}

// unfit says why a certificate cannot be used, or nothing.
func (k *Keeper) unfit(c *credentials) string {
	leaf := c.pair.Leaf
	switch {
	case leaf.Subject.CommonName != k.options.ClusterID:
		return fmt.Sprintf("is for %q, not for cluster %q: give the one a certificate of its own or correct --cluster-id", leaf.Subject.CommonName, k.options.ClusterID)
	case k.options.Clock.Now().After(leaf.NotAfter):
		return "ended on " + leaf.NotAfter.Format(time.RFC3339) + ": renew it"
	}
	return ""
}

// join returns the identity kept in the Secret, joining first, or again, where
// that is needed.
func (k *Keeper) join(ctx context.Context) (*credentials, error) {
	secret, err := k.ensureKey(ctx)
	if err != nil {
		return nil, err
	}
	found, reason := k.kept(secret)
	if found != nil && reason == "" {
		return found, nil
	}
	if found != nil && k.options.Clock.Since(k.renewal) < renewAgain {
		return found, nil
	}
	k.renewal = k.options.Clock.Now()
	k.options.Log.V(1).Info("Joining the broker", "url", k.options.BrokerURL, "clusterID", k.options.ClusterID, "because", reason)
	joined, err := k.joinWith(ctx, secret)
	if err != nil && found != nil {
		k.options.Log.Error(err, "The certificate is past two thirds of its life and joining again failed; it is used as long as it lasts. Give the agent a valid join token before that",
			"notAfter", found.pair.Leaf.NotAfter)
		return found, nil
	}
	return joined, err
}

// kept reads what a Secret holds. Reason says why to join: nothing usable is
// there, or, where something is returned, it should be replaced soon.
func (k *Keeper) kept(secret *corev1.Secret) (found *credentials, reason string) {
	if len(secret.Data[fileCertificate]) == 0 {
		return nil, "there is no certificate yet"
	}
	found, err := parse(secret.Data[filePrivateKey], secret.Data[fileCertificate], secret.Data[fileCA])
	if err != nil {
		return nil, "the certificate cannot be used: " + err.Error()
	}
	if reason := k.unfit(found); reason != "" {
		return nil, "the certificate " + reason
	}
	ca, err := parseCA(found.ca)
	if err != nil || (k.options.CAHash != "" && protocol.CAHash(ca) != k.options.CAHash) {
		return nil, "the certificate is from another broker than --broker-ca-hash names"
	}
	leaf := found.pair.Leaf
	if due := leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 3 * 2); k.options.Clock.Now().After(due) {
		return found, "the certificate is past two thirds of its life"
	}
	return found, ""
}

// ensureKey returns the Secret, with a private key in it.
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
	key, keyErr := newKey()
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
			// Another replica was quicker: its key is the one.
			err = k.options.Client.Get(ctx, name, secret)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("keeping a private key in Secret %s: %w", name, err)
	}
	return secret, nil
}

func newKey() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a private key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding a private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// joinWith asks the broker for a certificate of the Secret's key, and keeps it.
func (k *Keeper) joinWith(ctx context.Context, secret *corev1.Secret) (*credentials, error) {
	if k.options.CAHash == "" {
		return nil, errors.New("joining needs --broker-ca-hash (chart value broker.caHash), the hash of the broker's CA: the hub's ConfigMap spillway-broker-ca has it")
	}
	token, err := os.ReadFile(k.options.TokenFile)
	if err != nil {
		return nil, fmt.Errorf("joining needs a token (chart value join.token): %w", err)
	}
	csr, err := request(secret.Data[filePrivateKey], k.options.ClusterID)
	if err != nil {
		return nil, fmt.Errorf("the private key in Secret %s/%s cannot be used (%w): delete the Secret, and this cluster's ClusterRegistration in the hub", secret.Namespace, secret.Name, err)
	}
	answer, err := protocol.Join(ctx, k.options.BrokerURL, k.options.CAHash, k.options.ClusterID, strings.TrimSpace(string(token)), csr)
	if err != nil {
		return nil, fmt.Errorf("joining the broker at %s: %w", k.options.BrokerURL, err)
	}
	joined, err := parse(secret.Data[filePrivateKey], []byte(answer.Certificate), []byte(answer.CA))
	if err != nil {
		return nil, fmt.Errorf("joining the broker at %s: what it answered cannot be used: %w", k.options.BrokerURL, err)
	}
	secret.Data[fileCertificate], secret.Data[fileCA] = joined.certificate, joined.ca
	if err := k.options.Client.Update(ctx, secret); err != nil && !apierrors.IsConflict(err) {
		return nil, fmt.Errorf("keeping the certificate in Secret %s/%s: %w", secret.Namespace, secret.Name, err)
	}
	// A conflict means that another replica has joined with the same key: this
	// certificate is as good, and theirs is read at the next beat.
	return joined, nil
}

func request(key []byte, clusterID string) ([]byte, error) {
	block, _ := pem.Decode(key)
	if block == nil {
		return nil, errors.New("not PEM")
	}
	private, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: clusterID}}, private)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), nil
}
