package owners

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// findOwner is demand.Resolve, and reports whether the object counts as a root owner only
// because the API server refuses it.
type findOwner func(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found, refused bool)

// KeyCache computes the keys of pods and keeps them until the pod is deleted, however
// many pods there are; those with a refused owner for CheckRefused. Safe for concurrent use.
type KeyCache struct {
	clock clock.PassiveClock
	Find  findOwner
	// Exists reports whether a pod was not deleted yet: then forget is called later.
	Exists func(*corev1.Pod) bool

	mu   sync.RWMutex
	keys map[types.UID]*PodKey
}

// PodKey is a pod's key and the results of demand.KeyOf beside it.
type PodKey struct {
	Key        demand.Key
	Owner      metav1.OwnerReference
	Set        broker.PodSet
	generation int64
	// until is when to compute the key again; zero for the life of the pod.
	until time.Time
}

func NewKeyCache(clock clock.PassiveClock, find findOwner) *KeyCache {
	return &KeyCache{clock: clock, Find: find, Exists: func(*corev1.Pod) bool { return true }, keys: map[types.UID]*PodKey{}}
}

// Get returns a pod's key; ok is false if its root owner cannot be resolved (yet).
func (c *KeyCache) Get(pod *corev1.Pod) (key *PodKey, ok bool) {
	c.mu.RLock()
	key = c.keys[pod.UID]
	c.mu.RUnlock()
	// A resize changes the shape, and the generation with it.
	if key != nil && key.generation == pod.Generation && (key.until.IsZero() || c.clock.Now().Before(key.until)) {
		return key, true
	}
	key = &PodKey{generation: pod.Generation}
	resolve := func(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		controller, found, refused := c.Find(namespace, ref)
		if refused {
			key.until = c.clock.Now().Add(CheckRefused)
		}
		return controller, found
	}
	if key.Key, key.Owner, key.Set, ok = demand.KeyOf(pod, resolve); !ok {
		return nil, false
	}
	c.mu.Lock()
	c.keys[pod.UID] = key
	c.mu.Unlock()
	if !c.Exists(pod) {
		c.Forget(pod.UID) // it was deleted during its cycle
	}
	return key, true
}

// KeyOf is get without what is beside the key.
func (c *KeyCache) KeyOf(pod *corev1.Pod) (demand.Key, bool) {
	key, ok := c.Get(pod)
	if !ok {
		return demand.Key{}, false
	}
	return key.Key, true
}

// Has reports whether a pod's key is kept.
func (c *KeyCache) Has(pod types.UID) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.keys[pod] != nil
}

// Forget drops the key of a deleted pod.
func (c *KeyCache) Forget(pod types.UID) {
	c.mu.Lock()
	delete(c.keys, pod)
	c.mu.Unlock()
}
