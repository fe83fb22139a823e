package stream

import (
	"maps"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// maxDirty is the maximum number of changed views that a stream keeps by ID. With more,
// the stream compares all its views.
const maxDirty = 1024

var streams = prometheus.NewGaugeVec(prometheus.GaugeOpts{
	Name: "broker_streams",
	Help: "Number of open watch streams, by role.",
}, []string{"role"})

func init() {
	metrics.Registry.MustRegister(streams)
	// So that they are there before the first stream.
	for _, role := range []protocol.Role{protocol.RoleRequester, protocol.RoleProvider, ""} {
		streams.WithLabelValues(streamLabel(role))
	}
}

func streamLabel(role protocol.Role) string {
	if role == "" {
		return "relay"
	}
	return string(role)
}

// Broadcaster notifies the open streams of changes.
type Broadcaster struct {
	// mutex is also that of the Subscriptions.
	mutex sync.Mutex
	// subscriptions by cluster, oldest first.
	subscriptions map[string][]*Subscription
}

// Subscription is one open stream.
type Subscription struct {
	// Cluster and role are whose it is. Relayed messages have no role.
	Cluster string
	role    protocol.Role
	// Changed has a token if there may be something to send.
	Changed chan struct{}
	// Dropped is closed to end the stream.
	Dropped chan struct{}

	broadcaster *Broadcaster
	// dirty are the IDs of the views that may have changed since they were last sent;
	// overflowed is true if they are more than maxDirty. So a stream that is not read
	// needs no more memory, and gets only the newest state of each view.
	dirty      map[string]struct{}
	overflowed bool
}

// NewBroadcaster returns a Broadcaster without streams.
func NewBroadcaster() *Broadcaster {
	return &Broadcaster{subscriptions: map[string][]*Subscription{}}
}

// Subscribe opens a stream. If a cluster has more than limit, its oldest one ends, which
// may be a connection whose loss was not detected.
func (b *Broadcaster) Subscribe(cluster string, role protocol.Role, limit int) *Subscription {
	added := &Subscription{Cluster: cluster, role: role, Changed: make(chan struct{}, 1), Dropped: make(chan struct{}), broadcaster: b}
	b.mutex.Lock()
	defer b.mutex.Unlock()
	open := append(b.subscriptions[cluster], added)
	for len(open) > max(limit, 1) {
		close(open[0].Dropped)
		streams.WithLabelValues(streamLabel(open[0].role)).Dec()
		open = open[1:]
	}
	b.subscriptions[cluster] = open
	streams.WithLabelValues(streamLabel(role)).Inc()
	return added
}

// Close ends a stream.
func (s *Subscription) Close() {
	b := s.broadcaster
	b.mutex.Lock()
	before := len(b.subscriptions[s.Cluster])
	left := slices.DeleteFunc(b.subscriptions[s.Cluster], func(open *Subscription) bool { return open == s })
	if len(left) == 0 {
		delete(b.subscriptions, s.Cluster)
	} else {
		b.subscriptions[s.Cluster] = left
	}
	if len(left) < before {
		streams.WithLabelValues(streamLabel(s.role)).Dec()
	}
	b.mutex.Unlock()
	// Another stream is the newest now.
	b.Notify(s.Cluster, s.role)
}

// Newest reports whether a stream is the newest of its cluster and role.
func (s *Subscription) Newest() bool {
	s.broadcaster.mutex.Lock()
	defer s.broadcaster.mutex.Unlock()
	for _, open := range slices.Backward(s.broadcaster.subscriptions[s.Cluster]) {
		if open.role == s.role {
			return open == s
		}
	}
	return false
}

// Notify notifies the streams of a cluster and role that views may have changed.
func (b *Broadcaster) Notify(cluster string, role protocol.Role, ids ...string) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	for _, open := range b.subscriptions[cluster] {
		if open.role == role {
			open.notify(ids)
		}
	}
}

func (s *Subscription) notify(ids []string) {
	for _, id := range ids {
		if s.overflowed {
			break
		}
		if s.dirty == nil {
			s.dirty = map[string]struct{}{}
		}
		if s.dirty[id] = struct{}{}; len(s.dirty) > maxDirty {
			s.dirty, s.overflowed = nil, true
		}
	}
	select {
	case s.Changed <- struct{}{}:
	default:
	}
}

// Take returns and forgets which views may have changed: those with the IDs, or any of
// them.
func (s *Subscription) Take() (ids []string, all bool) {
	s.broadcaster.mutex.Lock()
	dirty, all := s.dirty, s.overflowed
	s.dirty, s.overflowed = nil, false
	s.broadcaster.mutex.Unlock()
	return slices.Sorted(maps.Keys(dirty)), all
}
