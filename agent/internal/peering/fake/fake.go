// Package fake is a driver for tests: peerings and virtual nodes are entries in
// memory, every call is recorded, and the next result can be set.
package fake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Call is one call of a method.
type Call struct {
	Method  string
	Cluster string
	// Capacity of EnsureCapacity; resources and pods of EnsureGrant.
	Capacity peering.Capacity
	// Message of Handle.
	Message []byte
}

// String is for test output.
func (c Call) String() string {
	return fmt.Sprintf("%s(%s) %s, %d pods, %v", c.Method, c.Cluster, broker.FromList(c.Capacity.Resources), c.Capacity.Pods, c.Capacity.Namespaces)
}

// recorder is what Driver and Provider have in common. It is safe for concurrent
// use.
type recorder struct {
	mu      sync.Mutex
	calls   []Call
	errs    map[string]error
	waiting map[string]peering.Progress
}

// Calls returns the calls so far, of one method or of all if empty.
func (r *recorder) Calls(method string) []Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Call
	for _, c := range r.calls {
		if method == "" || c.Method == method {
			out = append(out, c)
		}
	}
	return out
}

// FailNext makes the next call of a method return err.
func (r *recorder) FailNext(method string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errs[method] = err
}

// Hold makes a method return progress without doing anything until Free is called.
func (r *recorder) Hold(method string, progress peering.Progress) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting[method] = progress
}

// Free ends Hold.
func (r *recorder) Free(method string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.waiting, method)
}

// enter records a call. proceed is false if its result was set by FailNext or Hold.
// The caller holds the lock.
func (r *recorder) enter(c Call) (progress peering.Progress, err error, proceed bool) {
	r.calls = append(r.calls, c)
	if err := r.errs[c.Method]; err != nil {
		delete(r.errs, c.Method)
		return peering.Progress{}, err, false
	}
	if progress, ok := r.waiting[c.Method]; ok {
		return progress, nil, false
	}
	return peering.Progress{}, nil, true
}

// Driver is a peering.Driver.
type Driver struct {
	recorder
	peerings map[string]peering.Capacity
	unmapped map[string]peering.Unmapped
	// Changed, if set before use, is called with what a virtual node provides after
	// every change, nil after its removal: a test makes a Node of it.
	Changed func(clusterID string, capacity *peering.Capacity) error
}

var _ peering.Driver = &Driver{}

// NewDriver returns a Driver without peerings.
func NewDriver() *Driver {
	return &Driver{recorder: recorder{errs: map[string]error{}, waiting: map[string]peering.Progress{}}, peerings: map[string]peering.Capacity{}, unmapped: map[string]peering.Unmapped{}}
}

// EnsurePeering implements peering.Driver.
func (d *Driver) EnsurePeering(_ context.Context, peer peering.Peer) (peering.Progress, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if progress, err, proceed := d.enter(Call{Method: "EnsurePeering", Cluster: peer.ClusterID}); !proceed {
		return progress, err
	}
	if _, ok := d.peerings[peer.ClusterID]; !ok {
		d.peerings[peer.ClusterID] = peering.Capacity{}
	}
	return peering.Done("Peered", "peered with "+peer.ClusterID), nil
}

// EnsureCapacity implements peering.Driver.
func (d *Driver) EnsureCapacity(_ context.Context, peer peering.Peer, capacity peering.Capacity) (peering.Progress, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if progress, err, proceed := d.enter(Call{Method: "EnsureCapacity", Cluster: peer.ClusterID, Capacity: capacity}); !proceed {
		return progress, err
	}
	if _, ok := d.peerings[peer.ClusterID]; !ok {
		return peering.Waiting("NotPeered", "not peered with "+peer.ClusterID), nil
	}
	d.peerings[peer.ClusterID] = capacity
	if d.Changed != nil {
		if err := d.Changed(peer.ClusterID, &capacity); err != nil {
			return peering.Progress{}, err
		}
	}
	ready := peering.Done("Ready", "the virtual node provides the capacity")
	ready.Namespaces = map[string]peering.Unmapped{}
	for _, namespace := range capacity.Namespaces {
		if why, ok := d.unmapped[namespace]; ok {
			ready.Namespaces[namespace] = why
		}
	}
	return ready, nil
}

// Unmap makes pods of a namespace unable to use virtual nodes; nil ends it.
func (d *Driver) Unmap(namespace string, why *peering.Unmapped) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if delete(d.unmapped, namespace); why != nil {
		d.unmapped[namespace] = *why
	}
}

// Unmappable implements peering.Driver.
func (d *Driver) Unmappable(context.Context, string) (why string, err error) { return "", nil }

// Teardown implements peering.Driver.
func (d *Driver) Teardown(_ context.Context, peer peering.Peer) (peering.Progress, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if progress, err, proceed := d.enter(Call{Method: "Teardown", Cluster: peer.ClusterID}); !proceed {
		return progress, err
	}
	delete(d.peerings, peer.ClusterID)
	if d.Changed != nil {
		if err := d.Changed(peer.ClusterID, nil); err != nil {
			return peering.Progress{}, err
		}
	}
	return peering.Done("Removed", "the peering is removed"), nil
}

// Observe implements peering.Driver.
func (d *Driver) Observe(context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err, proceed := d.enter(Call{Method: "Observe"}); !proceed {
		return nil, err
	}
	return slices.Sorted(maps.Keys(d.peerings)), nil
}

// Tolerations implements peering.Driver.
func (d *Driver) Tolerations(clusterID string) []corev1.Toleration {
	return []corev1.Toleration{
		session.Toleration(clusterID),
		{Key: "driver.example.com/not-allowed", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	}
}

// Provider is a peering.Provider.
type Provider struct {
	recorder
	grants map[string]peering.Capacity
}

var _ peering.Provider = &Provider{}

// NewProvider returns a Provider without consumers.
func NewProvider() *Provider {
	return &Provider{recorder: recorder{errs: map[string]error{}, waiting: map[string]peering.Progress{}}, grants: map[string]peering.Capacity{}}
}

// Handle implements peering.Provider; the reply is the message itself.
func (p *Provider) Handle(_ context.Context, consumer peering.Peer, message []byte) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err, proceed := p.enter(Call{Method: "Handle", Cluster: consumer.ClusterID, Message: message}); !proceed {
		return nil, err
	}
	return message, nil
}

// EnsureGrant implements peering.Provider.
func (p *Provider) EnsureGrant(_ context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	capacity := peering.Capacity{Resources: total, Pods: pods}
	if progress, err, proceed := p.enter(Call{Method: "EnsureGrant", Cluster: consumer, Capacity: capacity}); !proceed {
		return progress, err
	}
	p.grants[consumer] = capacity
	return peering.Done("Granted", "granted"), nil
}

// Granted is what a consumer may use.
func (p *Provider) Granted(consumer string) peering.Capacity {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.grants[consumer]
}

// Teardown implements peering.Provider.
func (p *Provider) Teardown(_ context.Context, consumer string) (peering.Progress, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if progress, err, proceed := p.enter(Call{Method: "Teardown", Cluster: consumer}); !proceed {
		return progress, err
	}
	delete(p.grants, consumer)
	return peering.Done("Removed", "the peering is removed"), nil
}

// Consumers implements peering.Provider.
func (p *Provider) Consumers(context.Context) ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err, proceed := p.enter(Call{Method: "Consumers"}); !proceed {
		return nil, err
	}
	return slices.Sorted(maps.Keys(p.grants)), nil
}

// GuestNamespaces are the namespaces for the guests of consumers.
type GuestNamespaces struct {
	// Of returns those that exist for a consumer; none where nil.
	Of func(consumer string) []string
	// Trial is the name of one in which guests of others are tried.
	Trial string
}

// GuestNamespaces returns the namespaces that exist for the guests of a consumer.
func (n GuestNamespaces) GuestNamespaces(_ context.Context, consumer string) ([]string, error) {
	if n.Of == nil {
		return nil, nil
	}
	return n.Of(consumer), nil
}

// EnsureTrialNamespace returns Trial.
func (n GuestNamespaces) EnsureTrialNamespace(context.Context, string) (string, peering.Progress, error) {
	return n.Trial, peering.Done("TrialNamespaceReady", "guests can be tried"), nil
}

// RemoveTrialNamespace does nothing.
func (GuestNamespaces) RemoveTrialNamespace(context.Context, string) error { return nil }
