package gang

import (
	"context"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// refusedOften is how many refusals in a row make a kind absent: with client-go's backoff, 12 s or
// more of them. While an API server starts, it refuses also what it will allow.
const refusedOften = 5

// spreads is how long another API server of the cluster may still refuse a kind that was installed.
const spreads = 5 * time.Second

// gangInformer watches one of the resources that describe gangs. While it is not served, or must
// not be read, client-go asks for it again, at least once a minute.
type gangInformer struct {
	cache.SharedIndexInformer
	clock clock.PassiveClock
	// changed is called while the kind is absent, each time that it is refused.
	changed func()

	mu sync.Mutex
	// refusals in a row, the time of the last one, and the version that was read before them.
	refusals  int
	refusedAt time.Time
	read      string
}

// watchErrors returns the handler of the errors of a watch; missing is to be logged while the kind
// is not served.
type watchErrors func(resource, missing string) cache.WatchErrorHandlerWithContext

func newGangInformer(clock clock.PassiveClock, client dynamic.Interface, resource schema.GroupVersionResource, onError watchErrors) (*gangInformer, error) {
	i := &gangInformer{clock: clock, SharedIndexInformer: dynamicinformer.NewFilteredDynamicInformer(client, resource, metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()}
	logFailure := onError(resource.Resource, "The API server does not serve "+resource.GroupResource().String())
	err := i.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if i.failed(err) {
			i.changed()
		}
		logFailure(ctx, r, err)
	})
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", resource.Resource, err)
	}
	return i, nil
}

// run watches the objects until ctx ends. changed is called when it has become known which there
// are, or that there are none.
func (i *gangInformer) run(ctx context.Context, handler cache.ResourceEventHandler, changed func()) {
	i.changed = changed
	if _, err := i.AddEventHandler(handler); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to watch what describes gangs") // the informer has stopped
	}
	go i.RunWithContext(ctx)
	if cache.WaitForCacheSync(ctx.Done(), i.HasSynced) {
		changed()
	}
}

// failed records that the objects were not listed or not watched, and reports whether the kind is
// absent.
func (i *gangInformer) failed(err error) (absent bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	refused := apierrors.IsNotFound(err) || meta.IsNoMatchError(err) || apierrors.IsForbidden(err)
	if read := i.LastSyncResourceVersion(); !refused || read != i.read {
		i.refusals, i.read = 0, read
	}
	if refused {
		i.refusals++
		i.refusedAt = i.clock.Now()
	}
	return i.refusals >= refusedOften
}

// absent reports whether the API server does not serve the kind, or does not allow to read it.
func (i *gangInformer) absent() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.refusals >= refusedOften && i.LastSyncResourceVersion() == i.read
}

// absentAfter reports whether the kind was absent still, everywhere, after a time.
func (i *gangInformer) absentAfter(since time.Time) bool {
	absent := i.absent()
	i.mu.Lock()
	defer i.mu.Unlock()
	return absent && i.refusedAt.After(since.Add(spreads))
}

// served reports whether the objects are known.
func (i *gangInformer) served() bool { return i.HasSynced() && !i.absent() }

// known reports whether the objects are known, or that there are none.
func (i *gangInformer) known() bool { return i.HasSynced() || i.absent() }
