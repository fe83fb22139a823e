package view

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// Flows is the view of who runs where.
type Flows struct {
	Paging
	Rows    []Flow
	Diagram Diagram
}

// Flow is what one consumer holds and uses at one provider.
type Flow struct {
	Consumer, Provider string
	// Holds is the number of Reservations, Guests that of running pods.
	Holds, Guests int
	// Promised is what the provider holds, Used what guests request of it.
	Promised, Used string
	Price          string
	cpu            float64
}

// Diagram shows the largest flows as lines from consumers to providers.
type Diagram struct {
	Height           int
	Left, Right      []Label
	Lines            []Line
	Shown, OutOfFlow int
}

// Label is the name of a cluster in a diagram.
type Label struct {
	Name string
	Y    int
}

// Line is a flow in a diagram.
type Line struct {
	Y1, Y2 int
	Width  float64
	Text   string
}

// pair is who runs where.
type pair struct{ consumer, provider string }

// summed are the sums of a flow.
type summed struct {
	holds, guests  int
	promised, used corev1.ResourceList
	price          text.Prices
}

// OfFlows is a page of the view of flows, the largest first.
func OfFlows(s Snapshot, page int) Flows {
	sums := map[pair]*summed{}
	of := func(consumer, provider string) *summed {
		key := pair{consumer, provider}
		if sums[key] == nil {
			sums[key] = &summed{}
		}
		return sums[key]
	}
	known := map[string]bool{}
	for _, ad := range s.Clusters {
		known[ad.Name] = true
	}
	for _, ad := range s.Clusters {
		for i := range ad.Status.Holds {
			hold := &ad.Status.Holds[i]
			sum := of(hold.Requester, ad.Name)
			sum.holds++
			sum.promised = broker.AddTo(sum.promised, hold.Promised.Totals.List())
			addCost(&sum.price, hold)
		}
		for i := range ad.Spec.ObservedHolds {
			observed := &ad.Spec.ObservedHolds[i]
			// A provider may say anything of whose its guests are.
			if !known[observed.Requester] && sums[pair{observed.Requester, ad.Name}] == nil {
				continue
			}
			sum := of(observed.Requester, ad.Name)
			sum.guests += max(0, int(observed.Pods))
			sum.used = broker.AddTo(sum.used, observed.Used.List())
		}
	}
	var flows []Flow
	for key, sum := range sums {
		cpu := sum.promised[corev1.ResourceCPU]
		flows = append(flows, Flow{
			Consumer: key.consumer, Provider: key.provider, Holds: sum.holds, Guests: sum.guests,
			Promised: amounts(sum.promised), Used: amounts(sum.used), Price: priced(&sum.price), cpu: cpu.AsApproximateFloat64(),
		})
	}
	slices.SortFunc(flows, func(a, b Flow) int {
		return cmp.Or(cmp.Compare(b.cpu, a.cpu), cmp.Compare(a.Consumer, b.Consumer), cmp.Compare(a.Provider, b.Provider))
	})
	v := Flows{Diagram: diagram(flows)}
	v.Rows, v.Paging = cut(flows, page)
	return v
}

// maxLines is how many flows a diagram has at most, rowHeight the height of a cluster in it.
const maxLines, rowHeight = 12, 36

func diagram(flows []Flow) Diagram {
	d := Diagram{Shown: min(len(flows), maxLines)}
	d.OutOfFlow = len(flows) - d.Shown
	at := func(labels *[]Label, name string) int {
		i := slices.IndexFunc(*labels, func(l Label) bool { return l.Name == name })
		if i < 0 {
			i = len(*labels)
			*labels = append(*labels, Label{name, i*rowHeight + rowHeight/2})
		}
		return (*labels)[i].Y
	}
	for _, f := range flows[:d.Shown] {
		line := Line{Y1: at(&d.Left, f.Consumer), Y2: at(&d.Right, f.Provider), Width: 2}
		if largest := flows[0].cpu; largest > 0 {
			line.Width = max(2, 24*f.cpu/largest)
		}
		line.Text = fmt.Sprintf("%s runs %s in %s: %s", f.Consumer, plural(f.Guests, "pod"), f.Provider, f.Promised)
		d.Lines = append(d.Lines, line)
	}
	d.Height = rowHeight * max(len(d.Left), len(d.Right))
	return d
}

// plural is a number of things.
func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
