package explain

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Reasons of the scheduler plugin's events.
const (
	eventNotPossible = "OverflowNotPossible"
	eventIncomplete  = "OverflowIncomplete"
	eventOutdated    = "OverflowOutdated"
	eventCapped      = "OverflowCapped"
	eventDelayed     = "OverflowDelayed"
	eventFailed      = "OverflowFailed"
)

// namespace: whether it is opted in.
func (w *walk) namespace() {
	const name = "Namespace"
	ns := w.Pod.Namespace
	switch {
	case w.Namespace == nil:
		w.step(name, Unknown, w.permission(Namespaces))
	case w.Namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled && (ns == "kube-system" || ns == w.system()):
		w.stop(name, fmt.Sprintf("Pods of namespace %s do not overflow, whatever its labels", ns), nil)
	case w.Namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled:
		w.step(name, OK, ns+" is opted in")
	case w.bound && w.provider != "":
		w.step(name, Waiting, fmt.Sprintf("%s is not opted in any more: no further pod of it overflows", ns))
	default:
		fix := w.createAgain(OptIn(ns))
		fix.Message = "Opt the namespace in, and create the pods again: the label applies to pods that are created afterwards."
		w.stop(name, fmt.Sprintf("Namespace %s is not opted in: it has no label %s=%s", ns, broker.LabelOverflow, broker.OverflowEnabled), fix)
	}
}

// OptIn is the command that opts a namespace in.
func OptIn(namespace string) string {
	return fmt.Sprintf("kubectl label namespace %s %s=%s", namespace, broker.LabelOverflow, broker.OverflowEnabled)
}

// createAgain is a fix of commands and of one that lets the controller replace the pod.
func (w *walk) createAgain(commands ...string) *Fix {
	fix := &Fix{Commands: commands}
	if resource, ok := w.template(); ok && resource != "job" {
		fix.Commands = append(fix.Commands, fmt.Sprintf("kubectl -n %s rollout restart %s/%s", w.Pod.Namespace, resource, w.Owner.Name))
	} else if w.Pod.UID != "" && metav1.GetControllerOfNoCopy(w.Pod) != nil {
		fix.Commands = append(fix.Commands, fmt.Sprintf("kubectl -n %s delete pod %s", w.Pod.Namespace, w.Pod.Name))
	}
	return fix
}

// template returns the resource of the owner whose pod template kubectl can change.
func (w *walk) template() (resource string, ok bool) {
	// The name may be what the pod's author has written, and not that of an object.
	if w.Owner == nil || len(validation.IsDNS1123Subdomain(w.Owner.Name)) > 0 {
		return "", false
	}
	switch resource = strings.ToLower(w.Owner.Kind); resource {
	case "deployment", "statefulset", "daemonset":
		return resource, strings.HasPrefix(w.Owner.APIVersion, "apps/")
	}
	return "", false
}

// pod: whether it may run in another cluster.
func (w *walk) pod() {
	const name = "Pod"
	unbound := w.Pod.DeepCopy()
	unbound.Spec.NodeName, unbound.Status.Phase, unbound.DeletionTimestamp = "", "", nil
	unbound.Spec.SchedulingGates = nil
	change := &Fix{Message: "Change the pod's template as it says; section \"What overflows\" of scheduler-plugin/README.md has what to use instead."}
	if resource, ok := w.template(); ok {
		change.Manual = true
		change.Commands = []string{fmt.Sprintf("kubectl -n %s edit %s/%s", w.Pod.Namespace, resource, w.Owner.Name)}
	}
	if c := metav1.GetControllerOfNoCopy(w.Pod); c != nil && c.Kind == "DaemonSet" {
		change = &Fix{Message: "Nothing, if it is to run on each node. Otherwise create its pods by a Deployment."}
	}
	ok, reason := demand.Admissible(unbound)
	said, refused := w.event(eventNotPossible)
	switch {
	case w.Pod.Labels[broker.LabelOverflow] == broker.OverflowDisabled:
		w.stop(name, fmt.Sprintf("The pod is opted out by its label %s=%s", broker.LabelOverflow, broker.OverflowDisabled),
			&Fix{Message: "Remove that label from the pod's template."})
	case !ok && w.bound:
		w.step(name, Skipped, "it stays at home: "+reason)
	case !ok:
		w.stop(name, "The pod cannot overflow: "+reason, change)
	case w.Pod.DeletionTimestamp != nil:
		w.stop(name, "The pod is being deleted", nil)
	case len(w.Pod.Spec.SchedulingGates) > 0:
		gate := w.Pod.Spec.SchedulingGates[0].Name
		w.stop(name, fmt.Sprintf("Scheduling gate %s keeps the pod from being scheduled anywhere", gate), &Fix{Message: "Let what has set the gate remove it."})
	case refused && !w.bound && Steered(w.Pod):
		w.stop(name, said, change)
	default:
		w.step(name, OK, "it may overflow")
	}
}

// Steered reports whether Spillway's scheduler has taken over a pod: by its name, or by the
// toleration that its webhook adds where it is the cluster's only scheduler.
func Steered(pod *corev1.Pod) bool {
	return pod.Spec.SchedulerName == broker.SchedulerName || demand.Steerable(pod) && len(demand.AddedTolerations(pod.Spec.Tolerations)) > 0
}

// scheduler: whether it is Spillway's.
func (w *walk) scheduler() {
	const name = "Scheduler"
	scheduler := cmp.Or(w.Pod.Spec.SchedulerName, corev1.DefaultSchedulerName)
	switch {
	case w.bound && w.provider == "" && !Steered(w.Pod):
		w.step(name, Skipped, scheduler)
	case Steered(w.Pod), w.provider != "":
		w.step(name, OK, scheduler)
	case w.Pod.UID == "" && scheduler == corev1.DefaultSchedulerName:
		w.step(name, OK, broker.SchedulerName+" takes its pods over")
	case scheduler == corev1.DefaultSchedulerName:
		fix := w.createAgain()
		fix.Message = "Create the pod again. If that does not help, check that " + broker.SchedulerName + " runs."
		fix.Commands = append(fix.Commands, w.schedulerPods())
		w.stop(name, fmt.Sprintf("The pod's scheduler is %s: it was created before its namespace opted in, or while no %s was available", scheduler, broker.SchedulerName), fix)
	default:
		fix := &Fix{Message: "Leave schedulerName of the pod's template empty."}
		if resource, ok := w.template(); ok {
			fix.Commands = []string{fmt.Sprintf(`kubectl -n %s patch %s %s --type=json -p '[{"op":"remove","path":"/spec/template/spec/schedulerName"}]'`, w.Pod.Namespace, resource, w.Owner.Name)}
		}
		w.stop(name, fmt.Sprintf("The pod names another scheduler, %s: only pods of %s overflow", scheduler, broker.SchedulerName), fix)
	}
}

// home: whether it is at home, or fits no node there.
func (w *walk) home() {
	const name = "Home"
	switch {
	case w.bound && w.provider == "":
		w.step(name, OK, "it is on node "+w.Pod.Spec.NodeName+", and needs no other cluster")
		w.decided = true
	case w.bound, w.Pod.UID == "":
		w.step(name, OK, "pods that fit no node of this cluster overflow")
	default:
		for _, c := range w.Pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Message != "" {
				w.step(name, OK, "it fits no node of this cluster: "+c.Message)
				return
			}
		}
		w.step(name, Waiting, "The scheduler has not tried the pod yet")
	}
}

// gang: whether there are enough pods of it.
func (w *walk) gang() {
	const name = "Gang"
	if w.Gang == nil {
		return
	}
	g := w.Gang
	said, incomplete := w.event(eventIncomplete)
	outdated, changed := w.event(eventOutdated)
	count := fmt.Sprintf("%s needs %d pods; %d exist, %d of them without scheduling gates", g.Group, g.Min, g.Members, g.Ungated)
	switch {
	case w.bound:
		w.step(name, OK, g.Group)
	case g.Missing:
		w.stop(name, g.Group+" does not exist: the pods that name it wait for it", &Fix{Message: "Create it, or remove the pods' reference to it."})
	case g.Min > 0 && g.Ungated < g.Min:
		w.stop(name, count, &Fix{Message: fmt.Sprintf("Create %d more pods of it, or remove their scheduling gates; or lower its minimum.", g.Min-g.Ungated)})
	case g.Min == 0 && incomplete && w.r == nil:
		w.stop(name, said, &Fix{Message: "Create the missing pods of the gang, or remove their scheduling gates."})
	case changed && w.r != nil:
		w.step(name, Waiting, outdated)
	case g.Min == 0:
		w.step(name, Unknown, w.permission(PodGroups))
	default:
		w.step(name, OK, count)
	}
}

// policy: what the namespace may request, and requests.
func (w *walk) policy() {
	const name = "Policy"
	policy := w.Policy()
	switch {
	case w.unreadable(Policies) || w.Namespace == nil:
		message := w.permission(Policies)
		if !w.unreadable(Policies) {
			message = w.permission(Namespaces)
		}
		if said, capped := w.event(eventCapped); capped && !w.bound {
			w.stop(name, said, &Fix{Message: "Request less, or ask an administrator to raise maxResources of the OverflowPolicy."})
			return
		}
		w.step(name, Unknown, message)
		return
	case policy == nil:
		w.step(name, OK, "no OverflowPolicy selects the namespace: nothing is limited")
		return
	}
	limits := ptr.Deref(policy.Spec.MaxResources, broker.ResourceQuantities{}).Limits()
	if len(limits) == 0 {
		w.step(name, OK, "OverflowPolicy "+policy.Name+" limits no resources"+terms(policy))
		return
	}
	if w.unreadable(Reservations) {
		w.step(name, Unknown, w.permission(Reservations))
		return
	}
	requested := w.Requested()
	pod := resourcehelper.PodRequests(w.Pod, resourcehelper.PodResourcesOptions{})
	_, capped := w.event(eventCapped)
	var details []Detail
	var short []corev1.ResourceName
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		most, used, each := limits[name], requested[name], pod[name]
		next := used.DeepCopy()
		next.Add(each)
		detail := Detail{State: OK, Subject: string(name), Message: fmt.Sprintf("%s of %s requested", used.String(), most.String())}
		if !w.bound && (w.r == nil || capped) && !each.IsZero() && next.Cmp(most) > 0 {
			detail.State, detail.Message = Failed, detail.Message+", the pod needs "+each.String()
			short = append(short, name)
		}
		details = append(details, detail)
	}
	if len(short) == 0 {
		w.step(name, OK, "OverflowPolicy "+policy.Name+terms(policy), details...)
		return
	}
	w.stop(name, fmt.Sprintf("OverflowPolicy %s allows namespace %s no more %s", policy.Name, w.Pod.Namespace, short[0]), w.raise(policy, requested, pod, short), details...)
}

// raise is the fix that lets the waiting pods of the workload, or this one, request what they need.
func (w *walk) raise(policy *broker.OverflowPolicy, requested, pod corev1.ResourceList, short []corev1.ResourceName) *Fix {
	n := int64(0)
	for i := range w.Siblings {
		if w.Siblings[i].Spec.NodeName == "" && !finished(&w.Siblings[i]) {
			n++
		}
	}
	limits := corev1.ResourceList{}
	for _, name := range short {
		amount, each := requested[name], pod[name].DeepCopy()
		each.Mul(max(n, 1))
		amount.Add(each)
		limits[name] = amount
	}
	// Quantities can always be marshalled.
	most, _ := json.Marshal(broker.FromList(limits))
	return &Fix{
		Message:  "Request less, let other Reservations of the namespace end, or raise maxResources of the policy.",
		Manual:   true,
		Commands: []string{fmt.Sprintf(`kubectl patch overflowpolicy %s --type=merge -p '{"spec":{"maxResources":%s}}'`, policy.Name, most)},
	}
}

// terms says what else a policy sets.
func terms(policy *broker.OverflowPolicy) string {
	var all []string
	if b := policy.Spec.Budget; b != nil {
		all = append(all, fmt.Sprintf("at most %s %s per hour for each Reservation", b.MaxPricePerHour, b.Currency))
	}
	if p := policy.Spec.Placement; p != nil {
		for _, part := range []struct {
			words string
			names []string
		}{{"regions ", p.Regions}, {"zones ", p.Zones}, {"not in ", p.ExcludeClusters}} {
			if len(part.names) > 0 {
				all = append(all, part.words+strings.Join(part.names, ", "))
			}
		}
	}
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, "; ") + ")"
}
