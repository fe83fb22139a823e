package request

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
)

const (
	// fieldManager of the plugin's writes.
	fieldManager = "spillway-scheduler"
	// writeTimeout limits each write.
	writeTimeout = 10 * time.Second
	// maxCacheLag is how long an own write takes precedence over the cache.
	maxCacheLag = 30 * time.Second
	// requestsPerSecond limits the requests for Reservations to the API server.
	requestsPerSecond = 200
	// maxShapes is how many pod sets the API server accepts in a Reservation.
	maxShapes = 8
)

// NewClient returns a client for Spillway's objects with the scheduler's
// identity.
func NewClient(base *rest.Config) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := broker.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config := rest.CopyConfig(base)
	config.APIPath = "/apis"
	config.GroupVersion = &broker.GroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.QPS, config.Burst = requestsPerSecond, 2*requestsPerSecond
	config.RateLimiter = nil
	return rest.RESTClientFor(config)
}

// Reservations reads Reservations from an informer's cache, overlaid with own
// writes that the cache does not show yet, and writes them. Safe for concurrent use.
type Reservations struct {
	client rest.Interface
	cache  cache.Indexer
	clock  clock.PassiveClock

	mu sync.Mutex
	// written has the own writes by the keys of their requests.
	written map[demand.Key]written
}

// written is a Reservation as the API server returned it to a write.
type written struct {
	*broker.Reservation
	at time.Time
}

// NewReservations returns the Reservations of an informer that has Indexers.
func NewReservations(client rest.Interface, indexer cache.Indexer, clock clock.PassiveClock) *Reservations {
	return &Reservations{client: client, cache: indexer, clock: clock, written: map[demand.Key]written{}}
}

// get returns the Reservation of a name that requests are written to, or nil.
func (s *Reservations) get(key demand.Key, name string) *broker.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	if obj, exists, err := s.cache.GetByKey(key.Namespace + "/" + name); err == nil && exists {
		return s.newest(obj.(*broker.Reservation))
	}
	return s.own(key)
}

// own returns the own write for a key, nil if there is none that may be newer than the cache.
func (s *Reservations) own(key demand.Key) *broker.Reservation {
	if s.clock.Since(s.written[key].at) > maxCacheLag {
		delete(s.written, key)
	}
	return s.written[key].Reservation
}

// newest returns a Reservation of the cache, or the own write that it does not show yet.
func (s *Reservations) newest(cached *broker.Reservation) *broker.Reservation {
	key, _ := demand.KeyOfReservation(cached)
	if own := s.own(key); own != nil && own.Name == cached.Name {
		if age, err := resourceversion.CompareResourceVersion(cached.ResourceVersion, own.ResourceVersion); err == nil && age < 0 {
			return own
		}
		delete(s.written, key)
	}
	return cached
}

// list returns the Reservations of a namespace.
func (s *Reservations) list(namespace string) (all []*broker.Reservation, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	objs, err := s.cache.ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return nil, fmt.Errorf("listing Reservations: %w", err)
	}
	for _, obj := range objs {
		all = append(all, s.newest(obj.(*broker.Reservation)))
	}
	for key := range s.written {
		if own := s.own(key); own != nil && key.Namespace == namespace && !s.cached(own) {
			all = append(all, own)
		}
	}
	return all, nil
}

// cached reports whether the cache has a Reservation.
func (s *Reservations) cached(r *broker.Reservation) bool {
	_, exists, err := s.cache.Get(r)
	return err == nil && exists
}

// keyIndex indexes Reservations by key.
const keyIndex = "key"

// Indexers are those that the informer of Reservations needs.
func Indexers() cache.Indexers {
	return cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc, keyIndex: indexByKey}
}

func indexByKey(obj any) ([]string, error) {
	if r, ok := obj.(*broker.Reservation); ok {
		if key, ok := demand.KeyOfReservation(r); ok {
			return []string{key.String()}, nil
		}
	}
	return nil, nil
}

// ByKey returns the Reservations that serve pods of a key from the cache.
func (s *Reservations) ByKey(key demand.Key) ([]*broker.Reservation, error) {
	objs, err := s.cache.ByIndex(keyIndex, key.OfReservation().String())
	if err != nil {
		return nil, fmt.Errorf("listing Reservations of %s: %w", key, err)
	}
	all := make([]*broker.Reservation, 0, len(objs))
	for _, obj := range objs {
		all = append(all, obj.(*broker.Reservation))
	}
	return all, nil
}

// Requested sums up what the Reservations of a namespace request.
func (s *Reservations) Requested(namespace string) (corev1.ResourceList, error) {
	all, err := s.list(namespace)
	return requestedResources(all, ""), err
}

// dropDeleted drops the own write to the Reservation of a key that the cache shows as
// deleted.
func (s *Reservations) dropDeleted(key demand.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if own := s.written[key].Reservation; own != nil && !s.cached(own) {
		delete(s.written, key)
	}
}

// apply writes the Reservation of a request under a policy, which may be nil, by
// server-side apply. owner is the object that owns it. current is the existing Reservation, or nil: a conflict is
// returned if it has changed since.
func (s *Reservations) apply(ctx context.Context, request demand.Request, owner metav1.OwnerReference, policy *broker.OverflowPolicy, current *broker.Reservation) (*broker.Reservation, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	desired := desiredReservation(request, owner, policy, current)
	// Server-side apply owns all fields that it sends: leave out the empty status.
	body, err := json.Marshal(struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              broker.ReservationSpec `json:"spec"`
	}{desired.TypeMeta, desired.ObjectMeta, desired.Spec})
	if err != nil {
		return nil, fmt.Errorf("encoding Reservation: %w", err)
	}
	applied := &broker.Reservation{}
	err = s.client.Patch(types.ApplyPatchType).
		Namespace(desired.Namespace).Resource("reservations").Name(desired.Name).
		VersionedParams(&metav1.PatchOptions{FieldManager: fieldManager, Force: ptr.To(true)}, metav1.ParameterCodec).
		Body(body).Do(ctx).Into(applied)
	if err != nil {
		return nil, fmt.Errorf("applying Reservation %s/%s: %w", desired.Namespace, desired.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written[request.Key] = written{applied, s.clock.Now()}
	return applied, nil
}

// raised returns pod sets with their counts raised to those of others, and the others that
// are not among them.
func raised(sets, others []broker.PodSet) []broker.PodSet {
	sets = slices.Clone(sets)
	for _, other := range others {
		i := slices.IndexFunc(sets, func(set broker.PodSet) bool { return set.Name == other.Name })
		if i < 0 {
			sets = append(sets, other)
		} else {
			sets[i].Count = max(sets[i].Count, other.Count)
		}
	}
	return sets
}

// covers reports whether a Reservation requests what a request does: as many pods of each
// set, with the same priority, and of use from the same number on.
func covers(r *broker.Reservation, request demand.Request) bool {
	return r.Spec.Priority == request.Priority && r.Spec.MinAvailable == request.MinAvailable && coversPods(r, request)
}

// coversPods reports whether a Reservation requests as many pods of each set as a request.
func coversPods(r *broker.Reservation, request demand.Request) bool {
	return !slices.ContainsFunc(request.PodSets, func(set broker.PodSet) bool { return usage.PodsOf(r.Spec.PodSets, set.Name) < set.Count })
}

// desiredReservation returns what apply writes.
func desiredReservation(request demand.Request, owner metav1.OwnerReference, policy *broker.OverflowPolicy, current *broker.Reservation) *broker.Reservation {
	owner.Controller, owner.BlockOwnerDeletion = ptr.To(false), ptr.To(false)
	desired := &broker.Reservation{
		TypeMeta: metav1.TypeMeta{APIVersion: broker.GroupVersion.String(), Kind: "Reservation"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: request.Key.Namespace,
			Name:      request.Key.Name(request.Owner.Name),
			Labels: map[string]string{
				broker.LabelOwnerUID:  string(request.Key.OwnerUID),
				broker.LabelShape:     request.Key.Shape,
				broker.LabelManagedBy: broker.ManagedBySpillway,
			},
			OwnerReferences: []metav1.OwnerReference{owner},
		},
		Spec: broker.ReservationSpec{PodSets: slices.Clone(request.PodSets), Priority: request.Priority, MinAvailable: request.MinAvailable},
	}
	switch {
	case current != nil:
		desired.ResourceVersion = current.ResourceVersion
		desired.Spec.PodSets = raised(current.Spec.PodSets, request.PodSets)
		// A Reservation keeps the policy that it was created with: only counts, the
		// priority and minAvailable change.
		desired.Spec.Placement, desired.Spec.Budget, desired.Spec.Duration = current.Spec.Placement, current.Spec.Budget, current.Spec.Duration
	case policy != nil:
		desired.Spec.Placement, desired.Spec.Budget, desired.Spec.Duration = policy.Spec.Placement, policy.Spec.Budget, policy.Spec.Duration
	}
	return desired
}
