package direct

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Names of what the chart brings, and of what is made with it.
const (
	// VirtualNodeAccount is the ServiceAccount of spillway-virtual-node in the
	// agent's namespace, and the name of the RoleBindings that let it read a
	// namespace.
	VirtualNodeAccount = "spillway-virtual-node"
	// VirtualNodeNamespaceRole is what it may do in a namespace with overflowed
	// pods.
	VirtualNodeNamespaceRole = "spillway-virtual-node-namespace"
	// GuestRole is what a consumer may do in the namespace of its guests.
	GuestRole = "spillway-direct-guest"
	// guestAccount is the ServiceAccount there that a consumer's token is of.
	guestAccount = "spillway-virtual-node"
	// quotaName bounds what runs there.
	quotaName = "spillway-guests"

	// maxClusterID keeps the names made of it valid labels.
	maxClusterID = 40
)

var clusterIDPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// Options of a Driver and of a Provider. Client, ClusterID and ServiceAccount are
// required; for a Driver the Messenger, for a Provider the CA.
type Options struct {
	// Client reads and writes at the API server itself, not through a cache: a
	// step is done when it is so.
	Client client.Client
	// ClusterID of this cluster.
	ClusterID string
	// ServiceAccount of the agent; spillway-virtual-node stands in its namespace.
	ServiceAccount types.NamespacedName
	// Enqueue is told that something of the link to or from a cluster has changed,
	// and that the next call may get further. It must not block.
	Enqueue func(clusterID string)
	Clock   clock.PassiveClock
	Log     logr.Logger

	// Messenger carries requests to providers.
	Messenger peering.Messenger
	// LinkNamespace is where the Secrets are that spillway-virtual-node reads; the
	// agent's own if empty. A namespace for them alone keeps every other Secret
	// out of sight of both programs.
	LinkNamespace string
	// ResendAfter is how long an answer is waited for; 3s if zero.
	ResendAfter time.Duration
	// StaleAfter is how long a Node's lease may stand still before whoever keeps
	// it counts as gone; 1m if zero.
	StaleAfter time.Duration
	// UnreachableAfter is how long a teardown waits for pods to end, and for a
	// provider that does not answer, before it goes on without; 3m if zero.
	UnreachableAfter time.Duration

	// Endpoint is where consumers reach this cluster's API server,
	// https://host:port. They are refused where it is empty.
	Endpoint string
	// CA returns what that server's certificate is checked with, PEM.
	CA func() ([]byte, error)
	// AgentRole names a ClusterRole that is bound to ServiceAccount in each
	// namespace for guests, so that nobody need grant this program as much
	// everywhere. Empty: its permissions come from elsewhere.
	AgentRole string
	// TokenTTL is how long a token is good for; 1h if zero, at least MinTokenTTL.
	TokenTTL time.Duration
	// AllowIngressFrom and AllowEgressTo are the networks (CIDR) that guests may
	// talk with; none by default.
	AllowIngressFrom, AllowEgressTo []string
	// Patience is how long an answer waits for the cluster's controllers to do
	// their part; 8s if zero.
	Patience time.Duration
}

// MinTokenTTL is the shortest life of a token: what an API server grants.
const MinTokenTTL = 10 * time.Minute

func (o *Options) complete() error {
	if o.Client == nil {
		return errors.New("direct: a client is needed")
	}
	if err := validateClusterID(o.ClusterID); err != nil {
		return fmt.Errorf("direct: this cluster: %w", err)
	}
	if o.ServiceAccount.Namespace == "" || o.ServiceAccount.Name == "" {
		return errors.New("direct: the agent's own ServiceAccount is needed")
	}
	if o.Enqueue == nil {
		o.Enqueue = func(string) {}
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	o.LinkNamespace = cmp.Or(o.LinkNamespace, o.ServiceAccount.Namespace)
	o.ResendAfter = cmp.Or(o.ResendAfter, 3*time.Second)
	o.StaleAfter = cmp.Or(o.StaleAfter, time.Minute)
	o.UnreachableAfter = cmp.Or(o.UnreachableAfter, 3*time.Minute)
	o.TokenTTL = cmp.Or(o.TokenTTL, time.Hour)
	o.Patience = cmp.Or(o.Patience, 8*time.Second)
	return nil
}

// validateClusterID keeps a cluster's name from becoming something else: it ends
// in names of objects.
func validateClusterID(id string) error {
	if len(id) > maxClusterID || !clusterIDPattern.MatchString(id) {
		return fmt.Errorf("cluster ID %q is not a lower-case DNS label of at most %d characters", id, maxClusterID)
	}
	return nil
}

// get reads an object, and reports false where there is none.
func get[T client.Object](ctx context.Context, c client.Client, namespace, name string, into T) (T, bool, error) {
	err := c.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, into)
	if err != nil {
		return into, false, client.IgnoreNotFound(err)
	}
	return into, true, nil
}

// remove deletes exactly the object that was read; gone already is fine.
func remove(ctx context.Context, c client.Client, object client.Object, options ...client.DeleteOption) error {
	if !object.GetDeletionTimestamp().IsZero() && len(options) == 0 {
		return nil
	}
	uid := object.GetUID()
	return client.IgnoreNotFound(c.Delete(ctx, object, append(options, client.Preconditions{UID: &uid})...))
}

func isOurs(object client.Object) bool {
	return object.GetLabels()[broker.LabelManagedBy] == broker.ManagedBySpillway
}
