package explain

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Explain returns the steps of what was observed, in the order in which a pod passes them, and a fix
// of the first that fails.
func Explain(o *Observed) Explanation {
	w := &walk{Observed: o, Explanation: Explanation{Object: o.Asked, Unreadable: o.Unreadable}}
	if o.Pod != nil {
		w.Object = Object{Kind: "Pod", Namespace: o.Pod.Namespace, Name: o.Pod.Name}
		w.bound, w.provider = o.Pod.Spec.NodeName != "", o.providerOf(o.Pod)
		if o.Pod.UID == "" {
			w.Object = o.Asked
		}
	}
	w.r = o.reservation()
	if w.r != nil {
		w.status = w.r.EffectiveStatus()
	}
	w.Workload = o.workload()
	steps := []func(){w.reservation, w.providers, w.peering, w.node}
	if o.Pod != nil {
		steps = append([]func(){w.namespace, w.pod, w.scheduler, w.home, w.gang, w.policy}, append(steps, w.guest)...)
	}
	for _, step := range steps {
		step()
	}
	w.conclude()
	w.printable()
	return w.Explanation
}

// walk is an explanation in the making.
type walk struct {
	*Observed
	Explanation
	// bound is whether the pod has a node, provider whose virtual node that is.
	bound    bool
	provider string
	// r is the Reservation that counts for it, or nil, with its status as it counts.
	r      *broker.Reservation
	status broker.ReservationStatus
	// decided is whether a step has decided where the pod is, or why it is nowhere.
	decided bool
}

// step adds a step, which is skipped if an earlier one has decided.
func (w *walk) step(name string, state State, message string, details ...Detail) {
	if w.decided {
		state, message, details = Skipped, "", nil
	}
	w.Steps = append(w.Steps, Step{Name: name, State: state, Message: message, Details: details})
}

// stop adds a step that fails and decides, with its fix.
func (w *walk) stop(name, message string, fix *Fix, details ...Detail) {
	if w.decided {
		w.step(name, Skipped, "")
		return
	}
	w.step(name, Failed, message, details...)
	w.decided = true
	w.suggest(fix)
}

// suggest keeps the first fix.
func (w *walk) suggest(fix *Fix) {
	if w.Fix == nil {
		w.Fix = fix
	}
}

// workload describes where the pods are of a workload that is asked about.
func (o *Observed) workload() string {
	if o.Asked.Kind == "Pod" || o.Pod == nil {
		return ""
	}
	if len(o.Siblings) == 0 {
		return fmt.Sprintf("%s has no pods: its template is explained", o.Asked)
	}
	home, waiting, ended := 0, 0, 0
	away := map[string]int{}
	var order []string
	for i := range o.Siblings {
		pod := &o.Siblings[i]
		provider := o.providerOf(pod)
		switch {
		case finished(pod):
			ended++
		case pod.Spec.NodeName == "":
			waiting++
		case provider == "":
			home++
		default:
			if away[provider] == 0 {
				order = append(order, provider)
			}
			away[provider]++
		}
	}
	var parts []string
	add := func(n int, where string) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, where))
		}
	}
	add(home, "at home")
	for _, provider := range order {
		add(away[provider], "in "+provider)
	}
	add(waiting, "waiting")
	add(ended, "ended")
	return fmt.Sprintf("%s: %s", o.Asked, strings.Join(parts, ", "))
}

// finished reports whether a pod has ended.
func finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// conclude sums up the steps.
func (w *walk) conclude() {
	failed, waiting := "", ""
	for _, step := range w.Steps {
		if step.State == Failed && failed == "" {
			failed = step.Message
		}
		if step.State == Waiting && waiting == "" {
			waiting = step.Message
		}
	}
	running := w.Pod != nil && w.Pod.Status.Phase == corev1.PodRunning
	switch {
	case w.Pod != nil && finished(w.Pod):
		w.Outcome, w.Summary, w.Fix = OutcomeEnded, fmt.Sprintf("The pod has ended: %s.", w.Pod.Status.Phase), nil
	case w.provider != "" && running && failed == "":
		w.Outcome, w.Summary = OutcomeOverflow, fmt.Sprintf("The pod runs in %s.", w.provider)
	case w.bound && w.provider == "":
		w.Outcome, w.Summary, w.Fix = OutcomeHome, fmt.Sprintf("The pod is at home, on node %s.", w.Pod.Spec.NodeName), nil
	case failed != "" && waiting != "" && !w.decided: // the providers may have room later
		w.Outcome, w.Summary = OutcomeWaiting, sentence(waiting)+" "+failed
	case failed != "":
		w.Outcome, w.Summary = OutcomeBlocked, failed
	case w.Pod == nil && waiting == "":
		w.Outcome, w.Summary = OutcomeGranted, "The capacity can be used."
	case waiting != "":
		w.Outcome, w.Summary = OutcomeWaiting, waiting
	case w.Pod != nil && w.Pod.UID == "":
		w.Outcome, w.Summary = OutcomeWaiting, "Its pods may overflow once they fit no node of this cluster."
	default:
		w.Outcome, w.Summary = OutcomeWaiting, "The pod waits to be scheduled."
	}
}
