package server

import (
	"slices"
	"sync"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// maxDirty is the maximum number of changed views that a stream keeps by ID. With more,
// the stream compares all its views.
const maxDirty = 1024

// broadcaster notifies the open streams of changes.
type broadcaster struct {
	mutex sync.Mutex
	// subscriptions by cluster, oldest first.
	subscriptions map[string][]*subscription
}

// subscription is one open stream.
type subscription struct {
	stream
	// changed has a token if there may be something to send.
	changed chan struct{}
	// dropped is closed to end the stream.
	dropped chan struct{}

	mutex sync.Mutex
	// dirty are the IDs of the views that may have changed since they were last sent;
	// overflowed is true if they are more than maxDirty. So a stream that is not read
	// needs no more memory, and gets only the newest state of each view.
	dirty      map[string]struct{}
	overflowed bool
}

func newBroadcaster() *broadcaster { return &broadcaster{subscriptions: map[string][]*subscription{}} }

// subscribe opens a stream. If a cluster has more than limit, its oldest one ends, which
// may be a connection whose loss was not detected.
func (b *broadcaster) subscribe(cluster string, role protocol.Role, limit int) *subscription {
	added := &subscription{stream: stream{cluster, role}, changed: make(chan struct{}, 1), dropped: make(chan struct{})}
	b.mutex.Lock()
	defer b.mutex.Unlock()
	open := append(b.subscriptions[cluster], added)
	for len(open) > max(limit, 1) {
		close(open[0].dropped)
		streams.WithLabelValues(streamLabel(open[0].role)).Dec()
		open = open[1:]
	}
	b.subscriptions[cluster] = open
	streams.WithLabelValues(streamLabel(role)).Inc()
	return added
}

func (b *broadcaster) unsubscribe(closed *subscription) {
	b.mutex.Lock()
	before := len(b.subscriptions[closed.cluster])
	left := slices.DeleteFunc(b.subscriptions[closed.cluster], func(s *subscription) bool { return s == closed })
	if len(left) == 0 {
		delete(b.subscriptions, closed.cluster)
	} else {
		b.subscriptions[closed.cluster] = left
	}
	if len(left) < before {
		streams.WithLabelValues(streamLabel(closed.role)).Dec()
	}
	b.mutex.Unlock()
	// Another stream is the newest now.
	b.notify(closed.cluster, closed.role)
}

// newest reports whether a stream is the newest of its cluster and role.
func (b *broadcaster) newest(of *subscription) bool {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	for _, open := range slices.Backward(b.subscriptions[of.cluster]) {
		if open.role == of.role {
			return open == of
		}
	}
	return false
}

// notify notifies the streams of a cluster and role that views may have changed.
func (b *broadcaster) notify(cluster string, role protocol.Role, ids ...string) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	for _, open := range b.subscriptions[cluster] {
		if open.role == role {
			open.notify(ids)
		}
	}
}

func (b *broadcaster) notifyAll(changed changes) {
	for to, ids := range changed {
		b.notify(to.cluster, to.role, ids...)
	}
}

func (s *subscription) notify(ids []string) {
	s.mutex.Lock()
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
	s.mutex.Unlock()
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// take returns and forgets which views may have changed: those with the IDs, or any of
// them.
func (s *subscription) take() (ids []string, all bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	ids, all = sortedKeys(s.dirty), s.overflowed
	s.dirty, s.overflowed = nil, false
	return ids, all
}
