package whatif

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/rehearsal"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Input is what the caller can see.
type Input struct {
	// Cluster is the ID of the one that would ask.
	Cluster   string
	Workloads []Workload
	// Namespaces are those of the workloads, with what limits their requests.
	Namespaces map[string]*explain.Observed
	// Hub is nil if it is not known: then NoHub says why.
	Hub   *rehearsal.Hub
	NoHub string
}

// Answers are those of a manifest.
type Answers struct {
	Answers []Answer `json:"answers"`
	// Notes are about what the answers leave out.
	Notes []string `json:"notes,omitempty"`
}

// Run answers for all workloads, in their order. Pods that would share a Reservation are answered
// for together, where the first of them is.
func Run(in Input) Answers {
	members := map[demand.Key]int32{}
	for i := range in.Workloads {
		if w := &in.Workloads[i]; w.Pod != nil {
			members[keyOf(w)] += w.Count
		}
	}
	var asks []*ask
	byKey := map[demand.Key]*ask{}
	for i := range in.Workloads {
		w := &in.Workloads[i]
		a := &ask{Input: &in, Answer: Answer{Object: w.Object}, reservation: w.Reservation}
		if w.Pod != nil {
			a.explain(w, members[keyOf(w)])
		}
		switch shared := byKey[keyOf(w)]; {
		case w.Pod == nil:
			a.byHand()
		case a.blocked:
		case shared != nil:
			shared.add(w)
			continue
		default:
			a.add(w)
			byKey[keyOf(w)] = a
		}
		asks = append(asks, a)
	}
	var answers Answers
	created := 0
	for _, a := range asks {
		a.decide()
		a.printable()
		answers.Answers = append(answers.Answers, a.Answer)
		if a.Status != nil {
			created++
		}
	}
	if in.Hub != nil {
		answers.Notes = in.Hub.Notes(in.Cluster, created)
	}
	return answers
}

// keyOf returns the key of the Reservation that would serve a workload, zero for none.
func keyOf(w *Workload) demand.Key {
	if w.Pod == nil {
		return demand.Key{}
	}
	key, _, _, _ := demand.KeyOf(w.Pod, func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) { return nil, true })
	return key.OfReservation()
}

// ask is a request in the making.
type ask struct {
	*Input
	Answer
	observed *explain.Observed
	// reservation is what is requested.
	reservation *broker.Reservation
	blocked     bool
	least       int32
}

// explain takes over what keeps pods of a workload from overflowing. members is how many pods its
// Reservation would be for.
func (a *ask) explain(w *Workload, members int32) {
	observed := *a.Input.Namespaces[w.Namespace]
	observed.Asked, observed.Pod = w.Object, w.Pod
	if gang, in := demand.GangOf(w.Pod); in {
		observed.Gang = &explain.Gang{Group: gang.String(), Members: members, Ungated: members}
		if w.Least != nil {
			observed.Gang.Min, a.least = *w.Least, *w.Least
		}
	}
	e := explain.Explain(&observed)
	a.observed, a.Unreadable, a.Fix = &observed, e.Unreadable, e.Fix
	a.blocked = e.Outcome == explain.OutcomeBlocked
	for _, step := range e.Steps {
		if step.Name == "Home" {
			step = explain.Step{Name: step.Name, State: explain.Unknown, Message: "not looked at: pods that fit a node of this cluster stay here, and this is about those that do not"}
		}
		if step.Name == "Reservation" {
			break
		}
		a.Steps = append(a.Steps, step)
	}
	if a.blocked {
		a.Outcome, a.Summary = OutcomeNotRequested, e.Summary
	}
	if w.Count == 0 {
		a.blocked, a.Outcome, a.Summary = true, OutcomeNotRequested, "It has no pods: its count is 0."
	}
}

// add adds the pods of a workload to the request.
func (a *ask) add(w *Workload) {
	key, owner, set, _ := demand.KeyOf(w.Pod, func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) { return nil, true })
	set.Count = w.Count
	if a.reservation == nil {
		a.reservation = &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: key.Name(owner.Name)}}
		a.reservation.Labels = map[string]string{broker.LabelSourceNamespace: w.Namespace}
		if policy := a.observed.Policy(); policy != nil {
			spec := &a.reservation.Spec
			spec.Placement, spec.Budget, spec.Duration = policy.Spec.Placement, policy.Spec.Budget, policy.Spec.Duration
		}
	} else {
		a.With = append(a.With, w.Object)
	}
	spec := &a.reservation.Spec
	if w.Pod.Spec.Priority != nil && (len(a.With) == 0 || *w.Pod.Spec.Priority > spec.Priority) {
		spec.Priority = min(*w.Pod.Spec.Priority, 1_000_000_000)
	}
	at := slices.IndexFunc(spec.PodSets, func(s broker.PodSet) bool { return s.Name == set.Name })
	if at < 0 {
		spec.PodSets = append(spec.PodSets, set)
	} else {
		spec.PodSets[at].Count += set.Count
	}
	if key.IsGang() {
		spec.MinAvailable = min(a.least, broker.HeldCapacity{PodSets: spec.PodSets}.Pods())
	}
}

// byHand is a Reservation of the manifest, as the agent would send it.
func (a *ask) byHand() {
	a.reservation = a.reservation.DeepCopy()
	a.reservation.Labels = map[string]string{broker.LabelSourceNamespace: a.Answer.Namespace, broker.LabelByHand: "true"}
}

// limit lowers the request to what the policy of the namespace allows beside what its Reservations
// and those of the manifest before request.
func (a *ask) limit() {
	shared := a.Input.Namespaces[a.Answer.Namespace]
	requested := shared.Requested()
	defer func() { shared.Reservations = append(slices.Clip(shared.Reservations), *a.reservation) }()
	if a.observed == nil {
		return // made by hand: no policy limits it
	}
	policy := a.observed.Policy()
	if policy == nil || policy.Spec.MaxResources == nil {
		return
	}
	request := demand.Request{PodSets: a.reservation.Spec.PodSets}
	each, wanted := request.Unit()
	units, short := demand.MaxPods(each, *policy.Spec.MaxResources, requested)
	if units >= wanted {
		return
	}
	request = request.Limited(units)
	pods := request.Pods()
	message := fmt.Sprintf("OverflowPolicy %s allows %d of %d pods now, for the limit of %s", policy.Name, pods, a.pods(), short)
	a.reservation.Spec.PodSets = request.PodSets
	if pods == 0 || pods < a.reservation.Spec.MinAvailable {
		a.reservation.Spec.PodSets = nil
		a.step("Limit", explain.Failed, message)
		a.Outcome, a.Summary = OutcomeNotRequested, message+"."
		return
	}
	a.step("Limit", explain.Waiting, message)
	a.limited = true
}

func (a *ask) pods() int32 { return broker.HeldCapacity{PodSets: a.reservation.Spec.PodSets}.Pods() }

func (a *ask) step(name string, state explain.State, message string, details ...explain.Detail) {
	a.Steps = append(a.Steps, explain.Step{Name: name, State: state, Message: message, Details: details})
}
