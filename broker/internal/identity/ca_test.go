package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// member is a cluster with the CAs that it got when it joined.
type member struct {
	id          string
	roots       *x509.CertPool
	certificate *tls.Certificate
}

func (f *fixture) member(t *testing.T, id, token string) *member {
	t.Helper()
	key := newKey(t)
	answer, err := f.Join(t.Context(), protocol.JoinRequest{ClusterID: id, Token: token, CSR: newCSR(t, key, named(id))})
	expect.NoError(t, err)
	m := &member{id: id, roots: x509.NewCertPool(), certificate: &tls.Certificate{Certificate: [][]byte{parse(t, answer.Certificate).Raw}, PrivateKey: key}}
	if !m.roots.AppendCertsFromPEM([]byte(answer.CA)) {
		t.Fatal("no CA")
	}
	return m
}

// testRotation rotates the CA again and again while clusters call: none is refused, of those that
// joined before and of those that joined in between, at each replica.
func (f *fixture) testRotation(t *testing.T) {
	first := f.CAHash()
	members := []*member{f.member(t, "first", f.token)}
	var calls atomic.Int64
	ended := make(chan struct{})
	var calling errgroup.Group
	call := func(m *member) {
		for i := 0; ; i++ {
			select {
			case <-ended:
				return
			default:
			}
			if id, err := dial(t, f.replicas[i%len(f.replicas)], m.roots, m.certificate); err != nil || id != m.id {
				t.Errorf("a call of %s as %q: %v", m.id, id, err)
				return
			}
			calls.Add(1)
		}
	}
	for range 2 {
		calling.Go(func() error { call(members[0]); return nil })
	}
	for _, id := range []string{"second", "third", "fourth"} {
		expect.NoError(t, Rotate(t.Context(), f.api, namespace, f.clock))
		for _, replica := range f.replicas {
			before := calls.Load()
			expect.NoError(t, replica.reload(t.Context()))
			expect.Eventually(t, "calls between the replicas", func() (bool, string) { return calls.Load() > before+4 || t.Failed(), "" })
		}
		m := f.member(t, id, f.token)
		members = append(members, m)
		calling.Go(func() error { call(m); return nil })
	}
	close(ended)
	expect.NoError(t, calling.Wait())
	if f.CAHash() == first {
		t.Error("the hash is still that of the first CA")
	}

	// An agent that knows the first CA only may still join.
	config, err := f.TLSConfig().GetCertificate(nil)
	expect.NoError(t, err)
	found := errors.New("it is not presented")
	for _, der := range config.Certificate {
		if ca, err := x509.ParseCertificate(der); err == nil && protocol.CAHash(ca) == first {
			found = nil
		}
	}
	expect.NoError(t, found)

	last := members[len(members)-1]
	for range 2 * maxCAs {
		expect.NoError(t, Rotate(t.Context(), f.api, namespace, f.clock))
	}
	expect.NoError(t, f.reload(t.Context()))
	if kept := f.cas.Load(); len(kept.own) != maxCAs || len(kept.all) != 2*maxCAs-1 {
		t.Errorf("%d CAs and %d certificates are kept", len(kept.own), len(kept.all))
	}
	if _, err := dial(t, f.Authority, last.roots, last.certificate); err == nil {
		t.Error("who knows a CA that is kept no longer trusts the broker")
	}
}

// testForeignCA: a CA that an operator made is neither replaced in time nor by a command, and one
// that may sign no other is not replaced, since no agent would trust what came after it.
func (f *fixture) testForeignCA(t *testing.T) {
	secret := &corev1.Secret{}
	expect.NoError(t, f.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: CAName}, secret))
	before := secret.DeepCopy()
	defer func() {
		expect.NoError(t, f.api.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
		secret.Data, secret.Labels = before.Data, before.Labels
		expect.NoError(t, f.api.Update(t.Context(), secret))
		f.clock.SetTime(f.now)
		expect.NoError(t, f.reload(t.Context()))
	}()
	secret.Labels = nil
	expect.NoError(t, f.api.Update(t.Context(), secret))
	f.clock.SetTime(f.now.Add(caValidity - rotateBefore + time.Hour))
	hash := f.CAHash()
	expect.NoError(t, f.reload(t.Context()))
	if err := Rotate(t.Context(), f.api, namespace, f.clock); err == nil || f.CAHash() != hash {
		t.Errorf("a CA that an operator made was replaced: %v", err)
	}
	leafOnly := f.cas.Load()
	leafOnly = &cas{own: []*x509.Certificate{new(*leafOnly.signer())}, key: leafOnly.key}
	leafOnly.own[0].MaxPathLen = 0
	if _, err := newCA(f.now, leafOnly); err == nil {
		t.Error("a CA of path length 0 has signed another one")
	}
}

// testDueRotation: a CA is replaced long before its end.
func (f *fixture) testDueRotation(t *testing.T) {
	before := f.CAHash()
	f.clock.SetTime(f.now.Add(caValidity - rotateBefore + time.Hour))
	defer f.clock.SetTime(f.now)
	for range 2 {
		expect.NoError(t, f.reload(t.Context()))
	}
	if f.CAHash() == before {
		t.Error("the CA is still the same")
	}
	published := &corev1.ConfigMap{}
	expect.NoError(t, f.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: CAName}, published))
	if published.Data["caHash"] != f.CAHash() {
		t.Errorf("published is %s", published.Data["caHash"])
	}
}
