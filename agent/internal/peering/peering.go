// Package peering is the port through which the agent links two clusters and
// makes virtual nodes. Drivers (liqo, …) stand behind it and do not know each
// other; the rest of the agent knows no driver.
//
// Every method is level-triggered: it does the next thing that can be done,
// recomputes its state from what it observes, may be called again at any time
// and after a break at any point, and never waits: where something must happen
// elsewhere first it returns Waiting with a sentence, and is called again.
package peering

import (
	"context"

	corev1 "k8s.io/api/core/v1"
)

// Peer is the other cluster of a link.
type Peer struct {
	// ClusterID of the other cluster.
	ClusterID string
	// PeerKey is its public key as the broker says; a pinned one goes first.
	PeerKey string
	// Endpoint of its API server, where it is a provider.
	Endpoint string
	// Holds is whether a consumer holds capacity here now.
	Holds bool
}

// Progress says how far a step is.
type Progress struct {
	// Done is true when what was asked for is observed to be so.
	Done bool
	// Reason is one CamelCase word, Message a sentence: what is waited for, or
	// what is there.
	Reason, Message string
}

// ReasonGrantPending is a driver's reason while the provider has not answered to
// the capacity that is asked for.
const ReasonGrantPending = "GrantPending"

// Waiting is Progress that is not done yet.
func Waiting(reason, message string) Progress { return Progress{Reason: reason, Message: message} }

// Done is Progress that is.
func Done(reason, message string) Progress {
	return Progress{Done: true, Reason: reason, Message: message}
}

// Capacity is what a virtual node is to carry.
type Capacity struct {
	// Resources is the node's exact allocatable, without "pods". Empty parks the
	// node: it stays Ready with next to nothing, and takes no pod.
	Resources corev1.ResourceList
	// Pods is how many pods it may run; 0 with empty Resources.
	Pods int32
	// Namespaces whose pods may run there. Only ever those that hold a grant or
	// a pod on the node.
	Namespaces []string
}

// Parked reports whether the capacity is that of a parked node.
func (c Capacity) Parked() bool { return len(c.Resources) == 0 }

// Observed is the state of one link, for people, metrics and decisions.
type Observed struct {
	ClusterID string
	// Peered is whether the link stands.
	Peered bool
	// Node is the virtual node, nil where there is none.
	Node *corev1.Node
}

// Driver makes links and virtual nodes, seen from the consumer.
type Driver interface {
	// EnsurePeering links this cluster to a provider.
	EnsurePeering(ctx context.Context, peer Peer) (Progress, error)
	// EnsureCapacity makes the provider's virtual node carry exactly capacity,
	// growing, shrinking or parking it in place. Done only when the Node itself
	// shows it. The caller shrinks only what no pod uses.
	EnsureCapacity(ctx context.Context, peer Peer, capacity Capacity) (Progress, error)
	// Teardown removes the virtual node, the link and everything made for them,
	// here and, through the relay, at the provider. Done when all of it is gone.
	Teardown(ctx context.Context, peer Peer) (Progress, error)
	// Observe lists the links that exist in any state, so that none is forgotten
	// after a restart.
	Observe(ctx context.Context) ([]Observed, error)
	// Tolerations a pod needs for the provider's virtual node.
	Tolerations(clusterID string) []corev1.Toleration
	// RefusedReason returns why the virtual node rejects a pod that is bound to it,
	// as a CamelCase reason; empty unless the pod's status shows a rejection that
	// waiting does not end. It reads the pod only, without I/O.
	RefusedReason(pod *corev1.Pod) string
}

// Provider is the provider's side of a driver.
type Provider interface {
	// Handle answers one opened message of a consumer: the reply is sealed and
	// sent back, none where nil. Only called for consumers that hold something,
	// or for a teardown.
	Handle(ctx context.Context, consumer Peer, message []byte) (reply []byte, err error)
	// EnsureGrant lets a consumer use up to total and pods, and no more. Zero
	// ends its right to start guests.
	EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (Progress, error)
	// Teardown removes everything that was made for a consumer here.
	Teardown(ctx context.Context, consumer string) (Progress, error)
	// Consumers lists the consumers for which anything exists here.
	Consumers(ctx context.Context) ([]string, error)
}

// Messenger carries a driver's messages to a peer, sealed and relayed.
type Messenger interface {
	// Send seals a message and hands it to the broker. The answer, if any,
	// reaches the driver's Receive later.
	Send(ctx context.Context, peer Peer, message []byte) error
}

// Receiver takes answers of providers; a driver whose links need messages
// implements it.
type Receiver interface {
	// Receive takes one opened message from a provider. It must not block.
	Receive(provider string, message []byte)
}

// PodsOfTotal is how many pods may run on a divisible total, for which nobody
// said a number: the kubelet's default for one node.
const PodsOfTotal = 110

// PodsBeside is how many pods of DaemonSets may sit on a virtual node beside
// those it is for. They never reach the provider, but the scheduler counts them.
const PodsBeside = 32
