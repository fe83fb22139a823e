package reservation

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// remembered is the advertisement that a cluster has sent: its digest, and the generation
// of the object that has its content.
type remembered struct {
	digest     uint64
	generation int64
}

// Remember records a digest of the advertisement of a cluster that was stored last. It
// does nothing if the stored one is not the same any more.
func (r *Reconciler) Remember(cluster string, spec broker.ClusterAdvertisementSpec, digest uint64) {
	stored := r.store.advertisement(cluster)
	if stored == nil || differs(stored.Spec, spec) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.remembered[cluster] = remembered{digest, stored.Generation}
}

// RepeatAdvertisement does what StoreAdvertisement does with an advertisement of the
// content that was remembered with this digest, without comparing the content. It reports
// false if that must be compared, or if the digest is not known: then it has done nothing.
func (r *Reconciler) RepeatAdvertisement(ctx context.Context, cluster string, digest uint64, sequence int64, _ metav1.Time) (known bool, err error) {
	config, err := r.config(ctx)
	if err != nil {
		return false, err
	}
	stored := r.store.advertisement(cluster)
	r.mu.Lock()
	latest, last := r.latest[cluster], r.remembered[cluster]
	r.mu.Unlock()
	switch {
	case stored == nil || last != (remembered{digest, stored.Generation}):
		return false, nil
	case !stored.Status.Active || stored.Status.ObservedGeneration != stored.Generation:
		return false, nil
	}
	if latest = max(latest, stored.Spec.Sequence); latest > sequence {
		return true, &protocol.OutdatedError{Latest: latest}
	}
	r.received(config, cluster, sequence)
	return true, nil
}
