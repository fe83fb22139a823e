package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// clocksDiffer is by how much this machine's clock may differ.
const clocksDiffer = 30 * time.Second

// Status says what runs now, and what waits.
func Status(o *Observed) Report {
	s := &status{Observed: o, Report: Report{Cluster: o.ClusterID(), Unreadable: o.Unreadable}}
	s.home()
	s.hub()
	s.scheduler()
	s.peers()
	s.queue()
	s.finish()
	return s.Report
}

type status struct {
	*Observed
	Report
}

func (s *status) step(name string, state explain.State, message string, details ...explain.Detail) {
	s.Steps = append(s.Steps, explain.Step{Name: name, State: state, Message: message, Details: details})
}

func (s *status) fail(name, message string, fix explain.Fix, details ...explain.Detail) {
	s.step(name, explain.Failed, message, details...)
	s.Fixes = append(s.Fixes, fix)
}

// unknown adds a step about what could not be read.
func (s *status) unknown(name string, what ...string) {
	for _, u := range s.Observed.Unreadable {
		if slices.Contains(what, u.What) {
			reason := "not known: " + u.Reason
			if u.Permission != "" {
				reason = "not known: you may not " + u.Permission
			}
			s.step(name, explain.Unknown, reason)
			return
		}
	}
	s.step(name, explain.Unknown, "not known")
}

// program describes a program by its Lease and its Deployment: present is whether there is any trace of it.
func (s *status) program(name string) (state explain.State, message string, present bool) {
	lease, deployment := s.lease(name), s.deployment(name)
	if lease == nil && deployment == nil {
		if s.unreadable(Deployments) && s.unreadable(Leases) {
			return explain.Unknown, "", true
		}
		return explain.Failed, name + " is not installed in namespace " + s.System, false
	}
	state = explain.OK
	var parts []string
	if lease != nil {
		holder := ptr.Deref(lease.Spec.HolderIdentity, "")
		renewed := ptr.Deref(lease.Spec.RenewTime, metav1.MicroTime{}).Time
		leads := holder != "" && s.Now.Sub(renewed) <= time.Duration(ptr.Deref(lease.Spec.LeaseDurationSeconds, 15))*time.Second+clocksDiffer
		if leads {
			parts = append(parts, holder+" leads")
		} else {
			state = explain.Failed
			parts = append(parts, fmt.Sprintf("no replica leads: the Lease was renewed %s", ago(s.Now, renewed)))
		}
	}
	if deployment != nil {
		wanted := ptr.Deref(deployment.Spec.Replicas, 1)
		parts = append(parts, fmt.Sprintf("%d of %d replicas ready", deployment.Status.ReadyReplicas, wanted))
		// Of two brokers only the leader is ready.
		if deployment.Status.ReadyReplicas == 0 && wanted > 0 || name != Broker && deployment.Status.ReadyReplicas < wanted && state == explain.OK && lease == nil {
			state = explain.Failed
		}
	}
	return state, name + ": " + strings.Join(parts, ", "), true
}

// logsOf is the fix of a program that does not run.
func (s *status) logsOf(name string) explain.Fix {
	return explain.Fix{Message: "See why " + name + " does not run (charts/README.md, Troubleshooting).", Commands: []string{
		fmt.Sprintf("kubectl -n %s get pods -l app.kubernetes.io/name=%s", s.System, name), fmt.Sprintf("kubectl -n %s logs deploy/%s --tail=50", s.System, name)}}
}

// home: the programs of this cluster, and what it has.
func (s *status) home() {
	const name = "Home"
	state, message, present := s.program(Agent)
	var details []explain.Detail
	if own := s.own(); own != nil {
		r := own.Spec.Resources
		details = append(details, explain.Detail{State: explain.OK, Subject: "allocatable", Message: r.Allocatable.String()},
			explain.Detail{State: explain.OK, Subject: "requested by its pods", Message: r.Allocated.String()})
	}
	if state, message, present := s.program(VirtualNode); present && state != explain.Unknown {
		details = append(details, explain.Detail{State: state, Subject: VirtualNode, Message: strings.TrimPrefix(message, VirtualNode+": ")})
	}
	hub, _, here := s.program(Broker)
	switch {
	case state == explain.Unknown:
		s.unknown(name, Deployments, Leases)
	case !present && here && hub != explain.Unknown:
		s.step(name, explain.Skipped, "this cluster is only the hub")
	case !present:
		s.fail(name, message, explain.Fix{Message: "Install the agent's chart (charts/README.md)."})
	case state == explain.Failed:
		s.fail(name, message, s.logsOf(Agent), details...)
	default:
		s.step(name, state, message, details...)
	}
}

// hub: whether the broker hears from this cluster, or what the broker that runs here hears.
func (s *status) hub() {
	const name = "Hub"
	if state, message, present := s.program(Broker); present && state != explain.Unknown {
		var details []explain.Detail
		active := 0
		for _, a := range s.advertised() {
			if a.Status.Active {
				active++
			} else {
				details = append(details, explain.Detail{State: explain.Failed, Subject: a.Spec.ClusterID, Message: "the broker does not hear from it"})
			}
		}
		if !s.unreadable(Advertisements) {
			message += fmt.Sprintf("; %d of %d clusters active", active, active+len(details))
		}
		if state == explain.Failed {
			s.fail(name, message, s.logsOf(Broker), details...)
			return
		}
		s.step(name, state, message, details...)
		return
	}
	for i := range s.Reservations {
		r := &s.Reservations[i]
		if c := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReported); c != nil && c.Status == "False" && c.Reason == "BrokerUnreachable" {
			s.fail(name, "the agent cannot reach the broker: "+c.Message, s.logsOf(Agent))
			return
		}
	}
	own := s.own()
	switch _, _, agent := s.program(Agent); {
	case !agent:
		s.step(name, explain.Skipped, "")
	case own != nil && s.Now.Sub(own.Spec.Timestamp.Time) > s.heardWithin():
		s.fail(name, "the broker last heard from this cluster "+ago(s.Now, own.Spec.Timestamp.Time)+", by this machine's clock", s.logsOf(Agent))
	case own != nil:
		s.step(name, explain.OK, "the broker heard from this cluster "+ago(s.Now, own.Spec.Timestamp.Time))
	case s.unreadable(Advertisements):
		s.unknown(name, Advertisements)
	default:
		s.fail(name, "the broker has not heard from this cluster yet", s.logsOf(Agent))
	}
}

// heardWithin is how old the last advertisement may be that the broker has received: three beats of the
// agent, and some for clocks that differ.
func (s *status) heardWithin() time.Duration {
	beat := 30 * time.Second
	if set, err := time.ParseDuration(s.flagOf(Agent, "--advertisement-requeue-interval=")); err == nil {
		beat = set
	}
	return 3*beat + clocksDiffer
}

// scheduler: whether pods can overflow.
func (s *status) scheduler() {
	const name = "Scheduler"
	state, message, present := s.program(Scheduler)
	switch {
	case state == explain.Unknown:
		s.unknown(name, Deployments, Leases)
	case !present:
		s.step(name, explain.Skipped, "none is installed: pods of this cluster do not overflow (value scheduler.mode of the agent's chart)")
	case state == explain.Failed:
		s.fail(name, message, s.logsOf(Scheduler))
	default:
		s.step(name, state, message)
	}
}

// peers: the virtual nodes.
func (s *status) peers() {
	const name = "Peers"
	if s.unreadable(explain.Nodes) {
		s.unknown(name, explain.Nodes)
		return
	}
	var details []explain.Detail
	lost := 0
	for i := range s.Nodes {
		node := &s.Nodes[i]
		d := explain.Detail{State: explain.OK, Subject: node.Labels[broker.LabelProvider], Message: "node " + node.Name + " has " + broker.FromList(node.Status.Allocatable).String()}
		if node.Spec.Unschedulable {
			d.Reason, d.State = "Cordoned", explain.Waiting
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				d.State, d.Reason, d.Message = explain.Failed, "NotReady", c.Message
				lost++
			}
		}
		details = append(details, d)
	}
	slices.SortFunc(details, func(a, b explain.Detail) int { return cmp.Compare(a.Subject, b.Subject) })
	switch {
	case lost > 0:
		s.fail(name, fmt.Sprintf("%d of %d virtual nodes are not ready", lost, len(details)),
			explain.Fix{Message: "See virtual-node/README.md, Troubleshooting.", Commands: []string{"kubectl describe nodes -l " + broker.LabelProvider}}, details...)
	case len(details) == 0:
		s.step(name, explain.OK, "none: this cluster connects to another one when its pods need capacity there")
	default:
		s.step(name, explain.OK, fmt.Sprintf("%d, each with a virtual node here", len(details)), details...)
	}
}

// NameOf names a Reservation as its consumer does.
func NameOf(r *broker.Reservation) string {
	requester, namespace, name := r.Labels[broker.LabelRequester], r.Labels[broker.LabelSourceNamespace], r.Labels[broker.LabelSourceName]
	if requester == "" || namespace == "" || name == "" {
		return r.Namespace + "/" + r.Name
	}
	return namespace + "/" + name + " of " + requester
}

// maxQueue is how many Reservations of the queue are listed.
const maxQueue = 20

// queue: the Reservations of this cluster, or of all in the hub.
func (s *status) queue() {
	const name = "Queue"
	if s.unreadable(explain.Reservations) {
		s.unknown(name, explain.Reservations)
		return
	}
	granted, failed := 0, 0
	var waiting []*broker.Reservation
	for i := range s.Reservations {
		r := &s.Reservations[i]
		switch status := r.EffectiveStatus(); {
		case status.Phase == broker.ReservationReleased:
		case status.Phase == broker.ReservationFailed:
			failed++
		case meta.IsStatusConditionTrue(status.Conditions, broker.ConditionQueued):
			waiting = append(waiting, r)
		default:
			granted++
		}
	}
	slices.SortFunc(waiting, func(a, b *broker.Reservation) int {
		return cmp.Or(cmp.Compare(a.Status.QueuePosition, b.Status.QueuePosition), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	var details []explain.Detail
	for _, r := range waiting[:min(len(waiting), maxQueue)] {
		d := explain.Detail{State: explain.Waiting, Subject: NameOf(r), Message: "has waited for " + since(s.Now, r.CreationTimestamp.Time)}
		if n := r.Status.QueuePosition; n > 0 {
			d.Message = fmt.Sprintf("number %d in the queue, %s", n, d.Message)
		}
		details = append(details, d)
	}
	if more := len(waiting) - len(details); more > 0 {
		details = append(details, explain.Detail{State: explain.Waiting, Subject: fmt.Sprintf("(%d more)", more)})
	}
	state := explain.OK
	if len(waiting)+failed > 0 {
		state = explain.Waiting
	}
	s.step(name, state, fmt.Sprintf("%d Reservations: %d have capacity, %d wait for it, %d failed", granted+len(waiting)+failed, granted, len(waiting), failed), details...)
}
