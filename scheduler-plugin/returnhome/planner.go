package returnhome

import (
	"cmp"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// firstBackOff and maxBackOff limit how long no pod of an owner moves after a move that
	// failed. It doubles with each failure until one succeeds.
	firstBackOff, maxBackOff = 5 * time.Minute, 8 * time.Hour
	// firstRetry and MaxRetry limit how long no pod of an owner is tried after an eviction
	// that was refused. It doubles with each refusal in a row.
	firstRetry, MaxRetry = 10 * time.Second, 5 * time.Minute
	// bindTimeout is how long a replacement may take to get a node, beside the time in
	// which its predecessor terminates, of which maxTermination counts at most.
	bindTimeout, maxTermination = 2 * time.Minute, 5 * time.Minute
	// ReadyTimeout is how long it may then take to become ready.
	ReadyTimeout = 5 * time.Minute
	// maxGap is how long the time between two observations may be, for room that both
	// show to count as room that has stayed.
	maxGap = time.Minute
)

var (
	afterFailures = wait.Backoff{Duration: firstBackOff, Factor: 2, Cap: maxBackOff, Steps: 16}
	afterRefusals = wait.Backoff{Duration: firstRetry, Factor: 2, Cap: MaxRetry, Steps: 16}
)

// Candidate is an overflowed pod that may move, as observed.
type Candidate struct {
	Pod             types.UID
	Namespace, Name string
	// Owner is the UID of what replaces the pod. Its pods share turns and back-offs.
	Owner types.UID
	// Since is when the pod got its virtual node.
	Since time.Time
	// Price per hour of the capacity that the pod uses; 0 if unknown.
	Price float64
	// Room reports whether the cluster has room for the pod that no other pod waits for.
	Room bool
	// Termination is how long the pod may take to terminate.
	Termination time.Duration
	// After and MinimumStay are the terms of the pod's policy.
	After, MinimumStay time.Duration
}

// Move is a pod that was evicted, and whose replacement is not settled yet.
type Move struct {
	Candidate
	// Deadline by which the replacement must have got a node; if Bound, become ready.
	Deadline time.Time
	Bound    bool
}

// Replacement is the pod that replaced one that moved.
type Replacement struct {
	// Bound to a node; Abroad: to a virtual one.
	Bound, Abroad bool
	Ready         bool
}

// Outcome of a move.
type Outcome string

const (
	// Returned: the replacement is ready in this cluster.
	Returned Outcome = "returned"
	// Overflowed: the replacement runs on a virtual node again.
	Overflowed Outcome = "overflowed"
	// NotBound: no replacement got a node in time.
	NotBound Outcome = "not_bound"
	// NotReady: the replacement runs in this cluster, and did not become ready in time.
	NotReady Outcome = "not_ready"
	// Blocked: the eviction was refused, as by a PodDisruptionBudget.
	Blocked Outcome = "blocked"
)

// Outcomes are all of them.
var Outcomes = []Outcome{Returned, Overflowed, NotBound, NotReady, Blocked}

// Planner decides on the moves of one scheduler. It remembers since when there is room for
// each candidate, and how the moves of each owner ended; it may be lost, which delays the
// next move. Not safe for concurrent use.
type Planner struct {
	// observedAt is the time of the last observation, and roomSince has the candidates
	// that had room in each observation since a time.
	observedAt time.Time
	roomSince  map[types.UID]time.Time
	// movedAt is when a pod of a namespace moved last.
	movedAt map[string]time.Time
	owners  map[types.UID]*owner
	moving  *Move
}

// owner is what is remembered of one.
type owner struct {
	movedAt time.Time
	// failures and refusals in a row have a back-off each.
	failures, refusals wait.Backoff
	restsUntil         time.Time
}

// New returns a Planner that remembers nothing.
func New() *Planner {
	return &Planner{roomSince: map[types.UID]time.Time{}, movedAt: map[string]time.Time{}, owners: map[types.UID]*owner{}}
}

// Plan records an observation of all candidates, and returns the one to move now, or nil:
// never while another move is not settled, before the candidate's minimum stay, before
// there was room for it for its time, or while its owner rests.
//
// Namespaces take turns, and so do the owners of each: first those that have never moved
// a pod, then those whose last move is longest ago. Among owners with equal turns, and
// the pods of one owner, the most expensive capacity is given back first, then that of
// the pod that has stayed longest.
func (p *Planner) Plan(now time.Time, candidates []Candidate) *Candidate {
	p.observe(now, candidates)
	if p.moving != nil {
		return nil
	}
	var first *Candidate
	for i := range candidates {
		if c := &candidates[i]; p.due(now, c) && (first == nil || p.compare(c, first) < 0) {
			first = c
		}
	}
	return first
}

// observe records for which candidates there is room.
func (p *Planner) observe(now time.Time, candidates []Candidate) {
	before := p.roomSince
	if now.Sub(p.observedAt) > maxGap {
		before = nil
	}
	p.observedAt, p.roomSince = now, map[types.UID]time.Time{}
	present := map[types.UID]bool{}
	for _, c := range candidates {
		present[c.Owner] = true
		if !c.Room {
			continue
		}
		since, known := before[c.Pod]
		if !known {
			since = now
		}
		p.roomSince[c.Pod] = since
	}
	// An owner without candidates is remembered while it may still have some again.
	maps.DeleteFunc(p.owners, func(uid types.UID, o *owner) bool {
		return !present[uid] && now.Sub(o.movedAt) > 2*maxBackOff && now.After(o.restsUntil)
	})
	maps.DeleteFunc(p.movedAt, func(_ string, at time.Time) bool { return now.Sub(at) > 2*maxBackOff })
}

// due reports whether a candidate may move.
func (p *Planner) due(now time.Time, c *Candidate) bool {
	since, room := p.roomSince[c.Pod]
	if !room || now.Sub(since) < c.After || now.Sub(c.Since) < c.MinimumStay {
		return false
	}
	o := p.owners[c.Owner]
	return o == nil || !now.Before(o.restsUntil)
}

// compare orders candidates that are due.
func (p *Planner) compare(a, b *Candidate) int {
	return cmp.Or(
		p.movedAt[a.Namespace].Compare(p.movedAt[b.Namespace]),
		p.ownerMovedAt(a.Owner).Compare(p.ownerMovedAt(b.Owner)),
		cmp.Compare(b.Price, a.Price),
		a.Since.Compare(b.Since),
		cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Name, b.Name),
	)
}

func (p *Planner) ownerMovedAt(uid types.UID) time.Time {
	if o := p.owners[uid]; o != nil {
		return o.movedAt
	}
	return time.Time{}
}

// Start records that a pod that Plan returned was evicted.
func (p *Planner) Start(now time.Time, c Candidate) {
	p.turn(now, c)
	p.moving = &Move{Candidate: c, Deadline: now.Add(min(c.Termination, maxTermination) + bindTimeout)}
}

// Refused records that the eviction of a pod that Plan returned was refused. It returns
// when its owner is tried again.
func (p *Planner) Refused(now time.Time, c Candidate) (retryAt time.Time) {
	o := p.turn(now, c)
	o.restsUntil = now.Add(o.refusals.Step())
	return o.restsUntil
}

// NotEvicted records that the pod that moves was not evicted after all, with the result of
// Refused. It must not be called while no pod moves.
func (p *Planner) NotEvicted(now time.Time) (retryAt time.Time) {
	c := p.moving.Candidate
	p.moving = nil
	return p.Refused(now, c)
}

// turn records that a candidate has had its turn.
func (p *Planner) turn(now time.Time, c Candidate) *owner {
	if p.owners[c.Owner] == nil {
		p.owners[c.Owner] = &owner{refusals: afterRefusals, failures: afterFailures}
	}
	p.movedAt[c.Namespace], p.owners[c.Owner].movedAt = now, now
	return p.owners[c.Owner]
}

// Moving returns the move that is not settled, or nil.
func (p *Planner) Moving() *Move { return p.moving }

// Settle records what has become of the pod that moves: found is nil while it has no
// replacement. If that settles the move, ended is true, and after one that failed,
// retryAt is when the next pod of its owner may move.
func (p *Planner) Settle(now time.Time, found *Replacement) (outcome Outcome, retryAt time.Time, ended bool) {
	m := p.moving
	if m == nil {
		return "", time.Time{}, false
	}
	bound := found != nil && found.Bound
	if bound && !found.Abroad && !m.Bound {
		m.Bound, m.Deadline = true, now.Add(ReadyTimeout)
	}
	switch {
	case bound && found.Abroad:
		outcome = Overflowed
	case bound && found.Ready:
		outcome = Returned
	case now.Before(m.Deadline):
		return "", time.Time{}, false
	case m.Bound:
		outcome = NotReady
	default:
		outcome = NotBound
	}
	p.moving = nil
	o := p.owners[m.Owner]
	if o == nil {
		o = p.turn(now, m.Candidate)
	}
	o.refusals = afterRefusals
	if outcome == Returned {
		o.failures, o.restsUntil = afterFailures, time.Time{}
		return outcome, time.Time{}, true
	}
	o.restsUntil = now.Add(o.failures.Step())
	return outcome, o.restsUntil, true
}

// minPeriod and maxPeriod limit Period.
const minPeriod, maxPeriod = 250 * time.Millisecond, 10 * time.Second

// Period returns how often to observe candidates: several times in the time that their
// room has to stay.
func Period(candidates []Candidate) time.Duration {
	period := maxPeriod
	for _, c := range candidates {
		period = min(period, c.After/4)
	}
	return max(minPeriod, period)
}
