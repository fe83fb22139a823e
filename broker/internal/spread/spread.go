// Package spread divides pods among clusters, zones or regions: up to how many pods each of them gets, as
// evenly as they have room, and with no more difference than is allowed. It is pure.
package spread

import (
	"fmt"
	"math"
	"sort"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Domain is a cluster, zone or region.
type Domain struct {
	name string
	// Held are the pods of the Reservation there, before those that it had before the division.
	Held, before int64
	// Room is how many more pods fit.
	Room int64
	// Counts is whether it has a cluster that may be chosen, and nodes for such pods: others may
	// have only maxSkew more pods than it, also when it is full.
	Counts bool
}

// Division is how far pods are divided.
type Division struct {
	broker.Spread
	Domains []Domain
	// Budget is whether room is also limited by prices.
	Budget bool
	// of is the domain of each cluster, -1 for none.
	of []int
	// level is up to which the domains that count are filled now, rest up to which others are, and most up to
	// which they may be.
	level, rest, most int64
}

// DomainOf is the domain of a cluster; "" if it states none.
func DomainOf(spread *broker.Spread, spec *broker.ClusterAdvertisementSpec) string {
	switch spread.Over {
	case broker.SpreadOverZone:
		return spec.Zone
	case broker.SpreadOverRegion:
		return spec.Region
	default:
		return spec.ClusterID
	}
}

// New has the domains of clusters, at each of which so many pods are held.
func New(spread *broker.Spread, clusters []*broker.ClusterAdvertisementSpec, held map[string]int32) *Division {
	d := &Division{Spread: *spread}
	d.MaxSkew = max(d.MaxSkew, 1)
	known := map[string]int{"": -1}
	for _, spec := range clusters {
		name := DomainOf(spread, spec)
		at, found := known[name]
		if !found {
			at = len(d.Domains)
			known[name], d.Domains = at, append(d.Domains, Domain{name: name})
		}
		if d.of = append(d.of, at); at >= 0 {
			d.Domains[at].Held += int64(held[spec.ClusterID])
			d.Domains[at].before = d.Domains[at].Held
		}
	}
	return d
}

// Of is the domain of a cluster, by its index; nil for none.
func (d *Division) Of(cluster int) *Domain {
	if at := d.of[cluster]; at >= 0 {
		return &d.Domains[at]
	}
	return nil
}

// Fill finds up to how many pods each domain is filled with n more: as evenly as there is room, and to no
// more than is allowed beside the one that counts and can have fewest. One that does not count gets what
// the others have no room for: what those have got before was as much as their room allows.
func (d *Division) Fill(n int64) {
	highest := int64(0)
	d.most = math.MaxInt64
	for _, domain := range d.Domains {
		if highest = max(highest, domain.Held); domain.Counts {
			d.most = min(d.most, domain.Held+domain.Room+int64(d.MaxSkew))
		}
	}
	d.level, d.rest = 0, 0
	for _, level := range []*int64{&d.level, &d.rest} {
		enough := sort.Search(int(highest+n), func(pods int) bool {
			*level = int64(pods)
			return d.Takes() >= n
		})
		*level = min(int64(enough), d.most)
	}
}

// Takes is how many pods the domains take to be filled.
func (d *Division) Takes() (pods int64) {
	for i := range d.Domains {
		pods += min(d.Share(&d.Domains[i]), d.Domains[i].Room)
	}
	return pods
}

// Share is how many more pods a domain may get.
func (d *Division) Share(domain *Domain) int64 { return max(d.upTo(domain)-domain.Held, 0) }

func (d *Division) upTo(domain *Domain) int64 {
	if domain.Counts {
		return d.level
	}
	return d.rest
}

// Excess is how many pods a domain has got that are too much beside those that others have.
func (d *Division) Excess(domain *Domain) int64 {
	least := int64(math.MaxInt32)
	for _, other := range d.Domains {
		if other.Counts {
			least = min(least, other.Held)
		}
	}
	return max(domain.Held-max(least+int64(d.MaxSkew), domain.before), 0)
}

// Limit says up to how many pods a domain gets.
func (d *Division) Limit(domain *Domain) string {
	return fmt.Sprintf("up to %d of the pods in %s %s", d.upTo(domain), d.Over, domain.name)
}

// Explain says why a domain gets no more.
func (d *Division) Explain(domain *Domain) string {
	message := fmt.Sprintf("placement.spread allows %d of the pods in %s %s, which has %d", d.upTo(domain), d.Over, domain.name, domain.Held)
	for _, least := range d.Domains {
		if most := least.Held + least.Room; d.upTo(domain) == d.most && least.Counts && most+int64(d.MaxSkew) == d.most {
			within := ""
			if d.Budget {
				within = " within the budget"
			}
			return fmt.Sprintf("%s: %s %s has room for %d%s, and maxSkew is %d.", message, d.Over, least.name, most, within, d.MaxSkew)
		}
	}
	if !domain.Counts && d.rest < d.level {
		message += ": first are those where all of the pods would be within the budget"
	}
	return message + "."
}
