package overflow

import (
	"sync"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// turns lets one write at a time go on in each namespace whose Reservations are limited in sum.
// The others do not block the writers meanwhile: their keys are kept. The zero turns is ready to
// use. Safe for concurrent use.
type turns struct {
	mu sync.Mutex
	// waiting has the keys that wait for a turn, by namespace, and busy the namespaces in which
	// a write goes on.
	waiting map[string]map[demand.Key]bool
	busy    map[string]bool
}

// take begins the turn of a key, which end ends. It keeps the key and returns false while
// another one has its turn.
func (t *turns) take(key demand.Key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.busy[key.Namespace] {
		if t.busy == nil {
			t.busy, t.waiting = map[string]bool{}, map[string]map[demand.Key]bool{}
		}
		t.busy[key.Namespace] = true
		return true
	}
	if t.waiting[key.Namespace] == nil {
		t.waiting[key.Namespace] = map[demand.Key]bool{}
	}
	t.waiting[key.Namespace][key] = true
	return false
}

func (t *turns) end(namespace string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.busy, namespace)
}

// next removes and returns a key that waits in a namespace in which none has its turn. It is
// called after each request of a namespace, whatever came of it, so that no key is left.
func (t *turns) next(namespace string) (key demand.Key, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.busy[namespace] {
		return demand.Key{}, false
	}
	for key = range t.waiting[namespace] {
		if delete(t.waiting[namespace], key); len(t.waiting[namespace]) == 0 {
			delete(t.waiting, namespace)
		}
		return key, true
	}
	return demand.Key{}, false
}
