package identity

import (
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

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// CAName is the Secret (tls.crt, tls.key) and the ConfigMap (ca.crt, caHash)
	// of the certificate authority.
	CAName = "spillway-broker-ca"
	// TokenName is the Secret whose key TokenKey lets a cluster join.
	TokenName = "spillway-join-token"
	// TokenKey in that Secret.
	TokenKey = "token"
	// serviceName is the Service that the chart puts before the broker.
	serviceName = "spillway-broker"

	caLife      = 10 * 365 * 24 * time.Hour
	clientLife  = 365 * 24 * time.Hour
	servingLife = 90 * 24 * time.Hour
	// backdate lets clusters whose clock is behind accept a new certificate.
	backdate = 5 * time.Minute
)

// Options of an Authority.
type Options struct {
	// Client reads from and writes to the API server itself: who has which key
	// must not be answered from a cache.
	Client client.Client
	// Cache answers Authenticate; what it does not know is asked of Client.
	Cache client.Reader
	// Namespace of the broker.
	Namespace string
	// Names are further DNS names and IP addresses of the broker.
	Names []string
	// Clock is the real one where nil.
	Clock clock.PassiveClock
}

// Authority is the hub's certificate authority.
type Authority struct {
	Options
	ca  *x509.Certificate
	key crypto.Signer

	mutex   sync.Mutex
	serving *tls.Certificate
}

// New loads the authority and the join token from the API server, making them on
// first start, and publishes the authority's certificate. Replicas that start at
// once agree, since only one of them can create a Secret.
func New(ctx context.Context, options Options) (*Authority, error) {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	a := &Authority{Options: options}
	if err := a.ensureCA(ctx); err != nil {
		return nil, fmt.Errorf("setting up the certificate authority in Secret %s: %w", CAName, err)
	}
	if err := a.ensureToken(ctx); err != nil {
		return nil, fmt.Errorf("setting up the join token in Secret %s: %w", TokenName, err)
	}
	if err := a.publish(ctx); err != nil {
		return nil, fmt.Errorf("publishing the certificate authority in ConfigMap %s: %w", CAName, err)
	}
	// A first serving certificate shows here, not at the first connection, that
	// one can be made.
	if _, err := a.servingCertificate(nil); err != nil {
		return nil, err
	}
	return a, nil
}

// CAHash is what agents recognise the broker by.
func (a *Authority) CAHash() string { return protocol.CAHash(a.ca) }

// CAPEM is the authority's certificate.
func (a *Authority) CAPEM() []byte { return certificatePEM(a.ca.Raw) }

// TLSConfig is that of the broker's listener. A caller may come without a
// certificate, but not with one of another authority.
func (a *Authority) TLSConfig() *tls.Config {
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

// ensureSecret returns the Secret of that name, creating it with what make
// returns if there is none.
func (a *Authority) ensureSecret(ctx context.Context, name string, make func() (corev1.SecretType, map[string][]byte, error)) (*corev1.Secret, error) {
	key := client.ObjectKey{Namespace: a.Namespace, Name: name}
	secret := &corev1.Secret{}
	err := a.Client.Get(ctx, key, secret)
	if !apierrors.IsNotFound(err) {
		return secret, err
	}
	kind, data, err := make()
	if err != nil {
		return nil, err
	}
	secret = &corev1.Secret{ObjectMeta: a.meta(name), Type: kind, Data: data}
	err = a.Client.Create(ctx, secret)
	if apierrors.IsAlreadyExists(err) {
		// Another replica was quicker: its Secret counts.
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
		cert, key, err := newCA(a.Clock.Now())
		return corev1.SecretTypeTLS, map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key}, err
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
		return errors.New("its key cannot sign")
	case !pair.Leaf.IsCA:
		return errors.New("its certificate is not that of an authority")
	case a.Clock.Now().After(pair.Leaf.NotAfter):
		return fmt.Errorf("it ended on %s; delete the Secret, restart the broker and let every cluster join again with the new broker.caHash", pair.Leaf.NotAfter.Format(time.DateOnly))
	}
	a.ca, a.key = pair.Leaf, signer
	return nil
}

func newCA(now time.Time) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: CAName},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, nil, fmt.Errorf("signing: %w", err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the key: %w", err)
	}
	return certificatePEM(der), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), nil
}

func (a *Authority) ensureToken(ctx context.Context) error {
	secret, err := a.ensureSecret(ctx, TokenName, func() (corev1.SecretType, map[string][]byte, error) {
		random := make([]byte, 32)
		if _, err := rand.Read(random); err != nil {
			return "", nil, fmt.Errorf("making a token: %w", err)
		}
		return corev1.SecretTypeOpaque, map[string][]byte{TokenKey: []byte(base64.RawURLEncoding.EncodeToString(random))}, nil
	})
	if err == nil && len(secret.Data[TokenKey]) < minToken {
		return fmt.Errorf("its key %q must have %d characters or more; put a random one there, or delete the Secret and restart the broker to have one made", TokenKey, minToken)
	}
	return err
}

// publish writes the ConfigMap that tells people what to give to agents.
func (a *Authority) publish(ctx context.Context) error {
	config := &corev1.ConfigMap{ObjectMeta: a.meta(CAName), Data: map[string]string{"ca.crt": string(a.CAPEM()), "caHash": a.CAHash()}}
	err := a.Client.Create(ctx, config)
	if apierrors.IsAlreadyExists(err) {
		err = a.Client.Update(ctx, config)
	}
	return err
}

// servingCertificate is the listener's own: kept in memory, made anew at two
// thirds of its life. Agents know the authority only, so each replica may have
// another one.
func (a *Authority) servingCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	now := a.Clock.Now()
	if a.serving != nil && now.Before(a.serving.Leaf.NotAfter.Add(-servingLife/3)) {
		return a.serving, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the serving key: %w", err)
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: serviceName},
		NotAfter:    now.Add(servingLife),
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
		return nil, fmt.Errorf("making the serving certificate: %w", err)
	}
	// The authority goes with it, for a joining agent to recognise.
	a.serving = &tls.Certificate{Certificate: [][]byte{leaf.Raw, a.ca.Raw}, PrivateKey: key, Leaf: leaf}
	return a.serving, nil
}

func (a *Authority) servingNames() []string {
	service := serviceName + "." + a.Namespace
	return append([]string{"localhost", "127.0.0.1", "::1", serviceName, service, service + ".svc", service + ".svc.cluster.local"}, a.Names...)
}

// sign completes a leaf's template and signs it. No leaf outlives the authority.
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
		return nil, fmt.Errorf("making a serial number: %w", err)
	}
	return serial, nil
}

func certificatePEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
