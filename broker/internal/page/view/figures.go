package view

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
)

// none is shown where there is no figure.
const none = "–"

// figure is an amount of a resource for people: cores, GiB, or a number.
func figure(name corev1.ResourceName, amount resource.Quantity) string {
	value := amount.AsApproximateFloat64()
	switch name {
	case corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		return decimal(value/(1<<30)) + " GiB"
	}
	return decimal(value)
}

// decimal has at most two decimals, and fewer for what is large.
func decimal(value float64) string {
	digits := 2
	if value >= 100 {
		digits = 0
	} else if value >= 10 {
		digits = 1
	}
	text := fmt.Sprintf("%.*f", digits, value)
	if strings.Contains(text, ".") {
		text = strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
	}
	return text
}

// title is the name of a resource for people.
func title(name corev1.ResourceName) string {
	switch name {
	case corev1.ResourceCPU:
		return "CPU cores"
	case corev1.ResourceMemory:
		return "memory"
	case corev1.ResourceEphemeralStorage:
		return "storage"
	case broker.ResourceGPU:
		return "GPUs"
	}
	return string(name)
}

// kinds are the names of resources in lists: the common ones first, then by name.
func kinds(lists ...corev1.ResourceList) (names []corev1.ResourceName) {
	all := map[corev1.ResourceName]bool{}
	for _, list := range lists {
		for name := range list {
			all[name] = true
		}
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, broker.ResourceGPU, corev1.ResourceEphemeralStorage} {
		if all[name] {
			names = append(names, name)
			delete(all, name)
		}
	}
	return append(names, slices.Sorted(maps.Keys(all))...)
}

// amounts is a list of resources in one line.
func amounts(list corev1.ResourceList) string {
	var parts []string
	for _, name := range kinds(list) {
		switch name {
		case corev1.ResourceCPU:
			parts = append(parts, "CPU "+figure(name, list[name]))
		default:
			parts = append(parts, title(name)+" "+figure(name, list[name]))
		}
	}
	if len(parts) == 0 {
		return none
	}
	return strings.Join(parts, ", ")
}

// priced is a sum of prices for people.
func priced(p *text.Prices) string {
	switch sum := p.Per(""); {
	case sum != "":
		return sum
	case p.Unknown:
		return "unknown"
	}
	return none
}

// addCost adds what a hold costs in an hour.
func addCost(p *text.Prices, hold *broker.Hold) {
	price, currency, _ := pricing.Of(hold.Cost, hold.Promised.Totals)
	p.Add(price, currency)
}

// Moment is a time, and how far it is from now.
type Moment struct {
	// At is for machines and for who points at it, Age for people: "12 s ago", "in 3 min".
	At, Age string
}

// moment is nil for no time.
func moment(at, now time.Time) *Moment {
	if at.IsZero() {
		return nil
	}
	m := &Moment{At: at.UTC().Format(time.RFC3339)}
	if at.After(now) {
		m.Age = "in " + span(at.Sub(now))
	} else {
		m.Age = span(now.Sub(at)) + " ago"
	}
	return m
}

// span is a length of time in its largest unit.
func span(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}
