package decide_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/broker/text"
)

// amounts reads "cpu=1 memory=1Gi"; the names are Kubernetes' own.
func amounts(text string) broker.ResourceQuantities {
	list := corev1.ResourceList{}
	for _, word := range strings.Fields(text) {
		name, amount, _ := strings.Cut(word, "=")
		list[corev1.ResourceName(name)] = resource.MustParse(amount)
	}
	return broker.FromList(list)
}

func snapshotOf(clusters []oracleCluster) decide.Snapshot {
	var store decide.Store
	activity := decide.Activity{}
	for i := range clusters {
		c := &clusters[i]
		store.Upsert(&c.Spec, c.Holds)
		if c.Active {
			activity[c.Spec.ClusterID] = c.Fresh
		}
	}
	return store.Snapshot(activity)
}

// clusterOption changes a cluster made by cluster.
type clusterOption func(*oracleCluster)

// cluster has one class "std" with one free node of cpu 2, memory 4Gi.
func cluster(id string, options ...clusterOption) oracleCluster {
	c := oracleCluster{Active: true, Fresh: true, Spec: broker.ClusterAdvertisementSpec{
		ClusterID: id,
		Lending:   broker.Lending{Enabled: true},
		Resources: broker.AdvertisedResources{Allocatable: amounts("cpu=2 memory=4Gi")},
		NodeClasses: []broker.NodeClass{{Name: "std", Arch: "amd64", FreeShapes: []broker.FreeShape{
			{Nodes: 1, Free: amounts("cpu=2 memory=4Gi"), Pods: 100},
		}}},
		Sequence: 7,
	}}
	for _, option := range options {
		option(&c)
	}
	return c
}

func totals(allocatable, allocated string) clusterOption {
	return func(c *oracleCluster) {
		c.Spec.Resources.Allocatable, c.Spec.Resources.Allocated = amounts(allocatable), amounts(allocated)
	}
}

func shapes(nodes int32, free string, pods int32) clusterOption {
	return func(c *oracleCluster) {
		c.Spec.NodeClasses[0].FreeShapes = []broker.FreeShape{{Nodes: nodes, Free: amounts(free), Pods: pods}}
	}
}

func class(change func(*broker.NodeClass)) clusterOption {
	return func(c *oracleCluster) { change(&c.Spec.NodeClasses[0]) }
}

func priced(cpu, currency string) clusterOption {
	return func(c *oracleCluster) {
		c.Spec.Cost = &broker.Cost{CPUCost: cpu, MemoryCost: "0", Currency: currency}
	}
}

func holds(requester string, count int32, requests string) clusterOption {
	return func(c *oracleCluster) {
		c.Holds = append(c.Holds, broker.Hold{ReservationName: "other", Requester: requester,
			Promised: capacity.OfPodSets([]broker.PodSet{{Name: "web", Count: count, Requests: amounts(requests)}})})
	}
}

func guests(requester string, count int32, used string) clusterOption {
	return func(c *oracleCluster) {
		c.Spec.ObservedHolds = append(c.Spec.ObservedHolds, broker.ObservedHold{Requester: requester, Pods: count, Used: amounts(used)})
	}
}

func pods(count int32, requests string) decide.Request {
	return decide.Request{Requester: "rome", Want: capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: count, Requests: amounts(requests)}})}
}

func with(request decide.Request, change func(*decide.Request)) decide.Request {
	change(&request)
	return request
}

// byCluster is a text for each cluster.
type byCluster map[string]string

type chooseCase struct {
	reason   string
	request  decide.Request
	clusters []oracleCluster
	want     string
	pods     int32
	// rejected is the reason of each rejection, messages a part of its message.
	rejected, messages byCluster
}

func runChoose(t *testing.T, cases map[string]chooseCase) {
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := decide.Choose(tc.request, snapshotOf(tc.clusters))
			if got.Cluster != tc.want || got.Placement.Pods() != tc.pods {
				t.Errorf("%s: chose %q for %d pods, want %q for %d\n%v", tc.reason, got.Cluster, got.Placement.Pods(), tc.want, tc.pods, got.Rejections)
			}
			reasons := byCluster{}
			for _, r := range got.Rejections {
				reasons[r.Cluster] = r.Reason
				if part := tc.messages[r.Cluster]; !strings.Contains(r.Message, part) {
					t.Errorf("%s: the message for %s is\n%q, want\n%q in it", tc.reason, r.Cluster, r.Message, part)
				}
			}
			if diff := cmp.Diff(tc.rejected, reasons); tc.rejected != nil && diff != "" {
				t.Errorf("%s: rejections (-want +got)\n%s", tc.reason, diff)
			}
		})
	}
}

// TestFilters: clusters that are rejected whatever they have free.
func TestFilters(t *testing.T) {
	runChoose(t, map[string]chooseCase{
		"filters": {
			reason: "every cluster that is filtered out has a reason",
			request: with(pods(1, "cpu=1"), func(a *decide.Request) {
				a.Placement = &broker.Placement{Regions: []string{"eu"}, Zones: []string{"a"}, ExcludeClusters: []string{"x"}}
				a.Rejected = map[string]capacity.Rejection{"no": {Reason: decide.ReasonRefused, Message: "The provider refused: a node went away."}}
			}),
			clusters: []oracleCluster{
				cluster("rome", func(c *oracleCluster) { c.Spec.Unreachable = []string{"cut"} }),
				cluster("cut", func(c *oracleCluster) { c.Spec.EndpointURL = "https://192.0.2.1:6443" }),
				cluster("offline", func(c *oracleCluster) { c.Spec.Lending.Enabled = false }),
				cluster("picky", func(c *oracleCluster) { c.Spec.Lending.Consumers = []string{"oslo"} }),
				cluster("gone", func(c *oracleCluster) { c.Active, c.Fresh = false, false }),
				cluster("old", func(c *oracleCluster) { c.Fresh = false }),
				cluster("x"),
				cluster("far", func(c *oracleCluster) { c.Spec.Region = "us" }),
				cluster("beside", func(c *oracleCluster) { c.Spec.Region, c.Spec.Zone = "eu", "b" }),
				cluster("no", func(c *oracleCluster) { c.Spec.Region, c.Spec.Zone = "eu", "a" }),
				cluster("paris", func(c *oracleCluster) { c.Spec.Region, c.Spec.Zone = "eu", "a" }),
			},
			want: "paris", pods: 1,
			rejected: byCluster{
				"rome": "RequesterItself", "offline": "LendingDisabled", "picky": "ConsumerNotAdmitted", "gone": "ClusterInactive", "old": "AdvertisementTooOld",
				"x": "Excluded", "far": "OtherRegion", "beside": "OtherZone", "no": "Refused", "cut": "Unreachable",
			},
			messages: byCluster{
				"no":  "The provider refused: a node went away.",
				"cut": "Cluster rome cannot connect to its API server at https://192.0.2.1:6443. Check the network between them, and the provider's value apiServer.endpoint.",
			},
		},
		"pinned": {
			reason:   "a pin leaves every other check in force",
			request:  with(pods(1, "cpu=5"), func(a *decide.Request) { a.Pin = "paris" }),
			clusters: []oracleCluster{cluster("berlin"), cluster("paris", totals("cpu=2", "cpu=800m"), shapes(1, "cpu=1200m memory=900Mi", 9))},
			rejected: byCluster{"berlin": "PinnedElsewhere", "paris": "InsufficientCapacity"},
			messages: byCluster{"paris": "0 of 1 pods of pod set \"pods\" fit. Insufficient cpu: requested 5, available 1200m."},
		},
		"budget": {
			reason: "unknown prices and other currencies do not fit a budget; what is committed counts",
			request: with(pods(2, "cpu=1"), func(a *decide.Request) {
				a.Budget = &broker.Budget{MaxPricePerHour: "0.30", Currency: "EUR"}
			}),
			clusters: []oracleCluster{cluster("unknown"), cluster("dollar", priced("0.01", "USD")), cluster("dear", priced("0.16", "EUR")), cluster("paris", priced("0.15", "EUR"))},
			want:     "paris", pods: 2,
			rejected: byCluster{"unknown": "PriceUnknown", "dollar": "PriceUnknown", "dear": "OverBudget"},
			messages: byCluster{"dear": "The price is 0.32 EUR per hour; the budget is 0.30 EUR."},
		},
	})
}

// TestFit: what counts as free, and what the messages say about it.
func TestFit(t *testing.T) {
	runChoose(t, map[string]chooseCase{
		"sums are not trusted": {
			reason:   "ten free cores on ten nodes do not fit a pod of eight",
			request:  pods(1, "cpu=8 memory=64Mi"),
			clusters: []oracleCluster{cluster("paris", totals("cpu=20 memory=20Gi", "cpu=10"), shapes(10, "cpu=1 memory=900Mi", 9))},
			rejected: byCluster{"paris": "InsufficientCapacity"},
			messages: byCluster{"paris": "Insufficient cpu on one node: requested 8."},
		},
		"a divisible total may be spread": {
			reason:  "that is what divisible means",
			request: decide.Request{Requester: "rome", Want: broker.HeldCapacity{Totals: amounts("cpu=8 memory=1Gi")}},
			clusters: []oracleCluster{
				cluster("paris", totals("cpu=20 memory=20Gi", "cpu=10"), shapes(10, "cpu=1 memory=900Mi", 9)),
				cluster("berlin", totals("cpu=20 memory=20Gi", "cpu=10"), shapes(7, "cpu=1 memory=900Mi", 9)),
			},
			want:     "paris",
			rejected: byCluster{"berlin": "InsufficientCapacity"},
			messages: byCluster{"berlin": "Insufficient cpu on the nodes without taints: requested 8."},
		},
		"zero of what no cluster has": {
			reason: "it needs none of it",
			request: with(pods(1, "cpu=1"), func(a *decide.Request) {
				a.Want.PodSets[0].Requests.GPU = &resource.Quantity{}
				a.Want.PodSets[0].Requests.Extended = map[corev1.ResourceName]resource.Quantity{"example.com/fpga": {}}
			}),
			clusters: []oracleCluster{cluster("paris")},
			want:     "paris", pods: 1,
		},
		"available by the ledger": {
			reason:   "free shapes do not help where the provider keeps headroom",
			request:  pods(3, "cpu=500m"),
			clusters: []oracleCluster{cluster("paris", totals("cpu=1200m", ""))},
			want:     "paris", pods: 2,
		},
		"claims of others": {
			reason:   "what others hold and do not use yet comes first: 2 of 4 held pods run, 2 more will",
			request:  pods(3, "cpu=500m"),
			clusters: []oracleCluster{cluster("paris", totals("cpu=4", ""), shapes(2, "cpu=1", 9), holds("oslo", 4, "cpu=500m"), guests("oslo", 2, "cpu=1"))},
			want:     "paris", pods: 2,
		},
		"unknown guests count for the smaller pods": {
			reason:  "a large claim stays as long as it is not certain that it is used",
			request: pods(1, "cpu=900m"),
			clusters: []oracleCluster{cluster("paris", totals("cpu=9", ""), shapes(1, "cpu=1", 9),
				holds("oslo", 1, "cpu=800m"), holds("oslo", 1, "cpu=100m"), guests("oslo", 1, "cpu=150m"))},
			rejected: byCluster{"paris": "InsufficientCapacity"},
			messages: byCluster{"paris": "Insufficient cpu on one node: requested 900m."},
		},
		"known guests free nothing twice": {
			reason:  "a guest with exactly the used amount is subtracted from the claims",
			request: pods(1, "cpu=900m"),
			clusters: []oracleCluster{cluster("paris", totals("cpu=9", ""), shapes(1, "cpu=1", 9),
				holds("oslo", 1, "cpu=800m"), holds("oslo", 1, "cpu=100m"), guests("oslo", 1, "cpu=800m"))},
			want: "paris", pods: 1,
		},
		"pods per node": {
			reason:   "a node runs no more pods than it may",
			request:  pods(5, "cpu=1m"),
			clusters: []oracleCluster{cluster("paris", shapes(2, "cpu=1", 2))},
			want:     "paris", pods: 4,
		},
		"pods without requests": {
			reason:   "they count towards the limit of the node all the same",
			request:  pods(5, ""),
			clusters: []oracleCluster{cluster("paris", shapes(2, "cpu=1", 2))},
			want:     "paris", pods: 4,
		},
		"devices": {
			reason:   "a GPU counts like any other resource",
			request:  pods(2, "nvidia.com/gpu=1"),
			clusters: []oracleCluster{cluster("berlin"), cluster("paris", totals("nvidia.com/gpu=2", ""), shapes(1, "nvidia.com/gpu=2", 9))},
			want:     "paris", pods: 2,
			rejected: byCluster{"berlin": "InsufficientCapacity"},
			messages: byCluster{"berlin": "Insufficient nvidia.com/gpu: requested 1, available 0."},
		},
		"selector": {
			reason: "labels, affinity and taints are matched class by class",
			request: decide.Request{Requester: "rome", Want: capacity.OfPodSets([]broker.PodSet{{
				Name: "pods", Count: 1, Requests: amounts("cpu=1"), NodeSelector: map[string]string{"disk": "ssd"},
				NodeAffinity: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: corev1.LabelArchStable, Operator: corev1.NodeSelectorOpIn, Values: []string{"amd64"}}}}}},
				Tolerations: []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}},
			}})},
			clusters: []oracleCluster{
				cluster("bare"),
				cluster("arm", class(func(c *broker.NodeClass) { c.Labels, c.Arch = map[string]string{"disk": "ssd"}, "arm64" })),
				cluster("tainted", class(func(c *broker.NodeClass) {
					c.Labels = map[string]string{"disk": "ssd"}
					c.Taints = []corev1.Taint{{Key: "db", Effect: corev1.TaintEffectNoSchedule}}
				})),
				cluster("paris", class(func(c *broker.NodeClass) {
					c.Labels = map[string]string{"disk": "ssd"}
					c.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}, {Key: "slow", Effect: corev1.TaintEffectPreferNoSchedule}}
				})),
			},
			want: "paris", pods: 1,
			rejected: byCluster{"bare": "NoMatchingNodes", "arm": "NoMatchingNodes", "tainted": "NoMatchingNodes"},
			messages: byCluster{"bare": "No node matches: label disk=ssd is missing.", "arm": "the node affinity does not match", "tainted": "taint db:NoSchedule is not tolerated"},
		},
	})
}

// TestPreference: which of several clusters is chosen.
func TestPreference(t *testing.T) {
	runChoose(t, map[string]chooseCase{
		"cheaper": {
			reason:   "with the same capacity the cheapest is preferred",
			request:  pods(1, "cpu=1"),
			clusters: []oracleCluster{cluster("berlin", priced("0.2", "EUR")), cluster("paris", priced("0.1", "EUR"))},
			want:     "paris", pods: 1,
			rejected: byCluster{"berlin": "NotPreferred"},
			messages: byCluster{"berlin": "The request fits with score 35.00; paris was chosen with score 65.00."},
		},
		"more available": {
			reason:   "with the same price the one with more available is preferred",
			request:  pods(1, "cpu=1"),
			clusters: []oracleCluster{cluster("berlin"), cluster("paris", totals("cpu=8", ""), shapes(4, "cpu=2", 9))},
			want:     "paris", pods: 1,
		},
		"own site first": {
			reason: "the order of the request is before the score, and explained",
			request: with(pods(1, "cpu=1"), func(r *decide.Request) {
				r.Placement = &broker.Placement{PreferredProviders: []broker.ProviderGroup{{Clusters: []string{"site", "other"}}, {Regions: []string{"eu"}, Zones: []string{"a"}}}}
			}),
			clusters: []oracleCluster{
				cluster("bern", priced("0.01", "EUR"), func(c *oracleCluster) { c.Spec.Region, c.Spec.Zone = "eu", "a" }),
				cluster("cloud", priced("0.01", "EUR"), func(c *oracleCluster) { c.Spec.Region, c.Spec.Zone = "eu", "b" }),
				cluster("site", priced("0.9", "EUR")),
			},
			want: "site", pods: 1,
			rejected: byCluster{"bern": "NotPreferred", "cloud": "NotPreferred"},
			messages: byCluster{"bern": "The request fits with score 65.00; site was chosen with score 35.00. It is in group 1 of placement.preferredProviders."},
		},
		"then the cheap region": {
			reason: "the next group is chosen where the first one has no room",
			request: with(pods(1, "cpu=1"), func(r *decide.Request) {
				r.Placement = &broker.Placement{PreferredProviders: []broker.ProviderGroup{{Clusters: []string{"site"}}, {Regions: []string{"eu"}}}}
			}),
			clusters: []oracleCluster{
				cluster("bern", priced("0.9", "EUR"), func(c *oracleCluster) { c.Spec.Region = "eu" }),
				cluster("cloud", priced("0.01", "EUR")),
				cluster("site", totals("cpu=2", "cpu=2")),
			},
			want: "bern", pods: 1,
			rejected: byCluster{"cloud": "NotPreferred", "site": "InsufficientCapacity"},
		},
		"tie": {
			reason:   "equal scores go by cluster ID",
			request:  pods(1, "cpu=1"),
			clusters: []oracleCluster{cluster("paris"), cluster("berlin")},
			want:     "berlin", pods: 1,
		},
		"prices that differ by rounding": {
			reason:  "prices that are equal but for rounding are equal, and scores go by cluster ID",
			request: with(pods(1, "cpu=1 memory=1Gi"), func(r *decide.Request) { r.Weights = broker.ScoreWeights{Cost: 100} }),
			clusters: []oracleCluster{cluster("paris", priced("0.3", "EUR")), cluster("berlin", priced("0.1", "EUR"), func(c *oracleCluster) {
				c.Spec.Cost.MemoryCost = "0.2"
			})},
			want: "berlin", pods: 1,
		},
		"completeness before score": {
			reason:  "a cluster where all pods fit is better than a cheaper one where they do not",
			request: pods(3, "cpu=1"),
			clusters: []oracleCluster{
				cluster("berlin", priced("0.01", "EUR"), totals("cpu=90", "")),
				cluster("paris", priced("0.9", "EUR"), totals("cpu=3", ""), shapes(3, "cpu=1", 9)),
			},
			want: "paris", pods: 3,
			rejected: byCluster{"berlin": "PartialCapacity"},
			messages: byCluster{"berlin": `2 of 3 pods of pod set "pods" fit. Insufficient cpu on one node: requested 1.`},
		},
		"most pods": {
			reason:  "if all pods fit nowhere, the one where most fit",
			request: pods(9, "cpu=1"),
			clusters: []oracleCluster{
				cluster("berlin", totals("cpu=90", "")),
				cluster("oslo", totals("cpu=9", ""), shapes(3, "cpu=1", 9)),
				cluster("paris", totals("cpu=90", ""), shapes(3, "cpu=1", 9)),
			},
			want: "paris", pods: 3,
			rejected: byCluster{"berlin": "PartialCapacity", "oslo": "NotPreferred"},
		},
		"no cluster": {
			reason:   "an empty snapshot is no error",
			request:  pods(1, "cpu=1"),
			clusters: nil,
		},
	})
}

func TestCurrencies(t *testing.T) {
	runChoose(t, map[string]chooseCase{
		"cheaper in another currency": {
			reason: "prices in several currencies are compared by the rates",
			request: with(pods(1, "cpu=1"), func(r *decide.Request) {
				r.ExchangeRates = []broker.ExchangeRate{{Currency: "EUR", Rate: "1", Date: "2026-11-28"}, {Currency: "JPY", Rate: "0.005", Date: "2026-11-01"}}
			}),
			clusters: []oracleCluster{cluster("berlin", priced("0.2", "EUR")), cluster("paris", priced("20", "JPY"))},
			want:     "paris", pods: 1,
			messages: byCluster{"berlin": "The request fits with score 35.00; paris was chosen with score 65.00."},
		},
		"a currency without a rate": {
			reason: "its prices are not compared, and equal scores go by cluster ID",
			request: with(pods(1, "cpu=1"), func(r *decide.Request) {
				r.ExchangeRates = []broker.ExchangeRate{{Currency: "EUR", Rate: "1", Date: "2026-11-28"}}
			}),
			clusters: []oracleCluster{cluster("berlin", priced("0.2", "EUR")), cluster("paris", priced("20", "JPY"))},
			want:     "berlin", pods: 1,
		},
		"one of several currencies has no rate": {
			reason: "only its own price is not known",
			request: with(pods(1, "cpu=1"), func(r *decide.Request) {
				r.ExchangeRates = []broker.ExchangeRate{{Currency: "EUR", Rate: "1", Date: "2026-11-28"}, {Currency: "USD", Rate: "0.9", Date: "2026-11-28"}}
			}),
			clusters: []oracleCluster{cluster("athens", priced("20", "JPY")), cluster("berlin", priced("0.3", "EUR")), cluster("paris", priced("0.3", "USD"))},
			want:     "paris", pods: 1,
			messages: byCluster{"athens": "The request fits with score 50.00; paris was chosen with score 65.00.", "berlin": "The request fits with score 35.00; paris was chosen with score 65.00."},
		},
		"budget in another currency": {
			reason: "a price counts by the rates, with their date",
			request: with(pods(1, "cpu=1"), func(r *decide.Request) {
				r.Budget = &broker.Budget{MaxPricePerHour: "0.10", Currency: "EUR"}
				r.ExchangeRates = []broker.ExchangeRate{{Currency: "EUR", Rate: "1", Date: "2026-11-28"}, {Currency: "JPY", Rate: "0.005", Date: "2026-11-01"}}
			}),
			clusters: []oracleCluster{cluster("berlin", priced("21", "JPY")), cluster("oslo", priced("0.1", "NOK")), cluster("paris", priced("20", "JPY"))},
			want:     "paris", pods: 1,
			rejected: byCluster{"berlin": "OverBudget", "oslo": "PriceUnknown"},
			messages: byCluster{
				"berlin": "The price is 0.105 EUR per hour at the rates of 2026-11-01; the budget is 0.10 EUR.",
				"oslo":   "The price is in NOK, the budget in EUR.",
			},
		},
	})
}

// TestPriceByClass: pods have the highest price of the nodes where they may run.
func TestPriceByClass(t *testing.T) {
	// The cluster has nodes for 1 a core, spot nodes for 0.2, and tainted nodes with an A100 for 2 a core and 3 a GPU.
	byClass := func(c *oracleCluster) {
		eur := func(cpu, gpu string) *broker.Cost {
			return &broker.Cost{CPUCost: cpu, MemoryCost: "0", GPUCost: gpu, Currency: "EUR"}
		}
		nodes := func(name, label, free string, cost *broker.Cost, taints ...corev1.Taint) broker.NodeClass {
			largest := amounts(free)
			return broker.NodeClass{Name: name, Labels: map[string]string{label: "true"}, Taints: taints, LargestNode: &largest, Cost: cost,
				FreeShapes: []broker.FreeShape{{Nodes: 1, Free: largest, Pods: 100}}}
		}
		c.Spec.Cost = eur("1", "0.5")
		c.Spec.Resources.Allocatable = amounts("cpu=20 memory=64Gi nvidia.com/gpu=2")
		c.Spec.NodeClasses = []broker.NodeClass{
			nodes("standard", "standard", "cpu=8 memory=16Gi", nil),
			nodes("spot", "spot", "cpu=4 memory=16Gi", eur("0.2", "0.5")),
			nodes("a100", "a100", "cpu=8 memory=32Gi nvidia.com/gpu=2", eur("2", "3"), corev1.Taint{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}),
		}
	}
	set := func(requests, selected string, tolerates bool) broker.PodSet {
		set := broker.PodSet{Name: requests + selected, Count: 1, Requests: amounts(requests)}
		if selected != "" {
			set.NodeSelector = map[string]string{selected: "true"}
		}
		if tolerates {
			set.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
		}
		return set
	}
	for name, tc := range map[string]struct {
		sets  []broker.PodSet
		total string
		want  string
	}{
		"any nodes without taints":  {sets: []broker.PodSet{set("cpu=1", "", false)}, want: "1.00 EUR"},
		"only spot nodes":           {sets: []broker.PodSet{set("cpu=1", "spot", false)}, want: "0.20 EUR"},
		"too large for other nodes": {sets: []broker.PodSet{set("cpu=1 memory=20Gi", "", true)}, want: "2.00 EUR"},
		"a GPU":                     {sets: []broker.PodSet{set("cpu=1 nvidia.com/gpu=1", "", true)}, want: "5.00 EUR"},
		"the same nodes for all":    {sets: []broker.PodSet{set("cpu=1", "", true)}, want: "2.00 EUR"},
		"several sets":              {sets: []broker.PodSet{set("cpu=1", "", false), set("cpu=2", "spot", false), set("cpu=1 nvidia.com/gpu=1", "", true)}, want: "6.40 EUR"},
		"a divisible total":         {total: "cpu=3", want: "3.00 EUR"},
		"no nodes":                  {sets: []broker.PodSet{set("cpu=1", "gone", false)}, want: "1.00 EUR"},
	} {
		t.Run(name, func(t *testing.T) {
			c := cluster("paris", byClass)
			request := decide.Request{Requester: "rome", Want: capacity.OfPodSets(tc.sets)}
			if tc.total != "" {
				request.Want = broker.HeldCapacity{Totals: amounts(tc.total)}
			}
			if got := decide.Compare(request, snapshotOf([]oracleCluster{c}))[0].PricePerHour; got != tc.want {
				t.Errorf("the price is %s, want %s", got, tc.want)
			}
			status := broker.ClusterAdvertisementStatus{}
			if _, err := ledger.Place(&c.Spec, &status, ledger.Growth{ReservationUID: "a", Attempt: 1, Capacity: request.Want}); err != nil {
				t.Fatal(err)
			}
			price, currency, known := pricing.Of(status.Holds[0].Cost, request.Want.Totals)
			if !known || text.Price(price, currency) != tc.want {
				t.Errorf("the hold costs %+v, want %s", status.Holds[0].Cost, tc.want)
			}
		})
	}
	spot := with(decide.Request{Requester: "rome", Want: capacity.OfPodSets([]broker.PodSet{set("cpu=1", "spot", false)})}, func(r *decide.Request) {
		r.Budget = &broker.Budget{MaxPricePerHour: "0.90", Currency: "EUR"}
	})
	dearSpot := cluster("berlin", byClass, func(c *oracleCluster) { c.Spec.NodeClasses[1].Cost.CPUCost = "0.95" })
	otherCurrency := cluster("oslo", byClass, func(c *oracleCluster) { c.Spec.NodeClasses[1].Cost.Currency = "NOK" })
	runChoose(t, map[string]chooseCase{
		"budget": {
			reason: "only the prices of nodes where the pods may run count", request: spot,
			clusters: []oracleCluster{dearSpot, otherCurrency, cluster("paris", byClass)}, want: "paris", pods: 1,
			rejected: byCluster{"berlin": "OverBudget", "oslo": "PriceUnknown"},
			messages: byCluster{"berlin": "The price is 0.95 EUR per hour; the budget is 0.90 EUR."},
		},
		"score": {
			reason: "the cost of the class is rated", request: with(spot, func(r *decide.Request) { r.Budget = nil }),
			clusters: []oracleCluster{dearSpot, cluster("paris", byClass)}, want: "paris", pods: 1,
			rejected: byCluster{"berlin": "NotPreferred"},
		},
	})

	// Each of two clusters has room for one pod, and nodes for 0.1 that the pods do not select.
	one := func(id, cpu string) oracleCluster {
		return cluster(id, byClass, func(c *oracleCluster) {
			c.Spec.Cost.CPUCost, c.Spec.NodeClasses[1].Cost.CPUCost = "0.1", cpu
			c.Spec.NodeClasses[1].FreeShapes[0].Pods = 1
		})
	}
	two := with(spot, func(r *decide.Request) { r.Want.PodSets[0].Count, r.Budget.MaxPricePerHour = 2, "2.1" })
	two.Want = capacity.OfPodSets(two.Want.PodSets)
	_, missing, decision := decide.Split(two, snapshotOf([]oracleCluster{one("berlin", "1.2"), one("paris", "1")}), func(_ *broker.ClusterAdvertisementSpec, holds []broker.Hold, amount broker.HeldCapacity) ([]broker.Hold, *capacity.Rejection) {
		return append(holds, broker.Hold{ReservationName: "r", Requester: "rome", Promised: amount}), nil
	})
	if missing.Pods() != 1 || !slices.ContainsFunc(decision.Rejections, func(r broker.ClusterRejection) bool {
		return strings.Contains(r.Message, "The price is 2.20 EUR per hour; the budget is 2.10 EUR.")
	}) {
		t.Errorf("the first part costs 1.00 EUR, so the second one for 1.20 EUR is over budget: %d pods are missing, %+v", missing.Pods(), decision.Rejections)
	}
}

// TestChooseProperties checks against a packing that puts pods on nodes one by
// one.
func TestChooseProperties(t *testing.T) {
	milli := func(q broker.ResourceQuantities, name corev1.ResourceName) int64 {
		amount := q.List()[name]
		return amount.MilliValue()
	}
	quantity := func(t *rapid.T, label string, most int64) broker.ResourceQuantities {
		return broker.FromList(corev1.ResourceList{
			corev1.ResourceCPU:    *resource.NewMilliQuantity(rapid.Int64Range(0, most).Draw(t, label+" cpu"), resource.DecimalSI),
			corev1.ResourceMemory: *resource.NewQuantity(rapid.Int64Range(0, most).Draw(t, label+" memory"), resource.BinarySI),
		})
	}
	rapid.Check(t, func(t *rapid.T) {
		var clusters []oracleCluster
		for i := range rapid.IntRange(0, 5).Draw(t, "clusters") {
			c := cluster(string(rune('a' + i)))
			c.Spec.Resources.Allocatable, c.Spec.Resources.Allocated = quantity(t, "allocatable", 9000), quantity(t, "allocated", 2000)
			c.Spec.NodeClasses[0].FreeShapes = nil
			for range rapid.IntRange(0, 3).Draw(t, "shapes") {
				c.Spec.NodeClasses[0].FreeShapes = append(c.Spec.NodeClasses[0].FreeShapes, broker.FreeShape{
					Nodes: rapid.Int32Range(0, 3).Draw(t, "nodes"), Pods: rapid.Int32Range(0, 4).Draw(t, "node pods"), Free: quantity(t, "free", 2000),
				})
			}
			c.Active, c.Fresh = rapid.Bool().Draw(t, "active"), true
			clusters = append(clusters, c)
		}
		request := decide.Request{Requester: "rome", Want: capacity.OfPodSets([]broker.PodSet{
			{Name: "x", Count: rapid.Int32Range(1, 9).Draw(t, "x"), Requests: quantity(t, "request x", 900)},
			{Name: "y", Count: rapid.Int32Range(0, 9).Draw(t, "y"), Requests: quantity(t, "request y", 900)},
		})}
		got := decide.Choose(request, snapshotOf(clusters))

		seen := map[string]int{}
		if got.Cluster != "" {
			seen[got.Cluster]++
		}
		for _, r := range got.Rejections {
			seen[r.Cluster]++
			if r.Reason == "" || r.Message == "" {
				t.Fatalf("a rejection without a reason: %+v", r)
			}
		}
		for _, c := range clusters {
			if seen[c.Spec.ClusterID] != 1 {
				t.Fatalf("%s is listed %d times", c.Spec.ClusterID, seen[c.Spec.ClusterID])
			}
		}
		if len(seen) != len(clusters) {
			t.Fatalf("unknown clusters: %v", seen)
		}
		if got.Complete != (got.Cluster != "" && capacity.Equal(got.Placement, request.Want)) {
			t.Fatalf("complete=%t with %v", got.Complete, got.Placement)
		}

		shuffled := rapid.Permutation(clusters).Draw(t, "order")
		if diff := cmp.Diff(got, decide.Choose(request, snapshotOf(shuffled))); diff != "" {
			t.Fatalf("the order of the snapshot changed the answer:\n%s", diff)
		}

		if got.Cluster == "" {
			return
		}
		at := slices.IndexFunc(clusters, func(c oracleCluster) bool { return c.Spec.ClusterID == got.Cluster })
		chosen := clusters[at]
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			_, available := ledger.Account(&chosen.Spec, &broker.ClusterAdvertisementStatus{})
			if milli(got.Placement.Totals, name) > milli(available, name) {
				t.Fatalf("placed %s of %s", got.Placement.Totals, available)
			}
		}
		if !packs(chosen, got.Placement.PodSets) {
			t.Fatalf("%+v does not go into %+v", got.Placement.PodSets, chosen.Spec.NodeClasses)
		}
	})
}

// packs reports whether some assignment of the pods to nodes fits, by trying
// all that matter.
func packs(c oracleCluster, sets []broker.PodSet) bool {
	type node struct{ cpu, memory, pods int64 }
	var nodes []node
	for _, s := range c.Spec.NodeClasses[0].FreeShapes {
		cpu, memory := s.Free.List()[corev1.ResourceCPU], s.Free.List()[corev1.ResourceMemory]
		for range s.Nodes {
			nodes = append(nodes, node{cpu.MilliValue(), memory.Value(), int64(s.Pods)})
		}
	}
	left := make([]int32, len(sets))
	for i, set := range sets {
		left[i] = set.Count
	}
	failed := map[string]bool{}
	var fill func(at int) bool
	fill = func(at int) bool {
		if !slices.ContainsFunc(left, func(n int32) bool { return n > 0 }) {
			return true
		}
		if at == len(nodes) {
			return false
		}
		key := string(rune(at)) + string(left)
		if failed[key] {
			return false
		}
		// Every combination of counts on this node.
		var put func(set int, free node) bool
		put = func(set int, free node) bool {
			if set == len(sets) {
				return fill(at + 1)
			}
			cpu, memory := sets[set].Requests.List()[corev1.ResourceCPU], sets[set].Requests.List()[corev1.ResourceMemory]
			for n := left[set]; n >= 0; n-- {
				after := node{free.cpu - int64(n)*cpu.MilliValue(), free.memory - int64(n)*memory.Value(), free.pods - int64(n)}
				if after.cpu < 0 || after.memory < 0 || after.pods < 0 {
					continue
				}
				left[set] -= n
				ok := put(set+1, after)
				left[set] += n
				if ok {
					return true
				}
			}
			return false
		}
		ok := put(0, nodes[at])
		failed[key] = !ok
		return ok
	}
	return fill(0)
}

// TestForConsumer: a consumer sees the clusters that lend to it by name.
func TestForConsumer(t *testing.T) {
	scores := []broker.ClusterScore{{Cluster: "paris", Score: "50.00"}}
	all := func(reasons ...string) (rejections []broker.ClusterRejection) {
		for i, reason := range reasons {
			rejections = append(rejections, broker.ClusterRejection{Cluster: fmt.Sprint("c", i), Reason: reason})
		}
		return rejections
	}
	counts := func(counts ...broker.RejectionCount) []broker.RejectionCount { return counts }
	for name, tc := range map[string]struct {
		reason         string
		decision, want *broker.Decision
	}{
		"none": {reason: "nothing was decided yet"},
		"all lend": {
			reason:   "there is nothing to hide",
			decision: &broker.Decision{Scores: scores, Rejections: all("Refused", "OverBudget")},
			want:     &broker.Decision{Scores: scores, Rejections: all("Refused", "OverBudget")},
		},
		"listed": {
			reason:   "those that lend to others, and to none, do not differ",
			decision: &broker.Decision{Scores: scores, Rejections: all("Refused", "LendingDisabled", "ConsumerNotAdmitted", "RequesterItself")},
			want:     &broker.Decision{Scores: scores, Rejections: all("Refused"), RejectionCounts: counts(broker.RejectionCount{Reason: "ConsumerNotAdmitted", Count: 2})},
		},
		"counted": {
			reason: "the counts stay in order",
			decision: &broker.Decision{Rejections: all("LendingDisabled"), RejectionCounts: counts(
				broker.RejectionCount{Reason: "ConsumerNotAdmitted", Count: 3}, broker.RejectionCount{Reason: "LendingDisabled", Count: 4},
				broker.RejectionCount{Reason: "AdvertisementTooOld", Count: 1}, broker.RejectionCount{Reason: "Refused", Count: 5}, broker.RejectionCount{Reason: "RequesterItself", Count: 1})},
			want: &broker.Decision{RejectionCounts: counts(
				broker.RejectionCount{Reason: "AdvertisementTooOld", Count: 1}, broker.RejectionCount{Reason: "ConsumerNotAdmitted", Count: 8}, broker.RejectionCount{Reason: "Refused", Count: 5})},
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := tc.decision.DeepCopy()
			if diff := cmp.Diff(tc.want, decide.ForConsumer(tc.decision)); diff != "" {
				t.Errorf("%s (-want +got)\n%s", tc.reason, diff)
			}
			if diff := cmp.Diff(before, tc.decision); diff != "" {
				t.Errorf("the decision has changed (-before +after)\n%s", diff)
			}
		})
	}
}
