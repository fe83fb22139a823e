package inventory

import (
	"slices"
	"strings"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// daemonSet is the nodes on which a DaemonSet runs a pod, and what that requests.
type daemonSet struct {
	uid types.UID
	// generation of the spec, 0 if it is not known.
	generation int64
	// replacing is whether its pods are being replaced by those of another template.
	replacing bool
	// nodeName, if set, is the only node.
	nodeName    string
	affinity    nodeaffinity.RequiredNodeAffinity
	tolerations []corev1.Toleration
	requests    corev1.ResourceList
}

// newDaemonSet returns nil for a DaemonSet that is being deleted.
func newDaemonSet(set *appsv1.DaemonSet) *daemonSet {
	if set.DeletionTimestamp != nil {
		return nil
	}
	pod := &corev1.Pod{Spec: *set.Spec.Template.Spec.DeepCopy()}
	requestLimits(pod.Spec.InitContainers)
	requestLimits(pod.Spec.Containers)
	tolerations := append(slices.Clone(pod.Spec.Tolerations), toleratedByDaemons...)
	if pod.Spec.HostNetwork {
		tolerations = append(tolerations, corev1.Toleration{Key: corev1.TaintNodeNetworkUnavailable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule})
	}
	status := &set.Status
	return &daemonSet{
		uid: set.UID, generation: set.Generation, nodeName: pod.Spec.NodeName, affinity: nodeaffinity.GetRequiredNodeAffinity(pod),
		replacing: set.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType &&
			(status.ObservedGeneration < set.Generation || status.UpdatedNumberScheduled < status.DesiredNumberScheduled),
		tolerations: tolerations, requests: Requests(pod),
	}
}

// requestLimits makes containers request what they are limited to where they say nothing, as
// the API server does when a pod is created.
func requestLimits(containers []corev1.Container) {
	for i := range containers {
		resources := &containers[i].Resources
		for name, limit := range resources.Limits {
			if _, given := resources.Requests[name]; given {
				continue
			}
			if resources.Requests == nil {
				resources.Requests = corev1.ResourceList{}
			}
			resources.Requests[name] = limit
		}
	}
}

// toleratedByDaemons is what the controller of DaemonSets makes each of its pods tolerate.
var toleratedByDaemons = []corev1.Toleration{
	{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodePIDPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
}

// runsOn reports whether the DaemonSet has a pod on a node, as its controller decides.
func (d *daemonSet) runsOn(n *corev1.Node) bool {
	if d.nodeName != "" && d.nodeName != n.Name {
		return false
	}
	if matches, err := d.affinity.Match(n); err != nil || !matches {
		return false
	}
	_, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), n.Spec.Taints, d.tolerations, func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	return !untolerated
}

// lacks is what the DaemonSet will use of a node on which it has a pod, besides what its pods
// use there already. Admission may have made these smaller than the template says: that is
// no lack, unless they are being replaced.
func (d *daemonSet) lacks(there share) share {
	if there.pods == 0 {
		return share{}.plus(d.requests, 1)
	}
	missing := share{requests: corev1.ResourceList{}}
	if !d.replacing {
		return missing
	}
	for name, amount := range d.requests {
		more := amount.DeepCopy()
		more.Sub(there.requests[name])
		if more.Sign() > 0 {
			missing.requests[name] = more
		}
	}
	return missing
}

// daemonSetOf is the DaemonSet that controls a pod, "" for none.
func daemonSetOf(pod *corev1.Pod) types.UID {
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil && owner.Kind == "DaemonSet" && strings.HasPrefix(owner.APIVersion, "apps/") {
		return owner.UID
	}
	return ""
}

// daemonPods are the pods of one DaemonSet that use one node.
type daemonPods struct {
	set  types.UID
	node string
}

// lacking is what pods of DaemonSets will use of a node besides what they use already.
func lacking(sets []*daemonSet, n *corev1.Node, there map[daemonPods]share) share {
	lack := share{requests: corev1.ResourceList{}}
	for _, d := range sets {
		if d.runsOn(n) {
			lack = lack.with(d.lacks(there[daemonPods{d.uid, n.Name}]))
		}
	}
	return lack
}

// with is the sum of two shares.
func (s share) with(other share) share {
	sum := s.plus(other.requests, 1)
	sum.pods = s.pods + other.pods
	return sum
}
