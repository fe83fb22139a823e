package decide_test

import (
	"fmt"
	"maps"
	"math"
	"math/big"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
)

func at(region, zone string) clusterOption {
	return func(c *oracleCluster) { c.Spec.Region, c.Spec.Zone = region, zone }
}

// places is a cluster with one node for so many pods of one CPU.
func places(id string, n int, options ...clusterOption) oracleCluster {
	cpu := fmt.Sprintf("cpu=%d", n)
	return cluster(id, append([]clusterOption{totals("cpu=99", fmt.Sprintf("cpu=%d", 99-n)), shapes(1, cpu, 100)}, options...)...)
}

func spread(over string, maxSkew int32) func(*decide.Request) {
	return func(r *decide.Request) {
		r.Placement = &broker.Placement{Spread: &broker.Spread{Over: over, MaxSkew: maxSkew}}
	}
}

// heldPods are so many pods of one CPU at each of clusters.
func heldPods(clusters ...any) map[string]broker.HeldCapacity {
	held := map[string]broker.HeldCapacity{}
	for i := 0; i < len(clusters); i += 2 {
		held[clusters[i].(string)] = pods(int32(clusters[i+1].(int)), "cpu=1").Want
	}
	return held
}

// divide splits a request. The clusters that refuse have a full ledger.
func divide(request decide.Request, clusters []oracleCluster, refuse ...string) (pods map[string]int32, missing broker.HeldCapacity, decision broker.Decision) {
	parts, missing, decision := decide.Split(request, snapshotOf(clusters), refusing(refuse...))
	pods = map[string]int32{}
	for _, part := range parts {
		pods[part.Cluster] += part.Capacity.Pods()
	}
	return pods, missing, decision
}

// refusing places what it is given, but for clusters with a full ledger.
func refusing(refuse ...string) decide.Place {
	return func(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold, amount broker.HeldCapacity) ([]broker.Hold, *capacity.Rejection) {
		if slices.Contains(refuse, spec.ClusterID) {
			return nil, &capacity.Rejection{Reason: "LedgerFull", Message: "The ledger is full."}
		}
		return append(slices.Clone(holds), broker.Hold{ReservationUID: "new", ReservationName: "new", Requester: "rome", Promised: amount}), nil
	}
}

// spreadCase is a request for pods of one CPU that is divided.
type spreadCase struct {
	reason   string
	pods     int32
	change   []func(*decide.Request)
	clusters []oracleCluster
	refuse   []string
	want     map[string]int32
	// messages are parts of those of the rejections.
	messages byCluster
}

var spreadCases = map[string]spreadCase{
	"evenly over clusters": {
		reason: "Each gets as much, and who is better the rest.",
		pods:   7, change: []func(*decide.Request){spread("cluster", 1)},
		clusters: []oracleCluster{places("bern", 9), places("oslo", 20), places("paris", 9)},
		want:     map[string]int32{"bern": 2, "oslo": 3, "paris": 2},
	},
	"without a spread": {
		reason: "One cluster gets all.",
		pods:   7, clusters: []oracleCluster{places("bern", 9), places("oslo", 20)},
		want: map[string]int32{"oslo": 7},
	},
	"over regions": {
		reason: "The clusters of a region count together.",
		pods:   8, change: []func(*decide.Request){spread("region", 1)},
		clusters: []oracleCluster{places("bern", 3, at("eu", "")), places("oslo", 3, at("eu", "")), places("reno", 9, at("us", ""))},
		want:     map[string]int32{"bern": 3, "oslo": 1, "reno": 4},
	},
	"over zones, which one does not state": {
		reason: "A cluster that states no zone gets nothing.",
		pods:   4, change: []func(*decide.Request){spread("zone", 1)},
		clusters: []oracleCluster{places("bern", 9, at("eu", "a")), places("oslo", 9, at("eu", "b")), places("reno", 9, at("us", ""))},
		want:     map[string]int32{"bern": 2, "oslo": 2},
		messages: byCluster{"reno": "states no zone"},
	},
	"one is full": {
		reason: "The rest waits, and the reason names the full one.",
		pods:   6, change: []func(*decide.Request){spread("region", 1)},
		clusters: []oracleCluster{places("bern", 9, at("eu", "")), places("reno", 1, at("us", ""))},
		want:     map[string]int32{"bern": 2, "reno": 1},
		messages: byCluster{
			"bern": "placement.spread allows 2 of the pods in region eu, which has 2: region us has room for 1, and maxSkew is 1.",
			"reno": "cpu",
		},
	},
	"one is full, and maxSkew is larger": {
		reason: "The others get more, and no more than that.",
		pods:   9, change: []func(*decide.Request){spread("cluster", 3)},
		clusters: []oracleCluster{places("bern", 9), places("oslo", 9), places("reno", 1)},
		want:     map[string]int32{"bern": 4, "oslo": 4, "reno": 1},
	},
	"its own pods fill one": {
		reason: "Nodes that could run such pods count, however full they are, as in Kubernetes.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1)},
		clusters: []oracleCluster{places("bern", 9), places("reno", 0)},
		want:     map[string]int32{"bern": 1},
		messages: byCluster{"bern": "cluster reno has room for 0"},
	},
	"one has no such nodes": {
		reason: "It does not count.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1)},
		clusters: []oracleCluster{places("bern", 9), places("reno", 0, class(func(c *broker.NodeClass) {
			c.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
		}))},
		want: map[string]int32{"bern": 4},
	},
	"one is gone": {
		reason: "What may not be chosen does not count.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1)},
		clusters: []oracleCluster{places("bern", 9), places("reno", 9, func(c *oracleCluster) { c.Active = false })},
		want:     map[string]int32{"bern": 4},
	},
	"one has refused": {
		reason: "It is full for a while, and counts.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1), func(r *decide.Request) {
			r.Rejected = map[string]capacity.Rejection{"reno": {Reason: decide.ReasonRefused, Message: "full."}}
		}},
		clusters: []oracleCluster{places("bern", 9), places("reno", 9)},
		want:     map[string]int32{"bern": 1},
	},
	"one has not been heard yet": {
		reason: "It counts as full: all are to be heard by a broker that has started.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1)},
		clusters: []oracleCluster{places("bern", 9), places("reno", 9, func(c *oracleCluster) { c.Fresh = false })},
		want:     map[string]int32{"bern": 1},
	},
	"one that is excluded has not been heard": {
		reason: "It does not count.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1), func(r *decide.Request) { r.Placement.ExcludeClusters = []string{"reno"} }},
		clusters: []oracleCluster{places("bern", 9), places("reno", 9, func(c *oracleCluster) { c.Fresh = false })},
		want:     map[string]int32{"bern": 4},
	},
	"one has nodes that are too small": {
		reason: "It does not count.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1)},
		clusters: []oracleCluster{places("bern", 9), places("reno", 0, class(func(c *broker.NodeClass) { small := amounts("cpu=500m"); c.LargestNode = &small }))},
		want:     map[string]int32{"bern": 4},
	},
	"one cannot be used by the consumer": {
		reason: "It does not count.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1), func(r *decide.Request) {
			r.Rejected = map[string]capacity.Rejection{"reno": {Reason: decide.ReasonUnreachable, Message: "no way."}}
		}},
		clusters: []oracleCluster{places("bern", 9), places("reno", 9)},
		want:     map[string]int32{"bern": 4},
	},
	"one is over the budget": {
		reason: "It does not count.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1), budget("8")},
		clusters: []oracleCluster{places("bern", 9, priced("1", "EUR")), places("oslo", 9), places("reno", 9, priced("3", "EUR"))},
		want:     map[string]int32{"bern": 4},
		messages: byCluster{"reno": "The price is 12.00 EUR per hour; the budget is 8.00 EUR.", "oslo": "no price"},
	},
	"one is over the budget until others have their part": {
		reason: "It gets the rest, for which the budget is enough.",
		pods:   6, change: []func(*decide.Request){spread("cluster", 1), budget("14")},
		clusters: []oracleCluster{places("bern", 2, priced("1", "EUR")), places("oslo", 9, priced("2", "EUR")), places("reno", 9, priced("3", "EUR"))},
		want:     map[string]int32{"bern": 2, "oslo": 3, "reno": 1},
	},
	"one is over the budget and full": {
		reason: "It does not count, also when less is missing.",
		pods:   1, change: []func(*decide.Request){spread("cluster", 1), budget("8"), func(r *decide.Request) {
			r.Held, r.Committed = heldPods("bern", 4), big.NewRat(4, 1)
		}},
		clusters: []oracleCluster{places("bern", 9, priced("1", "EUR")), places("reno", 0, priced("3", "EUR"))},
		want:     map[string]int32{"bern": 1},
	},
	"one has refused, and is over the budget": {
		reason: "Its price keeps it from being chosen later.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1), budget("8"), func(r *decide.Request) {
			r.Rejected = map[string]capacity.Rejection{"reno": {Reason: decide.ReasonRefused, Message: "full."}}
		}},
		clusters: []oracleCluster{places("bern", 9, priced("1", "EUR")), places("reno", 9, priced("3", "EUR"))},
		want:     map[string]int32{"bern": 4},
	},
	"one is dear until few are missing": {
		reason: "The others have room for all: bern has got 3 because oslo has room for 2.",
		pods:   5, change: []func(*decide.Request){spread("cluster", 1), budget("10")},
		clusters: []oracleCluster{places("bern", 20, priced("0", "EUR")), places("oslo", 2, priced("0", "EUR")), places("reno", 1, priced("5", "EUR"))},
		want:     map[string]int32{"bern": 3, "oslo": 2},
		messages: byCluster{"reno": "first are those"},
	},
	"one is dear, and another one's ledger is full": {
		reason: "It gets what bern gives back because bergen has no room after all.",
		pods:   6, change: []func(*decide.Request){spread("cluster", 2), budget("2")}, refuse: []string{"bergen"},
		clusters: []oracleCluster{places("bergen", 1, priced("0", "EUR")), places("bern", 20, priced("0", "EUR")), places("genoa", 1, priced("0", "EUR")), places("oslo", 1, priced("0", "EUR")), places("reno", 2, priced("1", "EUR"))},
		want:     map[string]int32{"bern": 2, "genoa": 1, "oslo": 1, "reno": 2},
	},
	"one is dear, and the others are full": {
		reason: "It gets what is left.",
		pods:   6, change: []func(*decide.Request){spread("cluster", 1), budget("10")},
		clusters: []oracleCluster{places("bern", 20, priced("0", "EUR")), places("oslo", 2, priced("0", "EUR")), places("reno", 1, priced("5", "EUR"))},
		want:     map[string]int32{"bern": 3, "oslo": 2, "reno": 1},
	},
	"growth": {
		reason: "What it holds counts, and is not moved.",
		pods:   3, change: []func(*decide.Request){spread("cluster", 1), func(r *decide.Request) { r.Held = heldPods("bern", 5, "oslo", 1) }},
		clusters: []oracleCluster{places("bern", 9), places("oslo", 9), places("reno", 9)},
		want:     map[string]int32{"oslo": 1, "reno": 2},
	},
	"a ledger is full": {
		reason: "That is known when the others have their share: they give back what is too much.",
		pods:   8, change: []func(*decide.Request){spread("cluster", 1)}, refuse: []string{"reno"},
		clusters: []oracleCluster{places("bern", 9), places("oslo", 9), places("reno", 8)},
		want:     map[string]int32{"bern": 1, "oslo": 1},
		messages: byCluster{"bern": "cluster reno has room for 0", "reno": "The ledger is full."},
	},
	"a single place": {
		reason: "A pin leaves nothing to divide.",
		pods:   4, change: []func(*decide.Request){spread("cluster", 1), func(r *decide.Request) { r.Pin = "bern" }},
		clusters: []oracleCluster{places("bern", 9), places("oslo", 9)},
		want:     map[string]int32{"bern": 4},
	},
	"the preferred one": {
		reason: "It gets the pod that is left, whatever the scores are.",
		pods:   3, change: []func(*decide.Request){spread("cluster", 1), func(r *decide.Request) {
			r.Placement.PreferredProviders = []broker.ProviderGroup{{Clusters: []string{"bern"}}}
		}},
		clusters: []oracleCluster{places("bern", 3), places("oslo", 20)},
		want:     map[string]int32{"bern": 2, "oslo": 1},
	},
}

func TestSpread(t *testing.T) {
	for name, c := range spreadCases {
		t.Run(name, func(t *testing.T) {
			request := pods(c.pods, "cpu=1")
			for _, change := range c.change {
				change(&request)
			}
			got, missing, decision := divide(request, c.clusters, c.refuse...)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("%s (-want +got)\n%s", c.reason, diff)
			}
			placed := int32(0)
			for n := range maps.Values(got) {
				placed += n
			}
			if placed+missing.Pods() != c.pods {
				t.Errorf("%d are placed and %d missing of %d", placed, missing.Pods(), c.pods)
			}
			for cluster, message := range c.messages {
				if !slices.ContainsFunc(decision.Rejections, func(r broker.ClusterRejection) bool {
					return r.Cluster == cluster && strings.Contains(r.Message, message)
				}) {
					t.Errorf("%s: %+v do not say %q of %s", c.reason, decision.Rejections, message, cluster)
				}
			}
		})
	}
}

// TestSpreadOverBudget: what a part of another shape cost may leave too little for a domain, which counts
// as a full one: the others do not get its pods.
func TestSpreadOverBudget(t *testing.T) {
	request := decide.Request{Requester: "rome", Want: capacity.OfPodSets([]broker.PodSet{
		{Name: "large", Count: 1, Requests: amounts("cpu=4 memory=1Gi")}, {Name: "small", Count: 3, Requests: amounts("cpu=1 memory=4Gi")}})}
	spread("cluster", 1)(&request)
	budget("14")(&request)
	memory := func(price string) clusterOption { return func(c *oracleCluster) { c.Spec.Cost.MemoryCost = price } }
	clusters := []oracleCluster{
		cluster("bern", totals("cpu=99 memory=99Gi", ""), shapes(1, "cpu=99 memory=99Gi", 9), priced("2", "EUR"), memory("0")),
		cluster("oslo", totals("cpu=9 memory=50Gi", ""), shapes(1, "cpu=3 memory=50Gi", 9), priced("0", "EUR"), memory("1")),
	}
	got, missing, decision := divide(request, clusters)
	if want := map[string]int32{"oslo": 1}; !maps.Equal(got, want) || missing.Pods() != 3 {
		t.Errorf("the pods are at %v, and %d are missing, want %v and 3", got, missing.Pods(), want)
	}
	if at := decision.Rejections; len(at) != 2 || at[0].Message != "The price is 16.00 EUR per hour; the budget is 14.00 EUR." {
		t.Errorf("%+v do not say what four CPU and two more cost beside the 4 EUR of a pod in oslo", at)
	}
}

// TestSpreadIsExplained: the score of a cluster says what its domain may have.
func TestSpreadIsExplained(t *testing.T) {
	_, _, decision := divide(with(pods(4, "cpu=1"), spread("region", 1)), []oracleCluster{places("bern", 9, at("eu", "")), places("reno", 9, at("us", ""))})
	for _, score := range decision.Scores {
		if !strings.Contains(score.Detail, "up to 2 of the pods in region ") {
			t.Errorf("%s: %s", score.Cluster, score.Detail)
		}
	}
	if len(decision.Scores) != 2 || len(decision.Rejections) != 0 {
		t.Errorf("the decision is %+v", decision)
	}
}

// TestSpreadKeepsFree: what a Reservation could not use because of its spread is not kept free for it,
// and one that could have nothing holds back no other.
func TestSpreadKeepsFree(t *testing.T) {
	for name, c := range map[string]struct {
		pods, gang int32
		held       map[string]broker.HeldCapacity
		us         oracleCluster
		// want is how many pods another one gets in the eu, of 9.
		want  int32
		could bool
	}{
		"others fill the us":                  {pods: 4, us: cluster("reno", totals("cpu=9", ""), shapes(1, "cpu=9", 100), holds("oslo", 9, "cpu=1")), want: 7, could: true},
		"the us is too small":                 {pods: 1, held: heldPods("bern", 2, "reno", 1), us: cluster("reno", totals("cpu=1", ""), shapes(1, "cpu=1", 100), holds("rome", 1, "cpu=1")), want: 9},
		"a gang that the us is too small for": {pods: 4, gang: 4, us: places("reno", 1, at("us", ""), totals("cpu=1", "")), want: 7},
		"a part":                              {pods: 4, gang: 3, us: places("reno", 1, at("us", ""), totals("cpu=1", "")), want: 7, could: true},
	} {
		t.Run(name, func(t *testing.T) {
			c.us.Spec.Region = "us"
			snapshot := snapshotOf([]oracleCluster{places("bern", 9, at("eu", "")), c.us})
			first := with(with(pods(c.pods, "cpu=1"), spread("region", 1)), func(r *decide.Request) { r.Held = c.held })
			if got := snapshot.CouldTake(first, c.gang); got != c.could {
				t.Errorf("it could take as many: %t", got)
			}
			for range 2 {
				if got := decide.Choose(with(pods(9, "cpu=1"), func(r *decide.Request) { r.Requester = "oslo" }), snapshot.KeepFree(&first, nil)).Placement.Pods(); got != c.want {
					t.Errorf("another one gets %d, want %d", got, c.want)
				}
			}
		})
	}
}

// TestBudgetKeepsFree: nothing is kept free where what is left of the budget is not enough.
func TestBudgetKeepsFree(t *testing.T) {
	snapshot := snapshotOf([]oracleCluster{places("bern", 9, priced("1", "EUR"))})
	for committed, want := range map[int64]bool{4: true, 5: false} {
		for name, change := range map[string]func(*decide.Request){"no spread": func(*decide.Request) {}, "a spread": spread("cluster", 1)} {
			request := with(with(pods(4, "cpu=1"), budget("8")), change)
			request.Committed = big.NewRat(committed, 1)
			if got := snapshot.CouldTake(request, 4); got != want {
				t.Errorf("%s, %d of 8 EUR committed: it could take 4 EUR more: %t", name, committed, got)
			}
			request.Committed, request.Unpriced = new(big.Rat), "oslo"
			if snapshot.CouldTake(request, 4) {
				t.Errorf("%s: it could take pods, although it is not known what is left", name)
			}
		}
	}
}

// spreadWorld draws a request with a spread, and clusters of which most may be chosen.
func spreadWorld(t *rapid.T) (request decide.Request, clusters []oracleCluster) {
	w := world{t}
	sets := []broker.PodSet{{Name: "small", Count: rapid.Int32Range(1, 12).Draw(t, "small"), Requests: amounts("cpu=1")}}
	if w.of("shapes", "one", "two") == "two" {
		sets = append(sets, broker.PodSet{Name: "large", Count: rapid.Int32Range(1, 5).Draw(t, "large"), Requests: amounts("cpu=2")})
	}
	request = decide.Request{Requester: "rome", Want: capacity.OfPodSets(sets), Held: map[string]broker.HeldCapacity{}, Rejected: map[string]capacity.Rejection{}}
	spread(w.of("over", "cluster", "zone", "region"), rapid.Int32Range(1, 3).Draw(t, "max skew"))(&request)
	if w.of("budget", "none", "a budget") == "a budget" {
		budget(fmt.Sprint(rapid.IntRange(0, 30).Draw(t, "price")))(&request)
	}
	for i := range rapid.IntRange(1, 6).Draw(t, "clusters") {
		c := places(fmt.Sprintf("c%02d", i), rapid.IntRange(0, 20).Draw(t, "room"), at(w.of("region", "eu", "us", "asia", ""), w.of("zone", "a", "b", "c", "")), priced(w.of("price", "0", "1", "2", "5"), "EUR"))
		id := c.Spec.ClusterID
		switch w.of("state", "well", "well", "well", "well", "held", "held", "small nodes", "tainted", "silent", "refused", "unreachable", "excluded") {
		case "held":
			request.Held[id] = heldPods(id, int(rapid.Int32Range(0, 4).Draw(t, "held")))[id]
		case "small nodes":
			shapes(rapid.Int32Range(0, 6).Draw(t, "nodes"), "cpu=1", 9)(&c)
		case "tainted":
			c.Spec.NodeClasses[0].Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
		case "silent":
			c.Active = false
		case "refused":
			request.Rejected[id] = capacity.Rejection{Reason: decide.ReasonRefused}
		case "unreachable":
			request.Rejected[id] = capacity.Rejection{Reason: decide.ReasonUnreachable}
		case "excluded":
			request.Placement.ExcludeClusters = []string{id}
		}
		clusters = append(clusters, c)
	}
	request.Committed = new(big.Rat)
	for i := range clusters {
		request.Committed.Add(request.Committed, costs(&clusters[i], request.Held[clusters[i].Spec.ClusterID]))
	}
	return request, clusters
}

// counts reports whether a cluster that states where it is makes its domain count.
func counts(request decide.Request, c *oracleCluster) bool {
	request.Rejected, request.Committed = maps.Clone(request.Rejected), nil
	maps.DeleteFunc(request.Rejected, func(_ string, r capacity.Rejection) bool { return r.Reason == decide.ReasonRefused })
	for _, held := range request.Held {
		request.Want = capacity.Add(request.Want, held)
	}
	return filter(&request, c) == nil && len(c.Spec.NodeClasses[0].Taints) == 0
}

// costs is the price of pods in a cluster.
func costs(c *oracleCluster, pods broker.HeldCapacity) *big.Rat {
	price, _, known := pricing.Of(c.Spec.Cost, pods.Totals)
	if !known {
		return new(big.Rat)
	}
	return price
}

// TestSpreadOfTwoShapes: what fits beside what a Reservation holds itself could be taken, whatever its shapes
// are; and what more clusters than the maximum would have to take could not.
func TestSpreadOfTwoShapes(t *testing.T) {
	request := decide.Request{Requester: "rome", Held: heldPods("bern", 8, "oslo", 8), Want: capacity.OfPodSets([]broker.PodSet{
		{Name: "large", Count: 1, Requests: amounts("cpu=4")}, {Name: "small", Count: 2, Requests: amounts("cpu=1")}})}
	spread("cluster", 5)(&request)
	snapshot := snapshotOf([]oracleCluster{places("bern", 16), places("oslo", 16)})
	if !snapshot.CouldTake(request, 3) {
		t.Error("three pods could not be taken beside 8 CPU of 16 at each of two clusters")
	}
	var clusters []oracleCluster
	for i := range decide.MaxProviders + 10 {
		clusters = append(clusters, places(fmt.Sprintf("c%02d", i), 1))
	}
	gang := with(pods(decide.MaxProviders+10, "cpu=1"), spread("cluster", 1))
	if snapshot := snapshotOf(clusters); snapshot.CouldTake(gang, decide.MaxProviders+10) || !snapshot.CouldTake(gang, decide.MaxProviders) {
		t.Error("one pod at each provider is not what all could take")
	}
}

// TestSpreadBound: no domain gets pods that make it differ by more than maxSkew from one that counts;
// pods of one shape wait only where one more would; and where none wait, no domain could take one of another.
// All are within the budget, by which clusters may take less than their share. So it is when what is missing is
// requested again.
func TestSpreadBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		request, clusters := spreadWorld(t)
		refuses := world{t}.of("refuses", "none", "none", "c01", "c02")
		all := request
		for range 2 {
			parts, missing, _ := decide.Split(request, snapshotOf(clusters), refusing(refuses))
			request.Held, request.Committed = maps.Clone(request.Held), new(big.Rat).Set(request.Committed)
			grew := map[string]int32{}
			for _, part := range parts {
				c := &clusters[slices.IndexFunc(clusters, func(c oracleCluster) bool { return c.Spec.ClusterID == part.Cluster })]
				c.Holds = append(slices.Clone(c.Holds), broker.Hold{ReservationUID: "new", ReservationName: "new", Requester: "rome", Promised: part.Capacity})
				request.Held[part.Cluster] = capacity.Add(request.Held[part.Cluster], part.Capacity)
				request.Committed.Add(request.Committed, costs(c, part.Capacity))
				grew[part.Cluster] += part.Capacity.Pods()
			}
			request.Want = missing
			checkBound(t, all, request, clusters, grew, refuses)
			if missing.Empty() {
				return
			}
		}
	})
}

// checkBound checks what a request holds after clusters have got pods of it, and what it wants then.
func checkBound(t *rapid.T, all, request decide.Request, clusters []oracleCluster, got map[string]int32, refuses string) {
	over, maxSkew := request.Placement.Spread.Over, request.Placement.Spread.MaxSkew
	domain := func(c *oracleCluster) string {
		return map[string]string{"cluster": c.Spec.ClusterID, "zone": c.Spec.Zone, "region": c.Spec.Region}[over]
	}
	held, grew := map[string]int32{}, map[string]bool{}
	for i := range clusters {
		id, name := clusters[i].Spec.ClusterID, domain(&clusters[i])
		held[name] += request.Held[id].Pods()
		grew[name] = grew[name] || got[id] > 0
	}
	if request.Budget != nil && len(got) > 0 {
		if most, _ := new(big.Rat).SetString(request.Budget.MaxPricePerHour); request.Committed.Cmp(most) > 0 {
			t.Fatalf("%v cost %s, and the budget is %s", request.Held, request.Committed, request.Budget.MaxPricePerHour)
		}
	}
	least, most := int32(math.MaxInt32/2), int32(0)
	for i := range clusters {
		if c := &clusters[i]; domain(c) != "" && counts(all, c) {
			least = min(least, held[domain(c)])
		}
	}
	for name := range held {
		if grew[name] {
			most = max(most, held[name])
		}
		if grew[name] && (name == "" || held[name] > least+maxSkew) {
			t.Fatalf("%s %q has %d, another one %d, and maxSkew is %d: %v", over, name, held[name], least, maxSkew, got)
		}
	}
	if len(all.Want.PodSets) > 1 {
		return
	}
	for i := range clusters {
		c := &clusters[i]
		more := request
		more.Want, more.Pin = pods(max(request.Want.Pods(), 1), "cpu=1").Want, c.Spec.ClusterID
		more.Placement = &broker.Placement{ExcludeClusters: request.Placement.ExcludeClusters}
		if domain(c) == "" || c.Spec.ClusterID == refuses {
			continue
		}
		switch room := decide.Choose(more, snapshotOf([]oracleCluster{*c})).Cluster != ""; {
		case room && !request.Want.Empty() && held[domain(c)] < least+maxSkew:
			t.Fatalf("%s %q has %d, another one %d, maxSkew is %d, and %s has room: %v", over, domain(c), held[domain(c)], least, maxSkew, c.Spec.ClusterID, got)
		case room && request.Budget == nil && held[domain(c)]+1 < most:
			t.Fatalf("%s %q has %d, another one that got pods %d, and %s has room: %v", over, domain(c), held[domain(c)], most, c.Spec.ClusterID, got)
		}
	}
}
