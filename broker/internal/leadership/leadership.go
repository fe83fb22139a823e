// Package leadership lets a new leader act only once its caches are as new as the API
// server was when the replica became the leader. A watch of a standby may lag behind
// what the former leader has written: views from such a cache would take the clusters
// back to decisions that were replaced.
package leadership

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// DefaultDeadline is how long a new leader waits for its caches before it gives up.
const DefaultDeadline = 15 * time.Second

// retryAfter is the delay between two tries of a live read.
const retryAfter = 100 * time.Millisecond

// errBehind ends a leader whose caches do not catch up.
var errBehind = errors.New("the caches of this new leader are outdated")

// kinds are all that the broker decides on.
var kinds = []client.Object{&broker.Reservation{}, &broker.ClusterAdvertisement{}, &broker.ClusterRegistration{}, &broker.BrokerConfig{}}

// Manager is a manager whose leader election is over only once the caches have caught
// up: then Elected is closed, and what needs leader election starts.
type Manager struct {
	manager.Manager
	namespace string
	deadline  time.Duration
	clock     clock.Clock
	elected   chan struct{}

	// kinds in the order in which they are read.
	kinds []schema.GroupVersionKind

	mu sync.Mutex
	// known is what Observe has reported of each kind, until the leader has caught up.
	known map[schema.GroupVersionKind]*known
	// changed has a value after a call of Observe.
	changed chan struct{}
}

// known is one kind as the cache has it.
type known struct {
	// versions are the resource versions of the objects.
	versions map[types.UID]string
	// newest is the resource version of the newest event.
	newest string
}

// state is what a live read has returned of one kind.
type state struct {
	kind     schema.GroupVersionKind
	versions map[types.UID]string
	// version is that of the whole list.
	version string
}

// New returns a Manager around mgr for the objects of a namespace. Its user calls
// Observe for each event of the cache. If the caches do not catch up within the deadline,
// the manager ends with an error, so that another replica gets the lease.
func New(mgr manager.Manager, namespace string, deadline time.Duration, clock clock.Clock) (*Manager, error) {
	m := &Manager{
		Manager: mgr, namespace: namespace, deadline: deadline, clock: clock, elected: make(chan struct{}),
		known: map[schema.GroupVersionKind]*known{}, changed: make(chan struct{}, 1),
	}
	for _, object := range kinds {
		kind, err := apiutil.GVKForObject(object, mgr.GetScheme())
		if err != nil {
			return nil, fmt.Errorf("looking up the kind of %T: %w", object, err)
		}
		m.kinds = append(m.kinds, kind)
		m.known[kind] = &known{versions: map[types.UID]string{}}
	}
	return m, mgr.Add(manager.RunnableFunc(m.catchUp))
}

// Elected is closed when the replica is the leader and its caches have caught up.
func (m *Manager) Elected() <-chan struct{} { return m.elected }

// Add adds a runnable. One that needs leader election starts after Elected is closed.
func (m *Manager) Add(runnable manager.Runnable) error {
	if r, ok := runnable.(manager.LeaderElectionRunnable); !ok || r.NeedLeaderElection() {
		runnable = &delayed{Runnable: runnable, until: m.elected}
	}
	return m.Manager.Add(runnable)
}

// delayed is a runnable that starts when a channel is closed.
type delayed struct {
	manager.Runnable
	until <-chan struct{}
}

// Start implements manager.Runnable.
func (d *delayed) Start(ctx context.Context) error {
	select {
	case <-d.until:
		return d.Runnable.Start(ctx)
	case <-ctx.Done():
		return nil
	}
}

// Unwrap returns the runnable that is delayed.
func (d *delayed) Unwrap() manager.Runnable { return d.Runnable }

// Observe records an object that the cache has added or updated, or the last version of
// one that it has deleted. Its caller has applied the event already.
func (m *Manager) Observe(object client.Object, deleted bool) {
	kind, err := apiutil.GVKForObject(object, m.GetScheme())
	m.mu.Lock()
	defer m.mu.Unlock()
	of := m.known[kind]
	if err != nil || of == nil {
		return
	}
	if version := object.GetResourceVersion(); !atLeast(of.newest, version) {
		of.newest = version
	}
	if deleted {
		delete(of.versions, object.GetUID())
	} else {
		of.versions[object.GetUID()] = object.GetResourceVersion()
	}
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// catchUp runs once the replica is the leader: it reads live what there is, and waits
// until the caches have it.
func (m *Manager) catchUp(ctx context.Context) error {
	within, cancel := context.WithTimeout(ctx, m.deadline)
	defer cancel()
	began := m.clock.Now()
	for _, kind := range m.kinds {
		live, err := m.read(within, kind)
		if err == nil {
			err = m.await(within, live)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("%w: %w within %s: this replica exits, so that another one becomes the leader", errBehind, err, m.deadline)
		}
	}
	log.FromContext(ctx).Info("The caches are up to date: this replica acts as the leader", "after", m.clock.Since(began).String())
	m.mu.Lock()
	m.known = nil
	m.mu.Unlock()
	close(m.elected)
	return nil
}

// read lists the objects of a kind at the API server until that succeeds.
func (m *Manager) read(ctx context.Context, kind schema.GroupVersionKind) (state, error) {
	for {
		var list metav1.PartialObjectMetadataList
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		err := m.GetAPIReader().List(ctx, &list, client.InNamespace(m.namespace))
		if err == nil {
			live := state{kind: kind, versions: make(map[types.UID]string, len(list.Items)), version: list.ResourceVersion}
			for i := range list.Items {
				live.versions[list.Items[i].UID] = list.Items[i].ResourceVersion
			}
			return live, nil
		}
		timer := m.clock.NewTimer(retryAfter)
		select {
		case <-ctx.Done():
			timer.Stop()
			return state{}, fmt.Errorf("listing %ss live failed (%w)", kind.Kind, err)
		case <-timer.C():
		}
	}
}

// await waits until the cache has reached a state.
func (m *Manager) await(ctx context.Context, live state) error {
	for !m.reached(live) {
		select {
		case <-m.changed:
		case <-ctx.Done():
			return fmt.Errorf("the watch of %ss did not reach resource version %s", live.kind.Kind, live.version)
		}
	}
	return nil
}

// reached reports whether the cache has all of a state, or what came after it.
func (m *Manager) reached(live state) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	of := m.known[live.kind]
	for uid, version := range live.versions {
		have, exists := of.versions[uid]
		if !exists {
			// It may have been deleted since: then its deletion is newer.
			have = of.newest
		}
		if !atLeast(have, version) {
			return false
		}
	}
	for uid, version := range of.versions {
		if _, exists := live.versions[uid]; !exists && atLeast(live.version, version) {
			// It was deleted before the live read.
			return false
		}
	}
	return true
}

// atLeast reports whether a resource version is not older than another one of its kind.
func atLeast(version, than string) bool {
	order, err := resourceversion.CompareResourceVersion(version, than)
	return version == than || err == nil && order >= 0
}
