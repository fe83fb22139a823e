// Package undecoded lets a program go on although some objects cannot be decoded: those that were
// written before the CRD had the rule that refuses them now. Informers leave such an object out, or
// keep it as it was last decoded; the program names it in the log, in an event and in a metric.
//
// A watch that meets such an object ends, and the informer lists instead. The lists of the API group
// hold the object apart, see broker.Undecoded.
package undecoded

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	clientevents "k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/watchlist"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
)

// repeatAfter is how often an object is named again for as long as it cannot be decoded: events
// do not live longer.
const repeatAfter = time.Hour

// reason is the reason of the events.
const reason = "NotDecodable"

// NewGauge returns the metric of a program, which registers it.
func NewGauge(program string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: program + "_undecodable_objects",
		Help: "Number of objects that the program leaves out because it cannot decode them, by kind. Events NotDecodable name them.",
	}, []string{"kind"})
}

// Objects are those that cannot be decoded, of the informers that it has made.
type Objects struct {
	log   logr.Logger
	gauge *prometheus.GaugeVec
	clock clock.WithTicker
	// observe is called before an informer's handlers see what has become of an object.
	observe func(object client.Object, deleted bool)
	// changed has a value after a change.
	changed chan struct{}

	mu sync.Mutex
	of map[*source]map[types.UID]broker.Undecoded
}

// New returns no objects.
func New(log logr.Logger, gauge *prometheus.GaugeVec, clock clock.WithTicker) *Objects {
	return &Objects{log: log, gauge: gauge, clock: clock, observe: func(client.Object, bool) {}, changed: make(chan struct{}, 1), of: map[*source]map[types.UID]broker.Undecoded{}}
}

// Observe has a function called with each object that cannot be decoded, and with its last version
// once it is gone or can be. It is called before an informer starts.
func (o *Objects) Observe(observe func(object client.Object, deleted bool)) { o.observe = observe }

// Of are the objects of a kind, in no order. Nil Objects have none.
func (o *Objects) Of(kind string) (all []broker.Undecoded) {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for s, objects := range o.of {
		if s.kind == kind {
			all = slices.AppendSeq(all, maps.Values(objects))
		}
	}
	return all
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := broker.AddToScheme(s); err != nil {
		panic(err) // of the types themselves
	}
	return s
}()

// NewInformer is cache.NewSharedIndexInformer, which goes on when objects of this API group cannot
// be decoded. Of other kinds it is the same.
func (o *Objects) NewInformer(from cache.ListerWatcher, example runtime.Object, resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer {
	kinds, _, err := scheme.ObjectKinds(example)
	if err != nil { // not of this API group
		return cache.NewSharedIndexInformer(from, example, resync, indexers)
	}
	s := &source{ListerWatcherWithContext: cache.ToListerWatcherWithContext(from), from: from, kind: kinds[0].Kind, objects: o}
	informer := cache.NewSharedIndexInformer(s, example, resync, indexers)
	s.decoded = informer.GetStore()
	return informer
}

// Run names the objects in the log and in events, until ctx ends.
func (o *Objects) Run(ctx context.Context, recorder clientevents.EventRecorder) {
	recorder = events.NewRecorder(recorder)
	named := map[types.UID]string{}
	ticker := o.clock.NewTicker(repeatAfter)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
			clear(named)
		case <-o.changed:
		}
		named = o.name(recorder, named)
	}
}

// name names the objects but those of which the same version was named already. It returns the
// versions of all.
func (o *Objects) name(recorder clientevents.EventRecorder, before map[types.UID]string) map[types.UID]string {
	o.mu.Lock()
	defer o.mu.Unlock()
	named := map[types.UID]string{}
	for s, objects := range o.of {
		for uid, u := range objects {
			named[uid] = u.ResourceVersion
			if before[uid] == u.ResourceVersion {
				continue
			}
			o.log.Error(errors.New(u.Message), "An object cannot be decoded: correct it", "kind", s.kind, "namespace", u.Namespace, "name", u.Name, "until", effect(s.kind))
			about := &corev1.ObjectReference{APIVersion: broker.GroupVersion.String(), Kind: s.kind, Namespace: u.Namespace, Name: u.Name, UID: uid, ResourceVersion: u.ResourceVersion}
			recorder.Eventf(about, nil, corev1.EventTypeWarning, reason, "Decode", "The %s cannot be decoded: %s. Correct it (durations are such as 90s or 24h, quantities such as 500m or 16Gi): until then, %s.", s.kind, u.Message, effect(s.kind))
		}
	}
	return named
}

// effect is what an object of a kind means for as long as it cannot be decoded.
func effect(kind string) string {
	if kind == "OverflowPolicy" {
		return "no capacity is requested for pods of the namespaces that it selects; if its namespaceSelector is wrong, its limits are off"
	}
	return "it has no effect, or that of its last version"
}

// replace sets the objects of an informer.
func (o *Objects) replace(s *source, now map[types.UID]broker.Undecoded) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.of[s]
	for uid, u := range before {
		if _, still := now[uid]; !still {
			o.observe(metadataOf(s.kind, u), true)
		}
	}
	for _, u := range now {
		o.observe(metadataOf(s.kind, u), false)
	}
	o.set(s, now)
}

// forget removes an object that could be decoded.
func (o *Objects) forget(s *source, uid types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if u, was := o.of[s][uid]; was {
		o.observe(metadataOf(s.kind, u), true)
		now := maps.Clone(o.of[s])
		delete(now, uid)
		o.set(s, now)
	}
}

// set sets the objects of an informer, with the lock held.
func (o *Objects) set(s *source, now map[types.UID]broker.Undecoded) {
	o.of[s] = now
	n := 0
	for other, objects := range o.of {
		if other.kind == s.kind {
			n += len(objects)
		}
	}
	o.gauge.WithLabelValues(s.kind).Set(float64(n))
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

func metadataOf(kind string, u broker.Undecoded) client.Object {
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: broker.GroupVersion.String(), Kind: kind},
		ObjectMeta: metav1.ObjectMeta{Namespace: u.Namespace, Name: u.Name, UID: u.UID, ResourceVersion: u.ResourceVersion},
	}
}

// source is where an informer lists and watches.
type source struct {
	cache.ListerWatcherWithContext
	from    any
	kind    string
	objects *Objects
	// decoded are the objects that the informer has.
	decoded cache.Store
	// listing are the objects of the pages of a list so far that cannot be decoded.
	listing map[types.UID]broker.Undecoded
}

// IsWatchListSemanticsUnSupported is asked by reflectors.
func (s *source) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(s.from)
}

// List implements cache.Lister.
func (s *source) List(options metav1.ListOptions) (runtime.Object, error) {
	return s.ListWithContext(context.Background(), options)
}

// Watch implements cache.Watcher.
func (s *source) Watch(options metav1.ListOptions) (watch.Interface, error) {
	return s.WatchWithContext(context.Background(), options)
}

// checked is a kind of which the API server accepts objects that cannot be used.
type checked interface{ Check() error }

// ListWithContext lists a page. Objects that cannot be decoded are in it as they were last decoded,
// or not at all.
func (s *source) ListWithContext(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	list, err := s.ListerWatcherWithContext.ListWithContext(ctx, options)
	if err != nil {
		return list, err
	}
	if options.Continue == "" {
		s.listing = map[types.UID]broker.Undecoded{}
	}
	if err := s.separate(list); err != nil {
		return nil, err
	}
	if page, err := meta.ListAccessor(list); err == nil && page.GetContinue() == "" {
		s.objects.replace(s, s.listing)
	}
	return list, nil
}

// separate notes the objects of a list that cannot be decoded, and replaces them by what is known
// of them.
func (s *source) separate(list runtime.Object) error {
	page, ok := list.(interface{ UndecodedItems() []broker.Undecoded })
	if !ok {
		return nil
	}
	items, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	undecoded, kept := page.UndecodedItems(), make([]runtime.Object, 0, len(items))
	for _, item := range items {
		if u, unusable := check(item); unusable {
			undecoded = append(undecoded, u)
		} else {
			kept = append(kept, item)
		}
	}
	for _, u := range undecoded {
		s.listing[u.UID] = u
		last, exists, err := s.decoded.GetByKey(cache.NewObjectName(u.Namespace, u.Name).String())
		if object, ok := last.(client.Object); ok && exists && err == nil && object.GetUID() == u.UID {
			kept = append(kept, object.DeepCopyObject())
		}
	}
	if len(undecoded) == 0 {
		return nil
	}
	return meta.SetList(list, kept)
}

// check returns an object as one that cannot be decoded if no program can use it.
func check(item runtime.Object) (u broker.Undecoded, unusable bool) {
	of, ok := item.(checked)
	object, also := item.(client.Object)
	if !ok || !also {
		return u, false
	}
	err := of.Check()
	if err == nil {
		return u, false
	}
	raw, _ := json.Marshal(item) // without it, nothing is known but its name
	return broker.Undecoded{Namespace: object.GetNamespace(), Name: object.GetName(), UID: object.GetUID(), ResourceVersion: object.GetResourceVersion(), Message: err.Error(), Raw: raw}, true
}

// WatchWithContext watches until there is an object that no program can use, as a watch ends with
// an object that cannot be decoded.
func (s *source) WatchWithContext(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	events, err := s.ListerWatcherWithContext.WatchWithContext(ctx, options)
	if err != nil {
		return events, err
	}
	ended := false
	return watch.Filter(events, func(event watch.Event) (watch.Event, bool) {
		object, ok := event.Object.(client.Object)
		switch {
		case ended: // the informer lists after an error, and this is older
			return event, false
		case !ok: // an error
		case event.Type == watch.Bookmark:
			if object.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
				s.objects.replace(s, nil)
			}
		case event.Type == watch.Deleted:
			s.objects.forget(s, object.GetUID())
		default:
			if u, unusable := check(event.Object); unusable {
				status := apierrors.NewInternalError(fmt.Errorf("%s %s: %s", s.kind, u.Name, u.Message)).Status()
				ended = true
				return watch.Event{Type: watch.Error, Object: &status}, true
			}
			s.objects.forget(s, object.GetUID())
		}
		return event, true
	}), nil
}
