package view

import (
	"cmp"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/broker/text"
)

// Ended is a Reservation that has ended, as a history has it. Times are zero for what has not happened.
type Ended struct {
	Name, Consumer, Owner, Requested, Reason string
	Asked, Ended                             time.Time
	Shares                                   []Share
}

// Share is what one provider gave it.
type Share struct {
	Provider, Why                string
	Most                         corev1.ResourceList
	Granted, FirstUsed, Released time.Time
	// CoreHours were promised, and UsedCoreHours used of them.
	CoreHours, UsedCoreHours float64
	// Cost in Currency; nil if the provider stated no price.
	Cost     *big.Rat
	Currency string
}

// Spent is what one consumer was promised by one provider in a day (2006-01-02, UTC), at prices in one
// currency.
type Spent struct {
	Day, Consumer, Provider  string
	CoreHours, UsedCoreHours float64
	// Cost in Currency, which is empty for what had no known price; Reference is what the same would
	// have cost at reference prices, nil if there are none.
	Cost, Reference *big.Rat
	Currency        string
}

// History is the view of what has ended, and of use and cost over time.
type History struct {
	// Off is whether no history is kept.
	Off  bool
	Days int
	// Hours were promised, of which Used, in percent, were used.
	Hours, Used, Cost string
	// Saved is empty without reference prices.
	Saved string
	// Use and Costs are charts of days, the costs by currency.
	Use   Chart
	Costs []Chart
	Pairs []Pair
	Rows  []EndedRow
	// Next is where the next page begins, empty on the last one.
	Next string
}

// Chart has a bar for each day.
type Chart struct {
	Title, Highest string
	First, Last    string
	Width          float64
	Bars           []Bar
}

// Bar is a day in a chart: along its width, and in percent of its height, from the top.
type Bar struct {
	X, Width, Top, Height, TopOfUsed, HeightOfUsed float64
	Text                                           string
}

// Pair is what one consumer was promised by one provider.
type Pair struct{ Consumer, Provider, Hours, Used, Cost string }

// EndedRow is a Reservation that has ended, as people read it.
type EndedRow struct {
	Name, Consumer, Owner, Requested, Reason string
	Asked, Ended                             *Moment
	Shares                                   []ShareRow
}

// ShareRow is a Share as people read it.
type ShareRow struct {
	Provider, Why, Most, Hours, Used, Cost string
	Granted, FirstUsed, Released           *Moment
}

// sums are those of some days.
type sums struct {
	hours, used float64
	cost, saved text.Prices
}

func (s *sums) add(row *Spent) {
	s.hours += row.CoreHours
	s.used += row.UsedCoreHours
	if row.Currency == "" || row.Cost == nil {
		s.cost.Unknown = s.cost.Unknown || row.CoreHours > 0
		return
	}
	s.cost.Add(row.Cost, row.Currency)
	if row.Reference != nil {
		s.saved.Add(new(big.Rat).Sub(row.Reference, row.Cost), row.Currency)
	}
}

func (s *sums) share() string {
	if s.hours <= 0 {
		return none
	}
	return fmt.Sprintf("%.0f %%", min(100, 100*s.used/s.hours))
}

// OfHistory is the view of days up to now, and of a page of what has ended.
func OfHistory(now time.Time, days int, spent []Spent, ended []Ended, next string) History {
	v := History{Days: days, Next: next}
	var all sums
	byDay, byPair := map[string]*sums{}, map[pair]*sums{}
	for i := range spent {
		row := &spent[i]
		key := pair{row.Consumer, row.Provider}
		if byDay[row.Day] == nil {
			byDay[row.Day] = &sums{}
		}
		if byPair[key] == nil {
			byPair[key] = &sums{}
		}
		for _, s := range []*sums{&all, byDay[row.Day], byPair[key]} {
			s.add(row)
		}
	}
	v.Hours, v.Used, v.Cost = decimal(all.hours), all.share(), priced(&all.cost)
	if len(all.saved.Sums) > 0 {
		v.Saved = priced(&all.saved)
	}
	v.charts(now, byDay, all)
	for key, s := range byPair {
		v.Pairs = append(v.Pairs, Pair{key.consumer, key.provider, decimal(s.hours), s.share(), priced(&s.cost)})
	}
	slices.SortFunc(v.Pairs, func(a, b Pair) int {
		return cmp.Or(cmp.Compare(byPair[pair{b.Consumer, b.Provider}].hours, byPair[pair{a.Consumer, a.Provider}].hours), cmp.Compare(a.Consumer, b.Consumer), cmp.Compare(a.Provider, b.Provider))
	})
	v.Pairs = v.Pairs[:min(len(v.Pairs), PageSize)]
	for i := range ended {
		v.Rows = append(v.Rows, endedRow(now, &ended[i]))
	}
	return v
}

// charts sets those of hours and of costs.
func (v *History) charts(now time.Time, byDay map[string]*sums, all sums) {
	var names []string
	for i := v.Days - 1; i >= 0; i-- {
		names = append(names, now.UTC().AddDate(0, 0, -i).Format(time.DateOnly))
	}
	chart := func(title string, values func(*sums) (whole, part float64), text func(float64) string) Chart {
		c := Chart{Title: title, First: names[0], Last: names[len(names)-1], Width: 1000}
		highest := 0.0
		for _, name := range names {
			if s := byDay[name]; s != nil {
				whole, _ := values(s)
				highest = max(highest, whole)
			}
		}
		c.Highest = text(highest)
		wide := c.Width / float64(len(names))
		for i, name := range names {
			s := byDay[name]
			if s == nil || highest <= 0 {
				continue
			}
			whole, part := values(s)
			bar := Bar{X: float64(i) * wide, Width: wide * 0.8, Height: 100 * max(0, whole) / highest, Text: name + ": " + text(whole)}
			bar.HeightOfUsed = 100 * max(0, min(part, whole)) / highest
			bar.Top, bar.TopOfUsed = 100-bar.Height, 100-bar.HeightOfUsed
			c.Bars = append(c.Bars, bar)
		}
		return c
	}
	v.Use = chart("Core-hours a day, promised and used", func(s *sums) (float64, float64) { return s.hours, s.used }, decimal)
	for _, currency := range slices.Sorted(maps.Keys(all.cost.Sums)) {
		v.Costs = append(v.Costs, chart("Cost a day in "+currency, func(s *sums) (float64, float64) {
			if s.cost.Sums[currency] == nil {
				return 0, 0
			}
			cost, _ := s.cost.Sums[currency].Float64()
			return cost, cost
		}, decimal))
	}
}

func endedRow(now time.Time, e *Ended) EndedRow {
	row := EndedRow{
		Name: e.Name, Consumer: e.Consumer, Owner: cmp.Or(strings.Trim(e.Owner, "/"), "made by hand"), Requested: e.Requested, Reason: text.TruncateTo(e.Reason, maxQuoted),
		Asked: moment(e.Asked, now), Ended: moment(e.Ended, now),
	}
	for _, s := range e.Shares {
		used := sums{hours: s.CoreHours, used: s.UsedCoreHours}
		share := ShareRow{
			Provider: s.Provider, Why: text.TruncateTo(s.Why, maxQuoted), Most: amounts(s.Most), Hours: decimal(s.CoreHours), Used: used.share(), Cost: "unknown",
			Granted: moment(s.Granted, now), FirstUsed: moment(s.FirstUsed, now), Released: moment(s.Released, now),
		}
		if s.Cost != nil {
			share.Cost = text.Price(s.Cost, s.Currency)
		}
		row.Shares = append(row.Shares, share)
	}
	return row
}
