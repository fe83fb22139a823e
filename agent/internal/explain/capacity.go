package explain

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

const (
	// Reasons of the agent and of the broker.
	reasonBrokerUnreachable = "BrokerUnreachable"
	reasonNotPreferred      = "NotPreferred"
	reasonUnusable          = "Unusable"
)

// system returns the namespace of Spillway.
func (o *Observed) system() string { return cmp.Or(o.System, broker.SystemNamespace) }

func (o *Observed) agentLogs() string {
	return "kubectl -n " + o.system() + " logs deploy/spillway-agent --tail=50"
}

func (o *Observed) schedulerPods() string {
	return "kubectl -n " + o.system() + " get pods -l app.kubernetes.io/name=" + broker.SchedulerName
}

// reservation: whether capacity is requested, and what the broker says.
func (w *walk) reservation() {
	const name = "Reservation"
	if w.r == nil {
		w.noReservation(name)
		return
	}
	r, status := w.r, &w.status
	reported, queued := w.condition(broker.ConditionReported), w.condition(broker.ConditionQueued)
	ready := w.condition(broker.ConditionReady)
	about := fmt.Sprintf("%s requests %s", r.Name, CapacityOf(r))
	inspect := fmt.Sprintf("kubectl -n %s describe reservation %s", r.Namespace, r.Name)
	switch {
	case w.provider != "":
		w.step(name, OK, about)
	case !r.DeletionTimestamp.IsZero():
		w.step(name, Waiting, fmt.Sprintf("Reservation %s is being deleted: %s", r.Name, ready.Message))
	case status.Phase == broker.ReservationFailed:
		w.stop(name, fmt.Sprintf("Reservation %s has failed: %s", r.Name, cmp.Or(ready.Message, "no cluster can grant it")), &Fix{
			Message: "Correct what it says. Then delete the Reservation: capacity is requested again for pods that wait.", Manual: true, Commands: []string{fmt.Sprintf("kubectl -n %s delete reservation %s", r.Namespace, r.Name)}})
	case status.Phase == broker.ReservationReleased:
		w.stop(name, fmt.Sprintf("Reservation %s has ended: %s", r.Name, ready.Message), &Fix{Message: "Create another one for more time.", Commands: []string{inspect}})
	case reported.Status == metav1.ConditionFalse && len(status.Allocations) == 0:
		fix := &Fix{Message: "Correct what the message says.", Commands: []string{inspect}}
		if reported.Reason == reasonBrokerUnreachable {
			fix = &Fix{Message: "Check that the broker runs, and that the agent can reach it.", Commands: []string{w.agentLogs()}}
		}
		w.stop(name, fmt.Sprintf("The broker has no copy of Reservation %s (%s): %s", r.Name, reported.Reason, reported.Message), fix)
	case queued.Status == metav1.ConditionTrue:
		message := fmt.Sprintf("Reservation %s, for %s, is queued", r.Name, CapacityOf(r))
		if status.QueuePosition > 0 {
			message += fmt.Sprintf(" as number %d", status.QueuePosition)
		}
		var details []Detail
		if len(status.Allocations) > 0 {
			details = append(details, Detail{State: OK, Subject: "granted", Message: status.Summary})
		}
		w.step(name, Waiting, message, details...)
	case status.Phase == "" || status.Phase == broker.ReservationPending:
		w.step(name, Waiting, fmt.Sprintf("Reservation %s waits for the broker's decision", r.Name))
	default:
		w.step(name, OK, about+": "+cmp.Or(status.Summary, string(status.Phase)))
	}
}

// noReservation: why none is there.
func (w *walk) noReservation(name string) {
	failed, refused := w.event(eventFailed)
	delayed, later := w.event(eventDelayed)
	said := w.waits()
	switch {
	case w.unreadable(Reservations) && said != nil && said.Reason != eventFailed:
		state := Waiting
		if said.Status == corev1.ConditionTrue {
			state = OK
		}
		w.step(name, state, said.Message, Detail{State: Unknown, Subject: "more", Message: w.permission(Reservations)})
	case refused && w.provider == "":
		w.stop(name, failed, &Fix{Message: "Correct what the message says: capacity is requested again by itself."})
	case w.unreadable(Reservations):
		w.step(name, Unknown, w.permission(Reservations))
	case w.provider != "":
		w.step(name, OK, "it uses capacity of a Reservation that is not here: of one in the hub, or of one that has ended")
	case w.Pod == nil:
		w.stop(name, fmt.Sprintf("Reservation %s does not exist", w.Asked.Name), nil)
	case later:
		w.step(name, Waiting, delayed)
	case w.Pod.UID == "":
		w.step(name, Skipped, "")
		w.decided = true
	default:
		w.step(name, Waiting, "No capacity has been requested yet, which takes some seconds")
		w.suggest(&Fix{Message: "If it stays so, check that " + broker.SchedulerName + " runs.", Commands: []string{w.schedulerPods()}})
	}
}

// condition returns one of the Reservation, empty if it has none.
func (w *walk) condition(kind string) metav1.Condition {
	if c := meta.FindStatusCondition(w.status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// CapacityOf words what a Reservation requests.
func CapacityOf(r *broker.Reservation) string {
	if total := r.Spec.RequestedResources; total != nil {
		return total.String()
	}
	var sets []string
	for _, set := range r.Spec.PodSets {
		sets = append(sets, fmt.Sprintf("%s of %s", podsOf(set.Count), set.Requests))
	}
	return strings.Join(sets, " and ")
}

func podsOf(n int32) string {
	if n == 1 {
		return "1 pod"
	}
	return fmt.Sprintf("%d pods", n)
}

// providers: what the broker has decided about each.
func (w *walk) providers() {
	const name = "Providers"
	if w.r == nil {
		w.step(name, Skipped, "")
		return
	}
	scores := map[string]string{}
	decision := cmp.Or(w.status.Decision, &broker.Decision{})
	for _, s := range decision.Scores {
		scores[s.Cluster] = s.Score
		if s.Detail != "" {
			scores[s.Cluster] += ": " + s.Detail
		}
	}
	var details []Detail
	for i := range w.status.Allocations {
		details = append(details, allocated(&w.status.Allocations[i], scores))
	}
	for _, r := range decision.Rejections {
		state := Failed
		if r.Reason == reasonNotPreferred {
			state = Skipped
		}
		details = append(details, Detail{State: state, Subject: r.Cluster, Reason: r.Reason, Message: r.Message + w.usableAgain(&r)})
	}
	for _, c := range decision.RejectionCounts {
		message := ""
		if c.Reason == capacity.ReasonConsumerNotAdmitted {
			message = capacity.NotAdmitted(c.Count, w.r.Spec.RequesterID)
		}
		details = append(details, Detail{State: Failed, Subject: fmt.Sprintf("(%d more)", c.Count), Reason: c.Reason, Message: message})
	}
	queued := w.condition(broker.ConditionQueued).Status == metav1.ConditionTrue
	switch n := len(w.status.Allocations); {
	case n > 0 && (w.provider != "" || !queued):
		w.step(name, OK, "chosen: "+strings.Join(w.chosen(), ", "), details...)
	case queued && w.condition(broker.ConditionQueued).Reason == "QuotaReached":
		w.stop(name, w.condition(broker.ConditionQueued).Message, &Fix{Message: "Delete Reservations that are not needed, or ask the administrator of the hub to raise the quota."})
	case len(details) == 0 && queued:
		w.stop(name, "No provider: no other cluster has sent an advertisement", &Fix{Message: "Install Spillway in another cluster that lends capacity (charts/README.md).", Commands: []string{w.agentLogs()}})
	case len(details) == 0:
		w.step(name, Waiting, "The broker has not decided yet")
	default:
		fix := w.fixRejections(decision)
		w.suggest(fix)
		w.step(name, Failed, w.rejected(decision), details...)
	}
}

// usableAgain says of a provider whose grant this cluster could not use that its node is as it has to be by
// now: the broker learns of that when it asks the provider again.
func (w *walk) usableAgain(r *broker.ClusterRejection) string {
	node := w.virtualNode(r.Cluster)
	if r.Reason != reasonUnusable || node == nil || node.Spec.Unschedulable || unready(node) != "" {
		return ""
	}
	return fmt.Sprintf(" That was so when it was asked: node %s is ready and not cordoned now.", node.Name)
}

func (w *walk) chosen() (clusters []string) {
	for _, a := range w.status.Allocations {
		clusters = append(clusters, a.Cluster)
	}
	return clusters
}

// allocated describes an allocation.
func allocated(a *broker.Allocation, scores map[string]string) Detail {
	d := Detail{State: OK, Subject: a.Cluster, Message: a.Resources.String()}
	if pods := (broker.HeldCapacity{PodSets: a.PodSets}).Pods(); pods > 0 {
		d.Message = podsOf(pods) + ", " + d.Message
	}
	if a.PricePerHour != "" {
		d.Message += " at " + a.PricePerHour + " per hour"
	}
	if score := scores[a.Cluster]; score != "" {
		d.Message += ", score " + score
	}
	if !a.Accepted {
		d.State, d.Message = Waiting, d.Message+"; the provider has yet to accept it"
	}
	return d
}

// rejected sums up why no provider was chosen, the most frequent reason first.
func (w *walk) rejected(decision *broker.Decision) string {
	n := len(decision.Rejections) + decision.Unlisted()
	if n == 1 && len(decision.Rejections) == 1 {
		return fmt.Sprintf("%s, the only other cluster, cannot take it: %s", decision.Rejections[0].Cluster, decision.Rejections[0].Reason)
	}
	return fmt.Sprintf("None of %d clusters can take it: %s", n, strings.Join(reasonsOf(decision), ", "))
}

// reasonsOf are the reasons of all rejections, the most frequent first.
func reasonsOf(decision *broker.Decision) []string {
	counts := map[string]int{}
	var reasons []string
	count := func(reason string, n int) {
		if counts[reason] == 0 {
			reasons = append(reasons, reason)
		}
		counts[reason] += n
	}
	for _, r := range decision.Rejections {
		count(r.Reason, 1)
	}
	for _, c := range decision.RejectionCounts {
		count(c.Reason, int(c.Count))
	}
	slices.SortStableFunc(reasons, func(a, b string) int { return cmp.Compare(counts[b], counts[a]) })
	return reasons
}

// fixRejections is what the consumer can do about the first reason that it can do something about.
func (w *walk) fixRejections(decision *broker.Decision) *Fix {
	for _, r := range decision.Rejections {
		fix := &Fix{Message: capacity.Fix(r.Reason)}
		switch r.Reason {
		case capacity.ReasonPodSecurityViolated:
			return w.restrict(fix)
		case capacity.ReasonNoMatchingNodes:
			return fix
		case "OverBudget", "PriceUnknown", "Excluded", "OtherRegion", "OtherZone", "ShareLimited", "NoDomain":
			return w.otherTerms(fix, r.Reason)
		case reasonUnusable:
			if w.usableAgain(&r) != "" {
				return &Fix{Message: "Wait: the broker asks " + r.Cluster + " again by itself, after retryAfter of its BrokerConfig (30 s), and longer if it has asked several times."}
			}
		case "Unreachable":
			fix.Commands = []string{w.agentLogs()}
			return fix
		}
	}
	for _, reason := range reasonsOf(decision) {
		switch reason {
		case capacity.ReasonInsufficientCapacity, capacity.ReasonPartialCapacity, capacity.ReasonConsumerNotAdmitted, capacity.ReasonLendingDisabled:
			return &Fix{Message: capacity.Fix(reason)}
		}
	}
	return &Fix{Message: capacity.Fix("Refused")}
}

// otherTerms completes the fix of a budget or placement that a provider does not meet. A Reservation keeps
// those that it was created with: its author's, or those of the policy.
func (w *walk) otherTerms(fix *Fix, reason string) *Fix {
	fix.Manual, fix.Commands = true, []string{fmt.Sprintf("kubectl -n %s delete reservation %s", w.r.Namespace, w.r.Name)}
	if _, scheduled := demand.KeyOfReservation(w.r); scheduled {
		policy := "overflowpolicies"
		if p := w.Policy(); p != nil {
			policy = "overflowpolicy " + p.Name
		}
		fix.Message += " After a change of the policy, delete the Reservation, which keeps the terms that it was created with: capacity is requested again for pods that wait."
		fix.Commands = append([]string{"kubectl edit " + policy}, fix.Commands...)
		return fix
	}
	own := fmt.Sprintf("Its own spec.placement cannot be changed: delete Reservation %s, and create it again with another one.", w.r.Name)
	switch reason {
	case "PriceUnknown":
		own = fmt.Sprintf("%s Or delete Reservation %s, and create it again without a budget.", fix.Message, w.r.Name)
	case "OverBudget":
		own = fmt.Sprintf("Its own spec.budget cannot be changed: delete Reservation %s, and create it again with a higher one; or wait for a lower price.", w.r.Name)
	case "ShareLimited", "NoDomain":
		// Providers can also mend it.
		own = fix.Message + " " + own
	}
	fix.Message = own
	return fix
}

// restrict completes the fix that lets a workload comply with the Pod Security Standard restricted.
func (w *walk) restrict(fix *Fix) *Fix {
	if w.Pod == nil {
		return fix
	}
	resource, ok := w.template()
	if !ok {
		return fix
	}
	type object = map[string]any
	var containers []object
	for _, c := range w.Pod.Spec.Containers {
		containers = append(containers, object{"name": c.Name, "securityContext": object{"allowPrivilegeEscalation": false, "capabilities": object{"drop": []string{"ALL"}}}})
	}
	patch, err := json.Marshal(object{"spec": object{"template": object{"spec": object{
		"securityContext": object{"runAsNonRoot": true, "seccompProfile": object{"type": "RuntimeDefault"}}, "containers": containers,
	}}}})
	if err == nil {
		fix.Manual = true // sidecars that were added are not in the template
		fix.Commands = []string{fmt.Sprintf("kubectl -n %s patch %s %s -p '%s'", w.Pod.Namespace, resource, w.Owner.Name, patch)}
	}
	return fix
}

// peering: whether it is established with each provider.
func (w *walk) peering() {
	w.each("Peering", broker.ConditionPeered, "peered with ", "Check the agents of both clusters, and the network between them.")
}

// node: whether the virtual nodes provide the capacity.
func (w *walk) node() {
	const name = "Virtual node"
	if w.provider == "" && len(w.chosen()) == 0 {
		w.step(name, Skipped, "")
		return
	}
	providers := w.chosen()
	if w.provider != "" {
		providers = []string{w.provider}
	}
	for _, provider := range providers {
		node := w.virtualNode(provider)
		if node == nil {
			continue
		}
		if lost := unready(node); lost != "" {
			message := fmt.Sprintf("Node %s is not ready: %s", node.Name, lost)
			fix := &Fix{Message: fmt.Sprintf("Restore the connection to %s. If it is gone for good, its pods are deleted and replaced by themselves (virtual-node/README.md).", provider),
				Commands: []string{"kubectl describe node " + node.Name}}
			w.stop(name, message, fix)
			return
		}
		if node.Spec.Unschedulable {
			if w.provider == "" {
				w.stop(name, fmt.Sprintf("Node %s is cordoned in this cluster", node.Name), &Fix{Message: "Uncordon it, or wait for capacity elsewhere.", Manual: true, Commands: []string{"kubectl uncordon " + node.Name}})
				return
			}
			w.step(name, OK, fmt.Sprintf("node %s is cordoned: no further pod gets there", node.Name))
			return
		}
	}
	if w.provider != "" {
		state, message := OK, "node "+w.Pod.Spec.NodeName+" is ready"
		if w.virtualNode(w.provider) == nil {
			state, message = Unknown, w.permission(Nodes)
		}
		w.step(name, state, message)
		return
	}
	w.each(name, broker.ConditionVirtualNodeReady, "it provides the capacity of ", "Check the message, and that the agent runs.")
}

// unready returns why a node is not Ready, empty if it is.
func unready(node *corev1.Node) string {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return cmp.Or(c.Message, c.Reason, "unknown")
		}
	}
	return ""
}

// each adds a step about a condition of every provider's instruction, or of the Reservation if
// instructions cannot be read.
func (w *walk) each(name, condition, done, todo string) {
	providers := w.chosen()
	if w.provider != "" && condition == broker.ConditionPeered {
		w.step(name, OK, done+w.provider)
		return
	}
	if w.r == nil || len(providers) == 0 {
		w.step(name, Skipped, "")
		return
	}
	sum := w.condition(condition)
	if w.unreadable(Instructions) || len(w.Instructions) == 0 {
		switch {
		case sum.Status == metav1.ConditionTrue:
			w.step(name, OK, done+strings.Join(providers, ", "))
		case sum.Message != "":
			w.step(name, Waiting, sum.Message)
		default:
			w.step(name, Unknown, w.permission(Instructions))
		}
		return
	}
	var details []Detail
	waiting := ""
	for _, provider := range providers {
		d := Detail{State: Waiting, Subject: provider, Message: "waits for the agent"}
		if in := w.instruction(w.status.ID, provider); in != nil {
			if c := meta.FindStatusCondition(in.Status.Conditions, condition); c != nil {
				d.Reason, d.Message = c.Reason, c.Message
				if c.Status == metav1.ConditionTrue {
					d.State = OK
				}
			}
		}
		if d.State != OK && waiting == "" {
			waiting = fmt.Sprintf("%s: %s", provider, d.Message)
		}
		details = append(details, d)
	}
	if waiting == "" {
		w.step(name, OK, done+strings.Join(providers, ", "))
		return
	}
	w.step(name, Waiting, waiting, details...)
	w.suggest(&Fix{Message: "If it stays so: " + todo, Commands: []string{w.agentLogs()}})
}

// guest: the pod at its provider.
func (w *walk) guest() {
	const name = "Guest"
	if w.provider == "" {
		w.step(name, Skipped, "")
		return
	}
	for _, reason := range []string{"GuestRefused", "WaitingForConfiguration", "SecretNotCopied", "GuestLost"} {
		if said, ok := w.event(reason); ok && w.Pod.Status.Phase != corev1.PodRunning {
			w.stop(name, said, &Fix{Message: "Correct what it says: see Events in scheduler-plugin/README.md."})
			return
		}
	}
	for _, c := range w.Pod.Status.Conditions {
		if c.Type == broker.PodMustLeave && c.Status == corev1.ConditionTrue {
			w.stop(name, fmt.Sprintf("%s has withdrawn the capacity, and the pod must leave: %s", w.provider, c.Message), &Fix{Message: "Nothing: it is evicted and replaced. Without a controller, create it again."})
			return
		}
	}
	switch why := containerWaits(w.Pod); {
	case finished(w.Pod):
		w.step(name, OK, string(w.Pod.Status.Phase)+" in "+w.provider)
	case w.Pod.Status.Phase == corev1.PodRunning && why == "":
		w.step(name, OK, "running in "+w.provider)
	case why != "":
		w.step(name, Waiting, "The guest in "+w.provider+" does not run: "+why)
	default:
		w.step(name, Waiting, "The guest in "+w.provider+" is starting")
	}
}

// containerWaits returns why a container does not run, empty if none says so.
func containerWaits(pod *corev1.Pod) string {
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if state := c.State.Waiting; state != nil && !slices.Contains([]string{"", "ContainerCreating", "PodInitializing"}, state.Reason) {
			return strings.TrimSuffix(fmt.Sprintf("container %s: %s: %s", c.Name, state.Reason, state.Message), ": ")
		}
	}
	return ""
}
