package reservation

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/queue"
)

// configName is the name of the BrokerConfig that is used.
const configName = "default"

// config is the BrokerConfig with defaults.
type config struct {
	weights              broker.ScoreWeights
	staleAfter, freshFor time.Duration
	maxDuration          time.Duration
	defaultLease         time.Duration
	proofDeadline        time.Duration
	retryAfter           time.Duration
	queueing             broker.Queueing
}

// duration is the length of a Reservation's lease; 0 if only silence ends it.
func (c config) duration(requested *metav1.Duration) time.Duration {
	switch {
	case requested == nil:
		return c.maxDuration
	case c.maxDuration > 0:
		return min(requested.Duration, c.maxDuration)
	default:
		return requested.Duration
	}
}

func (r *Reconciler) config(ctx context.Context) (config, error) {
	var object broker.BrokerConfig
	if err := r.client.Get(ctx, r.key(configName), &object); client.IgnoreNotFound(err) != nil {
		return config{}, fmt.Errorf("reading the BrokerConfig: %w", err)
	}
	duration := func(d *metav1.Duration, fallback time.Duration) time.Duration {
		return ptr.Deref(d, metav1.Duration{Duration: fallback}).Duration
	}
	// Without the object, the API server has not filled in the defaults.
	return config{
		weights:     ptr.Deref(object.Spec.Weights, decide.DefaultWeights),
		staleAfter:  duration(object.Spec.StaleAfter, 10*time.Minute),
		freshFor:    duration(object.Spec.FreshFor, 90*time.Second),
		maxDuration: duration(object.Spec.MaxDuration, 0),

		defaultLease:  duration(object.Spec.DefaultLease, time.Hour),
		proofDeadline: duration(object.Spec.ProofDeadline, 30*time.Second),
		retryAfter:    duration(object.Spec.RetryAfter, 30*time.Second),
		queueing:      object.Spec.Queueing,
	}, nil
}

// snapshot is everything that the plan for one Reservation depends on.
type snapshot struct {
	reservation *broker.Reservation
	// advertisements sorted by cluster ID.
	advertisements []broker.ClusterAdvertisement
	config         config
	now            time.Time
	// active are the clusters whose last advertisement is not stale; fresh those whose
	// last advertisement is recent enough to place pods.
	active, fresh map[string]bool
	// times are since when this process has seen the Reservation's state.
	times lease.Times
	// heard is when the consumer last advertised, or when this process became the leader.
	heard time.Time
	// rejections are the clusters that must not be chosen for a capacity because of
	// their answers so far, and when the first of them may be.
	rejections func(broker.HeldCapacity) (map[string]capacity.Rejection, time.Time)
	// ahead are those before the Reservation in the queue, where it would have that
	// position; eligible reports whether a cluster may be chosen for one of them.
	ahead    []*queue.Entry
	position int32
	eligible func(*queue.Entry, *broker.ClusterAdvertisementSpec) bool
}

// snapshot reads everything that a plan depends on. The Reservation is read first: if
// it is unchanged when the attempt is written, no other broker committed anything for
// it between the two reads.
func (r *Reconciler) snapshot(ctx context.Context, from client.Reader, name string) (snapshot, error) {
	in := snapshot{now: r.clock.Now(), active: map[string]bool{}, fresh: map[string]bool{}}
	var err error
	if in.config, err = r.config(ctx); err != nil {
		return in, err
	}
	in.reservation = &broker.Reservation{}
	if err := from.Get(ctx, r.key(name), in.reservation); err != nil {
		return in, err
	}
	var list broker.ClusterAdvertisementList
	if err := from.List(ctx, &list, client.InNamespace(r.namespace)); err != nil {
		return in, fmt.Errorf("listing advertisements: %w", err)
	}
	// An agent in the hub keeps a copy of its advertisement in the same namespace, under
	// another name: it is not a second offer.
	in.advertisements = slices.DeleteFunc(list.Items, func(a broker.ClusterAdvertisement) bool { return a.Name != a.Spec.ClusterID })
	slices.SortFunc(in.advertisements, func(a, b broker.ClusterAdvertisement) int {
		return cmp.Compare(a.Spec.ClusterID, b.Spec.ClusterID)
	})
	for i := range in.advertisements {
		id := in.advertisements[i].Spec.ClusterID
		in.active[id], in.fresh[id] = r.activity(id, in.config)
	}
	r.remember(&in)
	return in, nil
}

// activity reports whether a cluster is active, and whether its last advertisement is
// fresh. After a fail-over no cluster is fresh before its next advertisement, but all
// are active until the stale threshold.
func (r *Reconciler) activity(cluster string, c config) (active, fresh bool) {
	age := r.clock.Since(r.lastAdvertised(cluster))
	_, received := r.freshness.ReceivedAt(cluster)
	return age < c.staleAfter, received && age <= c.freshFor
}

// lastAdvertised is when this broker last received the cluster's advertisement, or else
// when it became the leader.
func (r *Reconciler) lastAdvertised(cluster string) time.Time {
	if at, received := r.freshness.ReceivedAt(cluster); received {
		return at
	}
	return r.startedAt()
}

// upToDate reports whether there is nothing to write.
func (in snapshot) upToDate() bool {
	r := in.reservation
	if !r.DeletionTimestamp.IsZero() {
		return !controllerutil.ContainsFinalizer(r, broker.FinalizerLedger)
	}
	p := newPlan(in)
	if controllerutil.ContainsFinalizer(r, broker.FinalizerLedger) != in.needsFinalizer() || !p.empty() {
		return false
	}
	next := nextStatus(in, p, false)
	return apiequality.Semantic.DeepEqual(r.Status, next) || !in.figuresDue() && differInFiguresOnly(r.Status, next)
}

// figuresDue reports whether a status may be written that differs in figures only.
func (in snapshot) figuresDue() bool {
	return !in.now.Before(lease.Later(in.times.FirstSeen, in.times.Written).Add(figuresAfter))
}

// needsFinalizer reports whether the Reservation must be kept: until it has ended and the
// providers have released its holds. Those that do not advertise any more are not
// waited for: what they hold stays charged without the Reservation.
func (in snapshot) needsFinalizer() bool {
	if !in.ended() {
		return true
	}
	return slices.ContainsFunc(in.holds(), func(h clusterHold) bool { return !h.Promised.Empty() || in.active[h.cluster] })
}

// requeue requeues the Reservation for the time of its expiration, or when a
// provider's answer is overdue.
func (in snapshot) requeue() ctrl.Result {
	var result ctrl.Result
	at := func(due time.Time) {
		if after := max(due.Sub(in.now), time.Second); result.RequeueAfter == 0 || after < result.RequeueAfter {
			result.RequeueAfter = after
		}
	}
	if in.ended() {
		return result
	}
	if end, _, exists := in.leaseEnd(); exists {
		at(end)
	}
	for _, h := range in.holds() {
		if asked, pending := in.askedAt(h); pending {
			at(asked.Add(in.config.proofDeadline))
		}
	}
	if meta.IsStatusConditionTrue(in.reservation.Status.Conditions, broker.ConditionQueued) {
		at(in.now.Add(queuedRetryAfter))
		if _, until := in.rejections(in.requested()); !until.IsZero() {
			at(until)
		}
		if deadline := in.reservation.Spec.Deadline; deadline != nil {
			since := in.times.Waiting
			if since.IsZero() {
				since = in.now
			}
			at(since.Add(deadline.Duration))
		}
		if !in.figuresDue() {
			at(in.now.Add(figuresAfter))
		}
	}
	return result
}

// clusterHold is the Reservation's hold at one cluster.
type clusterHold struct {
	broker.Hold
	cluster string
}

// holds lists the Reservation's holds, in the order of its allocations, newest last.
func (in snapshot) holds() []clusterHold {
	r := in.reservation
	var holds []clusterHold
	for i := range in.advertisements {
		if hold := ledger.Find(&in.advertisements[i].Status, r.UID); hold != nil {
			holds = append(holds, clusterHold{*hold, in.advertisements[i].Spec.ClusterID})
		}
	}
	order := func(h clusterHold) int {
		i := slices.IndexFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.Cluster == h.cluster })
		if i < 0 {
			return len(r.Status.Allocations)
		}
		return i
	}
	slices.SortFunc(holds, func(a, b clusterHold) int {
		return cmp.Or(cmp.Compare(order(a), order(b)), cmp.Compare(a.cluster, b.cluster))
	})
	return holds
}

// reliable is the part of a hold that the requester can count on: what an active
// cluster has granted, and the rest of the promise while its answer is expected.
func (in snapshot) reliable(h clusterHold) broker.HeldCapacity {
	switch {
	case !in.active[h.cluster]:
		return broker.HeldCapacity{}
	case in.overdue(h):
		return capacity.Sub(h.Promised, ledger.Pending(h.Hold))
	default:
		return h.Promised
	}
}

// ended reports whether the Reservation has been deleted, released, or its lease has
// ended.
func (in snapshot) ended() bool {
	r := in.reservation
	return !r.DeletionTimestamp.IsZero() || r.Status.Phase == broker.ReservationReleased || in.leaseEnded()
}

// requested is the capacity that the Reservation requests now: none once it has ended.
func (in snapshot) requested() broker.HeldCapacity {
	switch spec := &in.reservation.Spec; {
	case in.ended(), invalidReason(spec) != "":
		return broker.HeldCapacity{}
	case spec.RequestedResources != nil:
		return broker.HeldCapacity{Totals: *spec.RequestedResources}
	default:
		return capacity.OfPodSets(spec.PodSets)
	}
}

// invalidReason explains why no provider can satisfy the spec; "" if one could.
func invalidReason(spec *broker.ReservationSpec) string {
	switch {
	case spec.RequesterID == "":
		return "requesterID is empty: set it to the consumer's cluster ID."
	case spec.TargetClusterID == spec.RequesterID:
		return "targetClusterID is the requester itself: set another cluster ID, or remove it."
	case spec.TargetClusterID != "" && spec.Placement != nil && slices.Contains(spec.Placement.ExcludeClusters, spec.TargetClusterID):
		return fmt.Sprintf("targetClusterID is %s, which placement.excludeClusters excludes: change one of them.", spec.TargetClusterID)
	case spec.Duration != nil && spec.Duration.Duration <= 0:
		return "duration must be positive."
	}
	return ""
}
