package overflow

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// besideNominees rejects a node of this cluster that has room for a pod only without the
// nominees there.
func (p *Plugin) besideNominees(pod *corev1.Pod, info framework.NodeInfo) *framework.Status {
	if !p.placements.Nominees.Some.Load() {
		return nil // this runs for each pod and node
	}
	all := p.placements.Nominees.On(info.Node().Name, func(uid types.UID) bool {
		return slices.ContainsFunc(info.GetPods(), func(other framework.PodInfo) bool { return other.GetPod().UID == uid })
	})
	if len(all) == 0 {
		return nil
	}
	free, need := usage.FreeIn(info), usage.PodAmounts(pod)
	if need.FitsIn(free) == 0 || usage.FitsBeside(all, pod, need, free) {
		return nil // NodeResourcesFit says why the pod does not fit
	}
	p.placements.Nominees.KeepOut(pod)
	return framework.NewStatus(framework.Unschedulable, errNominees)
}

// ownNomineeChanged wakes those of the gate if a pod of this scheduler is neither nominated any more
// to the node that it was nominated to, nor bound to it. kube-scheduler wakes only its own queue.
func (p *Plugin) ownNomineeChanged(old, obj any) {
	before, _ := old.(*corev1.Pod)
	after, ok := obj.(*corev1.Pod)
	if !ok || before == nil || before.Spec.SchedulerName != p.handle.ProfileName() || !usage.IsNominee(before) {
		return
	}
	node := before.Status.NominatedNodeName
	if after.Spec.NodeName != node && !(usage.IsNominee(after) && after.Status.NominatedNodeName == node) {
		p.ownNomineeGone(node)
	}
}

// ownNomineeGone wakes those of the gate that have room on a node since a pod of this scheduler is
// not nominated to it any more.
func (p *Plugin) ownNomineeGone(node string) {
	if node == "" || p.placements.IsVirtual(node) {
		return
	}
	p.placements.Freed(node)
	p.queue.AddFreed(node, demand.Key{})
}

// nomineeGone wakes the pods that have room on a node since a nominee keeps none there: the
// gate its own, and the scheduler, which has no event of that, the others.
func (p *Plugin) nomineeGone(node string) {
	if node == "" || p.placements.IsVirtual(node) {
		return
	}
	p.ownNomineeGone(node)
	pods := map[string]*corev1.Pod{}
	for _, pod := range p.placements.Nominees.TakeKeptOut() {
		if p.gate.Passes(pod) {
			pods[waiting.NameOf(pod).String()] = pod
		}
	}
	if len(pods) > 0 {
		p.handle.Activate(klog.Background(), pods)
	}
}
