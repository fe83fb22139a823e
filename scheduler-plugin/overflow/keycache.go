package overflow

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/utils/lru"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// keyCache computes the keys of pods and caches them, because every cycle looks
// at the same pods. Safe for concurrent use.
type keyCache struct {
	replicaSets appslisters.ReplicaSetLister
	cache       *lru.Cache
}

// podKey is a pod's key and the results of demand.KeyOf beside it.
type podKey struct {
	key        demand.Key
	owner      metav1.OwnerReference
	set        broker.PodSet
	generation int64
}

// keyCacheSize limits the memory of a keyCache to about 20 MB.
const keyCacheSize = 20_000

func newKeyCache(replicaSets appslisters.ReplicaSetLister) *keyCache {
	return &keyCache{replicaSets: replicaSets, cache: lru.New(keyCacheSize)}
}

// get returns a pod's key; ok is false if its root owner cannot be resolved (yet).
func (c *keyCache) get(pod *corev1.Pod) (key *podKey, ok bool) {
	if cached, hit := c.cache.Get(pod.UID); hit {
		// A resize changes the shape, and the generation with it.
		if key := cached.(*podKey); key.generation == pod.Generation {
			return key, true
		}
	}
	key = &podKey{generation: pod.Generation}
	if key.key, key.owner, key.set, ok = demand.KeyOf(pod, c.resolve); !ok {
		return nil, false
	}
	c.cache.Add(pod.UID, key)
	return key, true
}

// resolve implements demand.Resolve.
func (c *keyCache) resolve(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
	rs, err := c.replicaSets.ReplicaSets(namespace).Get(ref.Name)
	if err != nil || rs.UID != ref.UID {
		return nil, false
	}
	return metav1.GetControllerOfNoCopy(rs), true
}
