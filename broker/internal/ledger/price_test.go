package ledger_test

import (
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// TestLockedPrice: a hold costs what the provider asked when it was promised.
func TestLockedPrice(t *testing.T) {
	priced := func(cpu string) *broker.Cost { return &broker.Cost{CPUCost: cpu, Currency: "EUR"} }
	for name, tc := range map[string]struct {
		costs []*broker.Cost
		want  *broker.Cost
	}{
		"one price":                         {[]*broker.Cost{priced("0.10")}, priced("0.10")},
		"the same price twice":              {[]*broker.Cost{priced("0.10"), priced("0.10")}, priced("0.10")},
		"a growth at a higher price":        {[]*broker.Cost{priced("0.10"), priced("0.30")}, priced("0.2")},
		"no price":                          {[]*broker.Cost{nil}, nil},
		"a growth without a price":          {[]*broker.Cost{priced("0.10"), nil}, nil},
		"a growth in another currency":      {[]*broker.Cost{priced("0.10"), {CPUCost: "0.10", Currency: "USD"}}, nil},
		"a mean that is not a short figure": {[]*broker.Cost{priced("1"), priced("1"), priced("2")}, priced("1.333333334")},
	} {
		t.Run(name, func(t *testing.T) {
			ad := paris(1000, 0)
			var s broker.ClusterAdvertisementStatus
			for i, cost := range tc.costs {
				ad.Cost = cost
				if _, err := ledger.Place(ad, &s, grow("a", int64(i+1), 1)); err != nil {
					t.Fatal(err)
				}
			}
			ad.Cost = priced("50.00")
			ledger.Shrink(&s, "a", 99, ledger.Find(&s, "a").Promised)
			got := ledger.Find(&s, "a").Cost
			if (got == nil) != (tc.want == nil) || got != nil && *got != *tc.want {
				t.Errorf("the hold costs %+v, want %+v", got, tc.want)
			}
		})
	}
}

// TestHighestPrice: of the classes where a pod may run, the highest price of each resource counts.
func TestHighestPrice(t *testing.T) {
	for name, tc := range map[string]struct {
		// cluster is the cluster's price of a core, others those of classes; empty if it is unknown.
		cluster string
		others  []string
		want    string
	}{
		"by value, not by text":   {"9", []string{"10"}, "10"},
		"fractions":               {"0.09", []string{"0.1"}, "0.1"},
		"a fraction of more":      {"1", []string{"1.001"}, "1.001"},
		"zeros in front":          {"002", []string{"1.5"}, "002"},
		"zeros at the end":        {"0.1", []string{"0.100"}, "0.1"},
		"no whole number":         {"0.5", []string{"0"}, "0.5"},
		"several":                 {"1", []string{"3", "2"}, "3"},
		"one that is unknown":     {"1", []string{"3", ""}, ""},
		"unknown for the cluster": {"", []string{"3"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ad := paris(1000, 0)
			ad.Cost = &broker.Cost{CPUCost: tc.cluster, Currency: "EUR"}
			ad.NodeClasses = []broker.NodeClass{{Name: "plain"}}
			for _, cpu := range tc.others {
				ad.NodeClasses = append(ad.NodeClasses, broker.NodeClass{Cost: &broker.Cost{CPUCost: cpu, Currency: "EUR"}})
			}
			if got := ledger.CostOf(ad, grow("a", 1, 1).Capacity); got == nil || got.CPUCost != tc.want {
				t.Errorf("the price is %+v, want %q", got, tc.want)
			}
		})
	}
}
