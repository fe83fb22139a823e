package reservation

import (
	"context"
	"hash/fnv"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// rewriteAfter is the time, by the agent's clock, within which a stored advertisement is
// replaced by an equal one, once in each such period. It shows other brokers that the cluster
// advertises: those that act at the same time take one for lost whose stored advertisement
// is older than the stale threshold, and that they do not hear themselves.
const rewriteAfter = 5 * time.Minute

// rewriteAloneAfter is the same where no other broker acts at the same time. Nothing depends
// on it but the age of the timestamp that users see, and which of two advertisements a new
// leader takes for older before it has heard of the cluster.
const rewriteAloneAfter = 30 * time.Minute

// maxRewrites is how many advertisements that have not changed are stored at the same time:
// after a failover or with a slow API server, thousands at once would fail each other's calls
// by their deadlines.
const maxRewrites = 4

// rewrites are the advertisements that wait to be stored again although they have not
// changed. They take turns in the order in which they came, one for each cluster: no cluster
// waits for ever, whenever others advertise and however often. The calls that brought them do
// not wait.
type rewrites struct {
	store func(ctx context.Context, spec broker.ClusterAdvertisementSpec)

	mu sync.Mutex
	// order has the clusters that wait, last has what each of them has sent last.
	order []string
	last  map[string]broker.ClusterAdvertisementSpec
	// storing are the clusters whose advertisement is being stored, each by a goroutine.
	storing map[string]bool
}

// add adds an advertisement, or replaces the one of the same cluster that waits. One is
// enough while another one of the cluster is being stored.
func (w *rewrites) add(ctx context.Context, spec broker.ClusterAdvertisementSpec) {
	w.mu.Lock()
	defer w.mu.Unlock()
	cluster := spec.ClusterID
	if w.storing[cluster] {
		return
	}
	if _, waits := w.last[cluster]; !waits {
		w.order = append(w.order, cluster)
	}
	w.last[cluster] = spec
	if len(w.storing) < maxRewrites {
		go w.run(context.WithoutCancel(ctx), w.nextLocked())
	}
}

// run stores an advertisement, and then what waits.
func (w *rewrites) run(ctx context.Context, spec broker.ClusterAdvertisementSpec) {
	for more := true; more; {
		w.store(ctx, spec)
		w.mu.Lock()
		delete(w.storing, spec.ClusterID)
		if more = len(w.order) > 0; more {
			spec = w.nextLocked()
		}
		w.mu.Unlock()
	}
}

// nextLocked takes the first that waits.
func (w *rewrites) nextLocked() broker.ClusterAdvertisementSpec {
	cluster := w.order[0]
	spec := w.last[cluster]
	w.order = w.order[1:]
	delete(w.last, cluster)
	w.storing[cluster] = true
	return spec
}

// rewriteIfDue lets an advertisement without changes be stored again if that is due.
func (r *Reconciler) rewriteIfDue(ctx context.Context, spec broker.ClusterAdvertisementSpec) {
	if stored := r.store.advertisement(spec.ClusterID); stored != nil && r.rewriteDue(spec.ClusterID, stored.Spec.Timestamp.Time, spec.Timestamp.Time) {
		r.rewrites.add(ctx, spec)
	}
}

// rewrite stores an advertisement again, if it has not changed or been deleted meanwhile. If
// that fails, it is due with the cluster's next one.
func (r *Reconciler) rewrite(ctx context.Context, spec broker.ClusterAdvertisementSpec) {
	cluster := spec.ClusterID
	before := r.store.advertisement(cluster)
	if before == nil || !r.rewriteDue(cluster, before.Spec.Timestamp.Time, spec.Timestamp.Time) {
		return
	}
	after, err := r.committer.commit(ctx, cluster, func(ad *broker.ClusterAdvertisement) (edited, error) {
		if ad.Spec.Sequence >= spec.Sequence || differs(ad.Spec, spec) {
			return edited{}, nil
		}
		ad.Spec.Sequence, ad.Spec.Timestamp = spec.Sequence, spec.Timestamp
		return edited{spec: true, status: r.account(ad, ad.Status.Active)}, nil
	})
	if err != nil {
		log.FromContext(ctx).Info("Failed to store an unchanged advertisement again", "cluster", cluster, "reason", err.Error())
		return
	}
	if differs(before.Spec, after.Spec) {
		return
	}
	// The next beat need not be decoded.
	r.mu.Lock()
	defer r.mu.Unlock()
	if last, known := r.remembered[cluster]; known && last.generation == before.Generation {
		r.remembered[cluster] = remembered{last.digest, after.Generation}
	}
}

// rewriteDue reports whether a period of the cluster has begun between the advertisement
// that is stored and the one received. The periods of the clusters begin at different times,
// which depend on nothing but their IDs: all brokers agree on them, and clusters that were
// stored together are not replaced together.
func (r *Reconciler) rewriteDue(cluster string, stored, received time.Time) bool {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(cluster))
	// In whole seconds, as the times that are stored.
	offset := time.Duration(hash.Sum64()%uint64(r.rewriteAfter/time.Second)) * time.Second
	period := func(t time.Time) time.Time { return t.Add(offset).Truncate(r.rewriteAfter) }
	return !period(stored).Equal(period(received))
}
