package store

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// goneFor is how long an event, a read or the answer to a call may still have an object that is gone: twice
// as long as a call takes at most.
const goneFor = time.Minute

// objects are those of one kind, by name: the newest version of each that a watch, a read or
// an own write has shown. It is not safe for concurrent use.
type objects[T client.Object] struct {
	clock clock.PassiveClock
	known map[string]T
	// gone are the objects that were removed lately: an event or a read may still have an
	// earlier version. removals are the same in their order.
	gone     map[types.UID]time.Time
	removals []removal
}

// removal is when an object was removed.
type removal struct {
	uid types.UID
	at  time.Time
}

func newObjects[T client.Object](clock clock.PassiveClock) objects[T] {
	return objects[T]{clock: clock, known: map[string]T{}, gone: map[types.UID]time.Time{}}
}

// news reports whether a version is newer than what is known of its object.
func (o *objects[T]) news(object T) bool {
	if at, gone := o.gone[object.GetUID()]; gone && o.clock.Since(at) <= goneFor {
		return false
	}
	known, exists := o.known[object.GetName()]
	return !exists || !older(object, known)
}

// remove forgets an object that is gone, and no newer one of its name. It reports whether it
// was known.
func (o *objects[T]) remove(object T) bool {
	uid, now := object.GetUID(), o.clock.Now()
	for len(o.removals) > 0 && now.Sub(o.removals[0].at) > goneFor {
		delete(o.gone, o.removals[0].uid)
		o.removals = o.removals[1:]
	}
	if _, noted := o.gone[uid]; !noted {
		o.gone[uid] = now
		o.removals = append(o.removals, removal{uid, now})
	}
	known, exists := o.known[object.GetName()]
	if !exists || known.GetUID() != uid {
		return false
	}
	delete(o.known, object.GetName())
	return true
}

// older reports whether an object is an older version than another one, or the same.
func older(object, than client.Object) bool {
	order, err := resourceversion.CompareResourceVersion(object.GetResourceVersion(), than.GetResourceVersion())
	return err == nil && order <= 0
}

// names are sets of names by key.
type names map[string]map[string]struct{}

func (n names) add(key, name string) {
	if n[key] == nil {
		n[key] = map[string]struct{}{}
	}
	n[key][name] = struct{}{}
}

func (n names) remove(key, name string) {
	if delete(n[key], name); len(n[key]) == 0 {
		delete(n, key)
	}
}
