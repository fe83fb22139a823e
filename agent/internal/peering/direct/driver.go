package direct

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// Driver is the consumer's side.
type Driver struct {
	Options
	handshake *session.Client[*message]

	mu sync.Mutex
	// wanted are the namespaces last requested for each provider.
	wanted map[string][]string
	// leases are the last observed renewals of Nodes' leases.
	leases map[string]leaseRenewal
}

var (
	_ peering.Driver   = (*Driver)(nil)
	_ peering.Receiver = (*Driver)(nil)
)

// NewDriver returns the consumer's side.
func NewDriver(options Options) (*Driver, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	if options.Messenger == nil {
		return nil, errors.New("direct: a messenger is required")
	}
	return &Driver{
		Options: options, handshake: session.NewClient(codec, options.Options, session.Grant, session.Gone, session.Refusal),
		wanted: map[string][]string{}, leases: map[string]leaseRenewal{},
	}, nil
}

// Receive implements peering.Receiver.
func (d *Driver) Receive(provider string, raw []byte) { d.handshake.Receive(provider, raw) }

// resetMemory drops what is kept in memory for a provider's peering.
func (d *Driver) resetMemory(provider string) {
	d.handshake.Reset(provider)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.leases, broker.VirtualNodeName(provider))
}

// EnsurePeering peers this cluster with a provider, and renews the token.
func (d *Driver) EnsurePeering(ctx context.Context, peer peering.Peer) (peering.Progress, error) {
	_, progress, err := d.ensurePeering(ctx, peer)
	return progress, err
}

func (d *Driver) ensurePeering(ctx context.Context, peer peering.Peer) (*record, peering.Progress, error) {
	provider := peer.ClusterID
	if err := session.ValidateClusterID(provider); err != nil {
		return nil, peering.Progress{}, err
	}
	r, taken, err := d.load(ctx, provider)
	switch {
	case err != nil:
		return nil, peering.Progress{}, err
	case taken:
		return nil, peering.Waiting("SecretNameTaken", fmt.Sprintf("Secret %s/%s already exists and is not managed by Spillway; rename or delete it", d.VirtualNodeNamespace, nodeconfig.SecretName(provider))), nil
	case r != nil && r.ending():
		// A teardown that has begun is completed before the next peering begins.
		if removed, err := d.Teardown(ctx, peer); err != nil || !removed.Done {
			return nil, peering.Waiting("Terminating", "the previous peering with "+provider+" is still being removed: "+removed.Message), err
		}
		r = nil
	}
	if r == nil {
		r = &record{Config: nodeconfig.Config{Provider: provider}, state: statePending, session: session.FirstNumber(d.Clock.Now())}
		d.resetMemory(provider)
		if err := d.store(ctx, r); err != nil {
			return nil, peering.Progress{}, err
		}
	}
	progress, err := d.ensureToken(ctx, peer, r)
	return r, progress, err
}

// ensureToken requests or renews the token where that is due. A reply that has
// arrived is stored first.
func (d *Driver) ensureToken(ctx context.Context, peer peering.Peer, r *record) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := d.storeReply(ctx, r); err != nil {
		return peering.Progress{}, err
	}
	state, err := d.tokenState(ctx, r)
	if err != nil {
		return peering.Progress{}, err
	}
	peered := peering.Done("Peered", "peered with "+provider)
	if state == tokenValid {
		return peered, nil
	}
	exchange := d.handshake.Exchange(provider)
	refused := exchange.Refused(r.session, provider, codec.Driver)
	if exchange.HelloDue(r.session, d.Clock.Now(), d.ResendAfter) {
		err = d.handshake.Send(ctx, peer, &message{Header: session.Header{Kind: session.Hello, Session: r.session, RequestID: d.handshake.RequestID(provider)}})
	}
	switch {
	case state == tokenRenewable && err != nil:
		// The old token is valid for as long again, so the peering remains.
		d.Log.Error(err, "Failed to renew a token; the old one is still valid", "provider", provider, "expires", r.expires)
		return peered, nil
	case state == tokenRenewable && refused != nil:
		return peering.Done("Peered", "peered with "+provider+"; the token is not renewed yet: "+refused.Message), nil
	case state == tokenRenewable:
		return peered, nil
	case err != nil:
		return peering.Progress{}, err
	case refused != nil:
		return *refused, nil
	case state == tokenRejected:
		return peering.Waiting("TokenRejected", "provider "+provider+" rejects this cluster's token; requesting another"), nil
	case state == tokenExpired:
		return peering.Waiting("TokenExpired", "the token for provider "+provider+" has expired; requesting another"), nil
	}
	return peering.Waiting("ResponsePending", "waiting for provider "+provider+" to respond"), nil
}

// tokenState is whether a token has to be requested from a provider.
type tokenState int

const (
	tokenValid tokenState = iota
	tokenRenewable
	tokenMissing
	tokenExpired
	tokenRejected
)

// reasonAccessDenied is the reason that virtual-node gives the Node's condition
// Ready if the provider rejects the token.
const reasonAccessDenied = "ProviderAccessDenied"

// tokenGrace is how long a new token has to take effect at the Node.
const tokenGrace = 20 * time.Second

func (d *Driver) tokenState(ctx context.Context, r *record) (tokenState, error) {
	now := d.Clock.Now()
	switch {
	case !r.connected():
		return tokenMissing, nil
	case !now.Before(r.expires):
		return tokenExpired, nil
	}
	node, err := session.Node(ctx, d.Client, r.Provider)
	if err != nil {
		return 0, err
	}
	if node != nil && node.Labels[broker.LabelProvider] == r.Provider && now.Sub(r.granted) >= tokenGrace {
		if ready := session.Ready(node); ready.Status != corev1.ConditionTrue && ready.Reason == reasonAccessDenied {
			return tokenRejected, nil
		}
	}
	if !now.Before(r.renew) {
		return tokenRenewable, nil
	}
	return tokenValid, nil
}

// storeReply stores what a provider granted.
func (d *Driver) storeReply(ctx context.Context, r *record) error {
	exchange := d.handshake.Exchange(r.Provider)
	if refusal, ok := exchange.Reply(session.Refusal, r.session); ok && refusal.Reason == session.ReasonStale {
		r.session = session.Next(r.session, refusal.Current)
		d.resetMemory(r.Provider)
		return d.store(ctx, r)
	}
	grant, ok := exchange.Reply(session.Grant, r.session)
	if !ok {
		return nil
	}
	now, lifetime := d.Clock.Now(), time.Duration(grant.Seconds)*time.Second
	r.Connection = nodeconfig.Connection{Endpoint: grant.Endpoint, CA: grant.CA, Namespace: grant.Namespace, Token: grant.Token, Expires: grant.Expires.UTC()}
	r.granted, r.renew, r.expires = now, now.Add(lifetime/2), now.Add(lifetime)
	if err := d.store(ctx, r); err != nil {
		return err
	}
	d.resetMemory(r.Provider)
	d.Log.Info("Provider granted a token", "provider", r.Provider, "seconds", grant.Seconds, "endpoint", grant.Endpoint)
	return nil
}

// Observe lists the providers of the peerings that exist in any state.
func (d *Driver) Observe(ctx context.Context) (providers []string, err error) {
	records, err := d.records(ctx)
	for _, r := range records {
		providers = append(providers, r.Provider)
	}
	slices.Sort(providers)
	return providers, err
}

// Tolerations for a provider's virtual node.
func (d *Driver) Tolerations(clusterID string) []corev1.Toleration {
	return []corev1.Toleration{session.Toleration(clusterID)}
}
