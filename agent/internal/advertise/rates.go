package advertise

import (
	"errors"
	"fmt"
	"strings"
	"time"
	// The agent's image has no time zones.
	_ "time/tzdata"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Tariff is what an hour of the cluster's resources costs, and when.
type Tariff struct {
	// Base are the prices where no rate applies, and the currency of all.
	Base broker.Cost
	// Rates, of which the first one that applies counts.
	Rates []Rate
}

// Rate are the prices of some nodes, at some times. Those that it does not have are the base's.
type Rate struct {
	// NodeSelector are the labels of the nodes; all nodes where empty.
	NodeSelector map[string]string `json:"nodeSelector"`
	// From and To are times of day, such as 22:00; all day where empty. A rate that goes on past
	// midnight belongs to the day on which it begins.
	From string `json:"from"`
	To   string `json:"to"`
	// Days of the week, such as Sat; all where empty.
	Days []string `json:"days"`
	// TimeZone of the times and days; UTC where empty.
	TimeZone string `json:"timeZone"`
	// Prices as in SetPrice.
	CPU     price `json:"cpu"`
	Memory  price `json:"memory"`
	GPU     price `json:"gpu"`
	Storage price `json:"storage"`

	selector labels.Selector
	// from and to are minutes of a day, equal for all of it.
	from, to int
	on       [7]bool
	zone     *time.Location
}

// price is a number, or one as text.
type price string

func (p *price) UnmarshalJSON(raw []byte) error {
	*p = price(strings.Trim(string(raw), `"`))
	return nil
}

// ParseRates parses a list of rates, as YAML or JSON.
func ParseRates(text string) (rates []Rate, err error) {
	if err := yaml.UnmarshalStrict([]byte(text), &rates); err != nil {
		return nil, fmt.Errorf("the rates are not a list of rates: %w", err)
	}
	var errs []error
	for i := range rates {
		if err := rates[i].complete(); err != nil {
			errs = append(errs, fmt.Errorf("rate %d: %w", i+1, err))
		}
	}
	return rates, errors.Join(errs...)
}

// complete validates the rate.
func (r *Rate) complete() (err error) {
	if r.selector, err = labels.ValidatedSelectorFromSet(r.NodeSelector); err != nil {
		return fmt.Errorf("the nodeSelector is not valid: %w", err)
	}
	if _, named := r.NodeSelector[corev1.LabelHostname]; named {
		return fmt.Errorf("the nodeSelector has %s, which names single nodes: use a label of the nodes that cost the same", corev1.LabelHostname)
	}
	if r.zone, err = time.LoadLocation(r.TimeZone); err != nil || r.TimeZone == "Local" {
		return fmt.Errorf("the time zone %q is unknown: use a name of the IANA database, such as Europe/Paris", r.TimeZone)
	}
	if r.From != "" || r.To != "" {
		from, errFrom := time.Parse("15:04", r.From)
		to, errTo := time.Parse("15:04", r.To)
		switch {
		case errFrom != nil || errTo != nil:
			return fmt.Errorf("from %q to %q are not two times of day such as 22:00: set both, or neither for all day", r.From, r.To)
		case from.Equal(to):
			return fmt.Errorf("from and to are both %s: set neither for all day", r.From)
		}
		r.from, r.to = minute(from), minute(to)
	}
	r.on = [7]bool{}
	for _, name := range r.Days {
		known := false
		for day := range r.on {
			if time.Weekday(day).String()[:3] == name {
				r.on[day], known = true, true
			}
		}
		if !known {
			return fmt.Errorf("the day %q is not one of Mon, Tue, Wed, Thu, Fri, Sat and Sun", name)
		}
	}
	cost, err := r.cost(broker.Cost{})
	if err == nil && cost == (broker.Cost{}) {
		return errors.New("it has no price: set cpu, memory, gpu or storage")
	}
	return err
}

func minute(t time.Time) int { return t.Hour()*60 + t.Minute() }

// cost are the prices of the rate, those of the base where it has none.
func (r *Rate) cost(base broker.Cost) (broker.Cost, error) {
	var errs []error
	for _, kind := range []struct {
		name string
		text price
	}{{"cpu", r.CPU}, {"memory", r.Memory}, {"gpu", r.GPU}, {"storage", r.Storage}} {
		if kind.text != "" {
			errs = append(errs, SetPrice(&base, kind.name, string(kind.text)))
		}
	}
	return base, errors.Join(errs...)
}

// applies reports whether it is a time of the rate, by the clocks of its time zone.
func (r *Rate) applies(now time.Time) bool {
	now = now.In(r.zone)
	at, day := minute(now), now.Weekday()
	switch {
	case r.from < r.to && (at < r.from || at >= r.to), r.from > r.to && at < r.from && at >= r.to:
		return false
	case r.from > r.to && at < r.to:
		day = (day + 6) % 7
	}
	return len(r.Days) == 0 || r.on[day]
}

// At returns the prices at a time, nil for none, and those of nodes that have others, of which the
// first ones that match count.
func (t Tariff) At(now time.Time) (cost *broker.Cost, classes []inventory.ClassCost) {
	cost = &t.Base
	for i := range t.Rates {
		rate := &t.Rates[i]
		if !rate.applies(now) {
			continue
		}
		// It was validated.
		prices, _ := rate.cost(t.Base)
		if rate.selector.Empty() {
			cost = &prices
			break
		}
		classes = append(classes, inventory.ClassCost{Selector: rate.selector, Cost: prices})
	}
	if *cost == (broker.Cost{Currency: cost.Currency}) {
		cost = nil
	}
	return cost, classes
}
