package view

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/text"
)

// maxName is how much is shown of what clusters call themselves and where they are, in bytes.
const maxName = 63

// Snapshot is what the views are made of. Its objects are shared and read-only.
type Snapshot struct {
	Now time.Time
	// Clusters are sorted by name.
	Clusters []*broker.ClusterAdvertisement
	// Heard is when this broker last heard each cluster.
	Heard        map[string]time.Time
	Reservations []*broker.Reservation
	// MaxPriority is the highest priority that counts in the queue.
	MaxPriority int32
}

// Clusters are the rows of the view of clusters.
type Clusters struct {
	Paging
	Totals Totals
	Rows   []Cluster
}

// Totals are what all clusters have together.
type Totals struct {
	Clusters, Active, Providers int
	// Resources are free only in clusters that are heard and lend.
	Resources []Usage
	// Price is that of an hour of all that is promised.
	Price string
}

// Cluster is one that advertises.
type Cluster struct {
	ID string
	// Name and Where are empty if they say no more than the ID.
	Name, Where string
	// State is one word or two for people; Good is whether it is as it should be.
	State string
	Good  bool
	// Heard is nil if this broker has not heard the cluster since it started.
	Heard     *Moment
	Resources []Usage
	// Price are those of one unit.
	Price []string
}

// Usage is what a cluster has of one resource.
type Usage struct {
	Resource string
	// Capacity is what pods may use. Own is what the cluster's own pods use of it, Lent what is
	// promised to others, Used what their guests use of that, and Free the rest.
	Capacity, Own, Lent, Used, Free string
	Bar                             []Part
}

// Part is a part of a bar, in percent of its length.
type Part struct {
	// Kind is own, used, lent or free.
	Kind     string
	From, Of float64
}

// usage are the figures of one resource.
func usage(name corev1.ResourceName, capacity, own, lent, used, free corev1.ResourceList) Usage {
	u := Usage{
		Resource: title(name), Capacity: figure(name, capacity[name]), Own: figure(name, own[name]),
		Lent: figure(name, lent[name]), Used: figure(name, used[name]), Free: figure(name, free[name]),
	}
	value := func(list corev1.ResourceList) float64 {
		amount := list[name]
		return max(0, amount.AsApproximateFloat64())
	}
	inUse := min(value(used), value(lent))
	parts := []struct {
		kind  string
		value float64
	}{{"own", value(own)}, {"used", inUse}, {"lent", value(lent) - inUse}, {"free", value(free)}}
	whole, at := max(value(capacity), value(own)+value(lent)), 0.0
	for _, p := range parts {
		if p.value <= 0 || whole <= 0 {
			continue
		}
		of := min(100-at, 100*p.value/whole)
		u.Bar = append(u.Bar, Part{p.kind, at, of})
		at += of
	}
	return u
}

// OfClusters is a page of the view of clusters.
func OfClusters(s Snapshot, page int) Clusters {
	v := Clusters{Totals: totals(s)}
	rows, paging := cut(s.Clusters, page)
	v.Paging = paging
	for _, ad := range rows {
		v.Rows = append(v.Rows, s.cluster(ad))
	}
	return v
}

func totals(s Snapshot) Totals {
	t := Totals{Clusters: len(s.Clusters)}
	var capacity, own, lent, used, free corev1.ResourceList
	var price text.Prices
	for _, ad := range s.Clusters {
		if ad.Status.Active {
			t.Active++
		}
		if ad.Spec.Lending.Enabled {
			t.Providers++
		}
		capacity = broker.AddTo(capacity, ad.Spec.Resources.Allocatable.List())
		own = broker.AddTo(own, ad.Spec.Resources.Allocated.List())
		lent = broker.AddTo(lent, ad.Status.Reserved.List())
		used = broker.AddTo(used, usedOf(ad))
		if ad.Status.Active && ad.Spec.Lending.Enabled {
			free = broker.AddTo(free, ad.Status.Available.List())
		}
		for i := range ad.Status.Holds {
			addCost(&price, &ad.Status.Holds[i])
		}
	}
	t.Price = priced(&price)
	for _, name := range kinds(capacity, lent) {
		t.Resources = append(t.Resources, usage(name, capacity, own, lent, used, free))
	}
	return t
}

// usedOf is what guests use in a cluster.
func usedOf(ad *broker.ClusterAdvertisement) (sum corev1.ResourceList) {
	for i := range ad.Spec.ObservedHolds {
		sum = broker.AddTo(sum, ad.Spec.ObservedHolds[i].Used.List())
	}
	return sum
}

func (s Snapshot) cluster(ad *broker.ClusterAdvertisement) Cluster {
	c := Cluster{ID: ad.Name, Heard: moment(s.Heard[ad.Name], s.Now)}
	if name := text.Line(ad.Spec.ClusterName, maxName); name != ad.Name {
		c.Name = name
	}
	var where []string
	for _, part := range []string{ad.Spec.Region, ad.Spec.Zone} {
		if part = text.Line(part, maxName); part != "" && !slices.Contains(where, part) {
			where = append(where, part)
		}
	}
	c.Where = strings.Join(where, ", ")
	switch {
	case !ad.Status.Active:
		c.State = "not heard"
	case !ad.Spec.Lending.Enabled:
		c.State, c.Good = "consumer only", true
	default:
		c.State, c.Good = "active", true
	}
	offered, lent := ad.Spec.Resources.Allocatable.List(), ad.Status.Reserved.List()
	own, used, free := ad.Spec.Resources.Allocated.List(), usedOf(ad), ad.Status.Available.List()
	for _, name := range kinds(offered, lent) {
		c.Resources = append(c.Resources, usage(name, offered, own, lent, used, free))
	}
	if cost := ad.Spec.Cost; cost != nil {
		for _, unit := range []struct{ price, of string }{{cost.CPUCost, "core"}, {cost.MemoryCost, "GiB"}, {cost.GPUCost, "GPU"}, {cost.StorageCost, "GiB of storage"}} {
			if unit.price != "" {
				c.Price = append(c.Price, unit.price+" "+cost.Currency+" a "+unit.of)
			}
		}
	}
	if capacity.PricedByClass(&ad.Spec) {
		c.Price = append(c.Price, "some nodes have other prices")
	}
	return c
}
