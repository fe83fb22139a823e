package hosting

import (
	"context"
	"sync"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
)

// sources watches the ConfigMaps and Secrets of those home namespaces whose pods
// refer to any. The agent allows this program to read there, and nowhere else.
type sources struct {
	home    kubernetes.Interface
	changed func(namespace string)

	mu    sync.Mutex
	all   map[string]*source
	ended bool
}

// source is one namespace.
type source struct {
	configMaps, secrets cache.Indexer
	informers           []cache.InformerSynced
	cancel              context.CancelFunc
}

func (s *source) synced() bool {
	for _, synced := range s.informers {
		if !synced() {
			return false
		}
	}
	return true
}

func newSources(home kubernetes.Interface, changed func(namespace string)) *sources {
	return &sources{home: home, changed: changed, all: map[string]*source{}}
}

// of is a namespace's source, which is watched from then on.
func (s *sources) of(namespace string) *source {
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.all[namespace]; have != nil {
		return have
	}
	factory := informers.NewSharedInformerFactoryWithOptions(s.home, 0, informers.WithNamespace(namespace),
		informers.WithTransform(ctrlcache.TransformStripManagedFields()))
	configMaps, secrets := factory.Core().V1().ConfigMaps().Informer(), factory.Core().V1().Secrets().Informer()
	ctx, cancel := context.WithCancel(context.Background())
	made := &source{
		configMaps: configMaps.GetIndexer(), secrets: secrets.GetIndexer(), cancel: cancel,
		informers: []cache.InformerSynced{configMaps.HasSynced, secrets.HasSynced},
	}
	if s.ended {
		cancel()
		return made
	}
	handler := onAny(func(any) { s.changed(namespace) })
	for _, informer := range []cache.SharedIndexInformer{configMaps, secrets} {
		// It fails only for informers that have ended.
		if _, err := informer.AddEventHandler(handler); err != nil {
			cancel()
		}
	}
	factory.Start(ctx.Done())
	s.all[namespace] = made
	return made
}

// only stops watching all other namespaces.
func (s *sources) only(namespaces map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for namespace, source := range s.all {
		if !namespaces[namespace] {
			source.cancel()
			delete(s.all, namespace)
		}
	}
}

func (s *sources) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for namespace, source := range s.all {
		source.cancel()
		delete(s.all, namespace)
	}
}
