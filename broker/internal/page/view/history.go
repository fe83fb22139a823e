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

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/text"
)

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

// ShareRow is what one provider gave it.
type ShareRow struct {
	Provider, Why, Most, Hours, Used, Cost string
	Granted, FirstUsed, Released           *Moment
}

// sums are those of some days.
type sums struct {
	hours, used float64
	cost, saved text.Prices
}

// add adds a row, and what was saved with it; nil if that is not known.
func (s *sums) add(row *history.UsageRow, saved *big.Rat) {
	promised := cores(row.Promised)
	s.hours += promised
	s.used += cores(row.Used)
	if row.Currency == "" || row.Cost == nil {
		s.cost.Unknown = s.cost.Unknown || promised > 0
		return
	}
	s.cost.Add(row.Cost, row.Currency)
	if saved != nil {
		s.saved.Add(saved, row.Currency)
	}
}

func cores(amount history.Amount) float64 {
	hours, _ := amount.Hours(corev1.ResourceCPU).Float64()
	return hours
}

func (s *sums) share() string {
	if s.hours <= 0 {
		return none
	}
	return fmt.Sprintf("%.0f %%", min(100, 100*s.used/s.hours))
}

// OfHistory is the view of days up to now, and of a page of what has ended. reference are the prices
// that the cost is compared with; nil for none.
func OfHistory(now time.Time, days int, rows []history.UsageRow, ended history.Page, reference *broker.Cost) History {
	v := History{Days: days, Next: ended.Continue}
	var all sums
	byDay, byPair := map[string]*sums{}, map[pair]*sums{}
	for i := range rows {
		row := &rows[i]
		key := pair{row.Requester, row.Provider}
		_, saved, _ := row.Saving(row.Currency, reference)
		if byDay[row.Period] == nil {
			byDay[row.Period] = &sums{}
		}
		if byPair[key] == nil {
			byPair[key] = &sums{}
		}
		for _, s := range []*sums{&all, byDay[row.Period], byPair[key]} {
			s.add(row, saved)
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
	for i := range ended.Records {
		v.Rows = append(v.Rows, endedRow(now, &ended.Records[i]))
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

func endedRow(now time.Time, r *history.Record) EndedRow {
	row := EndedRow{
		Name: r.Name, Consumer: r.Requester, Owner: cmp.Or(strings.Trim(r.Namespace+"/"+r.Owner, "/"), "made by hand"), Requested: r.Requested, Reason: text.TruncateTo(r.Reason, maxQuoted),
		Asked: moment(r.Asked, now), Ended: moment(r.Ended, now),
	}
	for _, provider := range slices.Sorted(maps.Keys(r.Shares)) {
		s := r.Shares[provider]
		used := sums{hours: cores(s.Total.Promised), used: cores(s.Total.Used)}
		share := ShareRow{
			Provider: provider, Why: text.TruncateTo(s.Why, maxQuoted), Most: amounts(s.Most.List()), Hours: decimal(used.hours), Used: used.share(), Cost: "unknown",
			Granted: moment(s.Granted, now), FirstUsed: moment(s.FirstUsed, now), Released: moment(s.Released, now),
		}
		if s.PricePerHour != nil {
			share.Cost = text.Price(cmp.Or(s.Total.Cost, new(big.Rat)), s.Currency)
		}
		row.Shares = append(row.Shares, share)
	}
	return row
}
