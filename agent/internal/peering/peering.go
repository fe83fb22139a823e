// Package peering is the port through which the agent peers clusters and makes
// virtual nodes. The drivers behind it do not import each other, and
// the rest of the agent imports no driver.
//
// Every method is level-triggered and idempotent: it takes the next step that is
// possible, derives its result from what it observes, may be called again at any
// time and after a crash at any point, and never blocks on another component: it
// returns Waiting with a reason and is called again.
package peering

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Peer is the other cluster of a peering.
type Peer struct {
	// ClusterID of the other cluster.
	ClusterID string
	// PeerKey is its public key in base64 as published by the broker; a pinned key
	// takes precedence.
	PeerKey string
	// Endpoint of its API server, if it is a provider.
	Endpoint string
	// Holds is whether it holds capacity here, if it is a consumer.
	Holds bool
}

// Progress is the state of a step.
type Progress struct {
	// Done is true if the desired state is observed.
	Done bool
	// Reason is a CamelCase word and Message a sentence, as in a condition: what is
	// observed or waited for.
	Reason, Message string
	// Namespaces are those whose pods cannot use the virtual node, although it provides the
	// capacity, and why. Only EnsureCapacity says so.
	Namespaces map[string]Unmapped
}

// Unmapped is why the pods of one namespace cannot use a virtual node. It concerns no other.
type Unmapped struct {
	// Reason and Message are as in Progress; the message says what to do.
	Reason, Message string
	// Final is whether waiting does not change it: another provider is to be asked.
	Final bool
}

// ReasonGrantPending is the Reason of EnsureCapacity while the provider has not
// answered the request for capacity.
const ReasonGrantPending = "GrantPending"

// ReasonSourceMissing is the Reason of Carry while something that a pod refers to does
// not exist.
const ReasonSourceMissing = "SourceMissing"

// Waiting is Progress that is not done.
func Waiting(reason, message string) Progress { return Progress{Reason: reason, Message: message} }

// Done is Progress that is done.
func Done(reason, message string) Progress {
	return Progress{Done: true, Reason: reason, Message: message}
}

// Capacity is the desired state of a virtual node.
type Capacity struct {
	// Resources is the node's exact allocatable, without "pods". Empty parks the
	// node: it stays Ready with minimal allocatable and no pods. A driver never changes
	// spec.unschedulable: an administrator may cordon the node.
	Resources corev1.ResourceList
	// Pods is the node's allocatable "pods"; 0 with empty Resources.
	Pods int32
	// Labels of the provider's nodes by which the pods select nodes; the node has them
	// too.
	Labels map[string]string
	// Namespaces whose pods may run there: those with a grant or a pod on the node.
	Namespaces []string
}

// Parked reports whether the capacity is that of a parked node.
func (c Capacity) Parked() bool { return len(c.Resources) == 0 }

// Driver is the consumer's side of a peering technology.
type Driver interface {
	// EnsurePeering peers this cluster with a provider and keeps the credentials
	// valid.
	EnsurePeering(ctx context.Context, peer Peer) (Progress, error)
	// EnsureCapacity makes the provider's virtual node provide exactly capacity by
	// growing, shrinking or parking it in place. It is done only when the Node shows
	// the capacity. The caller shrinks only what no pod uses. A namespace whose pods cannot
	// use the node does not keep it from being done: see Progress.Namespaces.
	EnsureCapacity(ctx context.Context, peer Peer, capacity Capacity) (Progress, error)
	// Unmappable returns why pods of a namespace can run at no provider, and what to do;
	// empty if they can.
	Unmappable(ctx context.Context, namespace string) (why string, err error)
	// Teardown removes the virtual node, the peering and everything made for them,
	// here and, through the relay, at the provider. It is done when nothing is left,
	// or when an unreachable provider is no longer waited for.
	Teardown(ctx context.Context, peer Peer) (Progress, error)
	// Observe lists the providers of the peerings that exist in any state, sorted, so that
	// a restarted agent finds all of them.
	Observe(ctx context.Context) ([]string, error)
	// Tolerations are those that a pod needs for the provider's virtual node: that of
	// Spillway's taint for this provider only, and the driver's.
	Tolerations(clusterID string) []corev1.Toleration
	// Carry makes what a pod refers to, such as ConfigMaps and Secrets, available to its
	// guest. It is called for each pod on the virtual node until it is done, and from then
	// on at intervals: what the pod refers to may be deleted and created again. Of the pod's
	// containers and volumes, the cache keeps the references to ConfigMaps and Secrets only.
	Carry(ctx context.Context, pod *corev1.Pod) (Progress, error)
	// RefusedReason returns why the virtual node rejects a pod that is bound to it,
	// as a CamelCase reason; empty unless the pod's status shows a rejection that
	// waiting does not end. It reads the pod only, without I/O.
	RefusedReason(pod *corev1.Pod) string
}

// Provider is the provider's side of a peering technology.
type Provider interface {
	// Handle answers one opened message of a consumer. The caller seals the reply
	// and sends it; nil is no reply. It is called only for consumers that hold
	// capacity here or did so before.
	Handle(ctx context.Context, consumer Peer, message []byte) (reply []byte, err error)
	// EnsureGrant lets a consumer use up to total and pods, and no more. It is done
	// when the limits are enforced. With zero no guest can start.
	EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (Progress, error)
	// Teardown removes everything that was made for a consumer here.
	Teardown(ctx context.Context, consumer string) (Progress, error)
	// Consumers lists the consumers for which anything exists here, sorted.
	Consumers(ctx context.Context) ([]string, error)
}

// Messenger sends a driver's messages to a peer, sealed and relayed by the broker.
type Messenger interface {
	// Send seals a message and hands it to the broker. It returns before the message
	// is delivered; a reply arrives at the Receiver.
	Send(ctx context.Context, peer Peer, message []byte) error
}

// Receiver takes replies of providers. A Driver that sends messages implements it.
type Receiver interface {
	// Receive takes one opened message from a provider. It must not block.
	Receive(provider string, message []byte)
}

// DefaultPodsOfTotal is how many pods may run on a divisible total.
const DefaultPodsOfTotal = broker.PodsOfTotal

// DaemonSetPodsAllowance is how many pods of DaemonSets a virtual node takes in
// addition to overflowed pods. They never reach the provider, but the scheduler
// counts them.
const DaemonSetPodsAllowance = 32
