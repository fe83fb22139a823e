package hold

import (
	"cmp"
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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/hold/handover"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/broker/guest"
)

// unseenFor is how long a write of a pod counts although the cache does not show it.
const unseenFor = 10 * time.Second

// ReasonNoPlace is the reason of the event of a guest that waits and for which nothing promised is
// left.
const ReasonNoPlace = "NoPlace"

// places is what was written of pods and is not in the cache yet, by UID.
type places struct {
	mu     sync.Mutex
	unseen map[types.UID]unseen
}

// unseen is a placeholder that was created or deleted, or the node that a guest was nominated to.
type unseen struct {
	created *corev1.Pod
	deleted bool
	node    string
	since   time.Time
}

// wrote notes a write.
func (p *places) wrote(uid types.UID, what unseen) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unseen[uid] = what
}

// Planning costs more with each guest and placeholder. So that many of them together do not
// cost the square of it, the places of a consumer rest for restFactor times as long as
// planning them took, within limits.
const (
	restFactor       = 4
	minRest, maxRest = 20 * time.Millisecond, time.Second
)

// placeholders are the cached placeholders of a consumer with what was written since.
func (p *places) placeholders(cached []*corev1.Pod, consumer string, now time.Time) (out []*corev1.Pod) {
	maps.DeleteFunc(p.unseen, func(_ types.UID, w unseen) bool { return now.Sub(w.since) >= unseenFor })
	for _, pod := range cached {
		written := p.unseen[pod.UID]
		if written.created != nil {
			delete(p.unseen, pod.UID)
		}
		if !written.deleted && pod.DeletionTimestamp == nil {
			out = append(out, pod)
		}
	}
	seen := len(out)
	for _, written := range p.unseen {
		if pod := written.created; pod != nil && pod.Labels[broker.LabelRequester] == consumer {
			out = append(out, pod)
		}
	}
	slices.SortFunc(out[seen:], func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return out
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
func (r *Reconciler) ensurePlaces(ctx context.Context, in input, promises []charge.Promise) (map[types.UID]placeholder.State, error) {
	began := r.Clock.Now()
	observed := in.observed.Places(in.Consumer)
	pods := r.places.placeholders(observed.Placeholders, in.Consumer, began)
	of := r.of(in.Consumer)
	of.planned = handover.Moves{}
	if len(promises) == 0 && len(pods) == 0 && len(observed.Guests) == 0 {
		of.reported, of.restsUntil = nil, time.Time{}
		return nil, nil
	}
	var namespace corev1.Namespace
	if err := r.client.Get(ctx, client.ObjectKey{Name: r.Placeholders.Namespace}, &namespace); err != nil {
		return nil, fmt.Errorf("reading the namespace of placeholders: %w", err)
	}
	options := r.Placeholders
	options.Owner = guest.Controller(&namespace)
	plan := handover.Make(handover.Input{
		Consumer: in.Consumer, Promises: promises, Guests: observed, Placeholders: pods, Nominated: func(uid types.UID) string { return r.places.unseen[uid].node }, Reported: of.reported,
		Node: in.observed.Node, Eligible: r.Recognizer.Eligible, Fits: in.Fits, Options: options, Now: r.Clock.Now(),
	})
	of.planned, of.reported = plan.Moves, plan.Reported
	of.restsUntil = r.Clock.Now().Add(min(max(restFactor*r.Clock.Since(began), minRest), maxRest))
	// What is removed may make room for what is created.
	return plan.States, errors.Join(r.each(ctx, plan.Remove, r.removePlaceholder), r.createPlaceholders(ctx, plan.Plan))
}

// moveGuests gives the next guests of a consumer that wait the places that were planned, and
// returns after how long it is to be repeated, 0 for not at all. What fails is logged and
// repeated: it must not keep holds from being decided.
func (r *Reconciler) moveGuests(ctx context.Context, consumer string) (retryAfter time.Duration) {
	of := r.of(consumer)
	planned := of.planned
	of.planned = handover.Moves{}
	next := planned.Next(maxMoved)
	for _, pod := range next.Unplaced {
		r.recorder.Eventf(pod, nil, corev1.EventTypeWarning, ReasonNoPlace, "HandOver",
			"No place that is kept for consumer %s has room for %s on a node that the guest may use: it waits until one has, or its own cluster moves it.", consumer, broker.FromList(inventory.Requests(pod)))
		of.reported.Insert(pod.UID)
	}
	if err := errors.Join(r.handOver(ctx, next.Taken), r.each(ctx, next.Ungate, r.ungate)); err != nil {
		log.FromContext(ctx).Error(err, "Failed to give guests their places", "retryAfter", requeueAfter.String())
		return requeueAfter
	}
	switch {
	case next.Count() < planned.Count():
		return minRest
	case planned.Waits:
		return requeueAfter
	}
	return 0
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
func (r *Reconciler) handOver(ctx context.Context, all []handover.Taken) error {
	return r.concurrently(ctx, len(all), func(ctx context.Context, i int) error {
		h := all[i]
		if nominated, err := r.nominate(ctx, h.Guest, h.Node); !nominated || err != nil {
			return err
		}
		for _, pod := range h.Placeholders {
			if err := r.removePlaceholder(ctx, pod); err != nil {
				return err
			}
		}
		log.FromContext(ctx).V(1).Info("Handed over a place to a guest", "guest", client.ObjectKeyFromObject(h.Guest).String(), "node", h.Node)
		return r.ungate(ctx, h.Guest)
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
	r.places.wrote(pod.UID, unseen{node: node, since: r.Clock.Now()})
	return true, nil
}

// ungate lets the scheduler place a guest.
func (r *Reconciler) ungate(ctx context.Context, pod *corev1.Pod) error {
	if !handover.Gated(pod) {
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
	r.places.wrote(pod.UID, unseen{created: pod, since: r.Clock.Now()})
	return nil
}

func (r *Reconciler) removePlaceholder(ctx context.Context, pod *corev1.Pod) error {
	err := r.client.Delete(ctx, pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &pod.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting placeholder %s: %w", pod.Name, err)
	}
	r.places.wrote(pod.UID, unseen{deleted: true, since: r.Clock.Now()})
	return nil
}

// prove makes the placeholders of a consumer those of what is decided. Those of what the scheduler
// refuses are removed before the broker learns it.
func (r *Reconciler) prove(ctx context.Context, in input, decisions []verdict.Decision) ([]verdict.Decision, error) {
	if r.Placeholders.Namespace == "" {
		return verdict.Account(decisions), nil
	}
	for tries, refused := 0, true; refused && tries < 2; tries++ {
		var promises []charge.Promise
		for _, d := range decisions {
			promises = append(promises, d.Promise())
		}
		states, err := r.ensurePlaces(ctx, in, promises)
		if err != nil {
			return nil, err
		}
		decisions, refused = verdict.Prove(decisions, states, r.Clock.Now(), r.ProofTimeout)
		r.memory.Note(decisions)
	}
	return decisions, nil
}
