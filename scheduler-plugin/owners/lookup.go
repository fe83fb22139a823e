package owners

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
)

const (
	// maxResults limits the results that are kept, and maxQueued the look-ups that wait. One
	// that finds the queue full is queued when it is asked for again.
	maxResults, maxQueued = 8192, 1024
	// requestsPerSecond limits the requests to the API server, timeout the time of one.
	requestsPerSecond = 50
	timeout           = 5 * time.Second
	workers           = 2

	// How long results are kept: of an object that exists, of a kind that cannot be read, of
	// an object that does not exist, and of a look-up that failed.
	keepFound, keepUnreadable, keepMissing, keepFailed = 10 * time.Minute, time.Minute, 10 * time.Second, 2 * time.Second
)

// Lookup finds the controllers of owners. Safe for concurrent use.
type Lookup struct {
	log    logr.Logger
	client metadata.Interface
	kinds  map[schema.GroupKind]string
	// results by the UID of the owner.
	results *utilcache.LRUExpireCache
	queue   workqueue.TypedInterface[object]
	// logged is when a kind was last logged that cannot be read.
	logged sync.Map
}

// object is an owner to be looked up.
type object struct {
	resource  schema.GroupVersionResource
	namespace string
	name      string
	uid       types.UID
}

// result of a look-up.
type result struct {
	controller *metav1.OwnerReference
	found      bool
}

// New returns a Lookup for these kinds.
func New(log logr.Logger, config *rest.Config, kinds []Kind) (*Lookup, error) {
	config = metadata.ConfigFor(config)
	config.QPS, config.Burst, config.RateLimiter = requestsPerSecond, 2*requestsPerSecond, nil
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client for metadata: %w", err)
	}
	l := &Lookup{
		log: log, client: client, kinds: map[schema.GroupKind]string{},
		results: utilcache.NewLRUExpireCache(maxResults), queue: workqueue.NewTyped[object](),
	}
	for _, k := range kinds {
		if err := k.Validate(); err != nil {
			return nil, fmt.Errorf("kind of owners %s: %w", k, err)
		}
		l.kinds[schema.GroupKind{Group: k.Group, Kind: k.Kind}] = k.Resource
	}
	return l, nil
}

// Resolve implements demand.Resolve for owners that the caller does not know itself. It
// never blocks: an owner that was not looked up yet is not found, and queued for Run. An
// owner of another kind than those of the Lookup, or of one that the API server does not
// serve or does not allow to be read, has no controller: it is a root owner.
func (l *Lookup) Resolve(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found bool) {
	resource, ok := resourceOf(l.kinds, ref)
	if !ok {
		return nil, true
	}
	// By all that the reference says: users write references.
	o := object{resource, namespace, ref.Name, ref.UID}
	if kept, ok := l.results.Get(o); ok {
		r := kept.(result)
		return r.controller, r.found
	}
	if l.queue.Len() < maxQueued {
		l.queue.Add(o)
	}
	return nil, false
}

// Run looks up what is queued until ctx ends. resolved is called after each owner that was
// found.
func (l *Lookup) Run(ctx context.Context, resolved func()) {
	var running sync.WaitGroup
	for range workers {
		running.Go(func() {
			for {
				o, shutdown := l.queue.Get()
				if shutdown {
					return
				}
				if _, kept := l.results.Get(o); kept { // it was queued again during its lookup
					l.queue.Done(o)
					continue
				}
				r, keep := l.get(ctx, o)
				l.results.Add(o, r, keep)
				l.queue.Done(o)
				if r.found {
					resolved()
				}
			}
		})
	}
	<-ctx.Done()
	l.queue.ShutDown()
	running.Wait()
}

// get reads an owner, and returns how long to keep the result.
func (l *Lookup) get(ctx context.Context, o object) (result, time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	owner, err := l.client.Resource(o.resource).Namespace(o.namespace).Get(ctx, o.name, metav1.GetOptions{})
	switch {
	case err == nil && owner.UID == o.uid:
		return result{metav1.GetControllerOf(owner), true}, keepFound
	case err == nil:
		return result{}, keepMissing // another object of that name
	case apierrors.IsForbidden(err):
		l.logUnreadable(o, "The kind of an owner must not be read; its objects count as root owners. Check the chart's value scheduler.ownerKinds")
		return result{found: true}, keepUnreadable
	case apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse):
		// No such path, rather than no such object.
		l.logUnreadable(o, "The kind of an owner is not served in this version; its objects count as root owners")
		return result{found: true}, keepUnreadable
	case apierrors.IsNotFound(err):
		return result{}, keepMissing
	default:
		l.log.V(1).Info("Failed to look up an owner; retrying", "resource", o.resource.GroupResource().String(), "namespace", o.namespace, "name", o.name, "reason", err.Error())
		return result{}, keepFailed
	}
}

// logUnreadable logs that a kind cannot be read, every ten minutes.
func (l *Lookup) logUnreadable(o object, message string) {
	now := time.Now()
	if last, ok := l.logged.Load(o.resource); ok && now.Sub(last.(time.Time)) < 10*time.Minute {
		return
	}
	l.logged.Store(o.resource, now)
	l.log.Info(message, "resource", o.resource.GroupResource().String(), "version", o.resource.Version)
}
