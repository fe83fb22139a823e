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
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
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
	keepFreeFor          time.Duration
	// maxPriority is the highest priority that counts.
	maxPriority int32
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
	quotas := ptr.Deref(object.Spec.Quotas, broker.Quotas{})
	return config{
		weights:     ptr.Deref(object.Spec.Weights, decide.DefaultWeights),
		staleAfter:  duration(object.Spec.StaleAfter, 10*time.Minute),
		freshFor:    duration(object.Spec.FreshFor, 90*time.Second),
		maxDuration: duration(object.Spec.MaxDuration, 0),

		defaultLease:  duration(object.Spec.DefaultLease, time.Hour),
		proofDeadline: duration(object.Spec.ProofDeadline, answers.DefaultDeadline),
		retryAfter:    duration(object.Spec.RetryAfter, 30*time.Second),
		queueing:      object.Spec.Queueing,
		keepFreeFor:   duration(object.Spec.KeepFreeFor, 0),
		maxPriority:   ptr.Deref(quotas.MaxPriority, 1000),
	}, nil
}

// snapshot is everything that the plan for one Reservation depends on.
type snapshot struct {
	reservation *broker.Reservation
	// advertisements sorted by cluster ID. They are shared: read-only.
	advertisements []*broker.ClusterAdvertisement
	// holders are the clusters with a hold of the Reservation, or of an earlier one of
	// the same name.
	holders []string
	config  config
	now     time.Time
	// clusters are what a placement is decided on.
	clusters decide.Snapshot
	// full are the clusters whose ledgers have no room for a hold of that capacity.
	full func(want broker.HeldCapacity) map[string]capacity.Rejection
	// active are the holders whose last advertisement is not stale.
	active map[string]bool
	// unreachable is since when the consumer has reported each provider as unreachable; none if
	// it is silent itself.
	unreachable map[string]time.Time
	// unusable is up to which attempt the consumer cannot use what each holder has granted.
	unusable map[string]int64
	// progress is how far the holders have come with what they were asked.
	progress map[string]answers.Progress
	// times are since when this process has seen the Reservation's state.
	times lease.Times
	// heard is when the consumer last advertised, or when this process became the leader.
	heard time.Time
	// rejections are the clusters that must not be chosen for a capacity because of
	// their answers so far, and when the first of them may be.
	rejections func(broker.HeldCapacity) (map[string]capacity.Rejection, time.Time)
	// first is the request for which capacity is kept free before the Reservation in the
	// queue, where it would have that position; nil for none. refuseFirst are the clusters that
	// must not be chosen for the first one at present.
	first       *decide.Request
	refuseFirst map[string]capacity.Rejection
	position    int32
	// queueTime is the time by which it is ordered there; nil for that of its creation.
	queueTime *metav1.MicroTime
}

// snapshot is what the store knows. What is outdated in it does no harm: the writes of
// the Reservation fail if it has changed, those of holds if the holds of this
// Reservation have. It returns NotFound if the Reservation does not exist.
func (r *Reconciler) snapshot(ctx context.Context, name string) (snapshot, error) {
	reservation, err := r.known(ctx, name)
	if err != nil {
		return snapshot{}, err
	}
	config, err := r.config(ctx)
	if err != nil {
		return snapshot{}, err
	}
	return r.snapshotOf(reservation, config), nil
}

// known is a copy of a Reservation that the store or the API server knows.
func (r *Reconciler) known(ctx context.Context, name string) (*broker.Reservation, error) {
	if known := r.store.reservation(name); known != nil {
		return known.DeepCopy(), nil
	}
	reservation := &broker.Reservation{}
	if err := r.client.Get(ctx, r.key(name), reservation); err != nil {
		return nil, err
	}
	if r.store.removedLately(reservation) {
		return nil, notFound(name)
	}
	return reservation, nil
}

// snapshotOf is what the store knows that concerns this version of a Reservation, to which
// it adds an attempt that its status does not have yet.
func (r *Reconciler) snapshotOf(reservation *broker.Reservation, config config) snapshot {
	adoptAttempt(reservation)
	in := snapshot{
		reservation: reservation, config: config, now: r.clock.Now(),
		active: map[string]bool{},
	}
	r.readLedgers(&in)
	return in
}

// readLedgers takes the advertisements and their activity from the store.
func (r *Reconciler) readLedgers(in *snapshot) {
	config := in.config
	in.advertisements = r.store.allAdvertisements()
	in.clusters = r.store.clusters.Snapshot(func(cluster string) (active, fresh bool) { return r.activity(cluster, config) })
	in.holders = r.store.holdersOf(in.reservation.Name)
	requester, holders := in.reservation.Spec.RequesterID, in.holders
	in.full = func(want broker.HeldCapacity) map[string]capacity.Rejection {
		return r.store.full(want, holders)
	}
	in.unreachable = nil
	if active, _ := r.activity(requester, config); active {
		in.unreachable = r.reports.unreachable(requester)
	}
	for _, cluster := range in.holders {
		in.active[cluster], _ = r.activity(cluster, config)
	}
	r.recall(in)
}

// readAttempt reads the clusters of the Reservation's last attempt that do not show its
// holds in the store: another broker may have written them before it stopped, and the
// watch may not have repeated them yet. It reports whether anything was read.
func (r *Reconciler) readAttempt(ctx context.Context, in snapshot) (read bool, err error) {
	attempt := in.reservation.Status.Attempt
	for _, cluster := range attempt.Clusters {
		ad := in.advertisement(cluster)
		if ad != nil {
			if hold := ledger.Find(&ad.Status, in.reservation.UID); hold != nil && hold.Attempt >= attempt.Number {
				continue
			}
		}
		if err := r.readLedger(ctx, cluster); err != nil {
			return read, err
		}
		read = true
	}
	return read, nil
}

// readLedger takes a cluster's advertisement from the API server into the store, if it is
// there.
func (r *Reconciler) readLedger(ctx context.Context, cluster string) error {
	live := &broker.ClusterAdvertisement{}
	if err := r.live.Get(ctx, r.key(cluster), live); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the ledger of %s: %w", cluster, err)
	} else if err == nil {
		r.store.putAdvertisement(live)
	}
	return nil
}

// advertisement is that of a cluster; nil if there is none.
func (in snapshot) advertisement(cluster string) *broker.ClusterAdvertisement {
	at, found := in.find(cluster)
	if !found {
		return nil
	}
	return in.advertisements[at]
}

func (in snapshot) find(cluster string) (at int, found bool) {
	return slices.BinarySearchFunc(in.advertisements, cluster, func(ad *broker.ClusterAdvertisement, cluster string) int {
		return cmp.Compare(ad.Spec.ClusterID, cluster)
	})
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

// urgency is how much a plan's write matters.
type urgency int

const (
	nothing urgency = iota
	// figures may be written, one now and then of all Reservations.
	figures
	// news is written at once.
	news
)

// outdated is what there is to write and, if that is nothing or only figures, until when if
// not for good: consumers go by what providers say of their nodes and the guests that they
// take.
func (in snapshot) outdated(p plan) (urgency, time.Time) {
	r := in.reservation
	switch {
	case in.deleted() && !controllerutil.ContainsFinalizer(r, broker.FinalizerLedger):
		return nothing, time.Time{}
	case in.deleted() || controllerutil.ContainsFinalizer(r, broker.FinalizerLedger) != in.needsFinalizer() || p.writes():
		return news, time.Time{}
	}
	next := nextStatus(in, p, false)
	var until time.Time
	switch {
	case apiequality.Semantic.DeepEqual(r.Status, next):
		return nothing, until
	case !differInFiguresOnly(r.Status, next):
		return news, until
	case differInTerms(r.Status, next):
		until = in.now.Add(figuresAfter)
	}
	if in.now.Before(lease.Later(in.times.FirstSeen, in.times.Written).Add(figuresAfter)) {
		return nothing, until
	}
	return figures, until
}

// mayWrite reports whether something is to be written now. A positive answer for figures counts as
// a write.
func (r *Reconciler) mayWrite(write urgency, now time.Time) bool {
	return write == news || write == figures && r.figures.AllowN(now, 1)
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
		if in.deleted() && in.needsFinalizer() && !in.statusDue() {
			at(in.times.Deleted.Add(releaseShownAfter))
		}
		return result
	}
	if end, _, exists := in.leaseEnd(); exists {
		at(end)
	}
	for _, h := range in.holds() {
		if due, pending := in.due(h); pending {
			at(due)
		}
		if due, unreachable := in.cutOffAt(h); unreachable && in.now.Before(due) {
			at(due)
		}
	}
	if in.reservation.Status.Phase == broker.ReservationFailed {
		at(in.now.Add(queuedRetryAfter)) // it may have become possible
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
	}
	return result
}

// requeueBy is requeue, or earlier, by a time that is not zero.
func (in snapshot) requeueBy(due time.Time) ctrl.Result {
	result := in.requeue()
	if after := due.Sub(in.now); !due.IsZero() && (result.RequeueAfter == 0 || after < result.RequeueAfter) {
		result.RequeueAfter = after
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
	for _, cluster := range in.holders {
		if ad := in.advertisement(cluster); ad != nil {
			if hold := ledger.Find(&ad.Status, r.UID); hold != nil {
				holds = append(holds, clusterHold{*hold, cluster})
			}
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

// reliable is the part of a hold that the requester can count on: what an active cluster
// that it can connect to has granted, and the rest of the promise while its answer is
// expected.
func (in snapshot) reliable(h clusterHold) broker.HeldCapacity {
	switch {
	case !in.counts(h):
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
	return in.deleted() || r.Status.Phase == broker.ReservationReleased || in.leaseEnded()
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
	case spec.RequestedResources != nil && len(spec.RequestedResources.List()) == 0:
		return "requestedResources is zero: set a positive amount."
	}
	return ""
}
