package hold

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Reasons of condition Enforced besides broker.ReasonReleased.
const (
	ReasonSetAside    = "SetAside"
	ReasonNoRoom      = "NoRoom"
	ReasonNotLending  = "NotLending"
	ReasonGranting    = "Granting"
	ReasonGuestsStill = "GuestsRemain"
)

// How often borrowers are looked for, and how soon what waits is tried again
// where no event would tell.
const (
	lookForBorrowers = time.Minute
	whileWaiting     = 2 * time.Second
)

// Options of a Reconciler.
type Options struct {
	// Namespace of the ProviderInstructions.
	Namespace string
	// Lending and Headroom are the lender's terms, as they are advertised.
	Lending  broker.Lending
	Headroom corev1.ResourceList
	// PeeringIdleTime is how long consumers keep an idle link. What a consumer
	// left behind is removed after twice that and five minutes.
	PeeringIdleTime time.Duration
	// Clock; the real one where nil.
	Clock clock.PassiveClock
}

// Reconciler answers ProviderInstructions, consumer by consumer.
type Reconciler struct {
	Options
	lender   peering.Provider
	client   client.Client
	live     client.Reader
	recorder events.EventRecorder
	wake     chan event.GenericEvent

	// forgotten is since when a borrower has neither an instruction nor a guest.
	// Only the one worker touches it.
	forgotten map[string]time.Time
}

// New makes a Reconciler.
func New(lender peering.Provider, options Options) *Reconciler {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	return &Reconciler{Options: options, lender: lender, wake: make(chan event.GenericEvent, 64), forgotten: map[string]time.Time{}}
}

// Enqueue has a consumer looked at now. It does not block: what does not fit the
// queue is looked at in its turn.
func (r *Reconciler) Enqueue(consumer string) {
	select {
	case r.wake <- event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: consumer}}}:
	default:
	}
}

// SetupWithManager adds the controller, and a look for borrowers now and then.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	r.client, r.live, r.recorder = mgr.GetClient(), mgr.GetAPIReader(), mgr.GetEventRecorder("spillway-agent")
	consumer := func(name string) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: name}}}
	}
	err := ctrl.NewControllerManagedBy(mgr).Named("provide").
		Watches(&broker.ProviderInstruction{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return consumer(o.(*broker.ProviderInstruction).Spec.RequesterClusterID)
		})).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			guestOf, ok := inventory.GuestOf(o.(*corev1.Pod), func(name string) map[string]string {
				var ns corev1.Namespace
				if mgr.GetClient().Get(ctx, client.ObjectKey{Name: name}, &ns) != nil {
					return nil
				}
				return ns.Labels
			})
			if !ok {
				return nil
			}
			return consumer(guestOf)
		})).
		WatchesRawSource(source.Channel(r.wake, &handler.EnqueueRequestForObject{})).
		// One at a time: two consumers must not be promised the same room.
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Complete(r)
	if err != nil {
		return err
	}
	return mgr.Add(leading{r.lookForBorrowers})
}

// leading is a manager.Runnable for the leader only.
type leading struct{ manager.RunnableFunc }

func (leading) NeedLeaderElection() bool { return true }

// lookForBorrowers queues every consumer for which something exists here, so
// that none is forgotten whose instruction went unseen.
func (r *Reconciler) lookForBorrowers(ctx context.Context) error {
	ticker := time.NewTicker(lookForBorrowers)
	defer ticker.Stop()
	for {
		consumers, err := r.lender.Consumers(ctx)
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Listing borrowers")
		}
		for _, consumer := range consumers {
			r.Enqueue(consumer)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// Reconcile answers all instructions of one consumer.
func (r *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	consumer := request.Name
	// Live, because what was promised to another consumer a moment ago must not
	// be missing.
	var all broker.ProviderInstructionList
	if err := r.live.List(ctx, &all, client.InNamespace(r.Namespace)); err != nil {
		return reconcile.Result{}, fmt.Errorf("listing provider instructions: %w", err)
	}
	cluster, err := inventory.Read(ctx, r.client)
	if err != nil {
		return reconcile.Result{}, err
	}
	guests := guestsByConsumer(cluster)
	mine := slices.DeleteFunc(slices.Clone(all.Items), func(in broker.ProviderInstruction) bool {
		return in.Spec.RequesterClusterID != consumer
	})
	if len(mine) == 0 {
		return r.forget(ctx, consumer, guests[consumer])
	}
	delete(r.forgotten, consumer)

	verdicts := r.judge(consumer, all.Items, cluster, guests)
	var held []broker.HeldCapacity
	for _, v := range verdicts {
		held = append(held, v.held)
	}
	total, pods := grant(held)
	most := pods
	if most > 0 {
		most += peering.DaemonSetPodsAllowance
	}
	granted, err := r.lender.EnsureGrant(ctx, consumer, total, most)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("granting %s to %s: %w", broker.FromList(total), consumer, err)
	}
	using, fits := guests[consumer].within(total, pods)
	var result reconcile.Result
	for _, v := range verdicts {
		status := v.status(granted, fits, using)
		if status.ObservedAttempt != v.instruction.Spec.Attempt {
			result.RequeueAfter = whileWaiting
		}
		if err := r.write(ctx, v.instruction, status); err != nil {
			return reconcile.Result{}, err
		}
	}
	return result, nil
}

// verdict is what is decided about one instruction.
type verdict struct {
	instruction *broker.ProviderInstruction
	// held is what is to be set aside from now on.
	held broker.HeldCapacity
	// refused says why not all that is wanted is, reason and message.
	refused, message string
	// smaller is set where less is held than was before.
	smaller bool
}

// judge decides about each instruction of a consumer. What is wanted beyond what
// is held already must fit the nodes, besides all that is promised to anybody
// and not used yet. An answer that was given stands until the broker asks anew.
func (r *Reconciler) judge(consumer string, all []broker.ProviderInstruction, cluster inventory.Cluster, guests map[string]guestSet) []verdict {
	held := map[types.UID]broker.HeldCapacity{}
	var mine []*broker.ProviderInstruction
	for i := range all {
		in := &all[i]
		if in.Status.Held != nil {
			held[in.UID] = *in.Status.Held
		}
		if in.Spec.RequesterClusterID == consumer {
			mine = append(mine, in)
		}
	}
	slices.SortFunc(mine, func(a, b *broker.ProviderInstruction) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	var verdicts []verdict
	for _, in := range mine {
		have, want := held[in.UID], wanted(in)
		v := verdict{instruction: in, held: have}
		standing := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced)
		switch {
		case Covers(have, want):
			v.held, v.smaller = want, !Covers(want, have) || in.Spec.Releasing
		case in.Status.ObservedAttempt == in.Spec.Attempt && standing != nil && standing.Status == metav1.ConditionFalse:
			v.refused, v.message = standing.Reason, standing.Message
		case !r.lends(consumer):
			v.refused, v.message = ReasonNotLending, fmt.Sprintf("this cluster does not lend to %s", consumer)
		default:
			rest, promised := r.outstanding(in, want, all, held, guests)
			answer := Fit(inventory.Slots(cluster.Nodes, cluster.Pods, r.Headroom), promised, rest)
			if answer.Fits {
				v.held, v.message = want, answer.Message
			} else {
				v.refused, v.message = ReasonNoRoom, answer.Message
			}
		}
		held[in.UID] = v.held
		verdicts = append(verdicts, v)
	}
	return verdicts
}

// outstanding is what of a wanted capacity no guest uses yet, and what of all
// other promises.
func (r *Reconciler) outstanding(in *broker.ProviderInstruction, want broker.HeldCapacity, all []broker.ProviderInstruction,
	held map[types.UID]broker.HeldCapacity, guests map[string]guestSet) (rest broker.HeldCapacity, promised []broker.HeldCapacity) {
	byConsumer := map[string][]broker.HeldCapacity{}
	for i := range all {
		if other := &all[i]; other.UID != in.UID {
			byConsumer[other.Spec.RequesterClusterID] = append(byConsumer[other.Spec.RequesterClusterID], held[other.UID])
		}
	}
	consumer := in.Spec.RequesterClusterID
	// Last, so that guests count for the consumer's other promises first and as
	// much as possible of this one must be found room for.
	byConsumer[consumer] = append(byConsumer[consumer], want)
	for _, name := range slices.Sorted(maps.Keys(byConsumer)) {
		unused := Unused(byConsumer[name], guests[name].bound)
		if name == consumer {
			rest, unused = unused[len(unused)-1], unused[:len(unused)-1]
		}
		promised = append(promised, unused...)
	}
	return rest, promised
}

func (r *Reconciler) lends(consumer string) bool {
	return r.Lending.Enabled && (len(r.Lending.Consumers) == 0 || slices.Contains(r.Lending.Consumers, consumer))
}

// status computes the status that tells a verdict. Its observedAttempt is the
// instruction's only where the answer is final.
func (v verdict) status(granted peering.Progress, fits bool, using string) broker.ProviderInstructionStatus {
	in := v.instruction
	status := *in.Status.DeepCopy()
	status.Enforced, status.ObservedGeneration = false, in.Generation
	condition := metav1.Condition{Type: broker.ConditionEnforced, Status: metav1.ConditionFalse, ObservedGeneration: in.Generation}
	final := true
	hold := v.held.DeepCopy()
	switch {
	case !granted.Done:
		condition.Status, condition.Reason, condition.Message, final = metav1.ConditionUnknown, ReasonGranting, granted.Message, false
		// Not told yet, but the grant may be there already: what was held before
		// and what is to be are both kept from others by the larger of the two.
		if v.smaller {
			hold = in.Status.Held
		}
	case v.refused != "":
		condition.Reason, condition.Message = v.refused, v.message
	case v.smaller && !fits:
		condition.Status, condition.Reason, final = metav1.ConditionUnknown, ReasonGuestsStill, false
		condition.Message = fmt.Sprintf("waiting for guests to end: %s of cluster %s, which keeps %s", using, in.Spec.RequesterClusterID, describe(v.held))
		hold = in.Status.Held
	case in.Spec.Releasing:
		condition.Reason, condition.Message = broker.ReasonReleased, "nothing is set aside for this reservation any more"
	default:
		status.Enforced = true
		condition.Status, condition.Reason = metav1.ConditionTrue, ReasonSetAside
		condition.Message = fmt.Sprintf("%s set aside for cluster %s", describe(v.held), in.Spec.RequesterClusterID)
	}
	if hold == nil || hold.Empty() {
		status.Held = nil
	} else {
		status.Held = hold
	}
	if final {
		status.ObservedAttempt = in.Spec.Attempt
	}
	meta.SetStatusCondition(&status.Conditions, condition)
	return status
}

func (r *Reconciler) write(ctx context.Context, in *broker.ProviderInstruction, status broker.ProviderInstructionStatus) error {
	if equality.Semantic.DeepEqual(in.Status, status) {
		return nil
	}
	before := in.DeepCopy()
	in.Status = status
	if err := r.client.Status().Patch(ctx, in, client.MergeFrom(before)); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("writing the status of provider instruction %s: %w", in.Name, err))
	}
	was, is := meta.FindStatusCondition(before.Status.Conditions, broker.ConditionEnforced), meta.FindStatusCondition(status.Conditions, broker.ConditionEnforced)
	if was == nil || was.Reason != is.Reason || was.Message != is.Message {
		kind := corev1.EventTypeNormal
		if is.Reason == ReasonNoRoom || is.Reason == ReasonNotLending {
			kind = corev1.EventTypeWarning
		}
		r.recorder.Eventf(in, nil, kind, is.Reason, "Enforce", "%s", is.Message)
		log.FromContext(ctx).Info("Hold answered", "reservation", in.Spec.ReservationName, "consumer", in.Spec.RequesterClusterID,
			"attempt", in.Spec.Attempt, "reason", is.Reason, "message", is.Message)
	}
	return nil
}

// forget ends a consumer's right to start guests, and after a long while removes
// what it left behind.
func (r *Reconciler) forget(ctx context.Context, consumer string, guests guestSet) (reconcile.Result, error) {
	borrowers, err := r.lender.Consumers(ctx)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("listing borrowers: %w", err)
	}
	if !slices.Contains(borrowers, consumer) {
		delete(r.forgotten, consumer)
		return reconcile.Result{}, nil
	}
	if _, err := r.lender.EnsureGrant(ctx, consumer, nil, 0); err != nil {
		return reconcile.Result{}, fmt.Errorf("ending the grant of %s: %w", consumer, err)
	}
	now := r.Clock.Now()
	since, known := r.forgotten[consumer]
	if !known || len(guests.active) > 0 {
		since = now
		r.forgotten[consumer] = now
	}
	// The consumer tears the link down when it is idle; this is for one that
	// cannot any more.
	limit := 2*r.PeeringIdleTime + 5*time.Minute
	if left := since.Add(limit).Sub(now); left > 0 {
		return reconcile.Result{RequeueAfter: min(left, lookForBorrowers)}, nil
	}
	log.FromContext(ctx).Info("Removing what a consumer left behind", "consumer", consumer, "idleFor", now.Sub(since).String())
	progress, err := r.lender.Teardown(ctx, consumer)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("removing what %s left behind: %w", consumer, err)
	}
	if !progress.Done {
		return reconcile.Result{RequeueAfter: whileWaiting}, nil
	}
	delete(r.forgotten, consumer)
	return reconcile.Result{}, nil
}

// wanted is what an instruction asks to set aside.
func wanted(in *broker.ProviderInstruction) broker.HeldCapacity {
	if in.Spec.Releasing {
		return broker.HeldCapacity{}
	}
	return broker.HeldCapacity{Totals: in.Spec.RequestedResources, PodSets: in.Spec.PodSets}
}

// guestSet is what runs here for one consumer.
type guestSet struct {
	// bound is what the guests request that use a node, active those and the
	// ones that wait for a node.
	bound, active []corev1.ResourceList
}

func guestsByConsumer(cluster inventory.Cluster) map[string]guestSet {
	out := map[string]guestSet{}
	for _, pod := range cluster.Pods {
		consumer, ok := cluster.GuestOf(pod)
		if !ok || inventory.Finished(pod) {
			continue
		}
		set, requests := out[consumer], inventory.Requests(pod)
		set.active = append(set.active, requests)
		if pod.Spec.NodeName != "" {
			set.bound = append(set.bound, requests)
		}
		out[consumer] = set
	}
	return out
}

// within reports whether the guests that have not finished keep to an amount,
// and what they use.
func (g guestSet) within(total corev1.ResourceList, pods int32) (using string, ok bool) {
	var used corev1.ResourceList
	for _, requests := range g.active {
		used = broker.AddTo(used, requests)
	}
	using = fmt.Sprintf("%d pods with %s", len(g.active), broker.FromList(used))
	return using, len(g.active) <= int(pods) && len(lacking(total, used)) == 0
}

// grant is the amount that lets a consumer use all that is held.
func grant(held []broker.HeldCapacity) (total corev1.ResourceList, pods int32) {
	total = corev1.ResourceList{}
	for _, h := range held {
		total = broker.AddTo(total, h.Totals.List())
		switch {
		case len(h.PodSets) > 0:
			pods += h.Pods()
		case !h.Empty():
			pods += peering.DefaultPodsOfTotal
		}
	}
	return total, pods
}
