package advertise_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func TestParsePrices(t *testing.T) {
	for name, c := range map[string]struct {
		data    map[string]string
		want    broker.Cost
		rates   int
		refused string
	}{
		"none":                 {want: broker.Cost{Currency: "EUR"}},
		"only a currency":      {data: map[string]string{"currency": "USD"}, want: broker.Cost{Currency: "USD"}},
		"empty ones":           {data: map[string]string{"cpu": "", "memory": "0.01"}, want: broker.Cost{MemoryCost: "0.01", Currency: "EUR"}},
		"all":                  {data: map[string]string{"cpu": "0.04", "memory": "0", "gpu": "1", "storage": "0.001", "currency": "USD"}, want: broker.Cost{CPUCost: "0.04", MemoryCost: "0", GPUCost: "1", StorageCost: "0.001", Currency: "USD"}},
		"an exponent":          {data: map[string]string{"cpu": "1e3"}, refused: "price of cpu"},
		"negative":             {data: map[string]string{"gpu": "-1"}, refused: "price of gpu"},
		"too long":             {data: map[string]string{"gpu": strings.Repeat("1", 33)}, refused: "price of gpu"},
		"a currency in words":  {data: map[string]string{"cpu": "1", "currency": "euro"}, refused: "ISO 4217"},
		"an unknown kind":      {data: map[string]string{"cpus": "1"}, refused: `"cpus" is not one of`},
		"rates":                {data: map[string]string{"rates": "- {from: 22:00, to: 06:00, cpu: 0.01}\n- {nodeSelector: {spot: \"true\"}, cpu: \"0.02\"}"}, want: broker.Cost{Currency: "EUR"}, rates: 2},
		"a rate of no day":     {data: map[string]string{"cpu": "1", "rates": "[{days: [Monday], cpu: 1}]"}, refused: `rate 1: the day "Monday" is not one of Mon`},
		"all that is mistaken": {data: map[string]string{"cpus": "1", "gpu": "x"}, refused: "price of gpu"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := advertise.ParsePrices(c.data, "EUR")
			if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
				t.Fatalf("error %v, want %q", err, c.refused)
			}
			if diff := cmp.Diff(c.want, got.Base); err == nil && (diff != "" || len(got.Rates) != c.rates) {
				t.Errorf("%d rates, prices (-want +got):\n%s", len(got.Rates), diff)
			}
		})
	}
}
