package plan

import (
	"math/big"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestUnknownPriceIsCommitted: what is held in a currency that has no rate any more is not free of charge.
func TestUnknownPriceIsCommitted(t *testing.T) {
	two := capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(expect.Resources("cpu", "1"))}})
	for currency, want := range map[string]string{"EUR": "", "USD": "paris"} {
		ad := &broker.ClusterAdvertisement{Spec: broker.ClusterAdvertisementSpec{ClusterID: "paris"}}
		ad.Status.Holds = []broker.Hold{{ReservationUID: "r", ReservationName: "r", Requester: "rome", Attempt: 1, Promised: two, Granted: &two, Cost: &broker.Cost{CPUCost: "0.10", Currency: currency}}}
		in := Input{
			Reservation: &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "r"}, Spec: broker.ReservationSpec{
				RequesterID: "rome", Budget: &broker.Budget{MaxPricePerHour: "1", Currency: "EUR"},
			}},
			Advertisements: []*broker.ClusterAdvertisement{ad}, Holders: []string{"paris"}, Active: map[string]bool{"paris": true},
		}
		if request, _ := (Plan{}).Request(in, two); request.Unpriced != want {
			t.Errorf("%s: the price of %q is not known, want that of %q", currency, request.Unpriced, want)
		}
		if entry := in.Entry().Request; entry.Unpriced != want || (want == "") != (entry.Committed.Cmp(big.NewRat(2, 10)) == 0) {
			t.Errorf("%s: in the queue %s are committed, and the price of %q is not known", currency, entry.Committed, entry.Unpriced)
		}
	}
}

// TestTransferIsCommitted: what is held outside of the data's regions takes the transfer from the budget.
func TestTransferIsCommitted(t *testing.T) {
	two := capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(expect.Resources("cpu", "1"))}})
	for region, want := range map[string]*big.Rat{"eu": big.NewRat(20, 100), "us": big.NewRat(26, 100), "": big.NewRat(26, 100)} {
		ad := &broker.ClusterAdvertisement{Spec: broker.ClusterAdvertisementSpec{ClusterID: "paris", Region: region}}
		ad.Status.Holds = []broker.Hold{{ReservationUID: "r", ReservationName: "r", Requester: "rome", Promised: two, Granted: &two, Cost: &broker.Cost{CPUCost: "0.10", Currency: "EUR"}}}
		in := Input{
			Reservation: &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "r"}, Spec: broker.ReservationSpec{
				RequesterID: "rome", Budget: &broker.Budget{MaxPricePerHour: "1", Currency: "EUR"},
				Placement: &broker.Placement{DataRegions: []string{"eu"}, TransferPrice: &broker.TransferPrice{PricePerHour: "0.03", Currency: "EUR"}},
			}},
			Advertisements: []*broker.ClusterAdvertisement{ad}, Holders: []string{"paris"}, Active: map[string]bool{"paris": true},
		}
		if request, _ := (Plan{}).Request(in, two); request.Committed.Cmp(want) != 0 {
			t.Errorf("region %q: %s are committed, want %s", region, request.Committed, want)
		}
	}
}
