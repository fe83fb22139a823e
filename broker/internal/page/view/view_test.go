package view_test

import (
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/page/view"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var now = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

func amounts(pairs ...string) broker.ResourceQuantities {
	return broker.FromList(expect.Resources(pairs...))
}

// paris lends 6 of its 10 cores to rome, of which guests use 3, and runs pods of its own on 2.
func paris() *broker.ClusterAdvertisement {
	return &broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{Name: "paris"},
		Spec: broker.ClusterAdvertisementSpec{
			ClusterID: "paris", ClusterName: "Paris", Region: "fr", Zone: "fr-1", Lending: broker.Lending{Enabled: true},
			Resources: broker.AdvertisedResources{
				Capacity: amounts("cpu", "12", "memory", "48Gi"), Allocatable: amounts("cpu", "10", "memory", "40Gi"), Allocated: amounts("cpu", "2", "memory", "8Gi"),
			},
			ObservedHolds: []broker.ObservedHold{{Requester: "rome", Used: amounts("cpu", "3", "memory", "6Gi"), Pods: 3}},
			Cost:          &broker.Cost{CPUCost: "0.05", MemoryCost: "0.01", Currency: "EUR"},
			NodeClasses:   []broker.NodeClass{{Name: "spot", Cost: &broker.Cost{CPUCost: "0.01", Currency: "EUR"}}},
		},
		Status: broker.ClusterAdvertisementStatus{
			Active: true, Reserved: amounts("cpu", "6", "memory", "12Gi"), Available: amounts("cpu", "2", "memory", "20Gi"),
			Holds: []broker.Hold{
				{ReservationName: "a", Requester: "rome", Promised: broker.HeldCapacity{Totals: amounts("cpu", "4", "memory", "8Gi")}, Cost: &broker.Cost{CPUCost: "0.05", MemoryCost: "0.01", Currency: "EUR"}},
				{ReservationName: "b", Requester: "rome", Promised: broker.HeldCapacity{Totals: amounts("cpu", "2", "memory", "4Gi")}},
			},
		},
	}
}

func snapshot(ads ...*broker.ClusterAdvertisement) view.Snapshot {
	return view.Snapshot{Now: now, Clusters: ads, Heard: map[string]time.Time{"paris": now.Add(-12 * time.Second)}, MaxPriority: 1000}
}

func TestClusters(t *testing.T) {
	quiet := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Name: "berlin"}, Spec: broker.ClusterAdvertisementSpec{ClusterID: "berlin", ClusterName: "berlin"}}
	got := view.OfClusters(snapshot(quiet, paris()), 1)
	want := view.Clusters{
		Paging: view.Paging{Page: 1, Pages: 1, First: 1, Last: 2, Total: 2},
		Totals: view.Totals{
			Clusters: 2, Active: 1, Providers: 1, Price: "0.28 EUR + unknown",
			Resources: []view.Usage{
				{Resource: "CPU cores", Capacity: "10", Own: "2", Lent: "6", Used: "3", Free: "2", Bar: []view.Part{{"own", 0, 20}, {"used", 20, 30}, {"lent", 50, 30}, {"free", 80, 20}}},
				{Resource: "memory", Capacity: "40 GiB", Own: "8 GiB", Lent: "12 GiB", Used: "6 GiB", Free: "20 GiB", Bar: []view.Part{{"own", 0, 20}, {"used", 20, 15}, {"lent", 35, 15}, {"free", 50, 50}}},
			},
		},
	}
	want.Rows = []view.Cluster{
		{ID: "berlin", State: "not heard"},
		{
			ID: "paris", Name: "Paris", Where: "fr, fr-1", State: "active", Good: true, Heard: &view.Moment{At: "2026-11-28T11:59:48Z", Age: "12 s ago"},
			Resources: want.Totals.Resources, Price: []string{"0.05 EUR a core", "0.01 EUR a GiB", "some nodes have other prices"},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A cluster may say anything: its bar stays within its length.
func TestAbsurdFigures(t *testing.T) {
	for _, edit := range []func(ad *broker.ClusterAdvertisement){
		func(ad *broker.ClusterAdvertisement) { ad.Spec.Resources.Allocatable = amounts("cpu", "1m") },
		func(ad *broker.ClusterAdvertisement) { ad.Spec.Resources.Allocated = amounts("cpu", "1e18") },
		func(ad *broker.ClusterAdvertisement) { ad.Spec.ObservedHolds[0].Used = amounts("cpu", "1e18") },
		func(ad *broker.ClusterAdvertisement) { ad.Spec.Resources.Allocatable = amounts("cpu", "-1") },
		func(ad *broker.ClusterAdvertisement) { ad.Status.Available = amounts("cpu", "1e18") },
	} {
		ad := paris()
		edit(ad)
		for _, resource := range view.OfClusters(snapshot(ad), 1).Rows[0].Resources {
			at := 0.0
			for _, part := range resource.Bar {
				if part.From < at-1e-6 || part.Of < 0 || part.From+part.Of > 100+1e-6 {
					t.Errorf("%s: %+v", resource.Resource, resource.Bar)
				}
				at = part.From + part.Of
			}
		}
	}
}

func TestFlows(t *testing.T) {
	got := view.OfFlows(snapshot(paris()), 1)
	want := []view.Flow{{
		Consumer: "rome", Provider: "paris", Holds: 2, Guests: 3, Promised: "CPU 6, memory 12 GiB", Used: "CPU 3, memory 6 GiB", Price: "0.28 EUR + unknown",
	}}
	if diff := cmp.Diff(want, got.Rows, cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".cpu" }, cmp.Ignore())); diff != "" {
		t.Error(diff)
	}
	lines := []view.Line{{Y1: 18, Y2: 18, Width: 24, Text: "rome runs 3 pods in paris: CPU 6, memory 12 GiB"}}
	if diff := cmp.Diff(view.Diagram{Height: 36, Left: []view.Label{{"rome", 18}}, Right: []view.Label{{"paris", 18}}, Lines: lines, Shown: 1}, got.Diagram); diff != "" {
		t.Error(diff)
	}
}

// A provider may say anything of its guests, and of itself.
func TestFalseWords(t *testing.T) {
	ad := paris()
	ad.Spec.ClusterName, ad.Spec.Region, ad.Spec.Zone = strings.Repeat("p", 64), "fr\u202e\n", "fr"
	ad.Spec.ObservedHolds = append(ad.Spec.ObservedHolds, broker.ObservedHold{Requester: "nowhere", Pods: 1}, broker.ObservedHold{Requester: "rome", Pods: -9})
	if got := view.OfFlows(snapshot(ad), 1).Rows; len(got) != 1 || got[0].Guests != 3 {
		t.Errorf("%+v", got)
	}
	if got := view.OfClusters(snapshot(ad), 1).Rows[0]; len(got.Name) != 63 || got.Where != "fr" {
		t.Errorf("%+v", got)
	}
}

// TestFree: only what a cluster that is heard lends is free for others.
func TestFree(t *testing.T) {
	silent, selfish := paris(), paris()
	silent.Status.Active, selfish.Spec.Lending.Enabled = false, false
	if got := view.OfClusters(snapshot(silent, selfish, paris()), 1).Totals.Resources[0]; got.Free != "2" || got.Capacity != "30" {
		t.Errorf("%+v", got)
	}
}

// Of many flows, the diagram has the largest, and the table all, in pages.
func TestManyFlows(t *testing.T) {
	ad := paris()
	ad.Status.Holds = nil
	for i := range 150 {
		ad.Status.Holds = append(ad.Status.Holds, broker.Hold{Requester: fmt.Sprintf("c-%03d", i), Promised: broker.HeldCapacity{Totals: amounts("cpu", fmt.Sprint(i))}})
	}
	rome := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Name: "rome"}}
	got := view.OfFlows(snapshot(ad, rome), 2)
	if len(got.Rows) != 51 || got.Rows[0].Consumer != "c-049" || got.Before != 1 || got.After != 0 || got.Total != 151 {
		t.Errorf("%d rows, %+v, the first is %+v", len(got.Rows), got.Paging, got.Rows[0])
	}
	if d := got.Diagram; len(d.Lines) != 12 || d.OutOfFlow != 139 || d.Left[0].Name != "c-149" {
		t.Errorf("%+v", d)
	}
}

// queued is a Reservation of rome that waits.
func queued(name string, priority int32, age time.Duration) *broker.Reservation {
	return &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(now.Add(-age)),
			Annotations: map[string]string{broker.LabelSourceName: "web", broker.LabelSourceNamespace: "shop"},
		},
		Spec: broker.ReservationSpec{RequesterID: "rome", Priority: priority, PodSets: []broker.PodSet{{Name: "pods", Count: 3, Requests: amounts("cpu", "500m"), NodeSelector: map[string]string{"disk": "ssd"}}}},
		Status: broker.ReservationStatus{
			Phase: broker.ReservationPending, Granted: broker.NothingGranted,
			Conditions: []metav1.Condition{
				{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: "InsufficientCapacity", Message: "No provider has room.", LastTransitionTime: metav1.NewTime(now.Add(-age + time.Second))},
				{Type: broker.ConditionReady, Status: metav1.ConditionFalse, Reason: "InsufficientCapacity", Message: "No provider has room.", LastTransitionTime: metav1.NewTime(now.Add(-age + time.Second))},
			},
			Decision: &broker.Decision{
				Scores:          []broker.ClusterScore{{Cluster: "paris", Score: "61.20"}},
				Rejections:      []broker.ClusterRejection{{Cluster: "berlin", Reason: "OverBudget", Message: "The price is 2 EUR."}, {Cluster: "paris", Reason: "InsufficientCapacity", Message: "1 core is free."}},
				RejectionCounts: []broker.RejectionCount{{Reason: "OtherRegion", Count: 7}},
			},
		},
	}
}

func TestQueue(t *testing.T) {
	running := queued("running", 0, time.Hour)
	running.Status.Conditions[0].Status = metav1.ConditionFalse
	deleted := queued("deleted", 0, time.Hour)
	deleted.DeletionTimestamp = &metav1.Time{Time: now}
	s := snapshot()
	s.Reservations = []*broker.Reservation{
		queued("young", 0, time.Minute), queued("old", 0, 3*time.Minute), running, deleted,
		// Above the highest priority that counts, the age decides.
		queued("greedy", 1_000_000, 2*time.Minute), queued("important", 1000, 5*time.Minute),
	}
	got := view.OfQueue(s, 1)
	var names []string
	for _, row := range got.Rows {
		names = append(names, row.Name)
	}
	if diff := cmp.Diff([]string{"important", "greedy", "old", "young"}, names); diff != "" {
		t.Fatal(diff)
	}
	if diff := cmp.Diff(view.Waiting{
		Position: 3, Name: "old", Consumer: "rome", Owner: "shop/web", Wanted: "3 pods", Granted: "none", Since: &view.Moment{At: "2026-11-28T11:57:00Z", Age: "3 min ago"},
		Reason: "InsufficientCapacity", Message: "No provider has room.", Fix: "Wait: the capacity is requested again when it appears. Or request less, or add nodes to a provider.",
	}, got.Rows[2]); diff != "" {
		t.Error(diff)
	}
}

func TestReservations(t *testing.T) {
	s := snapshot()
	for i := range 10_000 {
		s.Reservations = append(s.Reservations, queued(fmt.Sprintf("web-%05d", i), 0, time.Duration(i)*time.Second))
	}
	began := time.Now()
	got := view.OfReservations(s, "", 1_000_000)
	t.Logf("a page of 10,000 took %s", time.Since(began))
	if len(got.Rows) != view.PageSize || got.Page != 100 || got.Rows[99].Name != "web-09999" || got.After != 0 || got.Before != 99 {
		t.Errorf("%d rows, %+v", len(got.Rows), got.Paging)
	}
	if got = view.OfReservations(s, " WEB-0999", -1); len(got.Rows) != 10 || got.Filter != "web-0999" || got.Rows[0].Name != "web-09990" {
		t.Errorf("%d rows, %+v", len(got.Rows), got.Paging)
	}
	if got = view.OfReservations(s, "nowhere", 1); len(got.Rows) != 0 || got.Total != 0 || got.First != 0 {
		t.Errorf("%+v", got)
	}
}

func TestReservation(t *testing.T) {
	r := queued("web", 5, time.Hour)
	r.Spec.MinAvailable = 2
	r.Spec.Budget = &broker.Budget{MaxPricePerHour: "0.25", Currency: "EUR"}
	r.Spec.Deadline = &metav1.Duration{Duration: 10 * time.Minute}
	r.Status.Attempt = broker.Attempt{Number: 2, Clusters: []string{"paris"}}
	r.Status.Allocations = []broker.Allocation{{Cluster: "paris", Resources: amounts("cpu", "1"), PodSets: []broker.PodSet{{Count: 2}}, PricePerHour: "0.05 EUR", Accepted: true}}
	r.Status.Withdrawals = []broker.Withdrawal{{Cluster: "paris", LeaveWithin: metav1.Duration{Duration: 10 * time.Minute}}}
	r.Status.ReservedAt = &metav1.Time{Time: now.Add(-30 * time.Minute)}
	r.Status.ExpiresAt = &metav1.Time{Time: now.Add(30 * time.Minute)}
	r.Status.Summary = "2 of 3 pods in paris"
	s := snapshot()
	got := view.OfReservation(s, r)
	var steps []string
	for _, step := range got.Steps {
		steps = append(steps, strings.Join([]string{step.At.Age, step.What, step.Reason, step.Message}, "|"))
	}
	if diff := cmp.Diff([]string{
		"60 min ago|Requested||By rome, for shop/web.",
		"59 min ago|Waits for capacity|InsufficientCapacity|No provider has room.",
		"59 min ago|Cannot be used in full|InsufficientCapacity|No provider has room.",
		"30 min ago|Capacity held||",
		"in 30 min|The lease ends||About then, unless pods use the capacity.",
	}, steps); diff != "" {
		t.Error(diff)
	}
	if last := got.Steps[len(got.Steps)-1]; !last.Later || !got.Steps[1].Bad || !got.Steps[3].Good {
		t.Errorf("%+v", got.Steps)
	}
	if diff := cmp.Diff([]view.Allocation{{Cluster: "paris", Amount: "2 pods: CPU 1", Price: "0.05 EUR", Accepted: true, Leave: "10 min"}}, got.Allocations); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]view.Score{{"paris", "61.20", 61.2, true}}, got.Scores); diff != "" {
		t.Error(diff)
	}
	if len(got.Rejections) != 2 || got.Rejections[0].Fix == "" || got.Others[0].Count != 7 || got.PodSets[0].Selects != "disk=ssd" {
		t.Errorf("%+v", got)
	}
	for _, fact := range []view.Fact{{"Priority", "5"}, {"Of use from", "2 pods"}, {"Budget", "0.25 EUR an hour"}, {"Waits at most", "10 min"}, {"Attempt", "2: paris"}} {
		if !slices.Contains(got.Facts, fact) {
			t.Errorf("no %+v in %+v", fact, got.Facts)
		}
	}

	// What has ended as it should is not bad.
	ended := queued("ended", 0, time.Hour)
	ended.Status.Conditions = []metav1.Condition{{Type: broker.ConditionReady, Status: metav1.ConditionFalse, Reason: broker.ReasonReleased, LastTransitionTime: metav1.NewTime(now)}}
	if step := view.OfReservation(s, ended).Steps[1]; step.Good || step.Bad || step.Reason != broker.ReasonReleased {
		t.Errorf("%+v", step)
	}

	// One that is deleted grants nothing any more.
	r.DeletionTimestamp = &metav1.Time{Time: now}
	if got = view.OfReservation(s, r); got.Phase != "Released" || len(got.Allocations) != 0 || got.Steps[len(got.Steps)-1].Later {
		t.Errorf("%+v", got)
	}
}

func TestFigures(t *testing.T) {
	for _, c := range []struct{ name, amount, title, want string }{
		{"cpu", "1500m", "CPU cores", "1.5"}, {"cpu", "333m", "CPU cores", "0.33"}, {"cpu", "12345m", "CPU cores", "12.3"},
		{"cpu", "1234567m", "CPU cores", "1235"}, {"cpu", "100", "CPU cores", "100"}, {"memory", "512Mi", "memory", "0.5 GiB"},
		{"memory", "100Gi", "memory", "100 GiB"}, {"nvidia.com/gpu", "4", "GPUs", "4"}, {"example.com/fpga", "2", "example.com/fpga", "2"},
	} {
		ad := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Name: "paris"}}
		ad.Spec.Resources.Allocatable = amounts(c.name, c.amount)
		if got := view.OfClusters(snapshot(ad), 1).Rows[0].Resources[0]; got.Capacity != c.want || got.Resource != c.title {
			t.Errorf("%s of %s is %+v", c.amount, c.name, got)
		}
	}
}

func TestHistory(t *testing.T) {
	cores := func(hours int64) history.Amount {
		return history.Amount{corev1.ResourceCPU: big.NewInt(hours * capacity.Unit * time.Hour.Milliseconds())}
	}
	row := func(day, consumer, provider, currency string, promised, used int64, cost *big.Rat) history.UsageRow {
		return history.UsageRow{
			UsageKey: history.UsageKey{Period: day, Requester: consumer, Provider: provider, Currency: currency},
			Sum:      history.Sum{Promised: cores(promised), Used: cores(used), Cost: cost},
		}
	}
	rows := []history.UsageRow{
		row("2026-11-28", "rome", "paris", "EUR", 30, 15, big.NewRat(3, 2)),
		row("2026-11-27", "rome", "paris", "EUR", 10, 20, big.NewRat(1, 2)),
		row("2026-11-27", "rome", "berlin", "", 5, 0, nil),
		row("2026-11-22", "oslo", "paris", "USD", 60, 60, big.NewRat(2, 1)),
	}
	ended := history.Page{Continue: "more", Records: []history.Record{
		{
			Name: "web", Requester: "rome", Namespace: "shop", Owner: "web", Requested: "5 pods", Reason: "Deleted", Asked: now.Add(-3 * time.Hour), Ended: now.Add(-time.Hour),
			Shares: map[string]history.Share{
				"paris": {
					Why: "score 61.20", Most: capacity.Floor(expect.Resources("cpu", "5")), Granted: now.Add(-3 * time.Hour), FirstUsed: now.Add(-2 * time.Hour), Released: now.Add(-time.Hour),
					Total: history.Sum{Promised: cores(10), Used: cores(5), Cost: big.NewRat(1, 2)}, PricePerHour: big.NewRat(1, 6), Currency: "EUR",
				},
				"rome": {PricePerHour: big.NewRat(1, 6), Currency: "EUR"},
			},
		},
		{Name: "idle", Requester: "rome", Ended: now.Add(-2 * time.Hour), Shares: map[string]history.Share{"berlin": {Total: history.Sum{Cost: new(big.Rat)}}}},
	}}
	got := view.OfHistory(now, 7, rows, ended, &broker.Cost{CPUCost: "0.1125", Currency: "EUR"})
	if got.Hours != "105" || got.Used != "90 %" || got.Cost != "2.00 EUR + 2.00 USD + unknown" || got.Saved != "2.50 EUR" || got.Next != "more" {
		t.Errorf("%+v", got)
	}
	if diff := cmp.Diff([]view.Pair{
		{"oslo", "paris", "60", "100 %", "2.00 USD"}, {"rome", "paris", "40", "88 %", "2.00 EUR"}, {"rome", "berlin", "5", "0 %", "unknown"},
	}, got.Pairs); diff != "" {
		t.Error(diff)
	}
	if c := got.Use; len(c.Bars) != 3 || c.Highest != "60" || c.First != "2026-11-22" || c.Last != "2026-11-28" || c.Bars[0].Height != 100 || c.Bars[2].Height != 50 || c.Bars[2].HeightOfUsed != 25 || c.Bars[1].HeightOfUsed > c.Bars[1].Height || c.Bars[2].Text != "2026-11-28: 30" {
		t.Errorf("%+v", c)
	}
	if len(got.Costs) != 2 || got.Costs[0].Title != "Cost a day in EUR" || got.Costs[0].Highest != "1.5" {
		t.Errorf("%+v", got.Costs)
	}
	if diff := cmp.Diff(view.ShareRow{
		Provider: "paris", Why: "score 61.20", Most: "CPU 5", Hours: "10", Used: "50 %", Cost: "0.50 EUR", Granted: &view.Moment{At: "2026-11-28T09:00:00Z", Age: "3 h ago"},
		FirstUsed: &view.Moment{At: "2026-11-28T10:00:00Z", Age: "2 h ago"}, Released: &view.Moment{At: "2026-11-28T11:00:00Z", Age: "60 min ago"},
	}, got.Rows[0].Shares[0]); diff != "" {
		t.Error(diff)
	}
	if row := got.Rows[0]; row.Consumer != "rome" || row.Owner != "shop/web" || len(row.Shares) != 2 || row.Shares[1].Provider != "rome" || row.Shares[1].Cost != "0.00 EUR" {
		t.Errorf("%+v", row)
	}
	if idle := got.Rows[1]; idle.Owner != "made by hand" || idle.Asked != nil || idle.Shares[0].Cost != "unknown" || idle.Shares[0].Used != "–" {
		t.Errorf("%+v", idle)
	}
	if none := view.OfHistory(now, 365, nil, history.Page{}, nil); none.Cost != "–" || none.Used != "–" || len(none.Use.Bars) != 0 {
		t.Errorf("%+v", none)
	}
}
