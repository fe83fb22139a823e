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
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// Waits of a teardown.
const (
	waitPods       = "Pods"
	waitProvider   = "Provider"
	waitNamespaces = "Namespaces"
)

// Teardown removes the virtual node, the peering and everything made for them. The
// order leaves nothing behind: pods leave while virtual-node and its token still
// work, and the Secret stays until the provider has confirmed that nothing is
// left.
func (d *Driver) Teardown(ctx context.Context, peer peering.Peer) (progress peering.Progress, err error) {
	provider := peer.ClusterID
	if err := session.ValidateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	defer func() {
		if err != nil {
			progress, err = peering.Progress{}, fmt.Errorf("tearing down the peering with %s: %w", provider, err)
		}
	}()
	d.mu.Lock()
	delete(d.wanted, provider)
	d.mu.Unlock()
	r, _, err := d.load(ctx, provider)
	if err != nil {
		return progress, err
	}
	node, err := session.Node(ctx, d.Client, provider)
	if err != nil {
		return progress, err
	}
	if node != nil && (!session.IsManaged(node) || node.Labels[broker.LabelProvider] != provider) {
		node = nil
	}
	switch {
	case r == nil && node == nil:
		d.resetMemory(provider)
		return removed(provider), nil
	case r != nil && r.state == statePending:
		return d.endSession(ctx, peer, r) // virtual-node never saw it
	case r != nil && r.state == stateActive && !r.Terminating:
		r.Terminating = true
		return nodeTerminating(provider), d.store(ctx, r)
	case node != nil:
		return nodeTerminating(provider), d.ensureNodeReleased(ctx, r, node)
	}
	return d.endSession(ctx, peer, r)
}

func removed(provider string) peering.Progress {
	return peering.Done("Removed", "the peering with "+provider+" is removed")
}

func nodeTerminating(provider string) peering.Progress {
	return peering.Waiting("NodeTerminating", "waiting for node "+broker.VirtualNodeName(provider)+" and its pods to terminate")
}

// ensureNodeReleased makes sure that a Node and its pods terminate. If the
// virtual-node program is gone, the Node is deleted in its place. If the provider
// is unreachable, the pods are force-deleted here after UnreachableAfter, and the
// provider deletes their guests with everything else.
func (d *Driver) ensureNodeReleased(ctx context.Context, r *record, node *corev1.Node) error {
	provider := node.Labels[broker.LabelProvider]
	stale, err := d.leaseStale(ctx, node.Name)
	switch {
	case err != nil:
		return err
	case stale:
		d.Log.Info("Deleting a node whose lease is no longer renewed", "node", node.Name, "staleAfter", d.StaleAfter.String())
		if err := d.forceDeletePods(ctx, node.Name); err != nil {
			return err
		}
		if err := session.Delete(ctx, d.Client, node, client.GracePeriodSeconds(0)); err != nil {
			return fmt.Errorf("deleting node %s: %w", node.Name, err)
		}
		return nil
	case r == nil || r.state != stateActive || d.handshake.Waited(provider, waitPods) < d.UnreachableAfter || session.Ready(node).Status == corev1.ConditionTrue:
		return nil
	}
	if err := d.forceDeletePods(ctx, node.Name); err != nil {
		return err
	}
	// virtual-node no longer sees the Secret, stops and deletes the Node.
	return d.storeEnded(ctx, r)
}

// forceDeletePods force-deletes the pods of a node that cannot terminate them: virtual-node is
// gone, or the provider is unreachable.
func (d *Driver) forceDeletePods(ctx context.Context, node string) error {
	var pods corev1.PodList
	if err := d.Client.List(ctx, &pods, client.MatchingFields{"spec.nodeName": node}); err != nil {
		return fmt.Errorf("listing pods of node %s: %w", node, err)
	}
	var failed error
	for i := range pods.Items {
		d.Log.Info("Force-deleting a pod whose virtual node cannot terminate it", "node", node, "namespace", pods.Items[i].Namespace, "pod", pods.Items[i].Name)
		failed = errors.Join(failed, session.Delete(ctx, d.Client, &pods.Items[i], client.GracePeriodSeconds(0)))
	}
	return failed
}

// storeEnded hides the Secret from virtual-node and erases the token.
func (d *Driver) storeEnded(ctx context.Context, r *record) error {
	r.state, r.Config = stateEnded, nodeconfig.Config{Provider: r.Provider}
	r.granted, r.renew, r.expires = time.Time{}, time.Time{}, time.Time{}
	return d.store(ctx, r)
}

// endSession ends a peering whose Node is gone: Teardown is sent until the
// provider has confirmed it or has not answered for UnreachableAfter. Namespaces that
// refuse to be cleaned up are waited for as long.
func (d *Driver) endSession(ctx context.Context, peer peering.Peer, r *record) (peering.Progress, error) {
	provider := peer.ClusterID
	if r.state != stateEnded {
		if err := d.storeEnded(ctx, r); err != nil {
			return peering.Progress{}, err
		}
	}
	kept := d.revokeNamespaces(ctx)
	if kept == nil {
		d.handshake.StopWaiting(provider, waitNamespaces)
	}
	waitForThem := kept != nil && d.handshake.Waited(provider, waitNamespaces) < d.UnreachableAfter
	waited, exchange := d.handshake.Waited(provider, waitProvider), d.handshake.Exchange(provider)
	if !exchange.Removed(r.session) {
		var err error
		if exchange.Due(session.Teardown, d.Clock.Now(), d.ResendAfter) {
			err = d.handshake.Send(ctx, peer, &message{Header: session.Header{Kind: session.Teardown, Session: r.session}})
		}
		if waited < d.UnreachableAfter {
			return peering.Waiting("ProviderTerminating", "waiting for provider "+provider+" to remove its part of the peering"), err
		}
		d.Log.Info("Provider did not confirm the teardown; its agent cleans up when it is reachable again", "provider", provider)
	}
	if waitForThem {
		return peering.Progress{}, kept
	}
	if kept != nil { // a namespace in which nothing can be deleted must not keep the peering
		d.Log.Error(kept, "Failed to revoke access to namespaces; trying again with the next peering")
	}
	if err := session.Delete(ctx, d.Client, r.secret); err != nil {
		return peering.Progress{}, fmt.Errorf("deleting Secret %s/%s: %w", r.secret.Namespace, r.secret.Name, err)
	}
	d.resetMemory(provider)
	return removed(provider), nil
}

// leaseRenewal is a lease's renew time and when it was first observed.
type leaseRenewal struct {
	renewed  metav1.MicroTime
	observed time.Time
}

// leaseStale reports whether a Node's lease has not been renewed for StaleAfter, by
// this cluster's clock alone.
func (d *Driver) leaseStale(ctx context.Context, node string) (bool, error) {
	lease, err := session.Find(ctx, d.Client, corev1.NamespaceNodeLease, node, &coordinationv1.Lease{})
	if err != nil {
		return false, fmt.Errorf("reading the lease of node %s: %w", node, err)
	}
	var renewed metav1.MicroTime
	if lease != nil && lease.Spec.RenewTime != nil {
		renewed = *lease.Spec.RenewTime
	}
	now := d.Clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	last, known := d.leases[node]
	if !known || !last.renewed.Equal(&renewed) {
		d.leases[node] = leaseRenewal{renewed: renewed, observed: now}
		return false, nil
	}
	if now.Sub(last.observed) < d.StaleAfter {
		return false, nil
	}
	delete(d.leases, node)
	return true, nil
}
