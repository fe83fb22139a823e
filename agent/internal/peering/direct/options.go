package direct

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Names of objects of the chart, and of those made with them.
const (
	// virtualNodeAccount is the ServiceAccount of spillway-virtual-node in the
	// agent's namespace, and the name of the RoleBindings that let it run the pods
	// of a namespace.
	virtualNodeAccount = "spillway-virtual-node"
	// virtualNodeNamespaceRole is the ClusterRole of virtualNodeAccount in a
	// namespace with overflowed pods.
	virtualNodeNamespaceRole = "spillway-virtual-node-namespace"
	// guestRole is the ClusterRole of a consumer in the namespace of its guests.
	guestRole = "spillway-direct-guest"
	// guestAccount is the ServiceAccount in that namespace that tokens are for.
	guestAccount = "spillway-virtual-node"
	// quotaName is the ResourceQuota in that namespace.
	quotaName = confine.Quota
)

// Options of a Driver and of a Provider. Required are ServiceAccount and what
// session.Options requires, for a Provider also CA. spillway-virtual-node runs in
// the ServiceAccount's namespace.
type Options struct {
	session.Options

	// VirtualNodeNamespace is the namespace of the Secrets that
	// spillway-virtual-node reads; the agent's own if empty. A namespace that has
	// nothing else keeps all other Secrets from both programs.
	VirtualNodeNamespace string
	// StaleAfter is how long a Node's lease may go without renewal before the
	// virtual-node program counts as gone; 1m if zero.
	StaleAfter time.Duration

	// Endpoint is the URL at which consumers reach this cluster's API server,
	// https://host:port. Consumers are refused if it is empty.
	Endpoint string
	// CA returns the CA of that server's certificate, PEM.
	CA func() ([]byte, error)
	// AgentRole names a ClusterRole that is bound to ServiceAccount in each
	// namespace for guests, so that the agent needs no such permissions
	// cluster-wide. Empty: its permissions come from elsewhere.
	AgentRole string
	// TokenTTL is the lifetime of a token; 1h if zero, at least MinTokenTTL.
	TokenTTL time.Duration
	// Networks that guests may exchange traffic with; none by default.
	Networks confine.Networks
	// PodSecurity is the Pod Security Standard that guests must comply with,
	// restricted or baseline; restricted if empty.
	PodSecurity string
	// HandOver is whether placeholders keep the places of guests, which then wait for the
	// agent to hand them over.
	HandOver bool
}

// MinTokenTTL is the shortest lifetime of a token that an API server grants.
const MinTokenTTL = 10 * time.Minute

func (o *Options) complete() error {
	if err := o.Options.Complete(); err != nil {
		return fmt.Errorf("direct: %w", err)
	}
	if o.ServiceAccount.Namespace == "" || o.ServiceAccount.Name == "" {
		return errors.New("direct: the agent's ServiceAccount is required")
	}
	o.VirtualNodeNamespace = cmp.Or(o.VirtualNodeNamespace, o.ServiceAccount.Namespace)
	o.StaleAfter = cmp.Or(o.StaleAfter, time.Minute)
	o.TokenTTL = cmp.Or(o.TokenTTL, time.Hour)
	o.PodSecurity = cmp.Or(o.PodSecurity, broker.PodSecurityRestricted)
	if o.PodSecurity != broker.PodSecurityRestricted && o.PodSecurity != broker.PodSecurityBaseline {
		return fmt.Errorf("direct: Pod Security Standard %q is neither restricted nor baseline", o.PodSecurity)
	}
	return nil
}
