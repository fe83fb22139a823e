package overflow

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

const (
	errGangWaits   = "waiting for places for %d pods of %s"
	errGangRefused = "only %d of the %d pods of %s have places"
	errGangEnded   = "another pod of %s has lost its place"
)

// Permit lets a pod of a gang wait until as many pods as the gang requires have places. Then all of them are bound.
func (p *Plugin) Permit(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) (*framework.Status, time.Duration) {
	if waitsFor := p.gangs.Hold(pod); waitsFor != "" {
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, waitsFor), 0
	}
	gang, required := p.gangs.GangOf(pod)
	if required == 0 {
		return nil, 0
	}
	var placed, possible int32
	var unbound []*corev1.Pod // with a place
	others := map[string]*corev1.Pod{}
	for _, member := range p.gangs.Members(pod.Namespace, gang.UID()) {
		switch {
		case p.gangs.Leaves(member.UID): // it is tried again
		case p.placements.Has(member.UID):
			placed++
			if member.Spec.NodeName == "" {
				unbound = append(unbound, member)
			}
		case p.gate.Passes(member):
			possible++
			others[waiting.NameOf(member).String()] = member
		}
	}
	key, resolved := p.keys.KeyOf(pod)
	switch {
	case placed >= required && slices.ContainsFunc(unbound, func(pod *corev1.Pod) bool { return !p.stillGranted(pod) }):
		return framework.NewStatus(framework.Unschedulable, fmt.Sprintf(errGangEnded, gang)), 0
	case placed >= required && p.gangs.Allow(unbound):
		p.forWaiting(pod, func(w framework.WaitingPod) { w.Allow(Name) })
		return nil, 0
	case placed+possible < required && resolved && p.settled(key):
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errGangRefused, placed, required, gang)), 0
	}
	p.gangs.Await(pod.UID, p.args.GangTimeout.Duration)
	p.handle.Activate(klog.Background(), others)
	return framework.NewStatus(framework.Wait, fmt.Sprintf(errGangWaits, required, gang)), p.args.GangTimeout.Duration
}

// unreserveGang frees the places of the other pods of a gang when one has lost its place,
// at a time, and makes sure that all are tried again.
func (p *Plugin) unreserveGang(pod *corev1.Pod, at time.Time) {
	waited := p.gangs.Left(pod.UID)
	gang, required := p.gangs.GangOf(pod)
	if required == 0 && !waited { // what describes a gang may have gone while its pods waited
		return
	}
	if key, ok := p.keys.KeyOf(pod); ok {
		p.queue.Track(pod.UID)
		if now := p.gangs.Current(pod); now != nil {
			pod = now // not the one that the scheduler has assumed on a node
		}
		p.gate.Retry(pod, key, at)
		if !p.gangs.Pending(pod) {
			// Its deletion was reported before: it would be woken for the places of others.
			p.gate.Drop(pod.UID)
			p.queue.Untrack(pod.UID)
		}
	}
	p.rejectOthers(pod, gang)
}

// rejectOthers frees the places of the other pods of a gang that wait in Permit.
func (p *Plugin) rejectOthers(pod *corev1.Pod, gang demand.Gang) {
	p.forWaiting(pod, func(w framework.WaitingPod) {
		if p.gangs.Reject(w.GetPod().UID) {
			w.Reject(Name, fmt.Sprintf(errGangEnded, gang))
		}
	})
}

// forWaiting calls f for the other pods of a pod's gang that wait in Permit.
func (p *Plugin) forWaiting(pod *corev1.Pod, f func(framework.WaitingPod)) {
	gang, _ := demand.GangOf(pod)
	p.handle.IterateOverWaitingPods(func(w framework.WaitingPod) {
		if other := w.GetPod(); other.UID != pod.UID && other.Namespace == pod.Namespace {
			if of, ok := demand.GangOf(other); ok && of == gang {
				f(w)
			}
		}
	})
}

// refuseGang frees the places of a gang when one of its pods has none and gets none in
// other clusters.
func (p *Plugin) refuseGang(pod *corev1.Pod) {
	gang, required := p.gangs.GangOf(pod)
	if required == 0 {
		return
	}
	if key, ok := p.keys.KeyOf(pod); ok && p.settled(key) {
		p.rejectOthers(pod, gang)
	}
}
