package pricing_test

import (
	"slices"
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestPrice(t *testing.T) {
	cost := &broker.Cost{CPUCost: "0.04", MemoryCost: "0.005", Currency: "EUR"}
	price, currency, known := pricing.Of(cost, broker.FromList(expect.Resources("cpu", "1500m", "memory", "512Mi")))
	if got := text.Price(price, currency); !known || got != "0.0625 EUR" {
		t.Errorf("1.5 cores and half a GiB cost %s, want 0.0625 EUR", got)
	}
	if _, _, known := pricing.Of(cost, broker.FromList(expect.Resources("nvidia.com/gpu", "1"))); known {
		t.Error("a price without gpuCost cannot be known for a GPU")
	}
	amount := broker.FromList(expect.Resources("cpu", "1", "nvidia.com/gpu", "1", "example.com/dongle", "0"))
	for _, c := range []struct {
		cost *broker.Cost
		want []string
	}{{cost, []string{"nvidia.com/gpu"}}, {nil, []string{"cpu", "nvidia.com/gpu"}}} {
		if got := pricing.Missing(c.cost, amount); !slices.Equal(got, c.want) {
			t.Errorf("%+v has no price of %v, want %v", c.cost, got, c.want)
		}
	}
}
