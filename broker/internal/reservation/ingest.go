package reservation

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// version identifies what this process has last stored of a cluster's advertisement.
type version struct {
	uid        types.UID
	generation int64
}

// upToDate reports whether storing an advertisement would write nothing. It reads the
// cache only: most advertisements are beats without changes. If the cache does not have
// yet what this process has stored, it reports false.
func (r *Reconciler) upToDate(ctx context.Context, spec *broker.ClusterAdvertisementSpec) (bool, error) {
	var ad broker.ClusterAdvertisement
	err := r.client.Get(ctx, r.key(spec.ClusterID), &ad)
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("reading the advertisement of %s: %w", spec.ClusterID, err)
	}
	r.mu.Lock()
	stored, known := r.versions[spec.ClusterID]
	r.mu.Unlock()
	if known && (ad.UID != stored.uid || ad.Generation < stored.generation) {
		return false, nil
	}
	return ad.Status.Active && ad.Status.ObservedGeneration == ad.Generation && !needsUpdate(ad.Spec, *spec), nil
}

// noteStored records what was stored.
func (r *Reconciler) noteStored(ad *broker.ClusterAdvertisement) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.versions[ad.Spec.ClusterID] = version{ad.UID, ad.Generation}
}

// noteReceived records that a cluster has advertised, and enqueues the Reservations that
// it may be fresh again for.
func (r *Reconciler) noteReceived(cluster string, config config) {
	r.mu.Lock()
	now := r.clock.Now()
	last, stored := r.storedAt[cluster]
	r.storedAt[cluster] = now
	r.mu.Unlock()
	if stored && now.Sub(last) <= config.freshFor {
		return
	}
	select {
	case r.becameFresh <- event.GenericEvent{Object: &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: cluster}}}:
	default: // a pending event enqueues the same Reservations
	}
}
