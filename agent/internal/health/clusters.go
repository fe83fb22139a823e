package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/duration"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/text"
)

// Cluster is a cluster as another one or the hub sees it. An amount that is unknown there is nil.
type Cluster struct {
	Name  string `json:"name"`
	State string `json:"state"`
	// Region and zone, if they are known.
	Location string `json:"location,omitempty"`
	// Capacity is what pods may use, Lent what is promised to others: in a consumer, what it has been
	// granted there. Used is what guests request of that. Free can still be used.
	Capacity *broker.ResourceQuantities `json:"capacity,omitempty"`
	Lent     *broker.ResourceQuantities `json:"lent,omitempty"`
	Used     *broker.ResourceQuantities `json:"used,omitempty"`
	Free     *broker.ResourceQuantities `json:"free,omitempty"`
	Price    string                     `json:"price,omitempty"`
	// Since is when it joined, or when its virtual node was created.
	Since time.Time `json:"since"`
}

// Table is the clusters that are known.
type Table struct {
	Clusters   []Cluster            `json:"clusters"`
	Unreadable []explain.Unreadable `json:"unreadable,omitempty"`
	now        time.Time
}

// maxClusters is how many clusters are listed.
const maxClusters = 10_000

// Clusters lists the clusters as a cluster sees them: itself, its providers by their virtual nodes and
// grants, and in the hub all by their advertisements. overflowed are the pods on its virtual nodes.
// hub is what was observed in the hub, nil without access to it.
func Clusters(o *Observed, overflowed []corev1.Pod, hub *Observed) Table {
	table := Table{Unreadable: o.Unreadable, now: o.Now}
	rows := map[string]*Cluster{}
	if own := o.own(); own != nil {
		row := advertised(own)
		row.State, row.Lent, row.Since = "Home", nil, own.CreationTimestamp.Time
		row.Free = less(own.Spec.Resources.Allocatable, own.Spec.Resources.Allocated)
		rows[own.Spec.ClusterID] = &row
	}
	maps.Copy(rows, providers(o, overflowed))
	if hub == nil {
		hub = o
	} else {
		table.Unreadable = append(slices.Clone(table.Unreadable), hub.Unreadable...)
	}
	for _, a := range hub.advertised() {
		row := advertised(a)
		if seen := rows[row.Name]; seen != nil && seen.State != "Home" && row.State == "Active" {
			row.State = seen.State
		}
		rows[row.Name] = &row
	}
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		if row := rows[name]; len(table.Clusters) < maxClusters {
			row.Name, row.Location = text.Line(row.Name, 63), text.Line(row.Location, 100)
			table.Clusters = append(table.Clusters, *row)
		}
	}
	explain.Printable(nil, nil, table.Unreadable)
	return table
}

// advertised is a cluster by its advertisement.
func advertised(a *broker.ClusterAdvertisement) Cluster {
	spec := &a.Spec
	row := Cluster{Name: spec.ClusterID, State: "Active", Capacity: &spec.Resources.Allocatable, Lent: &a.Status.Reserved, Free: &a.Status.Available, Since: a.CreationTimestamp.Time}
	switch {
	case !a.Status.Active:
		row.State = "Stale"
	case !spec.Lending.Enabled:
		row.State, row.Free = "Consumer", nil
	}
	if row.Location = spec.Region; spec.Zone != "" {
		row.Location = strings.TrimPrefix(spec.Region+"/"+spec.Zone, "/")
	}
	used := corev1.ResourceList{}
	for _, hold := range spec.ObservedHolds {
		broker.AddTo(used, hold.Used.List())
	}
	all := broker.FromList(used)
	row.Used = &all
	if cost := spec.Cost; cost != nil {
		for _, part := range []struct{ price, of string }{{cost.CPUCost, "/cpu"}, {cost.MemoryCost, "/GiB"}, {cost.GPUCost, "/gpu"}} {
			if part.price != "" {
				row.Price += part.price + part.of + " "
			}
		}
		row.Price += cost.Currency + "/h"
	}
	if capacity.PricedByClass(spec) {
		row.Price += " (some nodes differ)"
	}
	return row
}

// providers are those with a virtual node or a grant.
func providers(o *Observed, overflowed []corev1.Pod) map[string]*Cluster {
	rows, nodes := map[string]*Cluster{}, map[string]string{}
	used, lent, prices := map[string]corev1.ResourceList{}, map[string]corev1.ResourceList{}, map[string]*text.Prices{}
	for i := range o.Nodes {
		node := &o.Nodes[i]
		provider := node.Labels[broker.LabelProvider]
		nodes[node.Name] = provider
		rows[provider] = &Cluster{Name: provider, State: nodeState(node), Since: node.CreationTimestamp.Time}
	}
	for i := range o.Instructions {
		in := &o.Instructions[i]
		provider := in.Spec.TargetClusterID
		if rows[provider] == nil {
			rows[provider] = &Cluster{Name: provider, State: "SettingUp", Since: in.CreationTimestamp.Time}
		}
		if in.Spec.Releasing {
			continue
		}
		lent[provider] = broker.AddTo(lent[provider], in.Spec.RequestedResources.List())
		if prices[provider] == nil {
			prices[provider] = &text.Prices{}
		}
		prices[provider].AddText(in.Spec.PricePerHour)
	}
	for i := range overflowed {
		if pod := &overflowed[i]; pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			if provider := nodes[pod.Spec.NodeName]; provider != "" {
				used[provider] = broker.AddTo(used[provider], resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{}))
			}
		}
	}
	for provider, row := range rows {
		granted, taken := broker.FromList(lent[provider]), broker.FromList(used[provider])
		row.Lent, row.Used, row.Free = &granted, &taken, less(granted, taken)
		if price := prices[provider]; price != nil {
			row.Price = price.Per("/h")
		}
	}
	return rows
}

// nodeState is the state of a virtual node in a word.
func nodeState(node *corev1.Node) string {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return "NotReady"
		}
	}
	if node.Spec.Unschedulable {
		return "Cordoned"
	}
	return "Ready"
}

// less is what is left of an amount, not below zero.
func less(a, b broker.ResourceQuantities) *broker.ResourceQuantities {
	left := a.List()
	for name, amount := range b.List() {
		rest := left[name]
		if rest.Sub(amount); rest.Sign() < 0 {
			rest.Set(0)
		}
		left[name] = rest
	}
	q := broker.FromList(left)
	return &q
}

// Text returns the table for people: of amounts, CPU and memory, or all if it is wide.
func (t *Table) Text(style explain.Style) string {
	rows := [][]string{{"CLUSTER", "STATE", "CAPACITY", "LENT", "USED", "FREE", "PRICE", "AGE"}}
	if style.Wide {
		rows[0] = append(rows[0], "LOCATION")
	}
	for _, c := range t.Clusters {
		row := []string{c.Name, c.State, Amount(c.Capacity, style.Wide), Amount(c.Lent, style.Wide), Amount(c.Used, style.Wide), Amount(c.Free, style.Wide),
			cmp.Or(c.Price, "-"), duration.HumanDuration(max(t.now.Sub(c.Since), 0))}
		if style.Wide {
			row = append(row, cmp.Or(c.Location, "-"))
		}
		rows = append(rows, row)
	}
	out := explain.Columns(rows)
	if len(t.Clusters) == 0 {
		out = "No other cluster is known here: capacity is requested when pods need it.\n"
	}
	return out + explain.Notes(style, t.Unreadable)
}

// Amount words an amount in a column.
func Amount(q *broker.ResourceQuantities, wide bool) string {
	switch {
	case q == nil:
		return "-"
	case wide:
		return strings.ReplaceAll(strings.ReplaceAll(q.String(), ", ", ","), "nothing", "0")
	}
	list := q.List()
	out := cores(list[corev1.ResourceCPU]) + " " + memory(list[corev1.ResourceMemory])
	if out == "0 0" {
		out = "0"
	}
	if q.GPU != nil && !q.GPU.IsZero() {
		out += fmt.Sprintf(" %s gpu", q.GPU)
	}
	return out
}

// cores words an amount of CPU: below one core in thousandths, otherwise with one decimal at most.
func cores(q resource.Quantity) string {
	if q.MilliValue() < 1000 && !q.IsZero() {
		return fmt.Sprintf("%dm", q.MilliValue())
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", q.AsApproximateFloat64()), ".0")
}

// memory words an amount of memory in Mi or Gi, with one decimal at most.
func memory(q resource.Quantity) string {
	if q.IsZero() {
		return "0"
	}
	size, unit := q.AsApproximateFloat64()/(1<<20), "Mi"
	if size >= 1024 {
		size, unit = size/1024, "Gi"
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", size), ".0") + unit
}
