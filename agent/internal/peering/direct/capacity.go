package direct

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// target is what virtual-node is told for a capacity.
func target(capacity peering.Capacity) nodeconfig.Capacity {
	resources := corev1.ResourceList{}
	for name, amount := range capacity.Resources {
		resources[name] = amount.DeepCopy()
	}
	pods := int64(capacity.Pods)
	if capacity.Parked() {
		// What a parked node shows, with every driver.
		resources[corev1.ResourceCPU] = *resource.NewMilliQuantity(1, resource.DecimalSI)
		resources[corev1.ResourceMemory] = *resource.NewQuantity(1<<20, resource.BinarySI)
		pods = 0
	}
	resources[corev1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	namespaces := slices.Clone(capacity.Namespaces)
	slices.Sort(namespaces)
	return nodeconfig.Capacity{Resources: resources, Parked: capacity.Parked(), Namespaces: slices.Compact(namespaces)}
}

// same reports whether two lists are of equal amounts, where absent is zero.
func same(a, b corev1.ResourceList) bool {
	for name, amount := range a {
		if other := b[name]; amount.Cmp(other) != 0 {
			return false
		}
	}
	for name, amount := range b {
		if _, ok := a[name]; !ok && !amount.IsZero() {
			return false
		}
	}
	return true
}

func sameCapacity(a, b nodeconfig.Capacity) bool {
	return same(a.Resources, b.Resources) && a.Parked == b.Parked &&
		equality.Semantic.DeepEqual(a.Labels, b.Labels) && slices.Equal(a.Namespaces, b.Namespaces)
}

// EnsureCapacity makes the provider's virtual node carry exactly capacity.
func (d *Driver) EnsureCapacity(ctx context.Context, peer peering.Peer, capacity peering.Capacity) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := validateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	d.mu.Lock()
	d.wanted[provider] = slices.Clone(capacity.Namespaces)
	d.mu.Unlock()
	r, peered, err := d.ensurePeering(ctx, peer)
	if err != nil || !peered.Done {
		return peered, err
	}
	name := broker.VirtualNodeName(provider)
	node, found, err := get(ctx, d.Client, "", name, &corev1.Node{})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("reading node %s: %w", name, err)
	}
	if found && (!isOurs(node) || node.Labels[broker.LabelProvider] != provider) {
		return peering.Waiting("NodeNameTaken", "node "+name+" exists and is not Spillway's: rename or remove it"), nil
	}
	// Before virtual-node is told of them, so that it finds no closed door.
	if err := d.allowNamespaces(ctx, capacity.Namespaces); err != nil {
		return peering.Progress{}, err
	}
	if want := target(capacity); r.state != stateLinked || !sameCapacity(want, r.Capacity) {
		r.state, r.Capacity = stateLinked, want
		if err := d.store(ctx, r); err != nil {
			return peering.Progress{}, err
		}
	}
	if err := d.closeNamespaces(ctx); err != nil {
		return peering.Progress{}, err
	}
	lacks := nodeShows(node, found, provider, r.Capacity)
	if lacks == "" {
		d.settled(provider)
		return peering.Done("Ready", fmt.Sprintf("node %s carries %s", name, broker.FromList(capacity.Resources))), nil
	}
	message := "node " + name + " " + lacks
	if !found || readiness(node).Status == corev1.ConditionUnknown {
		if d.waitedFor(provider, waitingForNode) >= suspicious {
			message += fmt.Sprintf(": is Deployment %s running in namespace %s?", VirtualNodeAccount, d.ServiceAccount.Namespace)
		}
	}
	return peering.Waiting("NodePending", message), nil
}

const (
	waitingForNode = "Node"
	// suspicious is how long a Node may take that the program which makes it is
	// there to make.
	suspicious = 5 * time.Second
)

// settled forgets that the Node was waited for.
func (d *Driver) settled(provider string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conversation(provider).since, waitingForNode)
}

// nodeShows says what a node lacks of being ready with exactly that capacity, ""
// where nothing.
func nodeShows(node *corev1.Node, found bool, provider string, want nodeconfig.Capacity) string {
	if !found {
		return "is not there yet"
	}
	marked := slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool {
		return taint.Key == broker.TaintOverflow && taint.Value == provider && taint.Effect == corev1.TaintEffectNoSchedule
	})
	ready := readiness(node)
	switch {
	case !node.DeletionTimestamp.IsZero():
		return "is going"
	case !marked || node.Labels[broker.LabelProvider] != provider || node.Labels[broker.LabelNodeType] != broker.NodeTypeVirtual:
		return "does not carry Spillway's taint and labels yet"
	case ready.Status != corev1.ConditionTrue && ready.Message != "":
		return "is not Ready: " + ready.Message
	case ready.Status != corev1.ConditionTrue:
		return "is not Ready yet"
	case !same(node.Status.Allocatable, want.Resources):
		return "does not show the capacity yet"
	case node.Spec.Unschedulable != want.Parked:
		return "is not cordoned as it should be yet"
	case want.Parked:
		return ""
	}
	for key, value := range want.Labels {
		if node.Labels[key] != value {
			return "does not carry label " + key + " yet"
		}
	}
	for _, taint := range node.Spec.Taints {
		if strings.HasPrefix(taint.Key, "node.kubernetes.io/") {
			return "still has taint " + taint.Key
		}
	}
	return ""
}

// readiness is a node's condition Ready, Unknown where it has none.
func readiness(node *corev1.Node) corev1.NodeCondition {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition
		}
	}
	return corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}
}

// removeNode deletes a provider's Node, where it is Spillway's.
func (d *Driver) removeNode(ctx context.Context, node *corev1.Node) error {
	if err := remove(ctx, d.Client, node, client.GracePeriodSeconds(0)); err != nil {
		return fmt.Errorf("deleting node %s: %w", node.Name, err)
	}
	return nil
}
