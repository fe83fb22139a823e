package session

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Options that the Driver and the Provider of every driver have. Client and
// ClusterID are required, for a Driver also Messenger.
type Options struct {
	// Client reads from and writes to the API server, not a cache: a step is done
	// only when the API server shows it.
	Client client.Client
	// ClusterID of this cluster.
	ClusterID string
	// ServiceAccount of the agent.
	ServiceAccount types.NamespacedName
	// Enqueue reports that something of the peering with a cluster has changed. It
	// must not block.
	Enqueue func(clusterID string)
	Clock   clock.PassiveClock
	Log     logr.Logger

	// Messenger carries requests to providers.
	Messenger peering.Messenger
	// ResendAfter is how long a request waits for its reply; 3s if zero.
	ResendAfter time.Duration
	// UnreachableAfter is how long a teardown waits for an unreachable provider
	// before it goes on without it; 3m if zero.
	UnreachableAfter time.Duration
}

// Complete checks the options and sets defaults.
func (o *Options) Complete() error {
	if o.Client == nil {
		return errors.New("a client is required")
	}
	if err := ValidateClusterID(o.ClusterID); err != nil {
		return fmt.Errorf("this cluster: %w", err)
	}
	if o.Enqueue == nil {
		o.Enqueue = func(string) {}
	}
	o.Clock = cmp.Or[clock.PassiveClock](o.Clock, clock.RealClock{})
	o.ResendAfter = cmp.Or(o.ResendAfter, 3*time.Second)
	o.UnreachableAfter = cmp.Or(o.UnreachableAfter, 3*time.Minute)
	return nil
}

// ValidateClusterID checks a cluster ID of a peer. It becomes part of the names of
// objects, users and groups.
func ValidateClusterID(id string) error {
	if !protocol.ValidClusterID(id) {
		return fmt.Errorf("cluster ID %q is not a lower-case DNS label of at most %d characters", id, protocol.MaxClusterID)
	}
	return nil
}

// Grants is what each consumer may use, "pods" included, as last passed to
// EnsureGrant. It is safe for concurrent use.
type Grants struct {
	mu    sync.Mutex
	total map[string]corev1.ResourceList
}

// Set stores a copy of total and pods for a consumer.
func (g *Grants) Set(consumer string, total corev1.ResourceList, pods int32) {
	stored := corev1.ResourceList{}
	for name, amount := range total {
		stored[name] = amount.DeepCopy()
	}
	stored[corev1.ResourcePods] = *resource.NewQuantity(int64(pods), resource.DecimalSI)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.total == nil {
		g.total = map[string]corev1.ResourceList{}
	}
	g.total[consumer] = stored
}

// Get returns a consumer's total. It is not known from a restart until the first
// Set, and nothing is granted until then.
func (g *Grants) Get(consumer string) (total corev1.ResourceList, known bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	total, known = g.total[consumer]
	return total, known
}
