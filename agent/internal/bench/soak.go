package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// heldNodes and placesOfNode are what the soak holds in each round: all there is.
	heldNodes, placesOfNode = 2, 5
	heldMilli               = 400
	// localsEvery makes 20 local pods a second, of the held and of half the held size.
	localsEvery = 50 * time.Millisecond
	guestsEvery = 300 * time.Millisecond
	// startWithin is the time in which each guest is to run.
	startWithin = 30 * time.Second
)

// Forms of a hold. In the nominated form, which the agent does not have, a pod with a
// scheduling gate that is nominated to a node keeps each place: the pod never gets to a
// kubelet, and the node is the one that our packer has found.
const (
	formPlaceholders = "placeholders"
	formNominated    = "nominated"
	formNone         = "none"
)

// arm is one variant of the soak: how places are held, and whose pods compete for them.
type arm struct {
	form, localScheduler string
	rounds               int
}

func (a arm) String() string {
	switch a.localScheduler {
	case corev1.DefaultSchedulerName:
		return a.form
	case broker.SchedulerName:
		return a.form + ", pods of Spillway's scheduler"
	}
	return a.form + ", pods of another scheduler"
}

// outcome is what an arm has shown.
type outcome struct {
	// handOvers is the number of granted guests; lost are those of them that did not run
	// within startWithin, and stolen the local pods that got a place of theirs.
	handOvers, lost, stolen int
	locals                  int
	// took is how long each of the others took from its creation until it ran.
	took   []time.Duration
	writes float64
	// proofs that were given while local pods arrived, and those of them that were wrong.
	accepted, wrong int
}

// soak lets guests take held places while local pods compete for them, and prints a table.
// It fails if a guest did not run within startWithin with placeholders, unless the local pods
// are those of a third scheduler, or if all did without.
func soak(ctx context.Context) error {
	const another = "another-scheduler"
	arms := []arm{
		{formPlaceholders, corev1.DefaultSchedulerName, 6}, {formNominated, corev1.DefaultSchedulerName, 6}, {formNone, corev1.DefaultSchedulerName, 6},
		{formPlaceholders, broker.SchedulerName, 6}, {formPlaceholders, another, 2}, {formNominated, another, 2},
	}
	fmt.Printf("%-44s %9s %6s %6s %7s %8s %8s %9s %6s %7s\n", "hold", "handovers", "lost", "stolen", "locals", "running", "slowest", "accepted", "wrong", "writes")
	outcomes := make([]outcome, len(arms))
	for i, a := range arms {
		o, err := a.run(ctx)
		if err != nil {
			return fmt.Errorf("hold %s: %w", a, err)
		}
		outcomes[i] = o
		fmt.Printf("%-44s %9d %6d %6d %7d %8s %8s %9d %6d %7.1f\n", a, o.handOvers, o.lost, o.stolen, o.locals, quantile(o.took, 0.5), quantile(o.took, 1), o.accepted, o.wrong, o.writes)
	}
	with, nominated, none, beside := outcomes[0], outcomes[1], outcomes[2], outcomes[3]
	verdict := "passed"
	if with.lost > 0 || with.stolen > 0 || with.wrong > 0 || beside.lost > 0 || beside.stolen > 0 || none.lost == 0 {
		verdict = "failed"
	}
	fmt.Printf("soak: %s: with placeholders, %d of %d granted pods were Running within %s (slowest %s) while %d local pods wanted their places, 20 a second, and %d took one; with the nominated form %d of %d; with hold none %d of %d, and %d local pods took their room; with placeholders and local pods of Spillway's scheduler %d of %d, and %d took one\n",
		verdict, with.handOvers-with.lost, with.handOvers, startWithin, quantile(with.took, 1), with.locals, with.stolen,
		nominated.handOvers-nominated.lost, nominated.handOvers, none.handOvers-none.lost, none.handOvers, none.stolen, beside.handOvers-beside.lost, beside.handOvers, beside.stolen)
	if verdict != "passed" {
		return errors.New("the soak failed")
	}
	return nil
}

// run measures an arm on a cluster of its own.
func (a arm) run(ctx context.Context) (o outcome, err error) {
	p, err := startProvider(ctx, a.form == formPlaceholders)
	defer func() { err = errors.Join(err, p.stop()) }()
	if err != nil {
		return o, err
	}
	switch a.localScheduler {
	case corev1.DefaultSchedulerName:
	case broker.SchedulerName:
		err = p.startSpillwayScheduler(ctx)
	default:
		err = p.startScheduler(a.localScheduler)
	}
	if err != nil {
		return o, err
	}
	if err := p.cluster.StartKubelets(200 * time.Second); err != nil {
		return o, err
	}
	for i := range heldNodes {
		if err := p.addNode(ctx, fmt.Sprintf("node-%d", i), placesOfNode*heldMilli); err != nil {
			return o, err
		}
	}
	for i := range a.rounds {
		if err := a.handOvers(ctx, p, fmt.Sprintf("r%d", i), &o); err != nil {
			return o, err
		}
		if err := a.proof(ctx, p, fmt.Sprintf("p%d", i), &o); err != nil {
			return o, err
		}
	}
	o.writes /= float64(o.handOvers)
	return o, nil
}

// handOvers holds all places of the nodes, and lets a guest come for each while local pods
// want them too.
func (a arm) handOvers(ctx context.Context, p *provider, name string, o *outcome) error {
	before := p.writes.Load()
	if accepted, err := p.ask(ctx, name, heldNodes*placesOfNode, heldMilli); err != nil || !accepted {
		return errors.Join(err, notAccepted(accepted))
	}
	kept, err := a.keep(ctx, p, name, heldNodes*placesOfNode)
	if err != nil {
		return err
	}
	stop := p.compete(ctx, name, a.localScheduler)
	created := map[string]time.Time{}
	for i := range heldNodes * placesOfNode {
		pause(ctx, guestsEvery)
		guest, err := p.createGuest(ctx, fmt.Sprintf("%s-%d", name, i), heldMilli, a.form != formNone)
		if err != nil {
			return err
		}
		created[guest.Name] = time.Now()
		if a.form == formNominated {
			if err := p.takeOver(ctx, guest, kept[i]); err != nil {
				return err
			}
		}
		if err := p.note(ctx, created, o); err != nil {
			return err
		}
	}
	last := time.Now()
	for len(created) > 0 && time.Since(last) < startWithin && ctx.Err() == nil {
		if err := p.note(ctx, created, o); err != nil {
			return err
		}
		pause(ctx, 5*poll)
		if stolen, err := p.bound(ctx, localNamespace); err != nil || stolen > 0 && time.Since(last) > startWithin/3 {
			// No local pod ends: what is stolen stays so.
			break
		}
	}
	stolen, err := p.bound(ctx, localNamespace)
	o.locals += stop()
	o.handOvers += heldNodes * placesOfNode
	o.lost += len(created)
	o.stolen += stolen
	o.writes += float64(p.writes.Load() - before)
	return errors.Join(err, p.clear(ctx))
}

// proof asks for a hold while local pods fill the nodes, stops these at once when it is
// accepted, and lets its guests come: what is accepted must be there.
func (a arm) proof(ctx context.Context, p *provider, name string, o *outcome) error {
	const count = 4
	stop := p.compete(ctx, name, a.localScheduler)
	pause(ctx, 4*localsEvery)
	accepted, err := p.ask(ctx, name, count, heldMilli)
	if err != nil || !accepted {
		stop()
		return errors.Join(err, p.clear(ctx))
	}
	kept, err := a.keep(ctx, p, name, count)
	stop()
	if err != nil {
		return err
	}
	o.accepted++
	if err := p.removePending(ctx, localNamespace); err != nil {
		return err
	}
	created := map[string]time.Time{}
	for i := range count {
		guest, err := p.createGuest(ctx, fmt.Sprintf("%s-%d", name, i), heldMilli, a.form != formNone)
		if err != nil {
			return err
		}
		created[guest.Name] = time.Now()
		if a.form == formNominated {
			if err := p.takeOver(ctx, guest, kept[i]); err != nil {
				return err
			}
		}
	}
	ignored := outcome{}
	for start := time.Now(); len(created) > 0 && time.Since(start) < startWithin && ctx.Err() == nil; {
		if err := p.note(ctx, created, &ignored); err != nil {
			return err
		}
		pause(ctx, 5*poll)
	}
	if len(created) > 0 {
		o.wrong++
	}
	return p.clear(ctx)
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func notAccepted(accepted bool) error {
	if accepted {
		return nil
	}
	return errors.New("a hold of free capacity was not accepted")
}

// note removes the guests that run, and notes how long they took. One that took longer than
// startWithin is lost.
func (p *provider) note(ctx context.Context, waiting map[string]time.Time, o *outcome) error {
	var list corev1.PodList
	if err := p.api.List(ctx, &list, client.InNamespace(guestsNamespace)); err != nil {
		return err
	}
	for _, pod := range list.Items {
		since, waits := waiting[pod.Name]
		if !waits || pod.Status.Phase != corev1.PodRunning {
			continue
		}
		if took := time.Since(since); took <= startWithin {
			o.took = append(o.took, took)
		} else {
			o.lost++
		}
		delete(waiting, pod.Name)
	}
	return nil
}

// compete creates local pods until it is stopped, and returns how many.
func (p *provider) compete(ctx context.Context, name, scheduler string) (stop func() int) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan int)
	go func() {
		n := 0
		for ticker := time.NewTicker(localsEvery); ; {
			select {
			case <-ctx.Done():
				ticker.Stop()
				done <- n
				return
			case <-ticker.C:
				pod := podOf(localNamespace, fmt.Sprintf("%s-%d", name, n), heldMilli/int64(1+n%2))
				pod.Spec.SchedulerName = scheduler
				if p.api.Create(ctx, pod) == nil {
					n++
				}
			}
		}
	}()
	return func() int {
		cancel()
		return <-done
	}
}

// removePending removes the pods of a namespace that have no node.
func (p *provider) removePending(ctx context.Context, namespace string) error {
	var list corev1.PodList
	if err := p.api.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return err
	}
	for i := range list.Items {
		if pod := &list.Items[i]; pod.Spec.NodeName == "" {
			if err := client.IgnoreNotFound(p.api.Delete(ctx, pod, client.GracePeriodSeconds(0))); err != nil {
				return err
			}
		}
	}
	return nil
}

// keep does in the nominated form what placeholders do: it keeps the places that the packer
// has found, on the nodes in turn.
func (a arm) keep(ctx context.Context, p *provider, name string, count int) (kept []*corev1.Pod, err error) {
	if a.form != formNominated {
		return nil, nil
	}
	free, err := p.free(ctx)
	if err != nil {
		return nil, err
	}
	for i := range count {
		node := slices.MaxFunc([]string{"node-0", "node-1"}, func(x, y string) int { return int(free[x] - free[y]) })
		free[node] -= heldMilli
		pod := podOf(holdsNamespace, fmt.Sprintf("%s-%d", name, i), heldMilli)
		pod.Spec.PriorityClassName = placeholder.PriorityClass
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.Group + "/hold"}}
		if err := p.counted.Create(ctx, pod); err != nil {
			return kept, err
		}
		if err := p.nominate(ctx, pod, node); err != nil {
			return kept, err
		}
		kept = append(kept, pod)
	}
	return kept, nil
}

// free are the millicores of each node that no pod uses.
func (p *provider) free(ctx context.Context) (map[string]int64, error) {
	free := map[string]int64{"node-0": placesOfNode * heldMilli, "node-1": placesOfNode * heldMilli}
	var list corev1.PodList
	if err := p.api.List(ctx, &list); err != nil {
		return nil, err
	}
	for _, pod := range list.Items {
		free[pod.Spec.NodeName] -= pod.Spec.Containers[0].Resources.Requests.Cpu().MilliValue()
	}
	return free, nil
}

func (p *provider) nominate(ctx context.Context, pod *corev1.Pod, node string) error {
	pod.Status.NominatedNodeName = node
	return p.counted.Status().Patch(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}},
		client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"nominatedNodeName":%q}}`, node)))
}

// takeOver is the hand-over of a place in the nominated form.
func (p *provider) takeOver(ctx context.Context, guest, keeper *corev1.Pod) error {
	if err := p.nominate(ctx, guest, keeper.Status.NominatedNodeName); err != nil {
		return err
	}
	if err := p.counted.Delete(ctx, keeper, &client.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		return err
	}
	return p.counted.Patch(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guest.Namespace, Name: guest.Name}},
		client.RawPatch(types.MergePatchType, []byte(`{"spec":{"schedulingGates":[]}}`)))
}

// quantile of durations, 0 for none.
func quantile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[int(q*float64(len(sorted)-1))].Round(time.Millisecond)
}
