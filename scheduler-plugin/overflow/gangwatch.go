package overflow

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// A kind is absent once the API server has refused it minRefusals times in a row, over
// refusalLasts: while it starts, it refuses also what it will allow.
const minRefusals, refusalLasts = 3, 15 * time.Second

// lookEvery is the least time between two looks for a kind that is absent.
const lookEvery = 500 * time.Millisecond

// gangInformer watches one of the resources that describe gangs. The kind may be installed
// later. An informer asks for one that is missing once a minute only, so that the pods that
// name an object of it have it looked for.
type gangInformer struct {
	objects     dynamic.ResourceInterface
	newInformer func() (cache.SharedIndexInformer, error)
	clock       clock.PassiveClock
	// absent: the API server does not serve them, or does not allow to read them.
	absent atomic.Bool
	// look has a token while the kind is to be looked for, uninstalled while one that was
	// known has become absent.
	look, uninstalled chan struct{}

	mu       sync.RWMutex
	informer cache.SharedIndexInformer
	// lookedAt is when the last look that has not found the kind began.
	lookedAt time.Time
	// refusals in a row, since a time.
	refusals     int
	refusedSince time.Time
}

func newGangInformer(log klog.Logger, clock clock.PassiveClock, client dynamic.Interface, resource schema.GroupVersionResource, missing string) (i *gangInformer, err error) {
	i = &gangInformer{clock: clock, objects: client.Resource(resource), look: make(chan struct{}, 1), uninstalled: make(chan struct{}, 1)}
	logFailure := logWatchErrors(log, resource.Resource, missing)
	i.newInformer = func() (cache.SharedIndexInformer, error) {
		informer := dynamicinformer.NewFilteredDynamicInformer(client, resource, metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
		err := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
			i.failed(err)
			logFailure(ctx, r, err)
		})
		if err != nil {
			return nil, fmt.Errorf("watching %s: %w", resource.Resource, err)
		}
		return informer, nil
	}
	i.informer, err = i.newInformer()
	return i, err
}

// refuses reports whether an error says that a kind is not served, or must not be read.
func refuses(err error) bool { return isMissing(err) || apierrors.IsForbidden(err) }

// failed records that the API server has not listed or not watched the objects.
func (i *gangInformer) failed(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !refuses(err) {
		i.refusals = 0
		return
	}
	now := i.clock.Now()
	if i.refusals == 0 {
		i.refusedSince = now
	}
	if i.refusals++; i.refusals >= minRefusals && now.Sub(i.refusedSince) >= refusalLasts {
		i.absent.Store(true)
		if i.informer.HasSynced() {
			offer(i.uninstalled)
		}
	}
}

// offer puts a token into a channel that has room for one.
func offer(tokens chan<- struct{}) {
	select {
	case tokens <- struct{}{}:
	default:
	}
}

func (i *gangInformer) current() cache.SharedIndexInformer {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.informer
}

// HasSynced reports whether the objects are known.
func (i *gangInformer) HasSynced() bool { return i.current().HasSynced() }

// GetIndexer returns the objects.
func (i *gangInformer) GetIndexer() cache.Indexer { return i.current().GetIndexer() }

// isAbsent reports whether the kind was absent when it was asked for last.
func (i *gangInformer) isAbsent() bool { return i.absent.Load() && !i.HasSynced() }

// known reports whether the objects are known, or that there are none.
func (i *gangInformer) known() bool { return i.HasSynced() || i.absent.Load() }

// absentSince reports whether there are no objects for a pod that was first seen at a time. If
// that is not known, it has the kind looked for.
func (i *gangInformer) absentSince(seen time.Time) bool {
	if !i.absent.Load() {
		return false
	}
	i.mu.RLock()
	defer i.mu.RUnlock()
	if !i.lookedAt.Before(seen) {
		return true
	}
	offer(i.look)
	return false
}

// run watches the objects until ctx ends. changed is called when it has become known which
// there are, or that there are none.
func (i *gangInformer) run(ctx context.Context, handler cache.ResourceEventHandler, changed func()) {
	for ctx.Err() == nil {
		watching, stop := context.WithCancel(ctx)
		informer := i.current()
		if _, err := informer.AddEventHandler(handler); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to watch what describes gangs") // the informer has stopped
		}
		go informer.RunWithContext(watching)
		i.awaitKnown(ctx)
		changed()
		served := i.awaitChange(ctx, changed)
		stop()
		if ctx.Err() == nil {
			i.renew(ctx, served)
		}
	}
}

// renew replaces an informer that waits to ask again for a kind that is served by now, or that
// has objects of one that is served no more.
func (i *gangInformer) renew(ctx context.Context, served bool) {
	informer, err := i.newInformer()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to watch what describes gangs") // not of an informer that has not started
		return
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.informer, i.refusals = informer, 0
	i.absent.Store(!served)
	select { // what was said of the former one
	case <-i.uninstalled:
	default:
	}
}

func (i *gangInformer) awaitKnown(ctx context.Context) {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for !i.known() {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// awaitChange looks for an absent kind when it is asked to. It returns when it has found it
// (served), when one that was known has become absent, or when ctx ends.
func (i *gangInformer) awaitChange(ctx context.Context, changed func()) (served bool) {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-i.uninstalled:
			return false
		case <-i.look:
		}
		if !i.HasSynced() {
			began := i.clock.Now()
			_, err := i.objects.List(ctx, metav1.ListOptions{Limit: 1})
			switch {
			case err == nil:
				return true
			case refuses(err):
				i.mu.Lock()
				i.lookedAt = began
				i.mu.Unlock()
			}
		}
		changed()
		select {
		case <-ctx.Done():
			return false
		case <-time.After(lookEvery):
		}
	}
}
