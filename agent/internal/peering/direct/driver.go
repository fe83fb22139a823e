package direct

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// Driver is the consumer's side.
type Driver struct {
	Options

	mu sync.Mutex
	// conversations with providers, by cluster ID.
	conversations map[string]*conversation
	// wanted namespaces of each provider, as last asked for.
	wanted map[string][]string
	// leases are when a Node's lease was last seen to move.
	leases map[string]sighting
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
		return nil, errors.New("direct: a messenger is needed")
	}
	return &Driver{Options: options, conversations: map[string]*conversation{}, wanted: map[string][]string{}, leases: map[string]sighting{}}, nil
}

// Receive keeps a provider's answer for the next call.
func (d *Driver) Receive(provider string, raw []byte) {
	var answer message
	other, unreadable := peering.ReadsOnly(raw)
	if !unreadable {
		var err error
		if answer, err = decode(raw, kindGrant, kindGone, kindRefusal); err != nil {
			d.Log.Info("dropping a provider's message", "provider", provider, "reason", err.Error())
			return
		}
	}
	d.mu.Lock()
	c, asked := d.conversations[provider]
	if asked {
		if unreadable {
			c.otherDriver = other
		} else {
			c.otherDriver = ""
			c.hear(answer)
		}
	}
	d.mu.Unlock()
	if asked {
		d.Enqueue(provider)
	}
}

// EnsurePeering links this cluster to a provider, and renews the link's token.
func (d *Driver) EnsurePeering(ctx context.Context, peer peering.Peer) (peering.Progress, error) {
	_, progress, err := d.ensurePeering(ctx, peer)
	return progress, err
}

func (d *Driver) ensurePeering(ctx context.Context, peer peering.Peer) (*record, peering.Progress, error) {
	provider := peer.ClusterID
	if err := validateClusterID(provider); err != nil {
		return nil, peering.Progress{}, err
	}
	r, foreign, err := d.load(ctx, provider)
	switch {
	case err != nil:
		return nil, peering.Progress{}, err
	case foreign:
		return nil, peering.Waiting("SecretNameTaken", fmt.Sprintf("Secret %s/%s exists and is not Spillway's: rename or remove it", d.LinkNamespace, nodeconfig.SecretName(provider))), nil
	case r != nil && r.ending():
		// Its end has begun, and is brought to an end before the next one begins.
		if gone, err := d.Teardown(ctx, peer); err != nil || !gone.Done {
			return nil, peering.Waiting("Terminating", "the former link to "+provider+" is still going: "+gone.Message), err
		}
		r = nil
	}
	if r == nil {
		// Sessions grow with this cluster's clock; where it was set back, the
		// provider says from where to go on.
		r = &record{Config: nodeconfig.Config{Provider: provider}, state: stateBegun, session: d.Clock.Now().UnixMilli()}
		d.forget(provider)
		if err := d.store(ctx, r); err != nil {
			return nil, peering.Progress{}, err
		}
	}
	progress, err := d.ask(ctx, peer, r)
	return r, progress, err
}

// ask has the provider grant the link, or renew its token, where that is due. An
// answer that came is stored first.
func (d *Driver) ask(ctx context.Context, peer peering.Peer, r *record) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := d.takeAnswer(ctx, r); err != nil {
		return peering.Progress{}, err
	}
	need, err := d.needed(ctx, r)
	if err != nil {
		return peering.Progress{}, err
	}
	if need == needNothing {
		return peering.Done("Peered", "linked to "+provider), nil
	}
	now := d.Clock.Now()
	d.mu.Lock()
	c := d.conversation(provider)
	due, refused := c.due(now, d.ResendAfter), c.said(provider)
	if due {
		if c.ask == 0 {
			c.ask = max(now.UnixNano(), 1)
		}
		c.asked = now
	}
	number := c.ask
	d.mu.Unlock()
	if due {
		if err = d.send(ctx, peer, message{Kind: kindHello, Session: r.session, Ask: number}); err != nil {
			d.mu.Lock()
			d.conversation(provider).asked = time.Time{}
			d.mu.Unlock()
		}
	}
	if need == needRenewal {
		// The old token is good for as long again: nothing is to be disturbed.
		switch {
		case err != nil:
			d.Log.Error(err, "Renewing a link's token; the old one is still good", "provider", provider, "until", r.expires)
		case refused != nil:
			return peering.Done("Peered", "linked to "+provider+"; its token is not renewed yet: "+refused.Message), nil
		}
		return peering.Done("Peered", "linked to "+provider), nil
	}
	if err != nil {
		return peering.Progress{}, err
	}
	if refused != nil {
		return *refused, nil
	}
	switch need {
	case needAfresh:
		return peering.Waiting("TokenRefused", provider+" does not take this cluster's token any more: asking for another"), nil
	case needExpired:
		return peering.Waiting("TokenExpired", "the token for "+provider+" has ended: waiting for another"), nil
	}
	return peering.Waiting("Greeting", "waiting for "+provider+" to answer"), nil
}

// need is why a provider is asked for a token.
type need int

const (
	needNothing need = iota
	needRenewal
	needFirst
	needExpired
	needAfresh
)

// reasonProviderRefused is virtual-node's word for a token that the provider
// does not take, as the reason of the Node's condition Ready.
const reasonProviderRefused = "ProviderRefused"

// believeAfter is how long a new token is given to show at the Node.
const believeAfter = 20 * time.Second

func (d *Driver) needed(ctx context.Context, r *record) (need, error) {
	now := d.Clock.Now()
	switch {
	case !r.connected():
		return needFirst, nil
	case !now.Before(r.expires):
		return needExpired, nil
	}
	node, found, err := get(ctx, d.Client, "", broker.VirtualNodeName(r.Provider), &corev1.Node{})
	if err != nil {
		return 0, fmt.Errorf("reading node %s: %w", broker.VirtualNodeName(r.Provider), err)
	}
	if found && node.Labels[broker.LabelProvider] == r.Provider && now.Sub(r.granted) >= believeAfter {
		if ready := readiness(node); ready.Status != corev1.ConditionTrue && ready.Reason == reasonProviderRefused {
			return needAfresh, nil
		}
	}
	if !now.Before(r.renew) {
		return needRenewal, nil
	}
	return needNothing, nil
}

// takeAnswer stores what a provider answered.
func (d *Driver) takeAnswer(ctx context.Context, r *record) error {
	d.mu.Lock()
	c := d.conversation(r.Provider)
	answer := c.answer
	if answer.Kind == kindGrant || answer.Reason == reasonStale {
		c.answer = message{}
	}
	d.mu.Unlock()
	switch {
	case answer.Session != r.session:
		return nil
	case answer.Reason == reasonStale:
		// The provider knows a later session than this one: go on from there.
		r.session = max(r.session, answer.Current) + 1
		d.forget(r.Provider)
		return d.store(ctx, r)
	case answer.Kind != kindGrant:
		return nil
	}
	now := d.Clock.Now()
	life := time.Duration(answer.Seconds) * time.Second
	r.Connection = nodeconfig.Connection{Endpoint: answer.Endpoint, CA: answer.CA, Namespace: answer.Namespace, Token: answer.Token, Expires: answer.Expires.UTC()}
	r.granted, r.renew, r.expires = now, now.Add(life/2), now.Add(life)
	if err := d.store(ctx, r); err != nil {
		d.mu.Lock()
		d.conversation(r.Provider).answer = answer // it is stored the next time
		d.mu.Unlock()
		return err
	}
	d.forget(r.Provider)
	d.Log.Info("The provider has granted a token", "provider", r.Provider, "seconds", answer.Seconds, "endpoint", answer.Endpoint)
	return nil
}

func (d *Driver) send(ctx context.Context, peer peering.Peer, m message) error {
	raw, err := encode(m)
	if err != nil {
		return err
	}
	if err := d.Messenger.Send(ctx, peer, raw); err != nil {
		return fmt.Errorf("sending a %s to %s: %w", m.Kind, peer.ClusterID, err)
	}
	return nil
}

// Observe lists the links that exist in any state.
func (d *Driver) Observe(ctx context.Context) ([]peering.Observed, error) {
	records, err := d.records(ctx)
	if err != nil {
		return nil, err
	}
	var observed []peering.Observed
	for _, r := range records {
		o := peering.Observed{ClusterID: r.Provider, Peered: r.connected() && !r.ending() && d.Clock.Now().Before(r.expires)}
		node, found, err := get(ctx, d.Client, "", broker.VirtualNodeName(r.Provider), &corev1.Node{})
		if err != nil {
			return nil, fmt.Errorf("reading node %s: %w", broker.VirtualNodeName(r.Provider), err)
		}
		if found {
			o.Node = node
		}
		observed = append(observed, o)
	}
	slices.SortFunc(observed, func(a, b peering.Observed) int { return strings.Compare(a.ClusterID, b.ClusterID) })
	return observed, nil
}

// Tolerations for a provider's virtual node.
func (d *Driver) Tolerations(clusterID string) []corev1.Toleration {
	return []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: clusterID, Effect: corev1.TaintEffectNoSchedule}}
}
