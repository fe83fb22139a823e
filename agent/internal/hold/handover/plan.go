package handover

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
)

// reportAfter is how long a guest waits before an event says that there is no place for it: the
// placeholder of a place that was just given back needs some seconds.
const reportAfter = 10 * time.Second

// Input is what the places of one consumer are planned on.
type Input struct {
	Consumer string
	Promises []charge.Promise
	// Guests of the consumer, and its placeholders that exist.
	Guests       inventory.Places
	Placeholders []*corev1.Pod
	// Nominated returns the node to which a guest was nominated lately, "" for none.
	Nominated func(guest types.UID) (node string)
	// Reported are guests of which an event says that there is no place for them.
	Reported sets.Set[types.UID]
	Node     func(name string) *corev1.Node
	// Eligible reports whether the capacity of a node is offered.
	Eligible func(*corev1.Node) bool
	// Fits reports whether the pods of all sets fit what is free together.
	Fits    func(sets []broker.PodSet) bool
	Options placeholder.Options
	Now     time.Time
}

// Plan is what to change.
type Plan struct {
	placeholder.Plan
	Moves
	// Reported are those that were reported and still wait.
	Reported sets.Set[types.UID]
}

// Moves are the guests of a consumer that take a place, those that need none or have theirs
// already, and those of which an event is to say that there is none for them. Waits is set if
// that is not known of others yet.
type Moves struct {
	Taken            []Taken
	Ungate, Unplaced []*corev1.Pod
	Waits            bool
}

// Taken is the place of placeholders that a guest takes.
type Taken struct {
	Guest *corev1.Pod
	placeholder.HandOver
}

// Next are the first n guests, those that take no place first.
func (m Moves) Next(n int) Moves {
	ungate := m.Ungate[:min(len(m.Ungate), n)]
	return Moves{Taken: m.Taken[:min(len(m.Taken), n-len(ungate))], Ungate: ungate, Unplaced: m.Unplaced[:min(len(m.Unplaced), n)]}
}

// Count is the number of guests.
func (m Moves) Count() int { return len(m.Taken) + len(m.Ungate) + len(m.Unplaced) }

// Gated reports whether a guest waits for its place.
func Gated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == broker.GateHandOver })
}

// planner plans the places of one consumer.
type planner struct {
	Input
	// usage of the promises by the guests that have a place, or are nominated to one.
	usage *charge.Usage
	// expected are the numbers of guests nominated to nodes.
	expected map[string]int
	// free are the placeholders that guests do not take, leaving the others. before is what is
	// unused while these are there.
	free, leaving []*corev1.Pod
	before        []broker.HeldCapacity
	plan          Plan
}

// Make plans the places of a consumer: each guest that waits takes one, and the placeholders
// beside them become those that the promises need.
func Make(in Input) Plan {
	p := &planner{Input: in, usage: charge.New(in.Promises), expected: map[string]int{}, free: in.Placeholders}
	p.plan.Reported = sets.Set[types.UID]{}
	if waiting := p.placed(); len(waiting) > 0 {
		p.match(waiting)
	}
	p.plan.Plan = placeholder.Make(placeholder.Input{
		Holds: p.needs(), Pods: p.free, Leaving: p.leaving, Expected: p.expected, Options: in.Options, Fits: in.Fits,
		Usable: func(name string) bool { n := in.Node(name); return n != nil && in.Eligible(n) },
	})
	return p.plan
}

// placed counts the guests with a place as using their promises, and returns those that wait for
// one.
func (p *planner) placed() (waiting []int) {
	for i, pod := range p.Guests.Guests {
		written := p.Nominated(pod.UID)
		node := cmp.Or(pod.Status.NominatedNodeName, written)
		switch {
		case pod.Spec.NodeName != "":
			if inventory.Runs(p.Node(pod.Spec.NodeName)) {
				p.usage.Add(p.Guests.Guest(i))
			}
		case pod.DeletionTimestamp != nil:
		case node != "":
			p.usage.Add(p.Guests.Guest(i))
			p.expected[node]++
			if Gated(pod) && written == "" {
				// The agent was interrupted.
				p.plan.Ungate = append(p.plan.Ungate, pod)
			}
		default:
			waiting = append(waiting, i)
		}
	}
	slices.SortStableFunc(waiting, func(a, b int) int {
		return p.Guests.Guests[a].CreationTimestamp.Compare(p.Guests.Guests[b].CreationTimestamp.Time)
	})
	return waiting
}

// match finds a place for each guest that waits for one. No other guest is let go, so that what
// runs is never more than is promised: of a consumer that deletes guests and creates others, these
// wait until the first have ended.
func (p *planner) match(waiting []int) {
	p.before = p.usage.Unused()
	places := placeholder.NewPlaces(p.free)
	for _, i := range waiting {
		pod, guest := p.Guests.Guests[i], p.Guests.Guest(i)
		share, within := p.usage.Take(guest)
		if within && share.Divisible && capacity.Ceil(guest.Requests).IsZero() {
			if Gated(pod) {
				p.plan.Ungate = append(p.plan.Ungate, pod)
			}
			continue
		}
		if within {
			if place, ok := places.Take(guest.Requests, p.part(share), func(node string) bool { return p.suits(pod, p.Node(node)) }); ok {
				p.plan.Taken = append(p.plan.Taken, Taken{pod, place})
				p.leaving = append(p.leaving, place.Placeholders...)
				continue
			}
			p.usage.Return(guest)
		}
		switch {
		case !Gated(pod):
		case p.Reported.Has(pod.UID):
			p.plan.Reported.Insert(pod.UID)
		case p.Now.Sub(pod.CreationTimestamp.Time) < reportAfter:
			p.plan.Waits = true
		default:
			p.plan.Unplaced = append(p.plan.Unplaced, pod)
		}
	}
	p.free = slices.DeleteFunc(slices.Clone(p.free), sets.New(p.leaving...).Has)
}

// part is the share of a promise that a guest uses.
func (p *planner) part(of charge.Share) placeholder.Part {
	part := placeholder.Part{Hold: p.Promises[of.Of].UID, Divisible: of.Divisible}
	if !of.Divisible {
		part.Shape = placeholder.ShapeOf(p.Promises[of.Of].Held.PodSets[of.At])
	}
	return part
}

// suits reports whether a guest may run on a node, nil for none.
func (p *planner) suits(pod *corev1.Pod, node *corev1.Node) bool {
	return node != nil && p.Eligible(node) && placeholder.RunsOn(pod, node)
}

// needs returns what needs placeholders beside the guests: of a divisible total, as long as
// the guests have not taken theirs.
func (p *planner) needs() (out []placeholder.Hold) {
	for i, unused := range p.usage.Unused() {
		of := p.Promises[i]
		if len(p.leaving) > 0 && len(unused.PodSets) == 0 {
			unused = p.before[i]
		}
		out = append(out, placeholder.Hold{UID: of.UID, Name: of.Name, Consumer: p.Consumer, Unused: unused})
	}
	return out
}

// Leaving returns the guests of a consumer that must leave: those on nodes that are not
// offered, such as cordoned ones, for which nothing is held beside the others. Which of them
// that are changes as little as possible. exposed is the number of guests on such nodes or
// with a mark.
func Leaving(guests inventory.Places, offered func(node string) bool, promises []charge.Promise) (must map[types.UID]bool, exposed int) {
	var on, others []int
	for i, pod := range guests.Guests {
		switch {
		case pod.DeletionTimestamp != nil || pod.Spec.NodeName == "":
		case !offered(pod.Spec.NodeName):
			on = append(on, i)
			exposed++
		case Marked(pod):
			exposed++
			others = append(others, i)
		default:
			others = append(others, i)
		}
	}
	if exposed == 0 {
		return nil, 0
	}
	used := charge.New(promises)
	// The consumer lowers the hold that has lost capacity: its guests take none of another one.
	used.Strict = true
	for _, i := range others {
		used.Add(guests.Guest(i))
	}
	slices.SortStableFunc(on, func(i, j int) int {
		a, b := guests.Guests[i], guests.Guests[j]
		if Marked(a) != Marked(b) {
			if Marked(a) {
				return 1
			}
			return -1
		}
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	must = map[types.UID]bool{}
	for _, i := range on {
		if _, within := used.Take(guests.Guest(i)); !within {
			must[guests.Guests[i].UID] = true
		}
	}
	return must, exposed
}

// Marked reports whether a guest has the mark of those that must leave.
func Marked(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == broker.PodMustLeave })
}
