package pods

import (
	"context"
	"slices"
	"sync"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
)

// namespaceCaches caches the ConfigMaps and Secrets of those namespaces of this
// cluster whose pods refer to any: the agent authorizes this program to read them
// there only.
type namespaceCaches struct {
	client  kubernetes.Interface
	changed func(namespace string)

	mu      sync.Mutex
	caches  map[string]*namespaceCache
	stopped bool
}

type namespaceCache struct {
	configMaps, secrets cache.Indexer
	hasSynced           []cache.InformerSynced
	cancel              context.CancelFunc
}

func (c *namespaceCache) synced() bool { return allSynced(c.hasSynced) }

func allSynced(hasSynced []cache.InformerSynced) bool {
	return !slices.ContainsFunc(hasSynced, func(synced cache.InformerSynced) bool { return !synced() })
}

func newNamespaceCaches(client kubernetes.Interface, changed func(namespace string)) *namespaceCaches {
	return &namespaceCaches{client: client, changed: changed, caches: map[string]*namespaceCache{}}
}

// get returns the cache of a namespace, and starts it on the first call.
func (n *namespaceCaches) get(namespace string) *namespaceCache {
	n.mu.Lock()
	defer n.mu.Unlock()
	if existing := n.caches[namespace]; existing != nil {
		return existing
	}
	factory := informers.NewSharedInformerFactoryWithOptions(n.client, 0, informers.WithNamespace(namespace),
		informers.WithTransform(ctrlcache.TransformStripManagedFields()))
	configMaps, secrets := factory.Core().V1().ConfigMaps().Informer(), factory.Core().V1().Secrets().Informer()
	ctx, cancel := context.WithCancel(context.Background())
	created := &namespaceCache{
		configMaps: configMaps.GetIndexer(), secrets: secrets.GetIndexer(), cancel: cancel,
		hasSynced: []cache.InformerSynced{configMaps.HasSynced, secrets.HasSynced},
	}
	if n.stopped {
		cancel()
		return created
	}
	handler := onChange(func(any) { n.changed(namespace) })
	for _, informer := range []cache.SharedIndexInformer{configMaps, secrets} {
		// An error means that the informer was stopped.
		if _, err := informer.AddEventHandler(handler); err != nil {
			cancel()
		}
	}
	factory.Start(ctx.Done())
	n.caches[namespace] = created
	return created
}

// retain stops the caches of all other namespaces.
func (n *namespaceCaches) retain(namespaces map[string]bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for namespace, c := range n.caches {
		if !namespaces[namespace] {
			c.cancel()
			delete(n.caches, namespace)
		}
	}
}

// stop stops all caches for good.
func (n *namespaceCaches) stop() {
	n.mu.Lock()
	n.stopped = true
	n.mu.Unlock()
	n.retain(nil)
}
