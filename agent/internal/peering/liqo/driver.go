package liqo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Driver is the consumer's side.
type Driver struct {
	Options

	mu sync.Mutex
	// conversations with providers, by cluster ID.
	conversations map[string]*conversation
	// wanted namespaces of each provider, as last asked for.
	wanted map[string][]string
	// ended is when a provider's virtual node was last seen to be going.
	ended map[string]time.Time
}

var (
	_ peering.Driver   = (*Driver)(nil)
	_ peering.Receiver = (*Driver)(nil)
)

// NewDriver makes the consumer's side.
func NewDriver(options Options) (*Driver, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	if options.Messenger == nil {
		return nil, errors.New("liqo: a messenger is needed")
	}
	return &Driver{Options: options, conversations: map[string]*conversation{}, wanted: map[string][]string{}, ended: map[string]time.Time{}}, nil
}

// conversation is what was said to and by one provider.
type conversation struct {
	// heard is the last message of each kind.
	heard map[kind]message
	// said is when a kind was last sent, and since when something is waited for.
	said  map[kind]time.Time
	since map[string]time.Time
	// otherDriver is that of a provider that could not read what it was sent.
	otherDriver string
}

// conversation with a provider; the caller holds the lock.
func (d *Driver) conversation(provider string) *conversation {
	c := d.conversations[provider]
	if c == nil {
		c = &conversation{heard: map[kind]message{}, said: map[kind]time.Time{}, since: map[string]time.Time{}}
		d.conversations[provider] = c
	}
	return c
}

// forget drops what was said to and by a provider.
func (d *Driver) forget(provider string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conversations, provider)
}

// waitedFor is how long something has been waited for, by this process.
func (d *Driver) waitedFor(provider, what string) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	since := d.conversation(provider).since
	if since[what].IsZero() {
		since[what] = d.Clock.Now()
	}
	return d.Clock.Now().Sub(since[what])
}

// Receive keeps a provider's answer for the next call.
func (d *Driver) Receive(provider string, raw []byte) {
	if other, unreadable := peering.ReadsOnly(raw); unreadable {
		d.mu.Lock()
		c, asked := d.conversations[provider]
		if asked {
			c.otherDriver = other
		}
		d.mu.Unlock()
		if asked {
			d.Enqueue(provider)
		}
		return
	}
	m, err := decode(raw, kindOffer, kindGrant, kindGone, kindRefusal)
	if err != nil {
		d.Log.Info("dropping a provider's message", "provider", provider, "reason", err.Error())
		return
	}
	d.mu.Lock()
	c, asked := d.conversations[provider]
	if asked {
		c.heard[m.Kind] = m
		c.otherDriver = ""
	}
	d.mu.Unlock()
	if asked {
		d.Enqueue(provider)
	}
}

// EnsurePeering links this cluster to a provider.
func (d *Driver) EnsurePeering(ctx context.Context, peer peering.Peer) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := validateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	// Sessions grow with this cluster's clock; where it was set back, the
	// provider says from where to go on.
	namespace, wait, err := d.ensureTenantNamespace(ctx, provider, annotationSession, d.Clock.Now().UnixMilli())
	if wait != nil || err != nil {
		return ptr.Deref(wait, peering.Progress{}), err
	}
	d.mu.Lock()
	c := d.conversation(provider)
	clear(c.since) // whatever teardown there was has been thought better of
	_, ending := c.said[kindTeardown]
	d.mu.Unlock()
	identity, found, err := get(ctx, d.Client, namespace.Name, controlPlaneIdentity(provider), &authv1beta1.Identity{})
	switch {
	case err != nil:
		return peering.Progress{}, fmt.Errorf("reading the identity for %s: %w", provider, err)
	case !found && ending:
		// The provider was told that this session is over.
		if err := setSession(ctx, d.Client, namespace, annotationSession, sessionOf(namespace, annotationSession)+1); err != nil {
			return peering.Progress{}, err
		}
		d.forget(provider)
		return d.shakeHands(ctx, peer, namespace)
	case !found:
		return d.shakeHands(ctx, peer, namespace)
	case !isOurs(identity):
		return peering.Waiting(reasonPeeredByOthers, "Identity "+identity.Name+" is not Spillway's: "+provider+" was peered by hand"), nil
	case !identity.DeletionTimestamp.IsZero():
		return peering.Waiting(reasonTerminating, "the identity of an earlier peering is still going"), nil
	case identity.Status.KubeconfigSecretRef == nil:
		return peering.Waiting("KubeconfigPending", "waiting for Liqo to store the credentials for "+provider), nil
	}
	return peering.Done("Peered", "linked to "+provider), nil
}

// move is the next thing to do in a handshake.
type move struct {
	// say is sent if it is not empty; answer is the message to act on.
	say    kind
	answer message
	// progress is reported.
	progress peering.Progress
}

// next decides it from what was said and heard in this session. After a refusal
// it begins again, in time.
func (c *conversation) next(session int64, now time.Time, resendAfter time.Duration) move {
	current := func(k kind) (message, bool) {
		m, ok := c.heard[k]
		return m, ok && m.Session == session
	}
	due := func(k kind, patience time.Duration) kind {
		if said, ok := c.said[k]; ok && now.Sub(said) < patience {
			return ""
		}
		return k
	}
	if refusal, ok := current(kindRefusal); ok {
		return move{say: due(kindHello, 5*resendAfter), answer: refusal, progress: peering.Waiting("Refused",
			fmt.Sprintf("the provider refused the peering: %s: %s", refusal.Reason, refusal.Text))}
	}
	if grant, ok := current(kindGrant); ok {
		return move{answer: grant, progress: peering.Waiting("Granted", "the provider has signed a certificate")}
	}
	if offer, ok := current(kindOffer); ok {
		return move{say: due(kindRequest, resendAfter), answer: offer, progress: peering.Waiting("Requesting", "waiting for the provider to sign a certificate")}
	}
	return move{say: due(kindHello, resendAfter), progress: peering.Waiting("Greeting", "waiting for the provider to answer")}
}

// shakeHands takes the handshake one message further.
func (d *Driver) shakeHands(ctx context.Context, peer peering.Peer, namespace *corev1.Namespace) (peering.Progress, error) {
	provider, session := peer.ClusterID, sessionOf(namespace, annotationSession)
	d.mu.Lock()
	c := d.conversation(provider)
	next, other := c.next(session, d.Clock.Now(), d.ResendAfter), c.otherDriver
	d.mu.Unlock()
	if other != "" {
		next.progress = peering.Mismatched(provider, other, driverName)
	}

	switch next.answer.Kind {
	case kindGrant:
		return next.progress, d.createIdentity(ctx, provider, namespace, next.answer)
	case kindRefusal:
		if next.answer.Reason == reasonStale {
			// The provider knows a later session than this one: go on from there.
			d.forget(provider)
			if err := setSession(ctx, d.Client, namespace, annotationSession, max(session, next.answer.Current)+1); err != nil {
				return peering.Progress{}, err
			}
			return d.shakeHands(ctx, peer, namespace)
		}
		if next.say == kindHello {
			d.forget(provider)
		}
	}
	out := message{Kind: next.say, Session: session}
	switch next.say {
	case "":
		return next.progress, nil
	case kindRequest:
		keys, found, err := get(ctx, d.Client, d.LiqoNamespace, consts.AuthKeysSecretName, &corev1.Secret{})
		if err != nil {
			return peering.Progress{}, fmt.Errorf("reading Liqo's keys: %w", err)
		}
		if !found {
			return peering.Waiting("LiqoNotReady", fmt.Sprintf("Liqo has made no Secret %s/%s yet: is it installed there?", d.LiqoNamespace, consts.AuthKeysSecretName)), nil
		}
		if out.PublicKey, out.CSR, out.Signature, err = prove(keys, d.ClusterID, next.answer.Nonce); err != nil {
			return peering.Progress{}, fmt.Errorf("answering the nonce of %s: %w", provider, err)
		}
	}
	return next.progress, d.send(ctx, peer, out)
}

func (d *Driver) send(ctx context.Context, peer peering.Peer, m message) error {
	raw, err := encode(m)
	if err != nil {
		return err
	}
	// Noted first: the answer may be here before Send returns.
	d.mu.Lock()
	d.conversation(peer.ClusterID).said[m.Kind] = d.Clock.Now()
	d.mu.Unlock()
	if err := d.Messenger.Send(ctx, peer, raw); err != nil {
		d.mu.Lock()
		delete(d.conversation(peer.ClusterID).said, m.Kind)
		d.mu.Unlock()
		return fmt.Errorf("sending a %s to %s: %w", m.Kind, peer.ClusterID, err)
	}
	return nil
}

// createIdentity gives Liqo what to connect with; the ForeignCluster follows by
// itself.
func (d *Driver) createIdentity(ctx context.Context, provider string, namespace *corev1.Namespace, grant message) error {
	identity := &authv1beta1.Identity{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: controlPlaneIdentity(provider), Labels: ours(provider)},
		Spec: authv1beta1.IdentitySpec{
			ClusterID: liqov1beta1.ClusterID(provider),
			Type:      authv1beta1.ControlPlaneIdentityType,
			AuthParams: authv1beta1.AuthParams{
				CA: grant.CA, SignedCRT: grant.Certificate, APIServer: grant.APIServer,
			},
			Namespace: &grant.TenantNamespace,
		},
	}
	if grant.ProxyURL != "" {
		identity.Spec.AuthParams.ProxyURL = &grant.ProxyURL
	}
	if err := d.Client.Create(ctx, identity); err != nil {
		return fmt.Errorf("creating the identity for %s: %w", provider, err)
	}
	return nil
}

// Observe lists the links that exist in any state.
func (d *Driver) Observe(ctx context.Context) ([]peering.Observed, error) {
	var namespaces corev1.NamespaceList
	if err := d.Client.List(ctx, &namespaces, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway, consts.TenantNamespaceLabel: "true"}); err != nil {
		return nil, fmt.Errorf("listing tenant namespaces: %w", err)
	}
	var virtualNodes offloadingv1beta1.VirtualNodeList
	if err := d.Client.List(ctx, &virtualNodes, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}); err != nil {
		return nil, fmt.Errorf("listing virtual nodes: %w", err)
	}
	links := map[string]bool{}
	for i := range namespaces.Items {
		if sessionOf(&namespaces.Items[i], annotationSession) != 0 {
			links[namespaces.Items[i].Labels[consts.RemoteClusterID]] = true
		}
	}
	for i := range virtualNodes.Items {
		links[string(virtualNodes.Items[i].Spec.ClusterID)] = true
	}
	var observed []peering.Observed
	for id := range links {
		o := peering.Observed{ClusterID: id}
		identity, found, err := get(ctx, d.Client, tenantNamespace(id), controlPlaneIdentity(id), &authv1beta1.Identity{})
		if err != nil {
			return nil, fmt.Errorf("reading the identity for %s: %w", id, err)
		}
		o.Peered = found && identity.DeletionTimestamp.IsZero() && identity.Status.KubeconfigSecretRef != nil
		node, found, err := get(ctx, d.Client, "", sliceName(id), &corev1.Node{})
		if err != nil {
			return nil, fmt.Errorf("reading node %s: %w", sliceName(id), err)
		}
		if found {
			o.Node = node
		}
		observed = append(observed, o)
	}
	slices.SortFunc(observed, func(a, b peering.Observed) int { return strings.Compare(a.ClusterID, b.ClusterID) })
	return observed, nil
}

// Tolerations for a provider's virtual node: our taint and Liqo's.
func (d *Driver) Tolerations(clusterID string) []corev1.Toleration {
	return []corev1.Toleration{
		{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: clusterID, Effect: corev1.TaintEffectNoSchedule},
		{Key: consts.VirtualNodeTolerationKey, Operator: corev1.TolerationOpEqual, Value: "true", Effect: corev1.TaintEffectNoExecute},
	}
}
