package direct

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const namespaceTerminating = corev1.NamespaceTerminatingCause

// Teardown removes the virtual node, the link and everything made for them. The
// order strands nothing: pods leave while virtual-node and its token still work,
// and the link is remembered until the provider has said that nothing is left.
func (d *Driver) Teardown(ctx context.Context, peer peering.Peer) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := validateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	fail := func(err error) (peering.Progress, error) {
		return peering.Progress{}, fmt.Errorf("tearing down the link to %s: %w", provider, err)
	}
	d.mu.Lock()
	delete(d.wanted, provider)
	d.conversation(provider) // answers are welcome
	d.mu.Unlock()
	r, _, err := d.load(ctx, provider)
	if err != nil {
		return fail(err)
	}
	node, err := d.ourNode(ctx, provider)
	if err != nil {
		return fail(err)
	}
	switch {
	case r == nil && node == nil:
		d.forget(provider)
		return peering.Done("Gone", "nothing is left of the link to "+provider), nil
	case r != nil && r.state == stateBegun:
		// virtual-node never heard of it.
		return d.over(ctx, peer, r)
	case r != nil && r.state == stateLinked && !r.Ending:
		r.Ending = true
		if err := d.store(ctx, r); err != nil {
			return fail(err)
		}
		return peering.Waiting("NodeGoing", "waiting for the pods of node "+broker.VirtualNodeName(provider)+" to end, and for the node"), nil
	case node != nil:
		progress, err := d.awaitNode(ctx, r, node)
		if err != nil {
			return fail(err)
		}
		return progress, nil
	}
	return d.over(ctx, peer, r)
}

// ourNode is a provider's Node, nil where there is none that is Spillway's.
func (d *Driver) ourNode(ctx context.Context, provider string) (*corev1.Node, error) {
	name := broker.VirtualNodeName(provider)
	node, found, err := get(ctx, d.Client, "", name, &corev1.Node{})
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", name, err)
	}
	if !found || !isOurs(node) || node.Labels[broker.LabelProvider] != provider {
		return nil, nil
	}
	return node, nil
}

// awaitNode waits until virtual-node has let go of a Node. Where it is gone
// itself, its Node is removed for it; where the pods do not end because the
// provider does not answer, they are given up here, and ended by the provider
// with all that is there.
func (d *Driver) awaitNode(ctx context.Context, r *record, node *corev1.Node) (peering.Progress, error) {
	provider := node.Labels[broker.LabelProvider]
	waiting := peering.Waiting("NodeGoing", "waiting for the pods of node "+node.Name+" to end, and for the node")
	stale, err := d.leaseStands(ctx, node.Name)
	switch {
	case err != nil:
		return waiting, err
	case stale:
		d.Log.Info("Removing a node that nobody keeps any more", "node", node.Name, "leaseUnchangedFor", d.StaleAfter.String())
		if err := d.abandonPods(ctx, node.Name); err != nil {
			return waiting, err
		}
		return waiting, d.removeNode(ctx, node)
	case r == nil || r.state != stateLinked || d.waitedFor(provider, "Ending") < d.UnreachableAfter || readiness(node).Status == corev1.ConditionTrue:
		return waiting, nil
	}
	if err := d.abandonPods(ctx, node.Name); err != nil {
		return waiting, err
	}
	// virtual-node sees the link no more, stops and deletes the Node.
	return waiting, d.erase(ctx, r)
}

// abandonPods forgets the pods of a node that nobody ends there: its keeper is
// gone, or the provider does not answer.
func (d *Driver) abandonPods(ctx context.Context, node string) error {
	var pods corev1.PodList
	if err := d.Client.List(ctx, &pods, client.MatchingFields{"spec.nodeName": node}); err != nil {
		return fmt.Errorf("listing the pods of node %s: %w", node, err)
	}
	var failed error
	for i := range pods.Items {
		d.Log.Info("Forgetting a pod that nobody ends any more", "node", node, "namespace", pods.Items[i].Namespace, "pod", pods.Items[i].Name)
		failed = errors.Join(failed, remove(ctx, d.Client, &pods.Items[i], client.GracePeriodSeconds(0)))
	}
	return failed
}

// erase takes a link out of virtual-node's sight, and its token out of the world.
func (d *Driver) erase(ctx context.Context, r *record) error {
	r.state, r.Config = stateOver, nodeconfig.Config{Provider: r.Provider}
	r.granted, r.renew, r.expires = time.Time{}, time.Time{}, time.Time{}
	return d.store(ctx, r)
}

// over ends a link of which no Node is left: the provider is told until it has
// confirmed, or has been silent for long.
func (d *Driver) over(ctx context.Context, peer peering.Peer, r *record) (peering.Progress, error) {
	provider := peer.ClusterID
	fail := func(err error) (peering.Progress, error) {
		return peering.Progress{}, fmt.Errorf("tearing down the link to %s: %w", provider, err)
	}
	if r.state != stateOver {
		if err := d.erase(ctx, r); err != nil {
			return fail(err)
		}
	}
	if err := d.closeNamespaces(ctx); err != nil {
		return fail(err)
	}
	waited := d.waitedFor(provider, "Provider")
	now := d.Clock.Now()
	d.mu.Lock()
	c := d.conversation(provider)
	// A provider with another driver has nothing of this one.
	confirmed := c.gone == r.session || c.otherDriver != ""
	due := c.ended.IsZero() || now.Sub(c.ended) >= d.ResendAfter
	if due {
		c.ended = now
	}
	d.mu.Unlock()
	var sendErr error
	if !confirmed && due {
		if sendErr = d.send(ctx, peer, message{Kind: kindTeardown, Session: r.session}); sendErr != nil {
			d.mu.Lock()
			d.conversation(provider).ended = time.Time{}
			d.mu.Unlock()
		}
	}
	if !confirmed && waited < d.UnreachableAfter {
		if sendErr != nil {
			return fail(sendErr)
		}
		return peering.Waiting("ProviderGoing", "waiting for "+provider+" to confirm that nothing is left there"), nil
	}
	if !confirmed {
		d.Log.Info("The provider did not say that nothing is left there; its agent clears up when it is back", "provider", provider)
	}
	if err := remove(ctx, d.Client, r.secret); err != nil {
		return fail(fmt.Errorf("deleting Secret %s/%s: %w", r.secret.Namespace, r.secret.Name, err))
	}
	d.forget(provider)
	return peering.Done("Gone", "nothing is left of the link to "+provider), nil
}

// sighting is when a lease was first seen as it is.
type sighting struct {
	renewed metav1.MicroTime
	since   time.Time
}

// leaseStands reports whether a Node's lease has not moved for long, watched by
// this cluster's clock alone.
func (d *Driver) leaseStands(ctx context.Context, node string) (bool, error) {
	lease, found, err := get(ctx, d.Client, corev1.NamespaceNodeLease, node, &coordinationv1.Lease{})
	if err != nil {
		return false, fmt.Errorf("reading the lease of node %s: %w", node, err)
	}
	var renewed metav1.MicroTime
	if found && lease.Spec.RenewTime != nil {
		renewed = *lease.Spec.RenewTime
	}
	now := d.Clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	seen, known := d.leases[node]
	if !known || !seen.renewed.Equal(&renewed) {
		d.leases[node] = sighting{renewed: renewed, since: now}
		return false, nil
	}
	if now.Sub(seen.since) < d.StaleAfter {
		return false, nil
	}
	delete(d.leases, node)
	return true, nil
}
