package overflow

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

// findOwner is demand.Resolve, and reports whether the object counts as a root owner only
// because the API server refuses it.
type findOwner func(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found, refused bool)

// keyCache computes the keys of pods and keeps them until the pod is deleted, however
// many pods there are; those with a refused owner for owners.CheckRefused. Safe for concurrent use.
type keyCache struct {
	clock clock.PassiveClock
	find  findOwner
	// exists reports whether a pod was not deleted yet: then forget is called later.
	exists func(*corev1.Pod) bool

	mu   sync.RWMutex
	keys map[types.UID]*podKey
}

// podKey is a pod's key and the results of demand.KeyOf beside it.
type podKey struct {
	key        demand.Key
	owner      metav1.OwnerReference
	set        broker.PodSet
	generation int64
	// until is when to compute the key again; zero for the life of the pod.
	until time.Time
}

func newKeyCache(clock clock.PassiveClock, find findOwner) *keyCache {
	return &keyCache{clock: clock, find: find, exists: func(*corev1.Pod) bool { return true }, keys: map[types.UID]*podKey{}}
}

// get returns a pod's key; ok is false if its root owner cannot be resolved (yet).
func (c *keyCache) get(pod *corev1.Pod) (key *podKey, ok bool) {
	c.mu.RLock()
	key = c.keys[pod.UID]
	c.mu.RUnlock()
	// A resize changes the shape, and the generation with it.
	if key != nil && key.generation == pod.Generation && (key.until.IsZero() || c.clock.Now().Before(key.until)) {
		return key, true
	}
	key = &podKey{generation: pod.Generation}
	resolve := func(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		controller, found, refused := c.find(namespace, ref)
		if refused {
			key.until = c.clock.Now().Add(owners.CheckRefused)
		}
		return controller, found
	}
	if key.key, key.owner, key.set, ok = demand.KeyOf(pod, resolve); !ok {
		return nil, false
	}
	c.mu.Lock()
	c.keys[pod.UID] = key
	c.mu.Unlock()
	if !c.exists(pod) {
		c.forget(pod.UID) // it was deleted during its cycle
	}
	return key, true
}

// keyOf is get without what is beside the key.
func (c *keyCache) keyOf(pod *corev1.Pod) (demand.Key, bool) {
	key, ok := c.get(pod)
	if !ok {
		return demand.Key{}, false
	}
	return key.key, true
}

// forget drops the key of a deleted pod.
func (c *keyCache) forget(pod types.UID) {
	c.mu.Lock()
	delete(c.keys, pod)
	c.mu.Unlock()
}
