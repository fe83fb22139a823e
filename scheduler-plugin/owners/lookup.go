package owners

import (
	"context"
	"fmt"
	"maps"
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
	"k8s.io/utils/clock"
)

const (
	// maxResults limits the results that are kept, and maxQueued the look-ups that wait. One
	// that finds the queue full is queued when it is asked for again.
	maxResults, maxQueued = 8192, 1024
	// requestsPerSecond limits the requests to the API server, timeout the time of one.
	requestsPerSecond = 50
	timeout           = 5 * time.Second
	workers           = 2

	// How long results are kept: of an object that exists or counts as a root owner, of an
	// object that does not exist, and of a look-up that failed.
	keepFound, keepMissing, keepFailed = 10 * time.Minute, 10 * time.Second, 2 * time.Second

	// refusalLasts is how long the API server must have refused an owner, or not served its
	// kind, before that is believed: it refuses also what it will allow while it starts.
	refusalLasts = 15 * time.Second
	// CheckRefused is how often an owner is looked up again that counts as a root owner
	// because it is refused.
	CheckRefused = time.Minute
)

// Lookup finds the controllers of owners. Safe for concurrent use.
type Lookup struct {
	log    logr.Logger
	clock  clock.WithTicker
	client metadata.Interface
	kinds  map[schema.GroupKind]string
	// results by object, as the owner reference names it.
	results *utilcache.LRUExpireCache
	queue   workqueue.TypedDelayingInterface[object]

	mu sync.Mutex
	// refusedSince has the objects whose refusal is not believed yet. They are looked up
	// again until it is, or ends.
	refusedSince map[object]time.Time
	// refusedAt is when an owner was last refused of a kind of which refusals are believed.
	refusedAt map[refusal]time.Time
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

// refusal is of a kind that the API server does not serve or, if namespace is not empty, that
// must not be read there.
type refusal struct {
	resource  schema.GroupVersionResource
	namespace string
}

// result of a look-up.
type result struct {
	controller *metav1.OwnerReference
	found      bool
	// refused: the object counts as a root owner because it cannot be read.
	refused bool
	// dueAt is when the object may be looked up again.
	dueAt time.Time
}

// New returns a Lookup for these kinds.
func New(log logr.Logger, clock clock.WithTicker, config *rest.Config, kinds []Kind) (*Lookup, error) {
	config = metadata.ConfigFor(config)
	config.QPS, config.Burst, config.RateLimiter = requestsPerSecond, 2*requestsPerSecond, nil
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client for metadata: %w", err)
	}
	l := &Lookup{
		log: log, clock: clock, client: client, kinds: map[schema.GroupKind]string{},
		results: utilcache.NewLRUExpireCacheWithClock(maxResults, clock), refusedSince: map[object]time.Time{}, refusedAt: map[refusal]time.Time{},
		queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[object]{Clock: clock}),
	}
	for _, k := range kinds {
		if err := k.Validate(); err != nil {
			return nil, fmt.Errorf("kind of owners %s: %w", k, err)
		}
		l.kinds[schema.GroupKind{Group: k.Group, Kind: k.Kind}] = k.Resource
	}
	return l, nil
}

// Resolve implements demand.Resolve for owners that the caller does not know itself: it is
// Find without refused.
func (l *Lookup) Resolve(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found bool) {
	controller, found, _ = l.Find(namespace, ref)
	return controller, found
}

// Find returns the controller of an owner. It never blocks: an owner that was not looked up
// yet is not found, and queued for Run. An owner of another kind than those of the Lookup has
// no controller: it is a root owner. So is one that the API server has refused, or not served,
// for some time; refused is true then, and another call after CheckRefused shows whether it
// still is.
func (l *Lookup) Find(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found, refused bool) {
	resource, ok := resourceOf(l.kinds, ref)
	if !ok {
		return nil, true, false
	}
	// By all that the reference says: users write references.
	o := object{resource, namespace, ref.Name, ref.UID}
	kept, known := l.kept(o)
	if (!known || kept.refused && l.due(kept)) && l.queue.Len() < maxQueued {
		l.queue.Add(o)
	}
	return kept.controller, kept.found, kept.refused
}

// kept returns the last result for an object.
func (l *Lookup) kept(o object) (r result, known bool) {
	kept, known := l.results.Get(o)
	if !known {
		return result{}, false
	}
	return kept.(result), true
}

func (l *Lookup) due(r result) bool { return !l.clock.Now().Before(r.dueAt) }

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
				if kept, known := l.kept(o); !known || l.due(kept) { // else it was queued again during its lookup
					r, keep := l.get(ctx, o)
					r.dueAt = l.clock.Now().Add(min(keep, CheckRefused))
					l.results.Add(o, r, keep)
					if r.found {
						resolved()
					} else if l.isRefused(o) {
						l.queue.AddAfter(o, keep) // not before dueAt
					}
				}
				l.queue.Done(o)
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
	case apierrors.IsForbidden(err):
		return l.refused(o, refusal{o.resource, o.namespace}, "The kind of an owner must not be read; its objects count as root owners. Check the chart's value scheduler.ownerKinds")
	case apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse):
		// No such path, rather than no such object.
		return l.refused(o, refusal{resource: o.resource}, "The kind of an owner is not served in this version; its objects count as root owners")
	}
	l.answered(o, err)
	switch {
	case err == nil && owner.UID == o.uid:
		return result{controller: metav1.GetControllerOf(owner), found: true}, keepFound
	case err == nil:
		return result{}, keepMissing // another object of that name
	case apierrors.IsNotFound(err):
		return result{}, keepMissing
	}
	l.log.V(1).Info("Failed to look up an owner; retrying", "resource", o.resource.GroupResource().String(), "namespace", o.namespace, "name", o.name, "reason", err.Error())
	if kept, _ := l.kept(o); kept.refused {
		return kept, keepFound
	}
	return result{}, keepFailed
}

// answered records that an owner was not refused. That there is no such object shows as well
// that the kind is served, and may be read.
func (l *Lookup) answered(o object, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.refusedSince, o)
	if err == nil || apierrors.IsNotFound(err) {
		delete(l.refusedAt, refusal{resource: o.resource})
		delete(l.refusedAt, refusal{o.resource, o.namespace})
	}
}

// refused is the result for an owner that the API server refuses: not found, until the
// refusal has lasted, of this owner or lately of another one of its kind. message is logged
// then.
func (l *Lookup) refused(o object, of refusal, message string) (result, time.Duration) {
	kept, _ := l.kept(o)
	if !l.believe(o, of, kept.refused) {
		return result{}, keepFailed
	}
	l.logUnreadable(o, message)
	return result{found: true, refused: true}, keepFound
}

// believe reports whether the refusal of an owner is believed; known is true if it was before.
func (l *Lookup) believe(o object, of refusal, known bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	since, waits := l.refusedSince[o]
	if !waits {
		since = now
	}
	maps.DeleteFunc(l.refusedAt, func(_ refusal, at time.Time) bool { return now.Sub(at) > keepFound })
	if _, lately := l.refusedAt[of]; !known && !lately && now.Sub(since) < refusalLasts {
		l.refusedSince[o] = since
		return false
	}
	delete(l.refusedSince, o)
	l.refusedAt[of] = now
	return true
}

// isRefused reports whether an owner is refused, which is not believed yet.
func (l *Lookup) isRefused(o object) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, refused := l.refusedSince[o]
	return refused
}

// logUnreadable logs that a kind cannot be read, every ten minutes.
func (l *Lookup) logUnreadable(o object, message string) {
	now := l.clock.Now()
	if last, ok := l.logged.Load(o.resource); ok && now.Sub(last.(time.Time)) < 10*time.Minute {
		return
	}
	l.logged.Store(o.resource, now)
	l.log.Info(message, "resource", o.resource.GroupResource().String(), "version", o.resource.Version)
}
