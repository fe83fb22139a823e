package ledger_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// placeLife places a hold and lets the provider accept it and then shrink it, so that its
// capacity stands in it three times.
func placeLife(status *broker.ClusterAdvertisementStatus, name string, sets ...broker.PodSet) error {
	uid := types.UID(fmt.Sprintf("%036s", name))
	_, err := ledger.Place(&broker.ClusterAdvertisementSpec{Cost: &broker.Cost{CPUCost: "0.25", MemoryCost: "0.05", Currency: "EUR"}, Resources: broker.AdvertisedResources{Allocatable: plenty}}, status, ledger.Growth{
		ReservationUID: uid, ReservationName: strings.Repeat("n", 53), Requester: strings.Repeat("r", 40), Attempt: 1, Capacity: capacity.OfPodSets(sets),
	})
	if err == nil {
		ledger.Confirm(status, uid, 1, true, nil)
		fewer := make([]broker.PodSet, len(sets))
		for i, set := range sets {
			set.Count--
			fewer[i] = set
		}
		ledger.Shrink(status, uid, 2, capacity.OfPodSets(fewer))
	}
	return err
}

var plenty = broker.FromList(expect.Resources("cpu", "1G", "memory", "1Ei", "ephemeral-storage", "1Ei"))

// ordinary is what most pods are.
var ordinary = broker.PodSet{Name: "web", Count: 100, Requests: broker.FromList(expect.Resources("cpu", "1500m", "memory", "1536Mi"))}

// largest has a node selector as long as the server allows.
func largest() broker.PodSet {
	set := *ordinary.DeepCopy()
	set.NodeSelector = map[string]string{}
	for i := range 100 {
		set.NodeSelector[fmt.Sprintf("example.com/%063d", i)] = strings.Repeat("v", 63)
	}
	return set
}

func encoded(t *testing.T, status *broker.ClusterAdvertisementStatus) int {
	t.Helper()
	text, err := json.Marshal(status.Holds)
	expect.NoError(t, err)
	return len(text)
}

func TestALedgerCarriesTheMaximumOfOrdinaryHolds(t *testing.T) {
	status := &broker.ClusterAdvertisementStatus{}
	for i := range 1000 {
		if err := placeLife(status, fmt.Sprint(i), ordinary); err != nil {
			t.Fatalf("hold %d: %v", i, err)
		}
	}
	size := ledger.SizeOf(&broker.ClusterAdvertisementSpec{}, status.Holds)
	if bytes := encoded(t, status); bytes > size.Bytes || bytes > ledger.MaxBytes {
		t.Errorf("the holds have %d bytes, counted as %d", bytes, size.Bytes)
	}
	small := broker.PodSet{Name: "p", Count: 1, Requests: broker.FromList(expect.Resources("cpu", "1m"))}
	for i := range 150 {
		fill(t, advertisement(0), status, fmt.Sprint("small-", i), 1, small)
	}
	if holds := len(status.Holds); holds > ledger.MaxHolds || holds < ledger.MaxHolds-10 {
		t.Errorf("%d holds after 1000 of %d bytes", holds, size.Bytes/1000)
	}
}

func TestLargeHoldsLeaveRoomForOrdinaryOnes(t *testing.T) {
	status := &broker.ClusterAdvertisementStatus{}
	var large, small int
	for i := range 40 {
		if placeLife(status, fmt.Sprint("large-", i), largest()) == nil {
			large++
		}
	}
	for i := range ledger.MaxHolds {
		if placeLife(status, fmt.Sprint("small-", i), ordinary) == nil {
			small++
		}
	}
	if large == 0 || large == 40 || small < 500 {
		t.Errorf("%d large holds and %d ordinary ones found room", large, small)
	}
	if size := encoded(t, status); size > ledger.SizeOf(&broker.ClusterAdvertisementSpec{}, status.Holds).Bytes || size > ledger.MaxBytes {
		t.Errorf("the holds have %d bytes, counted as %d", size, ledger.SizeOf(&broker.ClusterAdvertisementSpec{}, status.Holds).Bytes)
	}
}
