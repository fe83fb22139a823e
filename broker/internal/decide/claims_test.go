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

func everywhere(int, string) bool { return true }

func selecting(request decide.Request, disk string) decide.Request {
	sets := slices.Clone(request.Want.PodSets)
	sets[0].NodeSelector = map[string]string{"disk": disk}
	request.Want = capacity.OfPodSets(sets)
	return request
}

// What can be placed one day is judged by nodes, not by the sum of a cluster.
func TestCouldPlace(t *testing.T) {
	total := func(text string) decide.Request {
		return decide.Request{Requester: "rome", Want: broker.HeldCapacity{Totals: amounts(text)}}
	}
	four := []clusterOption{totals("cpu=16", ""), shapes(4, "cpu=4", 100), class(func(c *broker.NodeClass) { c.Labels = map[string]string{"disk": "ssd"} })}
	paris := func(more ...clusterOption) oracleCluster { return cluster("paris", slices.Concat(four, more)...) }
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
		"a gang of more pods than the nodes' slots allow": {pods(5, "cpu=1"), 5, []oracleCluster{cluster("paris", totals("cpu=16", ""), shapes(4, "cpu=4", 1))}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := decide.CouldPlace(tc.request, tc.pods, snapshotOf(tc.clusters)); got != tc.want {
				t.Errorf("could be placed is %t", got)
			}
		})
	}
}

// What stays free is what those ahead could take, and no more.
func TestKeepFree(t *testing.T) {
	paris := cluster("paris", totals("cpu=16", ""), shapes(4, "cpu=4", 100))
	for name, tc := range map[string]struct {
		ahead  []decide.Request
		mayAsk func(int, string) bool
		cpus   int32
	}{
		"nothing ahead":              {nil, everywhere, 16},
		"one pod ahead":              {[]decide.Request{pods(1, "cpu=3")}, everywhere, 13},
		"several, one after another": {[]decide.Request{pods(2, "cpu=4"), pods(1, "cpu=4")}, everywhere, 4},
		"as many as fit of many":     {[]decide.Request{pods(100, "cpu=3")}, everywhere, 4},
		"nothing for what never fits": {[]decide.Request{pods(9, "cpu=5"), pods(1, "cpu=4")}, everywhere,
			12},
		"nothing where it may not be placed now": {[]decide.Request{pods(4, "cpu=4")}, func(int, string) bool { return false }, 16},
		"all":                                    {[]decide.Request{pods(4, "cpu=4")}, everywhere, 0},
		"a divisible total":                      {[]decide.Request{{Requester: "rome", Want: broker.HeldCapacity{Totals: amounts("cpu=6")}}}, everywhere, 10},
	} {
		t.Run(name, func(t *testing.T) {
			var claims decide.Claims
			want := pods(16, "cpu=1")
			decision := decide.Choose(want, claims.KeepFree(snapshotOf([]oracleCluster{paris}), addresses(tc.ahead), want.Want, tc.mayAsk))
			if got := decision.Placement.Pods(); got != tc.cpus {
				t.Errorf("%d pods of one cpu fit, want %d", got, tc.cpus)
			}
		})
	}
}

// A cluster keeps capacity free for the first 64 that could take any there. Those that
// could not are not counted, and neither are those that it refuses at present.
func TestKeepFreeForTheFirstThatCouldTakeAny(t *testing.T) {
	paris := cluster("paris", totals("cpu=100", ""), shapes(100, "cpu=1", 100))
	many := func(n int, r func() decide.Request) (out []decide.Request) {
		for range n {
			out = append(out, r())
		}
		return out
	}
	one := func() decide.Request { return pods(1, "cpu=1") }
	for name, tc := range map[string]struct {
		before []decide.Request
		mayAsk func(int, string) bool
		free   int32
	}{
		"none":                 {nil, everywhere, 90},
		"pinned elsewhere":     {many(200, func() decide.Request { return with(one(), func(r *decide.Request) { r.Pin = "berlin" }) }), everywhere, 90},
		"of no matching node":  {many(200, func() decide.Request { return selecting(one(), "ssd") }), everywhere, 90},
		"refused at present":   {many(64, one), func(i int, _ string) bool { return i >= 64 }, 90},
		"63 that could":        {many(63, one), everywhere, 27},
		"more than 64":         {many(70, one), everywhere, 36},
		"mixed with others":    {append(many(100, func() decide.Request { return selecting(one(), "ssd") }), many(20, one)...), everywhere, 70},
		"the pin is this one":  {many(20, func() decide.Request { return with(one(), func(r *decide.Request) { r.Pin = "paris" }) }), everywhere, 70},
		"larger than any node": {many(200, func() decide.Request { return pods(1, "cpu=2") }), everywhere, 90},
	} {
		t.Run(name, func(t *testing.T) {
			var claims decide.Claims
			want := pods(100, "cpu=1")
			ahead := addresses(append(tc.before, pods(10, "cpu=1")))
			for range 2 {
				decision := decide.Choose(want, claims.KeepFree(snapshotOf([]oracleCluster{paris}), ahead, want.Want, tc.mayAsk))
				if got := decision.Placement.Pods(); got != tc.free {
					t.Errorf("%d pods fit, want %d", got, tc.free)
				}
			}
		})
	}
}

func addresses(requests []decide.Request) []*decide.Request {
	out := make([]*decide.Request, len(requests))
	for i := range requests {
		out[i] = &requests[i]
	}
	return out
}

// TestKeepFreeRemembers: what was computed for other queues and other versions of the
// clusters never changes a decision.
func TestKeepFreeRemembers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := world{t}
		var store decide.Store
		var claims decide.Claims
		for i := range 5 {
			c := w.cluster(i)
			store.Upsert(&c.Spec, c.Holds)
		}
		all := func(string) (active, fresh bool) { return true, true }
		var queue []*decide.Request
		for range rapid.IntRange(1, 10).Draw(t, "steps") {
			switch w.of("step", "cluster", "queue", "front", "end") {
			case "cluster":
				c := w.cluster(rapid.IntRange(0, 4).Draw(t, "cluster"))
				store.Upsert(&c.Spec, c.Holds)
			case "front":
				if len(queue) > 0 {
					queue = slices.Clone(queue[1:])
				}
			case "queue":
				r := w.request()
				queue = slices.Insert(slices.Clone(queue), rapid.IntRange(0, len(queue)).Draw(t, "at"), &r)
			default:
				r := w.request()
				queue = append(slices.Clone(queue), &r)
			}
			refusing := w.of("refusing", "none", "c01", "c02")
			mayAsk := func(i int, cluster string) bool { return cluster != refusing || i%2 == 0 }
			request := w.request()
			ahead := queue[:rapid.IntRange(0, len(queue)).Draw(t, "ahead")]
			var none decide.Claims
			want := decide.Choose(request, none.KeepFree(store.Snapshot(all), ahead, request.Want, mayAsk))
			got := decide.Choose(request, claims.KeepFree(store.Snapshot(all), ahead, request.Want, mayAsk))
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
// changes, not with the queue.
func TestClaimsAreComputedOnce(t *testing.T) {
	const clusters, waiting = 20, 30
	var store decide.Store
	put := func(i int) {
		c := cluster(fmt.Sprintf("c%02d", i), totals("cpu=1000", ""), shapes(100, "cpu=10", 100))
		store.Upsert(&c.Spec, c.Holds)
	}
	for i := range clusters {
		put(i)
	}
	var queue []*decide.Request
	for range waiting {
		r := pods(1, "cpu=9")
		queue = append(queue, &r)
	}
	var claims decide.Claims
	request := pods(1, "cpu=1")
	made := func(ahead []*decide.Request) int {
		before := claims.Made()
		claims.KeepFree(store.Snapshot(func(string) (active, fresh bool) { return true, true }), ahead, request.Want, everywhere)
		return claims.Made() - before
	}
	first := made(queue)
	again := made(queue)
	shorter := made(queue[:waiting/2])
	put(7)
	changed := made(queue)
	r := pods(1, "cpu=8")
	longer := made(append(queue, &r))
	if diff := cmp.Diff([]int{clusters * waiting, 0, 0, waiting, clusters}, []int{first, again, shorter, changed, longer}); diff != "" {
		t.Errorf("claims computed at first, again, for a shorter queue, after a change of one cluster, for a longer queue (-want +got)\n%s", diff)
	}
}

// BenchmarkQueue measures a decision behind a queue of 1,000 in 100 clusters.
func BenchmarkQueue(b *testing.B) {
	for name, cpu := range map[string]string{"placeable": "cpu=8", "unplaceable": "cpu=11"} {
		b.Run(name, func(b *testing.B) {
			var store decide.Store
			random := rand.New(rand.NewPCG(1, 2))
			for i := range 100 {
				c := cluster(fmt.Sprintf("c%03d", i), totals("cpu=1000", ""), shapes(random.Int32N(20)+1, "cpu=10", 100))
				store.Upsert(&c.Spec, c.Holds)
			}
			activity := func(string) (active, fresh bool) { return true, true }
			var ahead []*decide.Request
			for range 1000 {
				r := pods(20, cpu)
				if decide.CouldPlace(r, 0, store.Snapshot(activity)) && len(ahead) < 64 {
					ahead = append(ahead, &r)
				}
			}
			var claims decide.Claims
			request := pods(1, "cpu=1")
			for b.Loop() {
				decide.Choose(request, claims.KeepFree(store.Snapshot(activity), ahead, request.Want, everywhere))
			}
		})
	}
}
