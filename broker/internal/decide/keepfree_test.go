package decide_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

func selecting(request decide.Request, disk string) decide.Request {
	sets := slices.Clone(request.Want.PodSets)
	sets[0].NodeSelector = map[string]string{"disk": disk}
	request.Want = capacity.OfPodSets(sets)
	return request
}

// What can be placed one day is judged by nodes, not by the sum of a cluster.
func TestCouldTake(t *testing.T) {
	total := func(text string) decide.Request {
		return decide.Request{Requester: "rome", Want: broker.HeldCapacity{Totals: amounts(text)}}
	}
	four := []clusterOption{totals("cpu=16", ""), shapes(4, "cpu=4", 100), class(func(c *broker.NodeClass) { c.Labels = map[string]string{"disk": "ssd"} })}
	paris := func(more ...clusterOption) oracleCluster { return cluster("paris", slices.Concat(four, more)...) }
	small := func(n int) (clusters []oracleCluster) {
		for i := range n {
			clusters = append(clusters, cluster(fmt.Sprintf("c%02d", i), totals("cpu=4", ""), shapes(1, "cpu=4", 9)))
		}
		return clusters
	}
	largest := func(text string) clusterOption {
		return class(func(c *broker.NodeClass) { largest := amounts(text); c.LargestNode = &largest })
	}
	for name, tc := range map[string]struct {
		request  decide.Request
		pods     int32
		clusters []oracleCluster
		want     bool
	}{
		"a pod that fits a node":                          {pods(1, "cpu=4"), 0, []oracleCluster{paris()}, true},
		"a pod larger than any node":                      {pods(1, "cpu=5"), 0, []oracleCluster{paris()}, false},
		"the cluster's own pods stay":                     {pods(1, "cpu=4"), 0, []oracleCluster{cluster("paris", totals("cpu=16", "cpu=13"), shapes(4, "cpu=4", 100))}, false},
		"what others hold may end":                        {pods(1, "cpu=4"), 0, []oracleCluster{paris(holds("oslo", 4, "cpu=4"))}, true},
		"guests may end":                                  {pods(1, "cpu=4"), 0, []oracleCluster{cluster("paris", totals("cpu=16", ""), shapes(4, "cpu=1", 9), guests("oslo", 4, "cpu=12"))}, true},
		"but no node becomes larger than it is":           {pods(1, "cpu=5"), 0, []oracleCluster{cluster("paris", totals("cpu=16", ""), shapes(4, "cpu=1", 9), guests("oslo", 4, "cpu=12"), largest("cpu=4"))}, false},
		"without that figure guests may be on one node":   {pods(1, "cpu=5"), 0, []oracleCluster{cluster("paris", totals("cpu=16", ""), shapes(4, "cpu=1", 9), guests("oslo", 4, "cpu=12"))}, true},
		"no node matches":                                 {selecting(pods(1, "cpu=4"), "hdd"), 0, []oracleCluster{paris()}, false},
		"no node matches beside guests":                   {selecting(pods(1, "cpu=1"), "hdd"), 0, []oracleCluster{paris(guests("oslo", 1, "cpu=1"))}, false},
		"a node matches":                                  {selecting(pods(1, "cpu=4"), "ssd"), 0, []oracleCluster{paris()}, true},
		"a part of many":                                  {pods(100, "cpu=4"), 0, []oracleCluster{paris()}, true},
		"a gang within one cluster":                       {pods(4, "cpu=4"), 4, []oracleCluster{paris()}, true},
		"a gang within two clusters":                      {pods(5, "cpu=4"), 5, []oracleCluster{paris(), cluster("berlin", four...)}, true},
		"a gang larger than all clusters":                 {pods(9, "cpu=4"), 9, []oracleCluster{paris(), cluster("berlin", four...)}, false},
		"a gang larger than those that may be chosen":     {with(pods(5, "cpu=4"), func(r *decide.Request) { r.Pin = "paris" }), 5, []oracleCluster{paris(), cluster("berlin", four...)}, false},
		"a gang larger than those that advertise":         {pods(5, "cpu=4"), 5, []oracleCluster{paris(), cluster("berlin", append(four, func(c *oracleCluster) { c.Active = false })...)}, false},
		"an old advertisement counts":                     {pods(1, "cpu=4"), 0, []oracleCluster{paris(func(c *oracleCluster) { c.Fresh = false })}, true},
		"a divisible total over nodes":                    {total("cpu=16"), 0, []oracleCluster{paris()}, true},
		"no divisible total over clusters":                {total("cpu=17"), 0, []oracleCluster{paris(), cluster("berlin", four...)}, false},
		"a divisible total beside guests":                 {total("cpu=16"), 0, []oracleCluster{paris(guests("oslo", 1, "cpu=1"))}, true},
		"pods that request nothing":                       {pods(3, "cpu=0"), 3, []oracleCluster{paris()}, true},
		"no cluster":                                      {pods(1, "cpu=1"), 0, nil, false},
		"the requester's own":                             {with(pods(1, "cpu=1"), func(r *decide.Request) { r.Requester = "paris" }), 0, []oracleCluster{paris()}, false},
		"a gang at as many providers as one may have":     {pods(decide.MaxProviders, "cpu=4"), decide.MaxProviders, small(decide.MaxProviders + 9), true},
		"a gang at more providers than one may have":      {pods(decide.MaxProviders+1, "cpu=4"), decide.MaxProviders + 1, small(decide.MaxProviders + 9), false},
		"a gang of more pods than the nodes' slots allow": {pods(5, "cpu=1"), 5, []oracleCluster{cluster("paris", totals("cpu=16", ""), shapes(4, "cpu=4", 1))}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := snapshotOf(tc.clusters).CouldTake(tc.request, tc.pods); got != tc.want {
				t.Errorf("could be placed is %t", got)
			}
		})
	}
}

// What stays free is what the first request could take, and no more.
func TestKeepFree(t *testing.T) {
	paris := cluster("paris", totals("cpu=16", ""), shapes(4, "cpu=4", 100))
	first := func(r decide.Request) *decide.Request { return &r }
	for name, tc := range map[string]struct {
		first    *decide.Request
		rejected map[string]capacity.Rejection
		cpus     int32
	}{
		"none":                        {nil, nil, 16},
		"one pod":                     {first(pods(1, "cpu=3")), nil, 13},
		"as many as fit of many":      {first(pods(100, "cpu=3")), nil, 4},
		"nothing for what never fits": {first(pods(9, "cpu=5")), nil, 16},
		"nothing where it may not be placed now": {first(pods(4, "cpu=4")), map[string]capacity.Rejection{"paris": {Reason: decide.ReasonRefused}},
			16},
		"nothing where it is pinned elsewhere": {first(with(pods(4, "cpu=4"), func(r *decide.Request) { r.Pin = "berlin" })), nil, 16},
		"nothing where no node matches":        {first(selecting(pods(4, "cpu=4"), "ssd")), nil, 16},
		"all":                                  {first(pods(4, "cpu=4")), nil, 0},
		"a divisible total":                    {first(decide.Request{Requester: "rome", Want: broker.HeldCapacity{Totals: amounts("cpu=6")}}), nil, 10},
	} {
		t.Run(name, func(t *testing.T) {
			decision := decide.Choose(pods(16, "cpu=1"), snapshotOf([]oracleCluster{paris}).KeepFree(tc.first, tc.rejected))
			if got := decision.Placement.Pods(); got != tc.cpus {
				t.Errorf("%d pods of one cpu fit, want %d", got, tc.cpus)
			}
		})
	}
}

// TestKeepFreeRemembers: what was computed for other requests and other versions of the
// clusters never changes a decision.
func TestKeepFreeRemembers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := world{t}
		var store decide.Store
		var clusters []oracleCluster
		for i := range 5 {
			clusters = append(clusters, w.cluster(i))
			store.Upsert(&clusters[i].Spec, clusters[i].Holds)
		}
		var queue []*decide.Request
		for range 3 {
			r := w.request()
			queue = append(queue, &r)
		}
		for range rapid.IntRange(1, 10).Draw(t, "steps") {
			if w.of("step", "cluster", "other request") == "cluster" {
				i := rapid.IntRange(0, 4).Draw(t, "cluster")
				clusters[i] = w.cluster(i)
				store.Upsert(&clusters[i].Spec, clusters[i].Holds)
			}
			rejected := map[string]capacity.Rejection{w.of("refusing", "none", "c01", "c02"): {Reason: decide.ReasonRefused}}
			request, first := w.request(), queue[rapid.IntRange(0, 2).Draw(t, "first")]
			var fresh decide.Store
			for i := range clusters {
				fresh.Upsert(&clusters[i].Spec, clusters[i].Holds)
			}
			want := decide.Choose(request, fresh.Snapshot(nil).KeepFree(first, rejected))
			got := decide.Choose(request, store.Snapshot(nil).KeepFree(first, rejected))
			if want.Cluster != got.Cluster || want.Complete != got.Complete {
				t.Fatalf("chose %s, complete %t; want %s, %t", got.Cluster, got.Complete, want.Cluster, want.Complete)
			}
			if diff := cmp.Diff(want.Placement, got.Placement); diff != "" {
				t.Fatalf("placement (-want +got)\n%s", diff)
			}
		}
	})
}

// A decision computes no claim that an earlier one has computed: the cost grows with what
// changes, not with the clusters.
func TestClaimsAreComputedOnce(t *testing.T) {
	var store decide.Store
	for i := range 100 {
		c := cluster(fmt.Sprintf("c%02d", i), totals("cpu=1000", ""), shapes(100, "cpu=10", 100))
		store.Upsert(&c.Spec, c.Holds)
	}
	first := pods(1, "cpu=9")
	keep := func() { store.Snapshot(nil).KeepFree(&first, nil) }
	keep()
	if allocations := testing.AllocsPerRun(10, keep); allocations > 10 {
		t.Errorf("%v allocations for 100 clusters without a change", allocations)
	}
}

// BenchmarkQueue measures a decision behind a request that waits, in 100 clusters of which one
// changes each time.
func BenchmarkQueue(b *testing.B) {
	for name, cpu := range map[string]string{"placeable": "cpu=8", "unplaceable": "cpu=11"} {
		b.Run(name, func(b *testing.B) {
			var store decide.Store
			random := rand.New(rand.NewPCG(1, 2))
			var changed oracleCluster
			for i := range 100 {
				changed = cluster(fmt.Sprintf("c%03d", i), totals("cpu=1000", ""), shapes(random.Int32N(20)+1, "cpu=10", 100))
				store.Upsert(&changed.Spec, changed.Holds)
			}
			first, request := pods(20, cpu), pods(1, "cpu=1")
			for b.Loop() {
				store.Upsert(&changed.Spec, changed.Holds)
				decide.Choose(request, store.Snapshot(nil).KeepFree(&first, nil))
			}
		})
	}
}
