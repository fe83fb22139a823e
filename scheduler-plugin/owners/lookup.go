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

	// An owner that the API server refuses, or whose kind it does not serve, is looked up every
	// checkRefusal, and counts as a root owner after refusedOften such answers in a row: while it
	// starts, the API server refuses also what it will allow.
	checkRefusal, refusedOften = 5 * time.Second, 4
	// CheckRefused is how often such a root owner is looked up again.
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
	// refusals in a row, and when to look the object up again if there are any.
	refusals int
	dueAt    time.Time
}

// refused reports whether the object counts as a root owner because it cannot be read.
func (r result) refused() bool { return r.refusals >= refusedOften }

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
		results: utilcache.NewLRUExpireCacheWithClock(maxResults, clock),
		queue:   workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[object]{Clock: clock}),
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
// several times; refused is true then, and another call after CheckRefused shows whether it
// still is.
func (l *Lookup) Find(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found, refused bool) {
	resource, ok := resourceOf(l.kinds, ref)
	if !ok {
		return nil, true, false
	}
	// By all that the reference says: users write references.
	o := object{resource, namespace, ref.Name, ref.UID}
	kept, known := l.kept(o)
	if (!known || l.due(kept)) && l.queue.Len() < maxQueued {
		l.queue.Add(o)
	}
	return kept.controller, kept.found, kept.refused()
}

// kept returns the last result for an object.
func (l *Lookup) kept(o object) (r result, known bool) {
	kept, known := l.results.Get(o)
	if !known {
		return result{}, false
	}
	return kept.(result), true
}

func (l *Lookup) due(r result) bool { return r.refusals > 0 && !l.clock.Now().Before(r.dueAt) }

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
					r, keep := l.get(ctx, o, kept)
					l.results.Add(o, r, keep)
					if r.found {
						resolved()
					} else if r.refusals > 0 {
						l.queue.AddAfter(o, checkRefusal) // not before dueAt
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

// get reads an owner whose last result was kept, and returns how long to keep the result.
func (l *Lookup) get(ctx context.Context, o object, kept result) (result, time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	owner, err := l.client.Resource(o.resource).Namespace(o.namespace).Get(ctx, o.name, metav1.GetOptions{})
	switch {
	case apierrors.IsForbidden(err):
		return l.refused(o, kept, "The kind of an owner must not be read; its objects count as root owners. Check the chart's value scheduler.ownerKinds")
	case apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse):
		// No such path, rather than no such object.
		return l.refused(o, kept, "The kind of an owner is not served in this version; its objects count as root owners")
	case err == nil && owner.UID == o.uid:
		return result{controller: metav1.GetControllerOf(owner), found: true}, keepFound
	case err == nil:
		return result{}, keepMissing // another object of that name
	case apierrors.IsNotFound(err):
		return result{}, keepMissing
	}
	l.log.V(1).Info("Failed to look up an owner; retrying", "resource", o.resource.GroupResource().String(), "namespace", o.namespace, "name", o.name, "reason", err.Error())
	if kept.refused() {
		kept.dueAt = l.clock.Now().Add(CheckRefused)
		return kept, keepFound
	}
	return result{}, keepFailed
}

// refused is the result for an owner that the API server has refused again: not found, until
// there are enough refusals in a row. Then message is logged.
func (l *Lookup) refused(o object, kept result, message string) (result, time.Duration) {
	r, dueIn := result{refusals: kept.refusals + 1}, checkRefusal
	if r.refused() {
		r.found, dueIn = true, CheckRefused
		l.logUnreadable(o, message)
	}
	r.dueAt = l.clock.Now().Add(dueIn)
	return r, keepFound
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
