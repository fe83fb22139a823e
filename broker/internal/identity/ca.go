package identity

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	caValidity = 10 * 365 * 24 * time.Hour
	// rotateBefore is how long before its end a CA is replaced.
	rotateBefore = 2 * 365 * 24 * time.Hour
	// maxCAs is the maximum number of CAs that are kept, the one that signs included: agents
	// that know only an older one need its hash replaced.
	maxCAs = 5
	// bundleKey is the key of the Secret with all certificates of CAs.
	bundleKey = corev1.ServiceAccountRootCAKey
)

// cas are the CAs of the broker: the first one signs. Each is also signed by the one before it, so
// that who trusts an earlier one trusts what the newest signs.
type cas struct {
	// own are the self-signed certificates, the newest first; all includes those of one CA by the
	// one before it, each after the first of its key.
	own, all []*x509.Certificate
	key      crypto.Signer
}

func (c *cas) signer() *x509.Certificate { return c.own[0] }

// clients are the CAs whose certificates are accepted. Those of an earlier one expire by themselves,
// and count only with the key of a registration.
func (c *cas) clients() *x509.CertPool {
	pool := x509.NewCertPool()
	for _, ca := range c.own {
		pool.AddCert(ca)
	}
	return pool
}

func (c *cas) pem() (out []byte) {
	for _, ca := range c.all {
		out = append(out, certificatePEM(ca.Raw)...)
	}
	return out
}

// parseCAs reads the Secret of the authority. One that an operator made has only its own CA.
func parseCAs(secret *corev1.Secret, now time.Time) (*cas, error) {
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, err
	}
	signer, signs := pair.PrivateKey.(crypto.Signer)
	switch {
	case !signs:
		return nil, errors.New("the key cannot sign")
	case !pair.Leaf.IsCA:
		return nil, errors.New("the certificate is not a CA certificate")
	case now.After(pair.Leaf.NotAfter):
		return nil, fmt.Errorf("the certificate expired on %s: delete the Secret, restart the broker, and upgrade the agents with the new broker.caHash and a join.token", pair.Leaf.NotAfter.Format(time.DateOnly))
	}
	c := &cas{own: []*x509.Certificate{pair.Leaf}, all: []*x509.Certificate{pair.Leaf}, key: signer}
	if len(secret.Data[bundleKey]) == 0 || !isSpillways(secret) {
		return c, nil
	}
	bundle, err := cert.ParseCertsPEM(secret.Data[bundleKey])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", bundleKey, err)
	}
	for _, ca := range bundle {
		switch {
		case ca.Equal(pair.Leaf) || !ca.IsCA || now.After(ca.NotAfter):
		case selfSigned(ca):
			c.own, c.all = append(c.own, ca), append(c.all, ca)
		default:
			c.all = append(c.all, ca)
		}
	}
	return c, nil
}

// isSpillways reports whether the broker has made the Secret of the authority.
func isSpillways(secret *corev1.Secret) bool {
	return secret.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway
}

func selfSigned(ca *x509.Certificate) bool {
	return bytes.Equal(ca.RawSubject, ca.RawIssuer) && ca.CheckSignatureFrom(ca) == nil
}

// newCA makes a CA, and the Secret's content with those before it.
func newCA(now time.Time, before *cas) (map[string][]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generating a key: %w", err)
	}
	// Each CA has a name of its own, by which chains are built.
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	if before != nil && (before.signer().MaxPathLen == 0 || !selfSigned(before.signer())) {
		return nil, errors.New("the CA cannot sign another one that who trusts it trusts, too: replace Secret " + CAName + " yourself, and broker.caHash of all agents")
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: CAName, SerialNumber: serial.Text(16)},
		NotBefore:             now.Add(-backdate(caValidity)),
		NotAfter:              now.Add(caValidity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	own, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	ca, err := x509.ParseCertificate(own)
	if err != nil {
		return nil, err
	}
	after := &cas{own: []*x509.Certificate{ca}, all: []*x509.Certificate{ca}}
	if before != nil {
		if template.SerialNumber, err = newSerial(); err != nil {
			return nil, err
		}
		template.NotAfter = before.signer().NotAfter
		crossed, err := x509.CreateCertificate(rand.Reader, template, before.signer(), key.Public(), before.key)
		if err != nil {
			return nil, fmt.Errorf("signing with the CA before: %w", err)
		}
		cross, err := x509.ParseCertificate(crossed)
		if err != nil {
			return nil, err
		}
		after.all = append(append(after.all, cross), before.all...)
		if last := len(before.own); last >= maxCAs {
			i := slices.IndexFunc(after.all, before.own[maxCAs-1].Equal)
			// With what the dropped one has signed.
			after.all = slices.DeleteFunc(after.all[:i], func(ca *x509.Certificate) bool { return bytes.Equal(ca.RawIssuer, before.own[maxCAs-1].RawSubject) })
		}
	}
	keyPEM, err := keyutil.MarshalPrivateKeyToPEM(key)
	return map[string][]byte{corev1.TLSCertKey: certificatePEM(own), corev1.TLSPrivateKeyKey: keyPEM, bundleKey: after.pem()}, err
}

// Rotate makes a new CA, which signs from now on. Agents that trust the one before trust it, too.
func Rotate(ctx context.Context, hub client.Client, namespace string, clock clock.PassiveClock) error {
	secret := &corev1.Secret{}
	if err := hub.Get(ctx, client.ObjectKey{Namespace: namespace, Name: CAName}, secret); err != nil {
		return fmt.Errorf("reading Secret %s: %w", CAName, err)
	}
	before, err := parseCAs(secret, clock.Now())
	if err != nil {
		return fmt.Errorf("reading Secret %s: %w", CAName, err)
	}
	return rotate(ctx, hub, secret, before, clock.Now())
}

// rotate replaces the Secret that was read, unless it has changed since.
func rotate(ctx context.Context, hub client.Client, secret *corev1.Secret, before *cas, now time.Time) (err error) {
	if !isSpillways(secret) {
		return fmt.Errorf("the broker has not made Secret %s: replace it yourself, and broker.caHash of all agents", CAName)
	}
	secret = secret.DeepCopy()
	if secret.Data, err = newCA(now, before); err != nil {
		return fmt.Errorf("rotating the CA: %w", err)
	}
	if err := hub.Update(ctx, secret); err != nil {
		return fmt.Errorf("writing Secret %s: %w", CAName, err)
	}
	return nil
}

// Start reads the CAs again until ctx ends, and replaces the one that signs long before it expires.
func (a *Authority) Start(ctx context.Context) error {
	if a.files != nil {
		return nil
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(reloadAfter):
		}
		if err := a.reload(ctx); err != nil && ctx.Err() == nil {
			a.Log.Error(err, "Failed to read the CA again; the earlier one is used")
		}
	}
}

// NeedLeaderElection is false: each replica has the CA.
func (a *Authority) NeedLeaderElection() bool { return false }

// reload reads the Secret, and rotates the CA if it is due.
func (a *Authority) reload(ctx context.Context) error {
	secret := &corev1.Secret{}
	if err := a.Client.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: CAName}, secret); err != nil {
		return fmt.Errorf("reading Secret %s: %w", CAName, err)
	}
	read, err := parseCAs(secret, a.Clock.Now())
	if err != nil {
		return fmt.Errorf("reading Secret %s: %w", CAName, err)
	}
	before := a.cas.Swap(read)
	certificateExpiry.WithLabelValues("ca").Set(float64(read.signer().NotAfter.Unix()))
	if before != nil && !before.signer().Equal(read.signer()) {
		a.Log.Info("The CA has changed", "caHash", a.CAHash())
	}
	if now := string(read.pem()); now != a.published {
		if err := a.publish(ctx); err != nil {
			return fmt.Errorf("publishing the certificate authority in ConfigMap %s: %w", CAName, err)
		}
		a.published = now
	}
	if left := read.signer().NotAfter.Sub(a.Clock.Now()); left < rotateBefore && isSpillways(secret) {
		// Of concurrent replicas one writes. It is tried again with the next look.
		if err := rotate(ctx, a.Client, secret, read, a.Clock.Now()); err != nil && !apierrors.IsConflict(err) {
			a.Log.Error(err, "Failed to replace the CA, which is used until it expires", "notAfter", read.signer().NotAfter)
		}
	}
	return nil
}
