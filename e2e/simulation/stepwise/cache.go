package stepwise

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/simulation/memory"
)

// snapshots is a program's cache: for each kind, the objects as of the last watch event
// that the scheduler delivered.
type snapshots struct {
	program *Program

	mu        sync.Mutex
	stopped   bool
	informers map[reflect.Type]*informer
	indexes   map[reflect.Type]map[string]client.IndexerFunc
}

var _ cache.Cache = &snapshots{}

func newSnapshots(p *Program) *snapshots {
	return &snapshots{program: p, informers: map[reflect.Type]*informer{}, indexes: map[reflect.Type]map[string]client.IndexerFunc{}}
}

// informer is the objects of one kind.
type informer struct {
	kind     client.Object
	name     string
	position int
	objects  map[types.NamespacedName]client.Object
	// sorted are the objects by key, nil after a change.
	sorted   []client.Object
	handlers []toolscache.ResourceEventHandler
	// delivering is set while the handlers of the last event run.
	delivering bool
}

func (s *snapshots) informer(object client.Object) *informer {
	t := reflect.TypeOf(object)
	if i, ok := s.informers[t]; ok {
		return i
	}
	i := &informer{kind: reflect.New(t.Elem()).Interface().(client.Object), name: t.Elem().Name(), objects: map[types.NamespacedName]client.Object{}}
	objects, position := s.program.server.Watch(i.kind)
	for _, o := range objects {
		i.objects[client.ObjectKeyFromObject(o)] = o
	}
	i.position = position
	s.informers[t] = i
	return i
}

// steps appends the delivery of each kind's next event.
func (s *snapshots) steps(steps []Step) []Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return steps
	}
	for _, i := range s.informers {
		if !i.delivering && s.program.server.Pending(i.kind, i.position) > 0 {
			steps = append(steps, Step{Name: s.program.Name + " watch " + i.name, Do: func() { s.deliver(i) }})
		}
	}
	return steps
}

func (s *snapshots) deliver(i *informer) {
	s.mu.Lock()
	change := s.program.server.Changes(i.kind, i.position)[0]
	i.position++
	i.sorted = nil
	key := client.ObjectKeyFromObject(change.New)
	if change.Type == watch.Deleted {
		delete(i.objects, key)
	} else {
		i.objects[key] = change.New
	}
	handlers := slices.Clone(i.handlers)
	i.delivering = true
	s.mu.Unlock()
	go func() {
		for _, handler := range handlers {
			notify(handler, change)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		i.delivering = false
	}()
}

func notify(handler toolscache.ResourceEventHandler, change memory.Change) {
	switch change.Type {
	case watch.Added:
		handler.OnAdd(change.New, false)
	case watch.Modified:
		handler.OnUpdate(change.Old, change.New)
	case watch.Deleted:
		handler.OnDelete(change.New)
	}
}

func (s *snapshots) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
}

// Get implements client.Reader.
func (s *snapshots) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.informer(object)
	found, ok := i.objects[key]
	if !ok {
		return apierrors.NewNotFound(schema.GroupResource{Resource: i.name}, key.Name)
	}
	reflect.ValueOf(object).Elem().Set(reflect.ValueOf(found.DeepCopyObject()).Elem())
	return nil
}

// List implements client.Reader.
func (s *snapshots) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	element := reflect.TypeOf(list).Elem()
	items, _ := element.FieldByName("Items")
	object := reflect.New(items.Type.Elem()).Interface().(client.Object)
	i := s.informer(object)
	if i.sorted == nil {
		i.sorted = make([]client.Object, 0, len(i.objects))
		for _, o := range i.objects {
			i.sorted = append(i.sorted, o)
		}
		slices.SortFunc(i.sorted, func(a, b client.Object) int {
			return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
		})
	}
	indexes := s.indexes[reflect.TypeOf(object)]
	return memory.Select(list, i.sorted, func(object client.Object, field, value string) bool {
		index, ok := indexes[field]
		if !ok {
			panic(fmt.Sprintf("%s has no index %s of %T", s.program.Name, field, object))
		}
		return slices.Contains(index(object), value)
	}, options...)
}

// IndexField implements client.FieldIndexer.
func (s *snapshots) IndexField(_ context.Context, object client.Object, field string, extract client.IndexerFunc) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := reflect.TypeOf(object)
	if s.indexes[t] == nil {
		s.indexes[t] = map[string]client.IndexerFunc{}
	}
	s.indexes[t][field] = extract
	return nil
}

// GetInformer implements cache.Cache.
func (s *snapshots) GetInformer(_ context.Context, object client.Object, _ ...cache.InformerGetOption) (cache.Informer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &subscription{cache: s, informer: s.informer(object)}, nil
}

// GetInformerForKind implements cache.Cache.
func (s *snapshots) GetInformerForKind(_ context.Context, gvk schema.GroupVersionKind, _ ...cache.InformerGetOption) (cache.Informer, error) {
	return nil, fmt.Errorf("no informer for %s", gvk)
}

// RemoveInformer implements cache.Cache.
func (s *snapshots) RemoveInformer(context.Context, client.Object) error { return nil }

// Start implements cache.Cache.
func (s *snapshots) Start(context.Context) error { return nil }

// WaitForCacheSync implements cache.Cache.
func (s *snapshots) WaitForCacheSync(context.Context) bool { return true }

// subscription is an informer as its users see it.
type subscription struct {
	cache    *snapshots
	informer *informer
}

// AddEventHandler implements cache.Informer.
func (s *subscription) AddEventHandler(handler toolscache.ResourceEventHandler) (toolscache.ResourceEventHandlerRegistration, error) {
	s.cache.mu.Lock()
	var objects []client.Object
	for _, o := range s.informer.objects {
		objects = append(objects, o)
	}
	s.informer.handlers = append(s.informer.handlers, handler)
	s.cache.mu.Unlock()
	slices.SortFunc(objects, func(a, b client.Object) int { return cmp.Compare(a.GetName(), b.GetName()) })
	for _, o := range objects {
		handler.OnAdd(o, true)
	}
	return synced{}, nil
}

// AddEventHandlerWithResyncPeriod implements cache.Informer.
func (s *subscription) AddEventHandlerWithResyncPeriod(handler toolscache.ResourceEventHandler, _ time.Duration) (toolscache.ResourceEventHandlerRegistration, error) {
	return s.AddEventHandler(handler)
}

// AddEventHandlerWithOptions implements cache.Informer.
func (s *subscription) AddEventHandlerWithOptions(handler toolscache.ResourceEventHandler, _ toolscache.HandlerOptions) (toolscache.ResourceEventHandlerRegistration, error) {
	return s.AddEventHandler(handler)
}

// RemoveEventHandler implements cache.Informer.
func (s *subscription) RemoveEventHandler(toolscache.ResourceEventHandlerRegistration) error {
	return nil
}

// AddIndexers implements cache.Informer.
func (s *subscription) AddIndexers(toolscache.Indexers) error { return nil }

// HasSynced implements cache.Informer.
func (s *subscription) HasSynced() bool { return true }

// HasSyncedChecker implements cache.Informer.
func (s *subscription) HasSyncedChecker() toolscache.DoneChecker { return synced{} }

// IsStopped implements cache.Informer.
func (s *subscription) IsStopped() bool { return false }

// synced is a registration, and its DoneChecker, that has seen all objects.
type synced struct{}

var done = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (synced) HasSynced() bool { return true }

func (synced) HasSyncedChecker() toolscache.DoneChecker { return synced{} }

func (synced) Name() string { return "snapshots" }

func (synced) Done() <-chan struct{} { return done }
