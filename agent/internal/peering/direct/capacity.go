package direct

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const (
	waitNode = "Node"
	// nodeTimeout is how long virtual-node may take to create a Node or renew its
	// status before its Deployment is suspected.
	nodeTimeout = 5 * time.Second
)

// configCapacity is a capacity as it is configured for virtual-node.
func configCapacity(capacity peering.Capacity) nodeconfig.Capacity {
	resources, pods := corev1.ResourceList{}, int64(capacity.Pods)
	for name, amount := range capacity.Resources {
		resources[name] = amount.DeepCopy()
	}
	if capacity.Parked() {
		resources, pods = session.ParkedResources(), 0
	}
	resources[corev1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	namespaces := slices.Clone(capacity.Namespaces)
	slices.Sort(namespaces)
	return nodeconfig.Capacity{Resources: resources, Labels: maps.Clone(capacity.Labels), Namespaces: slices.Compact(namespaces)}
}

// EnsureCapacity makes the provider's virtual node provide exactly capacity.
func (d *Driver) EnsureCapacity(ctx context.Context, peer peering.Peer, capacity peering.Capacity) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := session.ValidateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	d.mu.Lock()
	d.wanted[provider] = slices.Clone(capacity.Namespaces)
	d.mu.Unlock()
	r, peered, err := d.ensurePeering(ctx, peer)
	if err != nil || !peered.Done {
		return peered, err
	}
	node, err := session.Node(ctx, d.Client, provider)
	if err != nil {
		return peering.Progress{}, err
	}
	if node != nil && (!session.IsManaged(node) || node.Labels[broker.LabelProvider] != provider) {
		return session.NodeNameTaken(provider), nil
	}
	// Before the configuration lists the namespaces, so that virtual-node can read
	// them from the start.
	refused, err := d.allowNamespaces(ctx, capacity.Namespaces)
	if err != nil {
		return peering.Progress{}, err
	}
	capacity.Namespaces = slices.DeleteFunc(slices.Clone(capacity.Namespaces), func(name string) bool { _, out := refused[name]; return out })
	want, have := configCapacity(capacity), r.Capacity
	if r.state != stateActive || !session.Equal(want.Resources, have.Resources) || !maps.Equal(want.Labels, have.Labels) || !slices.Equal(want.Namespaces, have.Namespaces) {
		r.state, r.Capacity = stateActive, want
		if err := d.store(ctx, r); err != nil {
			return peering.Progress{}, err
		}
	}
	// A namespace that cannot be changed must not keep the virtual node as it is.
	if err := d.revokeNamespaces(ctx); err != nil {
		d.Log.Error(err, "Failed to revoke access to namespaces; trying again")
	}
	progress := d.nodeProgress(provider, node, r.Capacity, broker.FromList(capacity.Resources))
	if progress.Done {
		progress.Namespaces = refused
	}
	return progress, nil
}

// Unmappable implements peering.Driver: the guests of all namespaces share one of the provider.
func (*Driver) Unmappable(context.Context, string) (why string, err error) { return "", nil }

// nodeProgress compares a Node, nil if it does not exist, with its configuration.
func (d *Driver) nodeProgress(provider string, node *corev1.Node, want nodeconfig.Capacity, granted broker.ResourceQuantities) peering.Progress {
	name := broker.VirtualNodeName(provider)
	pending := session.NodePending(node, provider, want.Resources)
	for key, value := range want.Labels {
		if pending == "" && node.Labels[key] != value {
			pending = "does not have label " + key + " yet"
		}
	}
	if pending == "" {
		d.handshake.StopWaiting(provider, waitNode)
		return peering.Done("Ready", fmt.Sprintf("node %s provides %s", name, granted))
	}
	message := "node " + name + " " + pending
	if (node == nil || session.Ready(node).Status == corev1.ConditionUnknown) && d.handshake.Waited(provider, waitNode) >= nodeTimeout {
		message += fmt.Sprintf("; check that Deployment %s in namespace %s is running", virtualNodeAccount, d.ServiceAccount.Namespace)
	}
	return peering.Waiting("NodePending", message)
}
