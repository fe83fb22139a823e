package histories

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

const (
	// beat is the interval of a provider's advertisements.
	beat = 10 * time.Second
	// retryAfter is the time between two tries of a call.
	retryAfter = 50 * time.Millisecond
	// tryTimeout is how long one try may take: a broker that is stopped does not answer.
	tryTimeout = 5 * time.Second
)

// recorder collects a history.
type recorder struct {
	began time.Time

	mu      sync.Mutex
	history []porcupine.Operation
}

// now is the time in the history.
func (r *recorder) now() int64 { return time.Since(r.began).Nanoseconds() }

// add adds an operation that was called at a time and has returned.
func (r *recorder) add(call int64, s step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history = append(r.history, porcupine.Operation{Input: s, Call: call, Return: r.now()})
}

func (r *recorder) operations() []porcupine.Operation {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]porcupine.Operation(nil), r.history...)
}

// join makes a cluster known to the brokers and returns its client.
func (h *hub) join(t *testing.T, id string) *protocol.Client {
	t.Helper()
	var authority corev1.ConfigMap
	var token corev1.Secret
	expect.NoError(t, h.api.Get(t.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: "spillway-broker-ca"}, &authority))
	expect.NoError(t, h.api.Get(t.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: "spillway-join-token"}, &token))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: id}}, key)
	expect.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	expect.NoError(t, err)
	var joined protocol.JoinResponse
	expect.EventuallyWithin(t, patience, id+" to join", func() (bool, string) {
		joined, err = protocol.Join(t.Context(), h.service.url, authority.Data["caHash"], id, string(token.Data["token"]),
			pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr}))
		return err == nil, fmt.Sprint(err)
	})
	pair, err := tls.X509KeyPair([]byte(joined.Certificate), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	expect.NoError(t, err)
	config, err := protocol.TLSConfig([]byte(joined.CA), func() (*tls.Certificate, error) { return &pair, nil })
	expect.NoError(t, err)
	c, err := protocol.NewClient(h.service.url, config, logr.Discard())
	expect.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// retry repeats a call until it succeeds or ctx ends.
func retry(ctx context.Context, call func(context.Context) error) error {
	for {
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		err := call(try)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; the last try: %w", ctx.Err(), err)
		case <-time.After(retryAfter):
		}
	}
}

// provider is a cluster that holds whatever the broker asks it to.
type provider struct {
	id     string
	client *protocol.Client
	record *recorder

	mu       sync.Mutex
	sequence int64
	held     map[types.UID]int32
	// attempts are the last ones that it has heard of: what is older is outdated.
	attempts map[types.UID]int64
}

// run advertises and answers until ctx ends.
func (p *provider) run(ctx context.Context) {
	go func() {
		ticker := time.NewTicker(beat)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				p.advertise(ctx)
			}
		}
	}()
	p.client.Watch(ctx, protocol.RoleProvider, func(event protocol.Event) {
		if event.Type == protocol.EventRelist {
			// As the agent does when it connects: a new leader has heard nothing yet.
			go p.advertise(ctx)
		}
		for _, view := range event.Provider {
			go p.answer(ctx, view)
		}
	})
}

// advertise offers room for pods of one CPU, on a node each.
func (p *provider) advertise(ctx context.Context) {
	p.mu.Lock()
	p.sequence++
	sequence := p.sequence
	p.mu.Unlock()
	amount := func(cpus int64) broker.ResourceQuantities {
		return broker.ResourceQuantities{CPU: resource.NewQuantity(cpus, resource.DecimalSI)}
	}
	// One that fails is followed by another one.
	_, _ = p.client.PublishAdvertisement(ctx, broker.ClusterAdvertisementSpec{
		ClusterID: p.id, EndpointURL: "https://192.0.2.1:6443", Lending: broker.Lending{Enabled: true},
		Resources: broker.AdvertisedResources{Capacity: amount(room), Allocatable: amount(room)},
		NodeClasses: []broker.NodeClass{{
			Name: "nodes", Arch: "amd64", FreeShapes: []broker.FreeShape{{Nodes: room, Free: amount(1), Pods: 110}},
		}},
		Timestamp: metav1.Now().Rfc3339Copy(), Sequence: sequence,
	})
}

// answer holds what a view promises, and says so.
func (p *provider) answer(ctx context.Context, view protocol.ProviderView) {
	hold := &view.Hold
	if hold.AcceptedAttempt == hold.Attempt && hold.Unconfirmed == nil || !p.hold(hold) {
		return
	}
	// An error is that of the end.
	_ = retry(ctx, func(ctx context.Context) error {
		err := p.client.AckProvider(ctx, view.ID, protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Accepted: true})
		if protocol.HasCode(err, protocol.CodeNotFound) {
			return nil
		}
		return err
	})
}

// hold records what is held, unless the hold is outdated.
func (p *provider) hold(hold *broker.Hold) bool {
	call := p.record.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	uid, pods := hold.ReservationUID, hold.Promised.Pods()
	if hold.Attempt < p.attempts[uid] {
		return false
	}
	p.attempts[uid] = hold.Attempt
	if p.held[uid] != pods {
		p.held[uid] = pods
		p.record.add(call, step{kind: holds, provider: p.id, uid: uid, pods: pods})
	}
	return true
}

// holdsBesides reports whether something is held for a Reservation that is not listed.
func (p *provider) holdsBesides(listed map[types.UID]bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pods := range p.held {
		if pods > 0 && !listed[uid] {
			return true
		}
	}
	return false
}

// holding describes what is held.
func (p *provider) holding() (all []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pods := range p.held {
		if pods > 0 {
			all = append(all, fmt.Sprintf("%s holds %d pods for %s of attempt %d", p.id, pods, uid, p.attempts[uid]))
		}
	}
	return all
}

// consumer is a cluster that requests capacity.
type consumer struct {
	id     string
	client *protocol.Client
	record *recorder

	mu sync.Mutex
	// views are what the broker says, by the UID of the source; changed is closed at the
	// next change.
	views   map[types.UID]protocol.ConsumerView
	changed chan struct{}
	// mine are the sources that exist.
	mine map[types.UID]bool
}

// watch follows the broker's stream until ctx ends. It deletes what has no source, as
// the agent does: a request that was on its way may arrive after the deletion.
func (c *consumer) watch(ctx context.Context) {
	c.client.Watch(ctx, protocol.RoleRequester, func(event protocol.Event) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if event.Type == protocol.EventRelist {
			clear(c.views)
		}
		for _, view := range event.Consumer {
			c.views[view.SourceUID] = view
			if !c.mine[view.SourceUID] {
				go func() {
					_ = retry(ctx, func(ctx context.Context) error { return c.client.DeleteReservation(ctx, view.ID) })
				}()
			}
		}
		if event.Type == protocol.EventDelete {
			maps.DeleteFunc(c.views, func(_ types.UID, view protocol.ConsumerView) bool { return view.ID == event.ID })
		}
		close(c.changed)
		c.changed = make(chan struct{})
	})
}

// await waits until the view of a source is as it should be; known is false if there is
// none.
func (c *consumer) await(ctx context.Context, source types.UID, what string, is func(view *protocol.ConsumerView, known bool) bool) (protocol.ConsumerView, error) {
	for {
		c.mu.Lock()
		view, known := c.views[source]
		changed := c.changed
		c.mu.Unlock()
		if is(&view, known) {
			return view, nil
		}
		select {
		case <-ctx.Done():
			return view, fmt.Errorf("%s: waiting for %s to be %s: %w; %q, conditions %v", c.id, source, what, ctx.Err(), view.Status.Summary, view.Status.Conditions)
		case <-changed:
		}
	}
}

// own adds a source to those that exist, or removes it.
func (c *consumer) own(source types.UID, exists bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if exists {
		c.mine[source] = true
	} else {
		delete(c.mine, source)
	}
}
