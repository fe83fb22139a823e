// Package answers remembers which providers have refused a shape of pods, have not answered
// at all, or cannot be used by a Reservation's consumer, so that further requests do not go there at once. After a while one
// Reservation may ask again; the others wait for its answer. It is pure: the caller
// passes the time. What one process remembers, another one does not know.
package answers

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	backoff "k8s.io/apimachinery/pkg/util/wait"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Reasons of rejections.
const (
	ReasonRefused      = "Refused"
	ReasonNotAnswering = "NotAnswering"
	ReasonUnusable     = "Unusable"
)

const (
	// maxFactor limits how much longer a provider is left alone after repeated refusals.
	maxFactor = 16
	// maxQuoted is the maximum number of consumers whose messages are remembered of one shape:
	// the others see that of every consumer.
	maxQuoted = 16
	// maxEntries is the maximum number of shapes and Reservations that are remembered of one
	// provider: the last ones.
	maxEntries = 128
	// maxUnusable is the same for Reservations whose consumer cannot use the provider: apart, so
	// that a consumer with many of them does not displace what concerns others.
	maxUnusable = 4096
)

// Memory remembers refusals and missed deadlines. It is safe for concurrent use.
type Memory struct {
	mutex   sync.Mutex
	entries map[string]map[key]*entry // by cluster
	// progress is how far each cluster has come with what it was asked, records how it has kept its
	// promises.
	progress map[string]Progress
	records  map[string]Record
	// number is that of the last refusal or missed deadline.
	number uint64
}

// Progress is how far a provider has come with what it was asked.
type Progress struct {
	// At is when it last answered, Asked when the latest of what it has answered was asked.
	At, Asked time.Time
}

// Due is when the answer is overdue to what was asked at that time. The deadline of a
// provider that works through a queue counts from its last answer, as long as it has
// answered nothing that was asked much later.
func (p Progress) Due(asked time.Time, deadline time.Duration) time.Time {
	due := asked.Add(deadline)
	if p.At.After(asked) && !p.Asked.After(due) {
		return p.At.Add(deadline)
	}
	return due
}

const (
	// DefaultDeadline is the deadline where no BrokerConfig sets one.
	DefaultDeadline = 30 * time.Second
	// podsAtOnce is how many pods a provider proves within one deadline: its scheduler finds
	// a place for each.
	podsAtOnce = 250
	// maxDeadlines limits how long a provider may take that does not answer at all.
	maxDeadlines = 10
)

// Deadline is how long a provider may take to answer what it is asked: the deadline for
// podsAtOnce pods, and again for each further podsAtOnce, at most maxDeadlines times.
func Deadline(deadline time.Duration, asked broker.HeldCapacity) time.Duration {
	return deadline * time.Duration(min(1+asked.Pods()/podsAtOnce, maxDeadlines))
}

// key says what an entry of a provider is about. The zero key is one that has not answered anything.
type key struct {
	// shape is the hash of one that the provider refused.
	shape string
	// silentTo is the Reservation that it has not answered.
	silentTo types.UID
	// unusableBy is the Reservation whose consumer cannot use it: the provider's answers do not
	// change that.
	unusableBy types.UID
}

type entry struct {
	reason, message string
	// quoted are the messages for the consumers that were refused, in their provider's words.
	// Each is for its own consumer only.
	quoted map[string]string
	// pods is the smallest number of pods that was refused, 0 for a divisible total.
	pods int32
	// until is when the provider may be asked again; quiet when the entry does not count
	// any more, unless the provider is being asked.
	until, quiet time.Time
	backoff      backoff.Backoff
	wait         time.Duration
	// number is that of its last refusal or missed deadline.
	number uint64
	// attempt is the last one that the consumer could not use.
	attempt int64
	// waits is whether the provider waits for the Reservation's own guests to end.
	waits bool
	// prober is the Reservation that asks again, since probedAt.
	prober   types.UID
	probedAt time.Time
}

// New returns an empty Memory.
func New() *Memory {
	return &Memory{entries: map[string]map[key]*entry{}, progress: map[string]Progress{}, records: map[string]Record{}}
}

// Missed records that a provider has not answered a Reservation in time, which it was
// asked at that time. If it waits for the Reservation's own guests to end, or has answered
// others since, it is not silent, and only that Reservation does not ask it.
func (m *Memory) Missed(cluster string, uid types.UID, asked time.Time, waits bool, wait time.Duration, now time.Time) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if waits || m.progress[cluster].At.After(asked) {
		e := m.entry(cluster, key{silentTo: uid}, now)
		if e.set(ReasonNotAnswering, "The provider has not answered the Reservation's earlier request in time. It is asked again later.", 0, wait, now) && !waits {
			m.record(cluster, false, now)
		}
		e.waits = waits
		return
	}
	if m.entry(cluster, key{}, now).set(ReasonNotAnswering,
		"The provider has not answered an earlier request in time. Check its agent. It is asked again later, or when it answers.", 0, wait, now) {
		m.record(cluster, false, now)
	}
}

// Refused records that a provider has refused a capacity to a consumer, with its message,
// which only that consumer may read. It reports whether that is news: several refusals of
// one shape at about the same time are one.
func (m *Memory) Refused(cluster, consumer string, refused broker.HeldCapacity, message string, wait time.Duration, now time.Time) (news bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for _, shape := range shapes(refused) {
		e := m.entry(cluster, shape.key, now)
		if e.set(ReasonRefused, "The provider has refused such pods. It is asked again later.", shape.pods, wait, now) {
			e.quoted, news = map[string]string{}, true
		}
		if _, known := e.quoted[consumer]; known || len(e.quoted) < maxQuoted {
			e.quoted[consumer] = fmt.Sprintf("The provider refused: %s. It is asked again later.", message)
		}
	}
	if news {
		m.record(cluster, false, now)
	}
	return news
}

// Withdrawn records that a provider has given up what it had accepted, as Refused does: its promise is
// not kept any more.
func (m *Memory) Withdrawn(cluster, consumer string, withdrawn broker.HeldCapacity, message string, wait time.Duration, now time.Time) (news bool) {
	if news = m.Refused(cluster, consumer, withdrawn, message, wait, now); news {
		m.mutex.Lock()
		defer m.mutex.Unlock()
		m.records[cluster] = m.records[cluster].broken()
	}
	return news
}

// Unusable records that a Reservation's consumer cannot use what a provider has granted up to
// an attempt, with its message. It reports whether that is news.
func (m *Memory) Unusable(cluster string, uid types.UID, attempt int64, message string, wait time.Duration, now time.Time) (news bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	e := m.entry(cluster, key{unusableBy: uid}, now)
	e.set(ReasonUnusable, fmt.Sprintf("Pods of the consumer cannot use what this provider granted: %s. The provider is asked again later.", message), 0, wait, now)
	news = attempt > e.attempt
	e.attempt = max(e.attempt, attempt)
	return news
}

// UnusableUpTo is the last attempt that Unusable has recorded; 0 for none.
func (m *Memory) UnusableUpTo(cluster string, uid types.UID) (attempt int64) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if e := m.entries[cluster][key{unusableBy: uid}]; e != nil {
		return e.attempt
	}
	return 0
}

// Usable ends the memory of Unusable.
func (m *Memory) Usable(cluster string, uid types.UID) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.delete(cluster, key{unusableBy: uid})
}

// entry returns the entry for a refusal or missed deadline. It deletes those that do not
// count any more and, if there are too many, the oldest.
func (m *Memory) entry(cluster string, of key, now time.Time) *entry {
	known := m.entries[cluster]
	if known == nil {
		known = map[key]*entry{}
		m.entries[cluster] = known
	}
	maps.DeleteFunc(known, func(_ key, e *entry) bool { return !now.Before(e.quiet) && !now.Before(e.probedAt.Add(e.wait)) })
	e := known[of]
	if e == nil {
		var oldest key
		alike, most := 0, maxEntries
		apart := of.unusableBy != ""
		if apart {
			most = maxUnusable
		}
		for other, e := range known {
			if other == (key{}) || (other.unusableBy != "") != apart {
				continue
			}
			if alike++; oldest == (key{}) || e.number < known[oldest].number {
				oldest = other
			}
		}
		if of != (key{}) && alike >= most {
			delete(known, oldest)
		}
		e = &entry{}
		known[of] = e
	}
	m.number++
	e.number = m.number
	return e
}

// set makes the entry count from now on, unless it does already: longer each time, until
// the provider accepts or is not asked for a while.
func (e *entry) set(reason, message string, pods int32, wait time.Duration, now time.Time) (news bool) {
	if now.Before(e.until) {
		e.pods = min(e.pods, pods)
		return false
	}
	if e.until.IsZero() {
		e.pods = pods
	}
	if most := maxFactor * wait; e.backoff.Cap != most { // a new one, or another configuration
		e.backoff = backoff.Backoff{Duration: wait, Factor: 2, Cap: most, Steps: maxFactor}
	}
	e.pods, e.wait = min(e.pods, pods), e.backoff.Step()
	e.reason, e.message, e.until, e.prober = reason, message, now.Add(e.wait), ""
	e.quiet = e.until.Add(maxFactor * wait)
	return true
}

// Answered records that a provider has answered what it was asked for a Reservation at
// that time: that ends the memory that it did not. It reports whether there was any.
func (m *Memory) Answered(cluster string, uid types.UID, asked, now time.Time) (known bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if before := m.progress[cluster]; asked.Before(before.Asked) {
		asked = before.Asked
	}
	m.progress[cluster] = Progress{At: now, Asked: asked}
	for _, of := range []key{{}, {silentTo: uid}} {
		_, missed := m.entries[cluster][of]
		known = known || missed
		m.delete(cluster, of)
	}
	return known
}

// Released records that a provider has confirmed a release of a Reservation, which answers
// no request: the guests that it waited for have ended, and the Reservation may ask it
// again. It reports whether that is news.
func (m *Memory) Released(cluster string, uid types.UID) (known bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	of := key{silentTo: uid}
	if e := m.entries[cluster][of]; e == nil || !e.waits {
		return false
	}
	m.delete(cluster, of)
	return true
}

// Accepted records that a provider has accepted a capacity, and ends the memory that it refused
// these shapes. It reports whether there was any.
func (m *Memory) Accepted(cluster string, accepted broker.HeldCapacity, now time.Time) (known bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if !accepted.Empty() {
		m.record(cluster, true, now)
	}
	for _, shape := range shapes(accepted) {
		_, refused := m.entries[cluster][shape.key]
		known = known || refused
		m.delete(cluster, shape.key)
	}
	return known
}

func (m *Memory) delete(cluster string, of key) {
	delete(m.entries[cluster], of)
	if len(m.entries[cluster]) == 0 {
		delete(m.entries, cluster)
	}
}

// Progress is how far a provider has come; zero if it has answered nothing.
func (m *Memory) Progress(cluster string) Progress {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return m.progress[cluster]
}

// Forget drops all that is remembered of a provider.
func (m *Memory) Forget(cluster string) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	delete(m.entries, cluster)
	delete(m.records, cluster)
	delete(m.progress, cluster)
}

// Asked records that a Reservation asks a provider for a capacity.
func (m *Memory) Asked(cluster string, uid types.UID, capacity broker.HeldCapacity, now time.Time) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if len(m.entries[cluster]) == 0 {
		return
	}
	for _, e := range m.relevant(cluster, uid, shapes(capacity)) {
		e.prober, e.probedAt = uid, now
	}
}

// rejection is why a consumer's Reservation must not ask a provider for a capacity now, nil if it
// may, and when it may at the earliest. Of the Reservations that wait for that time, the
// first one asks, and the others wait for as long as its answer may take.
func (m *Memory) rejection(cluster, consumer string, uid types.UID, want []shape, answerIn time.Duration, now time.Time) (rejection *capacity.Rejection, until time.Time) {
	for _, e := range m.relevant(cluster, uid, want) {
		end := e.until
		if e.prober != "" && e.prober != uid {
			if probed := e.probedAt.Add(answerIn); probed.After(end) {
				end = probed
			}
		}
		if now.Before(end) && end.After(until) {
			rejection, until = &capacity.Rejection{Reason: e.reason, Message: cmp.Or(e.quoted[consumer], e.message)}, end
		}
	}
	return rejection, until
}

// Rejections are the rejections of all providers for a capacity of a consumer, and when the
// first of them ends; zero if there are none.
func (m *Memory) Rejections(consumer string, uid types.UID, want broker.HeldCapacity, answerIn time.Duration, now time.Time) (rejections map[string]capacity.Rejection, until time.Time) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if len(m.entries) == 0 {
		return nil, until
	}
	wanted := shapes(want)
	for cluster := range m.entries {
		rejection, end := m.rejection(cluster, consumer, uid, wanted, answerIn, now)
		if rejection == nil {
			continue
		}
		if rejections == nil {
			rejections = map[string]capacity.Rejection{}
		}
		rejections[cluster] = *rejection
		if until.IsZero() || end.Before(until) {
			until = end
		}
	}
	return rejections, until
}

// relevant are the entries of a provider that concern a Reservation's capacity.
func (m *Memory) relevant(cluster string, uid types.UID, want []shape) []*entry {
	known := m.entries[cluster]
	var relevant []*entry
	for _, of := range []key{{}, {silentTo: uid}, {unusableBy: uid}} {
		if e := known[of]; e != nil {
			relevant = append(relevant, e)
		}
	}
	for _, shape := range want {
		if e := known[shape.key]; e != nil && shape.pods >= e.pods {
			relevant = append(relevant, e)
		}
	}
	return relevant
}

type shape struct {
	key  key
	pods int32
}

// shapes of a capacity: what a provider judges a pod by, without names and counts.
func shapes(c broker.HeldCapacity) []shape {
	if len(c.PodSets) == 0 {
		return []shape{{key{shape: hash(c.Totals)}, 0}}
	}
	var out []shape
	for _, set := range c.PodSets {
		if set.Count <= 0 {
			continue
		}
		pods := set.Count
		set.Name, set.Count = "", 0
		out = append(out, shape{key{shape: hash(set)}, pods})
	}
	slices.SortFunc(out, func(a, b shape) int { return cmp.Compare(a.key.shape, b.key.shape) })
	return out
}

func hash(of any) string {
	// The types of the API always encode, with the keys of maps in order.
	encoded, _ := json.Marshal(of)
	sum := sha256.Sum256(encoded)
	return string(sum[:])
}
