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
	"errors"
	"fmt"
	"math/big"
	"net"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
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

	caValidity      = 10 * 365 * 24 * time.Hour
	servingValidity = 90 * 24 * time.Hour
	// backdate is for clusters whose clock is behind.
	backdate = 5 * time.Minute
)

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
	// ca and key are the own authority's.
	ca  *x509.Certificate
	key crypto.Signer
	// files are those of another authority; nil with the own one.
	files *files

	misses     misses
	admissions admissions

	mutex   sync.Mutex
	serving *tls.Certificate
}

// New loads the authority and the join token from their Secrets, creates them on first
// start, and publishes the authority's certificate. Concurrent replicas use the same
// ones, because only one of them can create a Secret. With Options.CertPath it reads that
// directory instead.
func New(ctx context.Context, options Options) (*Authority, error) {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	options.ClientValidity = cmp.Or(options.ClientValidity, DefaultClientValidity)
	a := &Authority{Options: options}
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
	if err := a.publish(ctx); err != nil {
		return nil, fmt.Errorf("publishing the certificate authority in ConfigMap %s: %w", CAName, err)
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
	return protocol.CAHash(a.ca)
}

// CAPEM is the authority's certificate in PEM.
func (a *Authority) CAPEM() []byte { return certificatePEM(a.ca.Raw) }

// TLSConfig is the configuration of the broker's listener. A client certificate is
// optional, but must be issued by the authority.
func (a *Authority) TLSConfig() *tls.Config {
	if a.files != nil {
		return a.files.tlsConfig()
	}
	clients := x509.NewCertPool()
	clients.AddCert(a.ca)
	return &tls.Config{
		MinVersion:             tls.VersionTLS12,
		SessionTicketsDisabled: true,
		ClientAuth:             tls.VerifyClientCertIfGiven,
		ClientCAs:              clients,
		GetCertificate:         a.servingCertificate,
		NextProtos:             []string{"http/1.1"},
		Time:                   a.Clock.Now,
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
	secret, err := a.ensureSecret(ctx, CAName, func() (corev1.SecretType, map[string][]byte, error) {
		certPEM, keyPEM, err := newCA(a.Clock.Now())
		return corev1.SecretTypeTLS, map[string][]byte{corev1.TLSCertKey: certPEM, corev1.TLSPrivateKeyKey: keyPEM}, err
	})
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return err
	}
	signer, signs := pair.PrivateKey.(crypto.Signer)
	switch {
	case !signs:
		return errors.New("the key cannot sign")
	case !pair.Leaf.IsCA:
		return errors.New("the certificate is not a CA certificate")
	case a.Clock.Now().After(pair.Leaf.NotAfter):
		return fmt.Errorf("the certificate expired on %s: delete the Secret, restart the broker, and upgrade the agents with the new broker.caHash and a join.token", pair.Leaf.NotAfter.Format(time.DateOnly))
	}
	a.ca, a.key = pair.Leaf, signer
	certificateExpiry.WithLabelValues("ca").Set(float64(pair.Leaf.NotAfter.Unix()))
	return nil
}

func newCA(now time.Time) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("generating a key: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: CAName},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caValidity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, nil, fmt.Errorf("signing: %w", err)
	}
	keyPEM, err = keyutil.MarshalPrivateKeyToPEM(key)
	return certificatePEM(der), keyPEM, err
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
	if a.serving != nil && now.Before(a.serving.Leaf.NotAfter.Add(-servingValidity/3)) {
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
	leaf, err := a.sign(template, key.Public())
	if err != nil {
		return nil, fmt.Errorf("issuing the serving certificate: %w", err)
	}
	// A joining agent knows the authority by its hash: the chain must include it.
	a.serving = &tls.Certificate{Certificate: [][]byte{leaf.Raw, a.ca.Raw}, PrivateKey: key, Leaf: leaf}
	certificateExpiry.WithLabelValues("serving").Set(float64(leaf.NotAfter.Unix()))
	return a.serving, nil
}

func (a *Authority) servingNames() []string {
	service := serviceName + "." + a.Namespace
	return append([]string{"localhost", "127.0.0.1", "::1", serviceName, service, service + ".svc", service + ".svc.cluster.local"}, a.Names...)
}

// sign completes and signs a certificate. It expires no later than the authority.
func (a *Authority) sign(template *x509.Certificate, key crypto.PublicKey) (*x509.Certificate, error) {
	var err error
	if template.SerialNumber, err = newSerial(); err != nil {
		return nil, err
	}
	template.NotBefore = a.Clock.Now().Add(-backdate)
	if template.NotAfter.After(a.ca.NotAfter) {
		template.NotAfter = a.ca.NotAfter
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.BasicConstraintsValid = true
	der, err := x509.CreateCertificate(rand.Reader, template, a.ca, key, a.key)
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
