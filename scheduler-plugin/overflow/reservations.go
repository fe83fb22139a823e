package overflow

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// fieldManager owns what the plugin writes.
const fieldManager = "spillway-scheduler"

// writeTimeout bounds each write.
const writeTimeout = 10 * time.Second

// cacheLag is how long a write is believed that the cache does not show.
const cacheLag = 30 * time.Second

// reservations reads Reservations from an informer's cache, overlaid with what
// was written since: an ask must not be judged by a cache that has not seen the
// one before. For one goroutine.
type reservations struct {
	client  rest.Interface
	cache   cache.Indexer
	clock   clock.PassiveClock
	written map[types.NamespacedName]written
}

// written is a Reservation as the API server returned it.
type written struct {
	*broker.Reservation
	at time.Time
}

func newReservations(client rest.Interface, indexer cache.Indexer, clock clock.PassiveClock) *reservations {
	return &reservations{client: client, cache: indexer, clock: clock, written: map[types.NamespacedName]written{}}
}

// get returns a Reservation, or nil.
func (r *reservations) get(namespace, name string) *broker.Reservation {
	nn := types.NamespacedName{Namespace: namespace, Name: name}
	own, wrote := r.written[nn]
	if wrote && r.clock.Since(own.at) > cacheLag {
		delete(r.written, nn)
		wrote = false
	}
	obj, exists, err := r.cache.GetByKey(nn.String())
	switch {
	case err == nil && exists:
		cached := obj.(*broker.Reservation)
		if wrote {
			if age, err := resourceversion.CompareResourceVersion(cached.ResourceVersion, own.ResourceVersion); err == nil && age < 0 {
				return own.Reservation
			}
			delete(r.written, nn)
		}
		return cached
	case wrote:
		return own.Reservation
	}
	return nil
}

// list returns the Reservations of a namespace.
func (r *reservations) list(namespace string) ([]*broker.Reservation, error) {
	names := map[string]bool{}
	objs, err := r.cache.ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return nil, fmt.Errorf("listing Reservations: %w", err)
	}
	for _, obj := range objs {
		names[obj.(*broker.Reservation).Name] = true
	}
	for nn := range r.written {
		if nn.Namespace == namespace {
			names[nn.Name] = true
		}
	}
	var all []*broker.Reservation
	for name := range names {
		if res := r.get(namespace, name); res != nil {
			all = append(all, res)
		}
	}
	return all, nil
}

// keyIndex finds the Reservations of a key.
const keyIndex = "key"

func indexByKey(obj any) ([]string, error) {
	if r, ok := obj.(*broker.Reservation); ok {
		if key, ok := demand.KeyOfReservation(r); ok {
			return []string{key.String()}, nil
		}
	}
	return nil, nil
}

// of returns the Reservations of a key that the cache shows, with their status.
func (r *reservations) of(key demand.Key) ([]*broker.Reservation, error) {
	objs, err := r.cache.ByIndex(keyIndex, key.String())
	if err != nil {
		return nil, fmt.Errorf("looking up Reservations: %w", err)
	}
	all := make([]*broker.Reservation, 0, len(objs))
	for _, obj := range objs {
		all = append(all, obj.(*broker.Reservation))
	}
	return all, nil
}

// forget drops what was written for a Reservation that was seen to be gone.
func (r *reservations) forget(key demand.Key) {
	for nn, own := range r.written {
		if k, _ := demand.KeyOfReservation(own.Reservation); k == key {
			if _, exists, _ := r.cache.GetByKey(nn.String()); !exists {
				delete(r.written, nn)
			}
		}
	}
}

// apply writes an ask by server-side apply. before is what it was decided on: a
// conflict is returned if it has changed since.
func (r *reservations) apply(ctx context.Context, ask demand.Ask, policy *broker.OverflowPolicySpec, before *broker.Reservation) (*broker.Reservation, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	desired := desiredReservation(ask, policy)
	if before != nil {
		desired.ResourceVersion = before.ResourceVersion
		// What was asked under one policy stays under it: only amounts may change.
		desired.Spec.Placement, desired.Spec.Budget, desired.Spec.Duration = before.Spec.Placement, before.Spec.Budget, before.Spec.Duration
	}
	// Server-side apply owns whatever it sends: leave out the empty status.
	body, err := json.Marshal(struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              broker.ReservationSpec `json:"spec"`
	}{desired.TypeMeta, desired.ObjectMeta, desired.Spec})
	if err != nil {
		return nil, fmt.Errorf("encoding a Reservation: %w", err)
	}
	applied := &broker.Reservation{}
	err = r.client.Patch(types.ApplyPatchType).
		Namespace(desired.Namespace).Resource("reservations").Name(desired.Name).
		VersionedParams(&metav1.PatchOptions{FieldManager: fieldManager, Force: ptr.To(true)}, metav1.ParameterCodec).
		Body(body).Do(ctx).Into(applied)
	if err != nil {
		return nil, fmt.Errorf("applying Reservation %s/%s: %w", desired.Namespace, desired.Name, err)
	}
	r.written[types.NamespacedName{Namespace: applied.Namespace, Name: applied.Name}] = written{applied, r.clock.Now()}
	return applied, nil
}

// desiredReservation is an ask within a policy, nil where none selects the
// namespace.
func desiredReservation(ask demand.Ask, policy *broker.OverflowPolicySpec) *broker.Reservation {
	owner := ask.Owner
	owner.Controller, owner.BlockOwnerDeletion = ptr.To(false), ptr.To(false)
	r := &broker.Reservation{
		TypeMeta: metav1.TypeMeta{APIVersion: broker.GroupVersion.String(), Kind: "Reservation"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ask.Key.Namespace,
			Name:      ask.Key.Name(ask.Owner.Name),
			Labels: map[string]string{
				broker.LabelOwnerUID:  string(ask.Key.OwnerUID),
				broker.LabelShape:     ask.Key.Shape,
				broker.LabelManagedBy: broker.ManagedBySpillway,
			},
			OwnerReferences: []metav1.OwnerReference{owner},
		},
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{ask.PodSet}},
	}
	if policy != nil {
		r.Spec.Placement, r.Spec.Budget, r.Spec.Duration = policy.Placement, policy.Budget, policy.Duration
	}
	return r
}
