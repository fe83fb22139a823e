// Package fake is a driver for tests: links and virtual nodes are entries in
// memory, every call is logged, and the next answer can be set.
package fake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Call is one call of a method.
type Call struct {
	Method  string
	Cluster string
	// Capacity of EnsureCapacity; of EnsureGrant resources and pods only.
	Capacity peering.Capacity
	// Message of Handle.
	Message []byte
}

// String is for test output.
func (c Call) String() string {
	return fmt.Sprintf("%s(%s) %s, %d pods, %v", c.Method, c.Cluster, broker.FromList(c.Capacity.Resources), c.Capacity.Pods, c.Capacity.Namespaces)
}

// log is what Driver and Provider have in common. Safe for concurrent use.
type log struct {
	mu      sync.Mutex
	calls   []Call
	errs    map[string]error
	waiting map[string]peering.Progress
}

// Calls returns what was called so far, of one method or of all where empty.
func (l *log) Calls(method string) []Call {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Call
	for _, c := range l.calls {
		if method == "" || c.Method == method {
			out = append(out, c)
		}
	}
	return out
}

// FailNext makes the next call of a method return err.
func (l *log) FailNext(method string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errs[method] = err
}

// Hold makes a method answer with progress, without doing anything, until Free
// is called.
func (l *log) Hold(method string, progress peering.Progress) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting[method] = progress
}

// Free ends Hold.
func (l *log) Free(method string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, method)
}

// enter logs a call. proceed is false where the answer was set beforehand. The
// lock is held.
func (l *log) enter(c Call) (progress peering.Progress, err error, proceed bool) {
	l.calls = append(l.calls, c)
	if err := l.errs[c.Method]; err != nil {
		delete(l.errs, c.Method)
		return peering.Progress{}, err, false
	}
	if progress, ok := l.waiting[c.Method]; ok {
		return progress, nil, false
	}
	return peering.Progress{}, nil, true
}

// Driver is a peering.Driver.
type Driver struct {
	log
	links map[string]peering.Capacity
	nodes map[string]bool
	// Changed, where set before use, is told what a virtual node carries after
	// every change, nil when it is gone: a test makes a Node of it.
	Changed func(clusterID string, capacity *peering.Capacity) error
}

var _ peering.Driver = &Driver{}

// NewDriver makes a Driver without links.
func NewDriver() *Driver {
	return &Driver{log: log{errs: map[string]error{}, waiting: map[string]peering.Progress{}}, links: map[string]peering.Capacity{}, nodes: map[string]bool{}}
}

// EnsurePeering implements peering.Driver.
func (d *Driver) EnsurePeering(_ context.Context, peer peering.Peer) (peering.Progress, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if progress, err, proceed := d.enter(Call{Method: "EnsurePeering", Cluster: peer.ClusterID}); !proceed {
		return progress, err
	}
	if _, ok := d.links[peer.ClusterID]; !ok {
		d.links[peer.ClusterID] = peering.Capacity{}
	}
	return peering.Done("Peered", "linked to "+peer.ClusterID), nil
}

// EnsureCapacity implements peering.Driver.
func (d *Driver) EnsureCapacity(_ context.Context, peer peering.Peer, capacity peering.Capacity) (peering.Progress, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if progress, err, proceed := d.enter(Call{Method: "EnsureCapacity", Cluster: peer.ClusterID, Capacity: capacity}); !proceed {
		return progress, err
	}
	if _, ok := d.links[peer.ClusterID]; !ok {
		return peering.Waiting("NotPeered", "not linked to "+peer.ClusterID), nil
	}
	d.links[peer.ClusterID], d.nodes[peer.ClusterID] = capacity, true
	if d.Changed != nil {
		if err := d.Changed(peer.ClusterID, &capacity); err != nil {
			return peering.Progress{}, err
		}
	}
	return peering.Done("Carried", "the virtual node carries it"), nil
}

// Teardown implements peering.Driver.
func (d *Driver) Teardown(_ context.Context, peer peering.Peer) (peering.Progress, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if progress, err, proceed := d.enter(Call{Method: "Teardown", Cluster: peer.ClusterID}); !proceed {
		return progress, err
	}
	delete(d.links, peer.ClusterID)
	delete(d.nodes, peer.ClusterID)
	if d.Changed != nil {
		if err := d.Changed(peer.ClusterID, nil); err != nil {
			return peering.Progress{}, err
		}
	}
	return peering.Done("Gone", "nothing is left"), nil
}

// Observe implements peering.Driver.
func (d *Driver) Observe(context.Context) ([]peering.Observed, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err, proceed := d.enter(Call{Method: "Observe"}); !proceed {
		return nil, err
	}
	var out []peering.Observed
	for _, id := range slices.Sorted(maps.Keys(d.links)) {
		o := peering.Observed{ClusterID: id, Peered: true}
		if d.nodes[id] {
			o.Node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(id)}}
		}
		out = append(out, o)
	}
	return out, nil
}

// Tolerations implements peering.Driver.
func (d *Driver) Tolerations(string) []corev1.Toleration {
	return []corev1.Toleration{{Key: "virtual-node.liqo.io/not-allowed", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}
}

// Provider is a peering.Provider.
type Provider struct {
	log
	grants map[string]peering.Capacity
}

var _ peering.Provider = &Provider{}

// NewProvider makes a Provider without borrowers.
func NewProvider() *Provider {
	return &Provider{log: log{errs: map[string]error{}, waiting: map[string]peering.Progress{}}, grants: map[string]peering.Capacity{}}
}

// Handle implements peering.Provider; it answers with the message itself.
func (l *Provider) Handle(_ context.Context, consumer peering.Peer, message []byte) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err, proceed := l.enter(Call{Method: "Handle", Cluster: consumer.ClusterID, Message: message}); !proceed {
		return nil, err
	}
	return message, nil
}

// EnsureGrant implements peering.Provider.
func (l *Provider) EnsureGrant(_ context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	capacity := peering.Capacity{Resources: total, Pods: pods}
	if progress, err, proceed := l.enter(Call{Method: "EnsureGrant", Cluster: consumer, Capacity: capacity}); !proceed {
		return progress, err
	}
	l.grants[consumer] = capacity
	return peering.Done("Granted", "granted"), nil
}

// Granted is what a consumer may use.
func (l *Provider) Granted(consumer string) peering.Capacity {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.grants[consumer]
}

// Teardown implements peering.Provider.
func (l *Provider) Teardown(_ context.Context, consumer string) (peering.Progress, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if progress, err, proceed := l.enter(Call{Method: "Teardown", Cluster: consumer}); !proceed {
		return progress, err
	}
	delete(l.grants, consumer)
	return peering.Done("Gone", "nothing is left"), nil
}

// Consumers implements peering.Provider.
func (l *Provider) Consumers(context.Context) ([]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err, proceed := l.enter(Call{Method: "Consumers"}); !proceed {
		return nil, err
	}
	return slices.Sorted(maps.Keys(l.grants)), nil
}
