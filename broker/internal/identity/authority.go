package identity

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// CAName is the name of the certificate authority's Secret (tls.crt, tls.key) and
	// ConfigMap (ca.crt, caHash).
	CAName = "spillway-broker-ca"
	// TokenName is the name of the Secret with the join token.
	TokenName = "spillway-join-token"
	// TokenKey is the key of the join token in that Secret.
	TokenKey = "token"
	// serviceName is the name of the broker's Service in the chart.
	serviceName = "spillway-broker"

	servingValidity = 90 * 24 * time.Hour
)

// backdate is how long before now a certificate begins, for clusters whose clock is behind.
func backdate(validity time.Duration) time.Duration { return min(time.Hour, validity/8) }

// DefaultClientValidity is how long the certificate of an agent is valid. It is renewed at two
// thirds of that.
const DefaultClientValidity = 24 * time.Hour

// Options of an Authority.
type Options struct {
	// Client reads and writes live: which key a cluster ID is bound to must not be read
	// from a cache.
	Client client.Client
	// Cache is read by Authenticate and Known. A registration that is not there is read
	// from Client. Join reads the quota and the number of clusters from it.
	Cache client.Reader
	// Namespace of the broker's objects.
	Namespace string
	// Names are additional DNS names and IP addresses of the broker.
	Names []string
	// ClientValidity is how long the certificates of agents are valid; defaults to
	// DefaultClientValidity.
	ClientValidity time.Duration
	// CertPath is a directory with tls.crt, tls.key and ca.crt, which another program creates and
	// renews. If it is set, the broker issues no certificates: it serves with that one, and the
	// common name of a client certificate of that CA is a cluster's ID.
	CertPath string
	// Clock defaults to the real one.
	Clock clock.PassiveClock
	Log   logr.Logger
}

// Authority is the hub's certificate authority, or knows another one by its files.
type Authority struct {
	Options
	// cas are the own authority's.
	cas atomic.Pointer[cas]
	// published is what the ConfigMap has of them.
	published string
	// files are those of another authority; nil with the own one.
	files *files

	// misses are the registrations (miss) that were read live lately and did not admit a cluster: a
	// revoked one does not cost a read of the API server with each of its calls.
	misses     *utilcache.LRUExpireCache
	admissions admissions

	mutex sync.Mutex
	// serving is signed by servedBy.
	serving  *tls.Certificate
	servedBy *x509.Certificate
}

// New loads the authority and the join token from their Secrets, creates them on first
// start, and publishes the authority's certificate. Concurrent replicas use the same
// ones, because only one of them can create a Secret. With Options.CertPath it reads that
// directory instead.
func New(ctx context.Context, options Options) (*Authority, error) {
	options.Clock = cmp.Or[clock.PassiveClock](options.Clock, clock.RealClock{})
	options.ClientValidity = cmp.Or(options.ClientValidity, DefaultClientValidity)
	a := &Authority{Options: options, misses: newMisses(options.Clock)}
	if options.CertPath != "" {
		a.files = &files{dir: options.CertPath, clock: options.Clock, log: options.Log}
		return a, a.files.load()
	}
	if err := a.ensureCA(ctx); err != nil {
		return nil, fmt.Errorf("setting up the certificate authority in Secret %s: %w", CAName, err)
	}
	if err := a.ensureToken(ctx); err != nil {
		return nil, fmt.Errorf("setting up the join token in Secret %s: %w", TokenName, err)
	}
	// Fail now, not at the first connection, if no serving certificate can be issued.
	if _, err := a.servingCertificate(nil); err != nil {
		return nil, err
	}
	return a, nil
}

// CAHash identifies the authority, see protocol.CAHash; empty if the agents of this broker do not
// join.
func (a *Authority) CAHash() string {
	if a.files != nil {
		return ""
	}
	return protocol.CAHash(a.cas.Load().signer())
}

// CAPEM are the authority's certificates in PEM, that of the signer first.
func (a *Authority) CAPEM() []byte { return a.cas.Load().pem() }

// TLSConfig is the configuration of the broker's listener. A client certificate is
// optional, but must be issued by the authority.
func (a *Authority) TLSConfig() *tls.Config {
	if a.files != nil {
		return a.files.tlsConfig()
	}
	config := serverConfig(a.Clock)
	config.GetCertificate = a.servingCertificate
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := config.Clone()
		now.GetConfigForClient = nil
		now.ClientCAs = a.cas.Load().clients()
		return now, nil
	}
	return config
}

// serverConfig has what all configurations of the listener have.
func serverConfig(clock clock.PassiveClock) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS12,
		SessionTicketsDisabled: true,
		ClientAuth:             tls.VerifyClientCertIfGiven,
		NextProtos:             []string{"http/1.1"},
		Time:                   clock.Now,
	}
}

// ensureSecret returns the Secret of the given name. If there is none, it is created with
// the type and data of generate.
func (a *Authority) ensureSecret(ctx context.Context, name string, generate func() (corev1.SecretType, map[string][]byte, error)) (*corev1.Secret, error) {
	key := client.ObjectKey{Namespace: a.Namespace, Name: name}
	secret := &corev1.Secret{}
	err := a.Client.Get(ctx, key, secret)
	if !apierrors.IsNotFound(err) {
		return secret, err
	}
	kind, data, err := generate()
	if err != nil {
		return nil, err
	}
	secret = &corev1.Secret{ObjectMeta: a.meta(name), Type: kind, Data: data}
	err = a.Client.Create(ctx, secret)
	if apierrors.IsAlreadyExists(err) {
		// Another replica has created it.
		secret = &corev1.Secret{}
		err = a.Client.Get(ctx, key, secret)
	}
	return secret, err
}

func (a *Authority) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: a.Namespace, Name: name, Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}}
}

func (a *Authority) ensureCA(ctx context.Context) error {
	_, err := a.ensureSecret(ctx, CAName, func() (corev1.SecretType, map[string][]byte, error) {
		data, err := newCA(a.Clock.Now(), nil)
		return corev1.SecretTypeTLS, data, err
	})
	if err != nil {
		return err
	}
	return a.reload(ctx)
}

func (a *Authority) ensureToken(ctx context.Context) error {
	secret, err := a.ensureSecret(ctx, TokenName, func() (corev1.SecretType, map[string][]byte, error) {
		token, err := newToken()
		return corev1.SecretTypeOpaque, map[string][]byte{TokenKey: []byte(token)}, err
	})
	if err == nil && len(secret.Data[TokenKey]) < minToken {
		return fmt.Errorf("key %q must have at least %d characters: set a random one, or delete the Secret and restart the broker to generate one", TokenKey, minToken)
	}
	return err
}

func newToken() (string, error) {
	random := make([]byte, 32)
	if _, err := rand.Read(random); err != nil {
		return "", fmt.Errorf("generating a token: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(random), nil
}

// publish writes the ConfigMap with the values for the agent chart.
func (a *Authority) publish(ctx context.Context) error {
	config := &corev1.ConfigMap{ObjectMeta: a.meta(CAName), Data: map[string]string{"ca.crt": string(a.CAPEM()), "caHash": a.CAHash()}}
	err := a.Client.Create(ctx, config)
	if apierrors.IsAlreadyExists(err) {
		err = a.Client.Update(ctx, config)
	}
	return err
}

// servingCertificate is the listener's certificate. It is kept in memory and renewed at
// two thirds of its validity. Agents verify the authority only, so each replica has its
// own certificate.
func (a *Authority) servingCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	now := a.Clock.Now()
	cas := a.cas.Load()
	if a.serving != nil && a.servedBy.Equal(cas.signer()) && now.Before(a.serving.Leaf.NotAfter.Add(-servingValidity/3)) {
		return a.serving, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generating the serving key: %w", err)
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: serviceName},
		NotAfter:    now.Add(servingValidity),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, name := range a.servingNames() {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	leaf, err := cas.sign(template, key.Public(), now)
	if err != nil {
		return nil, fmt.Errorf("issuing the serving certificate: %w", err)
	}
	// An agent knows the authority by the hash of one of its CAs: the chain must include it.
	a.serving, a.servedBy = &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}, cas.signer()
	for _, ca := range cas.all {
		a.serving.Certificate = append(a.serving.Certificate, ca.Raw)
	}
	certificateExpiry.WithLabelValues("serving").Set(float64(leaf.NotAfter.Unix()))
	return a.serving, nil
}

func (a *Authority) servingNames() []string {
	service := serviceName + "." + a.Namespace
	return append([]string{"localhost", "127.0.0.1", "::1", serviceName, service, service + ".svc", service + ".svc.cluster.local"}, a.Names...)
}

// sign completes and signs a certificate. It expires no later than the authority.
func (c *cas) sign(template *x509.Certificate, key crypto.PublicKey, now time.Time) (*x509.Certificate, error) {
	var err error
	if template.SerialNumber, err = newSerial(); err != nil {
		return nil, err
	}
	template.NotBefore = now.Add(-backdate(template.NotAfter.Sub(now)))
	if template.NotAfter.After(c.signer().NotAfter) {
		template.NotAfter = c.signer().NotAfter
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.BasicConstraintsValid = true
	der, err := x509.CreateCertificate(rand.Reader, template, c.signer(), key, c.key)
	if err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	return x509.ParseCertificate(der)
}

func newSerial() (*big.Int, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("generating a serial number: %w", err)
	}
	return serial, nil
}

func certificatePEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: der})
}
