package decide_test

import (
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// data is in the eu; its transfer has a price for each pod.
func data(price, currency string) func(*decide.Request) {
	return func(r *decide.Request) {
		r.Weights = broker.ScoreWeights{Cost: 100}
		r.Placement = &broker.Placement{DataRegions: []string{"asia", "eu"}, TransferPrice: &broker.TransferPrice{PricePerHour: price, Currency: currency}}
	}
}

func budget(most string) func(*decide.Request) {
	return func(r *decide.Request) { r.Budget = &broker.Budget{MaxPricePerHour: most, Currency: "EUR"} }
}

func rates(r *decide.Request) {
	r.ExchangeRates = []broker.ExchangeRate{{Currency: "EUR", Rate: "1", Date: "2026-11-28"}, {Currency: "USD", Rate: "0.5", Date: "2026-11-27"}}
}

func TestTransfer(t *testing.T) {
	eu, us, nowhere := places("bern", 9, at("eu", ""), priced("0.10", "EUR")), places("reno", 9, at("us", ""), priced("0.07", "EUR")), places("oslo", 9, priced("0.07", "EUR"))
	runChoose(t, map[string]chooseCase{
		"without data": {
			reason:  "The cheaper one is chosen.",
			request: with(pods(2, "cpu=1"), func(r *decide.Request) { r.Weights.Cost = 100 }), clusters: []oracleCluster{eu, us}, want: "reno", pods: 2,
			rejected: byCluster{"bern": decide.ReasonNotPreferred},
		},
		"the transfer costs more than it saves": {
			reason:  "0.07 and 0.04 is more than 0.10.",
			request: with(pods(2, "cpu=1"), data("0.04", "EUR")), clusters: []oracleCluster{eu, us}, want: "bern", pods: 2,
			rejected: byCluster{"reno": decide.ReasonNotPreferred},
		},
		"the transfer costs less than it saves": {
			reason:  "0.07 and 0.02 is less than 0.10.",
			request: with(pods(2, "cpu=1"), data("0.02", "EUR")), clusters: []oracleCluster{eu, us}, want: "reno", pods: 2,
			rejected: byCluster{"bern": decide.ReasonNotPreferred},
		},
		"no region": {
			reason:  "Who knows where it is: it is outside.",
			request: with(pods(2, "cpu=1"), data("0.04", "EUR")), clusters: []oracleCluster{eu, nowhere}, want: "bern", pods: 2,
			rejected: byCluster{"oslo": decide.ReasonNotPreferred},
		},
		"in another currency": {
			reason:  "0.07 EUR and 0.08 USD, which is 0.04 EUR.",
			request: with(with(pods(2, "cpu=1"), data("0.08", "USD")), rates), clusters: []oracleCluster{eu, us}, want: "bern", pods: 2,
			rejected: byCluster{"reno": decide.ReasonNotPreferred},
		},
		"over the budget": {
			reason:  "The budget is for the transfer, too.",
			request: with(with(pods(2, "cpu=1"), data("0.04", "EUR")), budget("0.21")), clusters: []oracleCluster{us}, want: "",
			rejected: byCluster{"reno": decide.ReasonOverBudget},
			messages: byCluster{"reno": "The price is 0.22 EUR per hour with the transfer of data; the budget is 0.21 EUR."},
		},
		"within the budget": {
			reason:  "Exactly.",
			request: with(with(pods(2, "cpu=1"), data("0.04", "EUR")), budget("0.22")), clusters: []oracleCluster{us}, want: "reno", pods: 2,
		},
		"a provider without a price": {
			reason:  "It is not known what is left of the budget.",
			request: with(with(pods(2, "cpu=1"), budget("9")), func(r *decide.Request) { r.Unpriced = "oslo" }), clusters: []oracleCluster{us}, want: "",
			rejected: byCluster{"reno": decide.ReasonPriceUnknown},
			messages: byCluster{"reno": "What oslo provides already has no price in EUR, so it is not known what is left of the budget: set the exchange rates in the BrokerConfig, or create the Reservation again."},
		},
		"a currency without a rate": {
			reason:  "The price of the transfer is not known.",
			request: with(with(pods(2, "cpu=1"), data("0.01", "USD")), budget("9")), clusters: []oracleCluster{us}, want: "",
			rejected: byCluster{"reno": decide.ReasonPriceUnknown},
			messages: byCluster{"reno": "The price is in EUR, and placement.transferPrice in USD."},
		},
	})
}

// TestTransferIsExplained: the reason of the score says so.
func TestTransferIsExplained(t *testing.T) {
	request := with(pods(2, "cpu=1"), data("0.04", "EUR"))
	offers := decide.Compare(request, snapshotOf([]oracleCluster{places("bern", 9, at("eu", ""), priced("0.10", "EUR")), places("reno", 9, at("us", ""), priced("0.07", "EUR"))}))
	for i, want := range []decide.Offer{
		{Detail: "cost 100.00 of 100 (0.20 EUR per hour)", PricePerHour: "0.20 EUR"},
		{Detail: "cost 0.00 of 100 (0.22 EUR per hour with the transfer of data)", PricePerHour: "0.22 EUR"},
	} {
		if offers[i].Detail != want.Detail || offers[i].PricePerHour != want.PricePerHour {
			t.Errorf("%s has %q at %s, want %q at %s", offers[i].Cluster, offers[i].Detail, offers[i].PricePerHour, want.Detail, want.PricePerHour)
		}
	}
}

// TestTransferOfParts: what is placed takes the transfer of its pods from the budget, too.
func TestTransferOfParts(t *testing.T) {
	clusters := []oracleCluster{places("reno", 2, at("us", ""), priced("0.07", "EUR")), places("yuma", 2, at("us", ""), priced("0.15", "EUR"))}
	for most, want := range map[string]int{"0.55": 1, "0.56": 2} {
		got, missing, _ := divide(with(with(pods(4, "cpu=1"), data("0.03", "EUR")), budget(most)), clusters)
		if len(got) != want || missing.Pods() != int32(4-2*want) {
			t.Errorf("placed %v of 0.20 EUR and 0.36 EUR in a budget of %s EUR", got, most)
		}
	}
}
