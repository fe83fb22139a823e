package queue_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/queue"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var start = time.Unix(1_000_000, 0)

func entry(name string, priority int32, age int, want broker.HeldCapacity) queue.Entry {
	return queue.Entry{
		Name: name, UID: types.UID(name), Priority: priority, Created: start.Add(-time.Duration(age) * time.Second),
		Request: decide.Request{Requester: "rome", Want: want},
	}
}

func pods(count int32, cpu string, change ...func(*broker.PodSet)) broker.HeldCapacity {
	set := broker.PodSet{Name: "pods", Count: count, Requests: broker.FromList(expect.Resources("cpu", cpu))}
	for _, f := range change {
		f(&set)
	}
	return capacity.OfPodSets([]broker.PodSet{set})
}

func names(entries []*queue.Entry) []string {
	out := []string{}
	for _, e := range entries {
		out = append(out, e.Name)
	}
	return out
}

func any(*queue.Entry) bool { return true }

func TestOrder(t *testing.T) {
	q := queue.New()
	q.Set(entry("young", 0, 1, pods(1, "1")))
	q.Set(entry("old", 0, 9, pods(1, "1")))
	q.Set(entry("urgent", 5, 0, pods(1, "1")))
	q.Set(entry("low", -5, 99, pods(1, "1")))
	if got := names(q.First(9, any)); !slices.Equal(got, []string{"urgent", "old", "young", "low"}) {
		t.Errorf("the order is %v", got)
	}
	if got := q.Position(entry("new", 0, 0, pods(1, "1"))); got != 4 {
		t.Errorf("a new one is number %d", got)
	}
	if got := names(q.Ahead(entry("young", 0, 1, pods(1, "1")))); !slices.Equal(got, []string{"urgent", "old"}) {
		t.Errorf("ahead of young: %v", got)
	}
	// A raised priority replaces the entry.
	q.Set(entry("low", 9, 99, pods(1, "1")))
	if !q.Remove("urgent") || q.Remove("urgent") || q.Len() != 3 || q.First(1, any)[0].Name != "low" {
		t.Errorf("after the changes: %v", names(q.First(9, any)))
	}
}

// TestQueueIsSorted: whatever happened, the queue has each name once, in order.
func TestQueueIsSorted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q, want := queue.New(), map[string]queue.Entry{}
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			name := fmt.Sprint(rapid.IntRange(0, 9).Draw(t, "name"))
			if rapid.Bool().Draw(t, "remove") {
				q.Remove(name)
				delete(want, name)
				continue
			}
			e := entry(name, rapid.Int32Range(-1, 1).Draw(t, "priority"), rapid.IntRange(0, 2).Draw(t, "age"), pods(1, "1"))
			q.Set(e)
			want[name] = e
		}
		got := q.First(99, any)
		if len(got) != len(want) || q.Len() != len(want) {
			t.Fatalf("%d entries, want %d", len(got), len(want))
		}
		for i, e := range got {
			if before := len(q.Ahead(*e)); before != i || q.Position(*e) != i+1 || want[e.Name].Priority != e.Priority {
				t.Fatalf("%s is number %d with %d ahead", e.Name, i, before)
			}
		}
	})
}

func cluster(cpu string) *broker.ClusterAdvertisementSpec {
	return &broker.ClusterAdvertisementSpec{
		ClusterID: "paris", Lending: broker.Lending{Enabled: true},
		Resources:   broker.AdvertisedResources{Allocatable: broker.FromList(expect.Resources("cpu", cpu))},
		NodeClasses: []broker.NodeClass{{Name: "std", Labels: map[string]string{"disk": "ssd"}}},
	}
}

func TestClaims(t *testing.T) {
	for name, tc := range map[string]struct {
		want     broker.HeldCapacity
		eligible bool
		claimed  int32
	}{
		"what a large one waits for stays free":             {pods(1, "10"), true, 1},
		"no more than the cluster could take":               {pods(9, "10"), true, 1},
		"nothing if it is too large for the cluster":        {pods(1, "17"), true, 0},
		"nothing if it may not go there":                    {pods(1, "10"), false, 0},
		"nothing if no node matches":                        {pods(1, "10", func(s *broker.PodSet) { s.NodeSelector = map[string]string{"disk": "hdd"} }), true, 0},
		"what matches stays free":                           {pods(1, "10", func(s *broker.PodSet) { s.NodeSelector = map[string]string{"disk": "ssd"} }), true, 1},
		"of many pods as many as fit in the empty cluster":  {pods(100, "2"), true, 8},
		"of pods that request nothing as many as there are": {pods(3, "0"), true, 3},
	} {
		t.Run(name, func(t *testing.T) {
			head := entry("head", 0, 9, tc.want)
			claims := queue.Claims([]*queue.Entry{&head}, cluster("16"), capacity.Floor(expect.Resources("cpu", "4")), pods(1, "100m"), func(*queue.Entry, *broker.ClusterAdvertisementSpec) bool { return tc.eligible })
			var got int32
			for _, claim := range claims {
				got += claim.Promised.Pods()
			}
			if got != tc.claimed {
				t.Errorf("%d pods are kept free, want %d", got, tc.claimed)
			}
		})
	}
}

func TestClaimsEnd(t *testing.T) {
	var ahead []*queue.Entry
	for i := range 9 {
		e := entry(fmt.Sprint(i), 0, 9-i, pods(1, "1"))
		ahead = append(ahead, &e)
	}
	all := func(*queue.Entry, *broker.ClusterAdvertisementSpec) bool { return true }
	for available, want := range map[string]int{"0": 0, "50m": 0, "4": 4, "16": 9} {
		if got := len(queue.Claims(ahead, cluster("16"), capacity.Floor(expect.Resources("cpu", available)), pods(1, "100m"), all)); got != want {
			t.Errorf("%d claims on %s, want %d", got, available, want)
		}
	}
}

func TestProfits(t *testing.T) {
	available := capacity.Floor(expect.Resources("cpu", "50m"))
	if queue.Profits(pods(5, "100m"), available) || !queue.Profits(pods(5, "50m"), available) {
		t.Error("want those that fit a pod in 50m, and only those")
	}
	total := broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", "60m"))}
	if queue.Profits(total, available) {
		t.Error("a divisible total is placed as a whole")
	}
}
