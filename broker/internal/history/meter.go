package history

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
)

// MaxUnwritten is how many records that have ended a Meter keeps until a store has them.
const MaxUnwritten = 10_000

// Reasons of an end that no condition gives.
const (
	reasonReleased = "Released"
	// ReasonGone is that of a Reservation that disappeared while no broker was running.
	ReasonGone = "Gone"
)

// Meter counts capacity over time: what each provider's ledger promises to Reservations, and what
// guests use of that, from one look at it to the next. It is not safe for concurrent use.
type Meter struct {
	// Counted is called with what was counted of a record, if it is set.
	Counted func(record *Record, provider, currency string, sum Sum)
	// Lost is how many records were dropped because too many waited for the store.
	Lost int

	records map[types.UID]*metered
	// at are the Reservations with a share at each provider.
	at    map[string]map[types.UID]bool
	ended int
}

// metered is a record that is counted.
type metered struct {
	Record
	// version increases with each change; written is that which the store has.
	version, written int
	// began is when this Meter began to count it.
	began time.Time
}

// Find returns the Reservation of a hold, or nil if it is unknown.
type Find func(name string, uid types.UID) *broker.Reservation

// NewMeter returns a Meter without records.
func NewMeter() *Meter {
	return &Meter{records: map[types.UID]*metered{}, at: map[string]map[types.UID]bool{}}
}

// Resume goes on from the records that a store has not seen ended, once all ledgers have been looked at.
// What was held when this Meter began is counted over the time between; all else was released while no
// broker was running, and counts up to when it was last written.
func (m *Meter) Resume(open []Record) {
	for _, record := range open {
		stored, live := &metered{Record: record}, m.records[record.UID]
		if stored.Shares == nil {
			stored.Shares = map[string]Share{}
		}
		for provider, share := range stored.Shares {
			held := false
			if live != nil {
				_, held = live.Shares[provider]
			}
			if share.Rate.Promised != nil && !held {
				share.Rate, share.Released = Rate{}, stored.Until
				stored.Shares[provider] = share
				stored.version++
			}
		}
		if live == nil {
			m.add(stored)
			continue
		}
		m.count(stored, live.began)
		last := DateOf(record.Until)
		for provider, share := range live.Shares {
			stored.Shares[provider] = stored.Shares[provider].and(share)
			m.place(stored.UID, provider)
		}
		for _, d := range live.Days {
			// The days before the last one may be in the store only.
			stored.addDay(d.Provider, max(d.Day, last), d.Currency, d.Sum)
		}
		stored.Ended, stored.Reason = live.Ended, live.Reason
		if live.Until.After(stored.Until) {
			stored.Until = live.Until
		}
		if !live.Ended.IsZero() {
			stored.Ended = stored.Until
		}
		live.Record = stored.Record
		live.version++
	}
}

// and is a share with what was counted later.
func (s Share) and(later Share) Share {
	later.Total, later.Why = s.Total.plus(later.Total), cmp.Or(s.Why, later.Why)
	if !s.Granted.IsZero() {
		later.Granted = s.Granted
	}
	if !s.FirstUsed.IsZero() {
		later.FirstUsed = s.FirstUsed
	}
	if s.PricePerHour != nil && capacity.Compare(later.Most, s.Most) <= 0 {
		later.Most, later.PricePerHour, later.Currency = s.Most, s.PricePerHour, s.Currency
	}
	return later
}

func (m *Meter) add(r *metered) {
	m.records[r.UID] = r
	for provider := range r.Shares {
		m.place(r.UID, provider)
	}
}

func (m *Meter) place(uid types.UID, provider string) {
	if m.at[provider] == nil {
		m.at[provider] = map[types.UID]bool{}
	}
	m.at[provider][uid] = true
}

// Observe looks at the ledger of a provider.
func (m *Meter) Observe(ad *broker.ClusterAdvertisement, find Find, now time.Time) {
	provider := ad.Spec.ClusterID
	held := map[types.UID]bool{}
	used := usedOf(ad, find)
	for i := range ad.Status.Holds {
		hold := &ad.Status.Holds[i]
		reservation := find(hold.ReservationName, hold.ReservationUID)
		r := m.records[hold.ReservationUID]
		if hold.Promised.Empty() || r == nil && reservation == nil || r != nil && !r.Ended.IsZero() {
			continue
		}
		if r == nil {
			r = &metered{Record: begin(reservation, now), began: now}
			m.add(r)
		}
		held[r.UID] = true
		m.count(r, now)
		m.place(r.UID, provider)
		r.promise(provider, hold, reservation, used[hold.ReservationUID], now)
		if m.Counted != nil { // counters begin at 0
			rate := r.Shares[provider].Rate
			m.Counted(&r.Record, provider, rate.Currency, rate.over(0))
		}
	}
	for uid := range m.at[provider] {
		if !held[uid] {
			m.release(m.records[uid], provider, now)
		}
	}
}

// promise sets what is counted from now on at a provider.
func (r *metered) promise(provider string, hold *broker.Hold, reservation *broker.Reservation, used capacity.Vector, now time.Time) {
	share := r.Shares[provider]
	rate := Rate{Promised: capacity.Ceil(hold.Promised.Totals.List()), Used: used}
	if price, currency, known := pricing.Of(hold.Cost, hold.Promised.Totals); known {
		rate.PricePerHour, rate.Currency = price, currency
	}
	if share.Granted.IsZero() && reservation != nil {
		// The decision may be written after the hold.
		share.Why = why(reservation, provider)
	}
	if hold.Granted != nil && share.Granted.IsZero() {
		share.Granted = now
	}
	if !used.IsZero() && share.FirstUsed.IsZero() {
		share.FirstUsed = now
	}
	if capacity.Compare(rate.Promised, share.Most) > 0 || share.PricePerHour == nil {
		share.Most, share.PricePerHour, share.Currency = rate.Promised, rate.PricePerHour, rate.Currency
	}
	before := r.Shares[provider]
	if !rate.equal(before.Rate) || share.Why != before.Why || !share.Granted.Equal(before.Granted) {
		// What was only counted is written by the next Sweep: until then, the store can tell from the rate.
		r.version++
	}
	share.Rate, share.Released = rate, time.Time{}
	r.Shares[provider] = share
}

// release ends what is counted at a provider.
func (m *Meter) release(r *metered, provider string, now time.Time) {
	share := r.Shares[provider]
	if share.Rate.Promised == nil {
		return
	}
	m.count(r, now)
	share.Total, share.Rate, share.Released = r.Shares[provider].Total, Rate{}, now
	r.Shares[provider] = share
	r.version++
}

// count counts a record up to now.
func (m *Meter) count(r *metered, now time.Time) {
	from := r.Until
	if !now.After(from) {
		return // clocks of replicas differ
	}
	r.Until = now
	for provider := range r.Shares {
		m.countShare(r, provider, from, now)
	}
}

// countShare counts what one provider gives.
func (m *Meter) countShare(r *metered, provider string, from, to time.Time) {
	share := r.Shares[provider]
	if share.Rate.Promised == nil {
		return
	}
	for at := from; at.Before(to); {
		until := at.UTC().Truncate(24 * time.Hour).Add(24 * time.Hour)
		if until.After(to) {
			until = to
		}
		sum := share.Rate.over(until.Sub(at))
		share.Total = share.Total.plus(sum)
		r.addDay(provider, DateOf(at), share.Rate.Currency, sum)
		if m.Counted != nil {
			m.Counted(&r.Record, provider, share.Rate.Currency, sum)
		}
		at = until
	}
	r.Shares[provider] = share
}

func (r *metered) addDay(provider, day, currency string, sum Sum) {
	for i := range r.Days {
		if d := &r.Days[i]; d.Provider == provider && d.Day == day && d.Currency == currency {
			d.Sum = d.plus(sum)
			return
		}
	}
	r.Days = append(r.Days, Day{Provider: provider, Day: day, Currency: currency, Sum: Sum{}.plus(sum)})
}

// Sweep counts all records up to now. It ends those of which no provider holds anything, and whose
// Reservation is released or gone. lists reports whether a provider has an advertisement.
func (m *Meter) Sweep(find Find, lists func(provider string) bool, now time.Time) {
	for _, r := range m.records {
		if !r.Ended.IsZero() {
			continue
		}
		holding := false
		for provider := range r.Shares {
			if !lists(provider) {
				m.release(r, provider, now)
			}
			holding = holding || r.Shares[provider].Rate.Promised != nil
		}
		m.count(r, now)
		switch reservation := find(r.Name, r.UID); {
		case holding:
			r.version++
		case reservation == nil:
			m.end(r, ReasonGone, now)
		case reservation.Status.Phase == broker.ReservationReleased:
			m.end(r, reasonOf(reservation), now)
		}
	}
}

// End ends the record of a Reservation that is about to disappear. IsWritten says when the store
// has it.
func (m *Meter) End(reservation *broker.Reservation, now time.Time) {
	r := m.records[reservation.UID]
	if r == nil {
		r = &metered{Record: begin(reservation, now), began: now}
		m.add(r)
	}
	if !r.Ended.IsZero() {
		return
	}
	for provider := range r.Shares {
		m.release(r, provider, now)
	}
	m.end(r, reasonOf(reservation), now)
}

func (m *Meter) end(r *metered, reason string, now time.Time) {
	if r.Until.After(now) {
		now = r.Until // clocks of replicas differ
	}
	r.Ended, r.Until, r.Reason = now, now, reason
	r.version++
	if m.ended++; m.ended > MaxUnwritten {
		m.Lost++
		m.forget(r)
	}
}

func (m *Meter) forget(r *metered) {
	if !r.Ended.IsZero() {
		m.ended--
	}
	delete(m.records, r.UID)
	for provider := range r.Shares {
		if delete(m.at[provider], r.UID); len(m.at[provider]) == 0 {
			delete(m.at, provider)
		}
	}
}

// Unwritten is a record as the store does not have it yet.
type Unwritten struct {
	Record
	version int
}

// Take returns copies of the records that the store does not have as they are, those that have ended
// first.
func (m *Meter) Take() (all []Unwritten) {
	for _, r := range m.records {
		if r.version == r.written {
			continue
		}
		record := r.Record
		record.Shares, record.Days = maps.Clone(r.Shares), slices.Clone(r.Days)
		all = append(all, Unwritten{record, r.version})
	}
	slices.SortFunc(all, func(a, b Unwritten) int {
		if a.Ended.IsZero() != b.Ended.IsZero() {
			return b.Ended.Compare(a.Ended)
		}
		return cmp.Compare(a.UID, b.UID)
	})
	return all
}

// Written notes that the store has these records, and forgets what has ended, and days before the
// last one.
func (m *Meter) Written(all []Unwritten) {
	for _, w := range all {
		r := m.records[w.UID]
		if r == nil {
			continue
		}
		if r.written = max(r.written, w.version); r.written == r.version && !r.Ended.IsZero() {
			m.forget(r)
			continue
		}
		last := DateOf(w.Until)
		r.Days = slices.DeleteFunc(r.Days, func(d Day) bool { return d.Day < last })
	}
}

// IsWritten reports whether the store has a record as it is, or it was dropped.
func (m *Meter) IsWritten(uid types.UID) bool {
	r := m.records[uid]
	return r == nil || r.version == r.written
}

// Waiting is the number of records that the store does not have as they are.
func (m *Meter) Waiting() (n int) {
	for _, r := range m.records {
		if r.version != r.written {
			n++
		}
	}
	return n
}

// begin is the record of a Reservation of which nothing was counted yet.
func begin(r *broker.Reservation, now time.Time) Record {
	record := Record{
		UID: r.UID, Name: r.Name, Requester: r.Spec.RequesterID, Namespace: r.Annotations[broker.LabelSourceNamespace],
		Requested: capacity.Wanted(&r.Spec), Asked: r.CreationTimestamp.Time, Until: now, Shares: map[string]Share{},
	}
	record.OwnerKind, record.Owner, _ = strings.Cut(r.Annotations[broker.AnnotationSourceOwner], "/")
	return record
}

// reasonOf is why a Reservation ends.
func reasonOf(r *broker.Reservation) string {
	ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady)
	if ready != nil && (r.Status.Phase == broker.ReservationReleased || r.Status.Phase == broker.ReservationFailed) {
		return cmp.Or(ready.Reason, reasonReleased)
	}
	return reasonReleased
}

// maxScores is how many clusters Share.Why compares.
const maxScores = 4

// why says why a provider was chosen: only clusters that lend to the consumer have scores.
func why(r *broker.Reservation, provider string) string {
	if r.Spec.TargetClusterID == provider {
		return "targetClusterID"
	}
	if r.Status.Decision == nil {
		return ""
	}
	var chosen, others []string
	for _, s := range r.Status.Decision.Scores {
		line := fmt.Sprintf("%s scored %s", s.Cluster, s.Score)
		if s.Cluster == provider {
			chosen = append(chosen, line)
		} else if len(others) < maxScores-1 {
			others = append(others, line)
		}
	}
	if chosen == nil {
		return ""
	}
	return strings.Join(append(chosen, others...), ", ")
}
