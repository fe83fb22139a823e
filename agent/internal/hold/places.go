package hold

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/hold/usage"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
)

// unseenFor is how long a write of a pod counts although the cache does not show it.
const unseenFor = 10 * time.Second

// ReasonNoPlace is the reason of the event of a guest that waits and for which nothing promised is
// left.
const ReasonNoPlace = "NoPlace"

// reportAfter is how long a guest waits before an event says that there is no place for it: the
// placeholder of a place that was just given back needs some seconds.
const reportAfter = 10 * time.Second

// places is what was written of placeholders and guests and is not in the cache yet.
type places struct {
	mu sync.Mutex
	// created are placeholders by name, deleted those by UID, nominated the nodes of
	// guests by UID.
	created   map[string]unseen[*corev1.Pod]
	deleted   map[types.UID]unseen[struct{}]
	nominated map[types.UID]unseen[string]
	// reported are the guests of a consumer of which an event says that there is no place for them.
	reported map[string]sets.Set[types.UID]
	// restsUntil is when each consumer's places may be planned again because of guests and
	// placeholders.
	restsUntil map[string]time.Time
	// planned is what was planned last for the guests that wait. Only the one worker uses it.
	planned moves
}

// moves are the guests of a consumer that take a place, those that need none or have theirs
// already, and those of which an event is to say that there is none for them. waits is set if
// that is not known of others yet.
type moves struct {
	handOvers        []handOver
	ungate, unplaced []*corev1.Pod
	waits            bool
}

type unseen[T any] struct {
	what  T
	since time.Time
}

func newPlaces() *places {
	return &places{
		created: map[string]unseen[*corev1.Pod]{},
		deleted: map[types.UID]unseen[struct{}]{}, nominated: map[types.UID]unseen[string]{},
		reported: map[string]sets.Set[types.UID]{}, restsUntil: map[string]time.Time{},
	}
}

// Planning costs more with each guest and placeholder. So that many of them together do not
// cost the square of it, the places of a consumer rest for restFactor times as long as
// planning them took, within limits.
const (
	restFactor       = 4
	minRest, maxRest = 20 * time.Millisecond, time.Second
)

// rest begins the rest of a consumer's places after they were planned.
func (p *places) rest(consumer string, now time.Time, planning time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.restsUntil[consumer] = now.Add(min(max(restFactor*planning, minRest), maxRest))
}

// resting is how long a consumer's places still rest.
func (p *places) resting(consumer string, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(0, p.restsUntil[consumer].Sub(now))
}

func (p *places) forget(consumer string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.restsUntil, consumer)
	delete(p.reported, consumer)
}

func expire[K comparable, T any](entries map[K]unseen[T], now time.Time) {
	maps.DeleteFunc(entries, func(_ K, e unseen[T]) bool { return now.Sub(e.since) >= unseenFor })
}

// placeholders are the cached placeholders of a consumer with what was written since.
func (p *places) placeholders(cached []*corev1.Pod, consumer string, now time.Time) []*corev1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	expire(p.created, now)
	expire(p.deleted, now)
	expire(p.nominated, now)
	var out []*corev1.Pod
	for _, pod := range cached {
		delete(p.created, pod.Name)
		if _, deleted := p.deleted[pod.UID]; !deleted && pod.DeletionTimestamp == nil {
			out = append(out, pod)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.created)) {
		if pod := p.created[name].what; pod.Labels[broker.LabelRequester] == consumer {
			out = append(out, pod)
		}
	}
	return out
}

// situation is what the placeholders of one consumer are planned on.
type situation struct {
	consumer string
	promises []usage.Promise
	// usage of the promises by the guests that have a place, or are nominated to one.
	usage *usage.Usage
	// expected are the numbers of guests nominated to nodes.
	expected map[string]int
	// pods are the placeholders that guests do not take, taken the others. before is what is
	// unused while these are there.
	pods, taken []*corev1.Pod
	before      []broker.HeldCapacity
	node        func(name string) *corev1.Node
}

// needs returns what needs placeholders beside the guests: of a divisible total, as long as
// the guests have not taken theirs.
func (s situation) needs() []placeholder.Hold {
	var out []placeholder.Hold
	for i, unused := range s.usage.Unused() {
		of := s.promises[i]
		if len(s.taken) > 0 && len(unused.PodSets) == 0 {
			unused = s.before[i]
		}
		out = append(out, placeholder.Hold{UID: of.UID, Name: of.Name, Consumer: s.consumer, Unused: unused})
	}
	return out
}

// handOver is a guest that takes the place of placeholders.
type handOver struct {
	guest *corev1.Pod
	placeholder.HandOver
}

// maxCreated is the number of placeholders that are created at a time: guests that come
// meanwhile wait for it. Their events bring the next ones.
const maxCreated = 64

// maxMoved is the number of guests that are given a place at a time: decisions, and the
// proofs of other holds, wait for it.
const maxMoved = 64

// ensurePlaces makes the placeholders of a consumer those that its holds need beside those
// that moveGuests hands over, which is to be called next. It returns the states of the
// holds, by UID.
func (r *Reconciler) ensurePlaces(ctx context.Context, in input, promises []usage.Promise) (map[types.UID]placeholder.State, error) {
	began := r.Clock.Now()
	observed := in.observed.Places(in.Consumer)
	pods := r.places.placeholders(observed.Placeholders, in.Consumer, began)
	r.places.planned = moves{}
	if len(promises) == 0 && len(pods) == 0 && len(observed.Guests) == 0 {
		r.places.forget(in.Consumer)
		return nil, nil
	}
	var namespace corev1.Namespace
	if err := r.client.Get(ctx, client.ObjectKey{Name: r.Placeholders.Namespace}, &namespace); err != nil {
		return nil, fmt.Errorf("reading the namespace of placeholders: %w", err)
	}
	moves, plan := r.planPlaces(in, promises, observed, pods, guest.Controller(&namespace))
	r.places.rest(in.Consumer, r.Clock.Now(), r.Clock.Since(began))
	r.places.planned = moves
	// What is removed may make room for what is created.
	return plan.States, errors.Join(r.each(ctx, plan.Remove, r.removePlaceholder), r.createPlaceholders(ctx, plan))
}

// moveGuests gives the next guests of a consumer that wait the places that were planned, and
// returns after how long it is to be repeated, 0 for not at all. What fails is logged and
// repeated: it must not keep holds from being decided.
func (r *Reconciler) moveGuests(ctx context.Context, consumer string) (retryAfter time.Duration) {
	planned := r.places.planned
	r.places.planned = moves{}
	next := planned.next(maxMoved)
	r.reportUnplaced(consumer, next.unplaced)
	if err := errors.Join(r.handOver(ctx, next.handOvers), r.each(ctx, next.ungate, r.ungate)); err != nil {
		log.FromContext(ctx).Error(err, "Failed to give guests their places", "retryAfter", requeueAfter.String())
		return requeueAfter
	}
	switch {
	case next.count() < planned.count():
		return minRest
	case planned.waits:
		return requeueAfter
	}
	return 0
}

// next are the first n guests, those that take no place first.
func (m moves) next(n int) moves {
	ungate := m.ungate[:min(len(m.ungate), n)]
	unplaced := m.unplaced[:min(len(m.unplaced), n)]
	return moves{handOvers: m.handOvers[:min(len(m.handOvers), n-len(ungate))], ungate: ungate, unplaced: unplaced}
}

func (m moves) count() int { return len(m.handOvers) + len(m.ungate) + len(m.unplaced) }

// reportUnplaced says of guests that there is no place for them.
func (r *Reconciler) reportUnplaced(consumer string, guests []*corev1.Pod) {
	if len(guests) > 0 && r.places.reported[consumer] == nil {
		r.places.reported[consumer] = sets.Set[types.UID]{}
	}
	for _, pod := range guests {
		r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, ReasonNoPlace, "HandOver",
			"No place that is kept for consumer %s has room for %s on a node that the guest may use: it waits until one has, or its own cluster moves it.", consumer, broker.FromList(inventory.Requests(pod)))
		r.places.reported[consumer].Insert(pod.UID)
	}
}

// createPlaceholders creates at most maxCreated placeholders of a plan, and notes in its
// states which of all the API server does not admit: those of a shape are the same.
func (r *Reconciler) createPlaceholders(ctx context.Context, plan placeholder.Plan) error {
	n := min(len(plan.Create), maxCreated)
	refusals := make([]error, n)
	err := r.concurrently(ctx, n, func(ctx context.Context, i int) error {
		err := r.createPlaceholder(ctx, plan.Create[i])
		if refuses(err) {
			refusals[i], err = err, nil
		}
		return err
	})
	type shape struct {
		hold types.UID
		key  string
	}
	refused := map[shape]error{}
	for i, pod := range plan.Create {
		of := shape{placeholder.HoldOf(pod), pod.Labels[broker.LabelShape]}
		why := refused[of]
		if i < n {
			if why = refusals[i]; why != nil {
				refused[of] = why
			}
		}
		if why != nil {
			plan.States[of.hold].Refuse(pod, why.Error())
		}
	}
	return err
}

// planPlaces plans what ensurePlaces does, with the placeholders that exist.
func (r *Reconciler) planPlaces(in input, promises []usage.Promise, observed inventory.Places, pods []*corev1.Pod, owner metav1.OwnerReference) (moves moves, plan placeholder.Plan) {
	s := situation{consumer: in.Consumer, promises: promises, usage: usage.New(promises), expected: map[string]int{}, pods: pods, node: in.observed.Node}
	moves = r.match(&s, observed)
	options := r.Placeholders
	options.Owner = owner
	return moves, placeholder.Make(placeholder.Input{
		Holds: s.needs(), Pods: s.pods, Leaving: s.taken, Expected: s.expected, Options: options,
		Usable: func(name string) bool { n := s.node(name); return n != nil && r.Recognizer.Eligible(n) },
		Fits:   in.Fits,
	})
}

// match finds a place for each guest that waits for one. The guests with a place count as using
// their holds from then on. No other guest is let go, so that what runs is never more than is
// promised: of a consumer that deletes guests and creates others, these wait until the first have
// ended.
func (r *Reconciler) match(s *situation, observed inventory.Places) (moves moves) {
	r.places.mu.Lock()
	defer r.places.mu.Unlock()
	var waiting []int
	for i, pod := range observed.Guests {
		written, isWritten := r.places.nominated[pod.UID]
		node := pod.Status.NominatedNodeName
		if node == "" && isWritten {
			node = written.what
		}
		switch {
		case pod.Spec.NodeName != "":
			delete(r.places.nominated, pod.UID)
			if inventory.Runs(s.node(pod.Spec.NodeName)) {
				s.usage.Add(observed.Guest(i))
			}
		case pod.DeletionTimestamp != nil:
		case node != "":
			s.usage.Add(observed.Guest(i))
			s.expected[node]++
			if gated(pod) && !isWritten {
				// The agent was interrupted.
				moves.ungate = append(moves.ungate, pod)
			}
		default:
			waiting = append(waiting, i)
		}
	}
	before, reported := r.places.reported[s.consumer], sets.Set[types.UID]{}
	delete(r.places.reported, s.consumer)
	if len(waiting) == 0 {
		return moves
	}
	slices.SortStableFunc(waiting, func(a, b int) int {
		return observed.Guests[a].CreationTimestamp.Compare(observed.Guests[b].CreationTimestamp.Time)
	})
	s.before = s.usage.Unused()
	places, left := placeholder.NewPlaces(s.pods), s.usage.Left()
	for _, i := range waiting {
		pod, guest := observed.Guests[i], observed.Guest(i)
		s.usage.Add(guest)
		with := s.usage.Left()
		share, within := s.usage.ShareOf(left, with)
		if within && share.Divisible && capacity.Ceil(guest.Requests).IsZero() {
			if left = with; gated(pod) {
				moves.ungate = append(moves.ungate, pod)
			}
			continue
		}
		if within {
			suits := func(name string) bool { return r.suits(pod, s.node(name)) }
			if place, ok := places.Take(guest.Requests, s.part(share), suits); ok {
				moves.handOvers, left = append(moves.handOvers, handOver{pod, place}), with
				s.taken = append(s.taken, place.Placeholders...)
				continue
			}
		}
		s.usage.Remove(guest)
		switch {
		case !gated(pod):
		case before.Has(pod.UID):
			reported.Insert(pod.UID)
		case r.Clock.Since(pod.CreationTimestamp.Time) < reportAfter:
			moves.waits = true
		default:
			moves.unplaced = append(moves.unplaced, pod)
		}
	}
	if len(reported) > 0 {
		r.places.reported[s.consumer] = reported
	}
	taken := sets.New(s.taken...)
	s.pods = slices.DeleteFunc(slices.Clone(s.pods), taken.Has)
	return moves
}

// part is the share of a hold that a guest uses.
func (s situation) part(of usage.Share) placeholder.Part {
	part := placeholder.Part{Hold: s.promises[of.Of].UID, Divisible: of.Divisible}
	if !of.Divisible {
		part.Shape = placeholder.ShapeOf(s.promises[of.Of].Held.PodSets[of.At])
	}
	return part
}

// suits reports whether a guest may run on a node, nil for none.
func (r *Reconciler) suits(pod *corev1.Pod, node *corev1.Node) bool {
	return node != nil && r.Recognizer.Eligible(node) && placeholder.RunsOn(pod, node)
}

// each calls write for each pod, some at a time.
func (r *Reconciler) each(ctx context.Context, pods []*corev1.Pod, write func(context.Context, *corev1.Pod) error) error {
	return r.concurrently(ctx, len(pods), func(ctx context.Context, i int) error { return write(ctx, pods[i]) })
}

func (r *Reconciler) concurrently(ctx context.Context, n int, call func(ctx context.Context, i int) error) error {
	errs := make([]error, n)
	if r.Writers == 1 {
		for i := range n {
			errs[i] = call(ctx, i)
		}
		return errors.Join(errs...)
	}
	workqueue.ParallelizeUntil(context.WithoutCancel(ctx), r.Writers, n, func(i int) { errs[i] = call(ctx, i) })
	return errors.Join(errs...)
}

// handOver makes guests take the places of placeholders. No other pod of their priority
// can take such a place: the guest is nominated to the node before the placeholder is
// deleted, and competes for it only then.
func (r *Reconciler) handOver(ctx context.Context, all []handOver) error {
	return r.concurrently(ctx, len(all), func(ctx context.Context, i int) error {
		h := all[i]
		if nominated, err := r.nominate(ctx, h.guest, h.Node); !nominated || err != nil {
			return err
		}
		for _, pod := range h.Placeholders {
			if err := r.removePlaceholder(ctx, pod); err != nil {
				return err
			}
		}
		log.FromContext(ctx).V(1).Info("Handed over a place to a guest", "guest", client.ObjectKeyFromObject(h.guest).String(), "node", h.Node)
		return r.ungate(ctx, h.guest)
	})
}

// nominate announces to the scheduler that a guest is going to run on a node. It reports
// false if the guest has got a node meanwhile, or is gone: then it needs no place.
func (r *Reconciler) nominate(ctx context.Context, pod *corev1.Pod, node string) (nominated bool, err error) {
	err = patchPod(pod, map[string]any{"status": map[string]any{"nominatedNodeName": node}}, func(target *corev1.Pod, patch client.Patch) error {
		return r.client.Status().Patch(ctx, target, patch)
	})
	if apierrors.IsInvalid(err) || errors.Is(err, errGone) {
		log.FromContext(ctx).V(1).Info("A guest needs no place any more", "guest", client.ObjectKeyFromObject(pod).String(), "reason", err.Error())
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("nominating guest %s/%s to node %s: %w", pod.Namespace, pod.Name, node, err)
	}
	r.places.mu.Lock()
	r.places.nominated[pod.UID] = unseen[string]{node, r.Clock.Now()}
	r.places.mu.Unlock()
	return true, nil
}

// gated reports whether a guest waits for the agent.
func gated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == broker.GateHandOver })
}

// ungate lets the scheduler place a guest.
func (r *Reconciler) ungate(ctx context.Context, pod *corev1.Pod) error {
	if !gated(pod) {
		return nil
	}
	others := []corev1.PodSchedulingGate{}
	for _, g := range pod.Spec.SchedulingGates {
		if g.Name != broker.GateHandOver {
			others = append(others, g)
		}
	}
	err := patchPod(pod, map[string]any{"spec": map[string]any{"schedulingGates": others}}, func(target *corev1.Pod, patch client.Patch) error {
		return r.client.Patch(ctx, target, patch)
	})
	if err != nil && !errors.Is(err, errGone) {
		return fmt.Errorf("removing the scheduling gate of guest %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// errGone: a pod is gone, or another one has its name.
var errGone = errors.New("the pod is gone")

// patchPod merges fields into a pod. The error is errGone if there is none.
func patchPod(pod *corev1.Pod, fields map[string]any, write func(target *corev1.Pod, patch client.Patch) error) error {
	fields["metadata"] = map[string]any{"uid": string(pod.UID)}
	data, err := json.Marshal(fields)
	if err != nil {
		return fmt.Errorf("encoding a patch: %w", err)
	}
	target := &corev1.Pod{ObjectMeta: *pod.ObjectMeta.DeepCopy()}
	if err = write(target, client.RawPatch(types.MergePatchType, data)); apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return errGone
	}
	return err
}

func (r *Reconciler) createPlaceholder(ctx context.Context, pod *corev1.Pod) error {
	switch err := r.client.Create(ctx, pod); {
	case apierrors.IsAlreadyExists(err):
		// It is not in the cache yet, or is being deleted.
		return nil
	case err != nil:
		return fmt.Errorf("creating a placeholder: %w", err)
	}
	r.places.mu.Lock()
	r.places.created[pod.Name] = unseen[*corev1.Pod]{pod, r.Clock.Now()}
	r.places.mu.Unlock()
	return nil
}

func (r *Reconciler) removePlaceholder(ctx context.Context, pod *corev1.Pod) error {
	err := r.client.Delete(ctx, pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &pod.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting placeholder %s: %w", pod.Name, err)
	}
	r.places.mu.Lock()
	delete(r.places.created, pod.Name)
	r.places.deleted[pod.UID] = unseen[struct{}]{since: r.Clock.Now()}
	r.places.mu.Unlock()
	return nil
}

// prove makes the placeholders of a consumer those of what is decided. Those of what the scheduler
// refuses are removed before the broker learns it.
func (r *Reconciler) prove(ctx context.Context, in input, decisions []verdict.Decision) ([]verdict.Decision, error) {
	if r.Placeholders.Namespace == "" {
		return verdict.Account(decisions), nil
	}
	refused := true
	for range 2 {
		if !refused {
			break
		}
		var promises []usage.Promise
		for _, d := range decisions {
			promises = append(promises, d.Promise())
		}
		states, err := r.ensurePlaces(ctx, in, promises)
		if err != nil {
			return nil, err
		}
		decisions, refused = verdict.Prove(decisions, verdict.Places{States: states, Now: r.Clock.Now(), Timeout: r.ProofTimeout})
		r.memory.Note(decisions)
	}
	return decisions, nil
}
