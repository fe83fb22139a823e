package decide_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/pricing"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// world draws clusters and requests that touch everything a decision depends on.
type world struct{ *rapid.T }

func (w world) of(label string, choices ...string) string {
	return rapid.SampledFrom(choices).Draw(w.T, label)
}

func (w world) amounts(label string, most int) broker.ResourceQuantities {
	n := func(name string, most int) int { return rapid.IntRange(0, most).Draw(w.T, label+" "+name) }
	text := fmt.Sprintf("cpu=%d%s memory=%d%s", n("cpu", most), w.of("unit", "00m", "00m", "", "50u"), n("memory", most), w.of("unit", "Mi", "M", ""))
	if n("kind", 3) == 0 {
		text += fmt.Sprintf(" nvidia.com/gpu=%d a.example/x=%d ephemeral-storage=%dMi", n("gpu", 2), n("x", 2), n("storage", most))
	}
	return amounts(text)
}

func (w world) sets(label string, most int32) (sets []broker.PodSet) {
	for i := range rapid.IntRange(1, 3).Draw(w.T, label) {
		set := broker.PodSet{Name: fmt.Sprint(label, i), Count: rapid.Int32Range(1, most).Draw(w.T, "count"), Requests: w.amounts("request", 6)}
		if disk := w.of("selector", "", "", "", "ssd"); disk != "" {
			set.NodeSelector = map[string]string{"disk": disk}
		}
		if arch := w.of("affinity", "", "", "amd64", "arm64", "bad value"); arch != "" {
			set.NodeAffinity = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: corev1.LabelArchStable, Operator: corev1.NodeSelectorOpIn, Values: []string{arch}}}}}}
		}
		if rapid.Bool().Draw(w.T, "tolerates") {
			set.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
		}
		set.PodSecurity = w.of("standard", "", "baseline", "restricted")
		sets = append(sets, set)
	}
	return sets
}

func (w world) capacity(label string, most int32) broker.HeldCapacity {
	if w.of("kind", "pods", "pods", "pods", "total") == "total" {
		return broker.HeldCapacity{Totals: w.amounts("total", 9)}
	}
	return capacity.OfPodSets(w.sets(label, most))
}

func (w world) cluster(i int) oracleCluster {
	c := oracleCluster{Active: w.of("active", "yes", "yes", "yes", "yes", "no") == "yes", Fresh: w.of("fresh", "yes", "yes", "yes", "yes", "no") == "yes"}
	c.Spec = broker.ClusterAdvertisementSpec{
		ClusterID: fmt.Sprintf("c%02d", i),
		Lending:   broker.Lending{Enabled: w.of("lends", "yes", "yes", "yes", "yes", "no") == "yes", PodSecurity: w.of("required standard", "", "baseline", "restricted")},
		Region:    w.of("region", "eu", "us"), Zone: w.of("zone", "a", "b"), Sequence: rapid.Int64Range(6, 7).Draw(w.T, "sequence"),
		Resources: broker.AdvertisedResources{Allocatable: w.amounts("allocatable", 90), Allocated: w.amounts("allocated", 9)},
	}
	if i == 1 {
		c.Spec.Latencies = []broker.ProviderLatency{{Cluster: "c00", Milliseconds: 5}, {Cluster: "c02", Milliseconds: rapid.Int32Range(1, 90).Draw(w.T, "latency")}}
	}
	if w.of("consumers", "all", "all", "all", "some") == "some" {
		c.Spec.Lending.Consumers = []string{w.of("admits", "rome", "oslo")}
	}
	if cpu := w.of("price", "", "0.04", "0.05", "1", "0.123456789", "0.1234567891", "99999999999"); cpu != "" {
		c.Spec.Cost = &broker.Cost{CPUCost: cpu, MemoryCost: w.of("memory price", "0", "0.01"), GPUCost: w.of("gpu price", "", "2"), Currency: w.of("currency", "EUR", "EUR", "EUR", "USD")}
	}
	for i := range rapid.IntRange(0, 3).Draw(w.T, "classes") {
		class := broker.NodeClass{Name: w.of("class", "x", "y") + fmt.Sprint(i), Arch: w.of("arch", "amd64", "arm64", "")}
		if disk := w.of("disk", "", "ssd"); disk != "" {
			class.Labels = map[string]string{"disk": disk}
		}
		if taint := w.of("taint", "", "", "gpu", "db"); taint != "" {
			class.Taints = []corev1.Taint{{Key: taint, Effect: corev1.TaintEffectNoSchedule}}
		}
		for range rapid.IntRange(0, 3).Draw(w.T, "shapes") {
			class.FreeShapes = append(class.FreeShapes, broker.FreeShape{
				Nodes: rapid.Int32Range(0, 4).Draw(w.T, "nodes"), Pods: rapid.Int32Range(0, 5).Draw(w.T, "pods"), Free: w.amounts("free", 12),
			})
		}
		c.Spec.NodeClasses = append(c.Spec.NodeClasses, class)
	}
	for i := range rapid.IntRange(0, 3).Draw(w.T, "holds") {
		hold := broker.Hold{ReservationUID: types.UID(fmt.Sprint(i)), ReservationName: fmt.Sprint(i), Requester: w.of("holder", "rome", "oslo"), Promised: w.capacity("held", 3)}
		if rapid.Bool().Draw(w.T, "shrunk") {
			before := w.capacity("before", 3)
			hold.Unconfirmed = &before
		}
		c.Holds = append(c.Holds, hold)
	}
	if rapid.Bool().Draw(w.T, "guests") {
		c.Spec.ObservedHolds = []broker.ObservedHold{{Requester: "oslo", Used: w.amounts("used", 9), Pods: rapid.Int32Range(0, 4).Draw(w.T, "guest pods")}}
	}
	return c
}

func (w world) request() decide.Request {
	request := decide.Request{Requester: w.of("requester", "rome", "c01"), Want: w.capacity("want", 12)}
	if w.of("pinned", "no", "no", "no", "yes") == "yes" {
		request.Pin = w.of("pin", "c00", "c01", "c02")
	}
	if w.of("placed", "no", "no", "yes") == "yes" {
		request.Placement = &broker.Placement{Regions: []string{"eu"}, ExcludeClusters: []string{"c02"}}
		if rapid.Bool().Draw(w.T, "by zone") {
			request.Placement.Zones = []string{"a"}
		}
	}
	if w.of("limited", "no", "no", "yes") == "yes" {
		request.Budget = &broker.Budget{MaxPricePerHour: w.of("budget", "0.01", "0.1", "1", "100", "none"), Currency: "EUR"}
		request.Committed = big.NewRat(rapid.Int64Range(0, 3).Draw(w.T, "committed"), 30)
	}
	if w.of("refused", "no", "no", "yes") == "yes" {
		request.Rejected = map[string]capacity.Rejection{"c00": {Reason: decide.ReasonRefused, Message: "full."}, "c03": {Reason: decide.ReasonNotAnswering, Message: "No answer."}}
	}
	if rapid.Bool().Draw(w.T, "weighted") {
		request.Weights = broker.ScoreWeights{Resources: 33, Cost: 67}
		if w.of("rules", "two", "four") == "four" {
			request.Weights = broker.ScoreWeights{Resources: 20, Cost: 30, Reliability: 20, Latency: 30}
			memory := answers.New()
			for i := range rapid.IntRange(0, 4).Draw(w.T, "promises") {
				now := time.Unix(int64(i)*1000, 0)
				if cluster := w.of("promising", "c00", "c01", "c02"); rapid.Bool().Draw(w.T, "kept") {
					memory.Accepted(cluster, request.Want, now)
				} else {
					memory.Refused(cluster, "oslo", request.Want, "full", time.Second, now)
				}
			}
			request.Records = memory.Records(time.Unix(5000, 0))
		}
	}
	if w.of("ordered", "no", "no", "yes") == "yes" {
		if request.Placement == nil {
			request.Placement = &broker.Placement{}
		}
		request.Placement.PreferredProviders = []broker.ProviderGroup{{Clusters: []string{"c03", "c04"}, Zones: []string{"b"}}, {Regions: []string{"us"}}}
	}
	return request
}

func (w world) clusters() (clusters []oracleCluster) {
	most := rapid.SampledFrom([]int{3, 6, 30}).Draw(w.T, "most clusters")
	for i := range rapid.IntRange(0, most).Draw(w.T, "clusters") {
		clusters = append(clusters, w.cluster(i))
	}
	return clusters
}

// TestChooseAsOracle: the decision, and the reason for each cluster, are those of the
// oracle.
func TestChooseAsOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := world{t}
		clusters, request := w.clusters(), w.request()
		want, snapshot := oracleChoose(request, oracleSnapshot{clusters}), snapshotOf(clusters)
		got := decide.Choose(request, snapshot)
		if got.Cluster != want.Cluster || got.Complete != want.Complete {
			t.Fatalf("chose %q (complete: %t), want %q (%t)", got.Cluster, got.Complete, want.Cluster, want.Complete)
		}
		if diff := cmp.Diff(want.Placement, got.Placement); diff != "" {
			t.Fatalf("placement (-want +got)\n%s", diff)
		}
		if diff := cmp.Diff(want.Rejections, decide.Explain(request, snapshot)); diff != "" {
			t.Fatalf("rejections (-want +got)\n%s", diff)
		}
		expectReport(t, got.Decision, want)
	})
}

// expectReport checks that a decision is the bounded form of the oracle's.
func expectReport(t *rapid.T, got broker.Decision, want oracleDecision) {
	t.Helper()
	if diff := cmp.Diff(want.Scores[:min(20, len(want.Scores))], got.Scores, cmpopts.IgnoreFields(broker.ClusterScore{}, "Detail")); len(want.Scores) > 0 && diff != "" {
		t.Fatalf("scores (-want +got)\n%s", diff)
	}
	if len(got.Rejections) != min(20, len(want.Rejections)) || len(got.Rejections)+got.Unlisted() != len(want.Rejections) {
		t.Fatalf("%d rejections are listed and %d counted, of %d", len(got.Rejections), got.Unlisted(), len(want.Rejections))
	}
	counts := map[string]int32{}
	for _, r := range want.Rejections {
		at := slices.IndexFunc(got.Rejections, func(g broker.ClusterRejection) bool { return g.Cluster == r.Cluster })
		if at < 0 {
			counts[r.Reason]++
			continue
		}
		listed := got.Rejections[at]
		if message, cut := strings.CutSuffix(listed.Message, "…"); listed.Reason != r.Reason || listed.Message != r.Message && !(cut && strings.HasPrefix(r.Message, message)) || len(listed.Message) > 512 {
			t.Fatalf("listed %+v, want %+v", listed, r)
		}
	}
	for _, c := range got.RejectionCounts {
		if counts[c.Reason] != c.Count {
			t.Fatalf("%d are rejected for %s, want %d", c.Count, c.Reason, counts[c.Reason])
		}
	}
}

// TestSplitAsOracle: a split is what the oracle chooses one after the other.
func TestSplitAsOracle(t *testing.T) {
	place := func(holds []broker.Hold, amount broker.HeldCapacity) []broker.Hold {
		return append(slices.Clone(holds), broker.Hold{ReservationUID: "new", ReservationName: "new", Requester: "rome", Promised: amount})
	}
	rapid.Check(t, func(t *rapid.T) {
		w := world{t}
		clusters, request := w.clusters(), w.request()
		for i := range request.Want.PodSets {
			request.Want.PodSets[i].Count *= 4
		}
		request.Want = capacity.Add(request.Want, broker.HeldCapacity{})
		if len(request.Want.PodSets) > 0 {
			request.Want = capacity.OfPodSets(request.Want.PodSets)
		}
		refuses := w.of("refuses", "none", "none", "c01", "c02")
		full := capacity.Rejection{Reason: "LedgerFull", Message: "The ledger is full."}
		parts, missing, decision := decide.Split(request, snapshotOf(clusters), func(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold, amount broker.HeldCapacity) ([]broker.Hold, *capacity.Rejection) {
			if spec.ClusterID == refuses {
				return nil, &full
			}
			return place(holds, amount), nil
		})

		left := request
		left.Rejected = maps.Clone(request.Rejected)
		left.Committed = new(big.Rat)
		if request.Committed != nil {
			left.Committed.Set(request.Committed)
		}
		var want []decide.Part
		var last oracleDecision
		for len(want) <= len(clusters) {
			last = oracleChoose(left, oracleSnapshot{clusters})
			at := slices.IndexFunc(clusters, func(c oracleCluster) bool { return c.Spec.ClusterID == last.Cluster })
			if at < 0 {
				break
			}
			if last.Cluster == refuses {
				if left.Rejected == nil {
					left.Rejected = map[string]capacity.Rejection{}
				}
				left.Rejected[refuses] = full
				continue
			}
			clusters[at].Holds = place(clusters[at].Holds, last.Placement)
			if price, _, known := pricing.Of(clusters[at].Spec.Cost, last.Placement.Totals); known {
				left.Committed.Add(left.Committed, price)
			}
			want = append(want, decide.Part{Cluster: last.Cluster, Capacity: last.Placement})
			if left.Want = capacity.Sub(left.Want, last.Placement); left.Want.Empty() {
				break
			}
		}
		if diff := cmp.Diff(want, parts); diff != "" {
			t.Fatalf("parts (-want +got)\n%s", diff)
		}
		if diff := cmp.Diff(left.Want, missing); diff != "" {
			t.Fatalf("missing (-want +got)\n%s", diff)
		}
		if missing.Empty() {
			last.Rejections = slices.DeleteFunc(last.Rejections, func(r broker.ClusterRejection) bool {
				return slices.ContainsFunc(parts, func(p decide.Part) bool { return p.Cluster == r.Cluster })
			})
		}
		last.Scores = nil
		scores := decision.Scores
		decision.Scores = nil
		expectReport(t, decision, last)
		if len(scores) > 20 {
			t.Fatalf("%d scores", len(scores))
		}
	})
}

// A Store that changed is like one that was filled with the outcome.
func TestStore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := world{t}
		var store decide.Store
		known, request := map[string]oracleCluster{}, w.request()
		for range rapid.IntRange(0, 8).Draw(t, "changes") {
			before := store.Snapshot(nil)
			answer := decide.Choose(request, before)
			c := w.cluster(rapid.IntRange(0, 4).Draw(t, "cluster"))
			c.Active, c.Fresh = true, true
			if id := c.Spec.ClusterID; w.of("change", "upsert", "upsert", "remove") == "remove" {
				store.Remove(id)
				delete(known, id)
			} else {
				store.Upsert(&c.Spec, c.Holds)
				known[id] = c
			}
			if diff := cmp.Diff(answer, decide.Choose(request, before)); diff != "" {
				t.Fatalf("a snapshot changed with its store:\n%s", diff)
			}
		}
		var clusters []oracleCluster
		for _, c := range known {
			clusters = append(clusters, c)
		}
		if diff := cmp.Diff(decide.Choose(request, snapshotOf(clusters)), decide.Choose(request, store.Snapshot(nil))); diff != "" {
			t.Fatalf("(-filled +changed)\n%s", diff)
		}
	})
}

// Decisions do not disturb changes of the store, which are made one at a time: run with -race.
func TestConcurrentUse(t *testing.T) {
	var store decide.Store
	var mu sync.Mutex
	request := pods(3, "cpu=500m")
	for i := range 20 {
		c := cluster(fmt.Sprintf("c%02d", i), holds("oslo", 1, "cpu=100m"))
		store.Upsert(&c.Spec, c.Holds)
	}
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for i := range 50 {
				mu.Lock()
				snapshot := store.Snapshot(nil)
				mu.Unlock()
				if got := decide.Choose(request, snapshot); got.Placement.Pods() != 3 || len(got.Rejections) != 19 {
					t.Errorf("chose %+v", got)
				}
				c := cluster(fmt.Sprintf("c%02d", i%20), holds("oslo", 1, "cpu=100m"))
				mu.Lock()
				store.Upsert(&c.Spec, c.Holds)
				mu.Unlock()
			}
		})
	}
	wait.Wait()
}

// The decision is part of a status: it stays small however many clusters there are.
func TestDecisionIsSmall(t *testing.T) {
	long := strings.Repeat("x", 200)
	var clusters []oracleCluster
	for i := range 5000 {
		clusters = append(clusters, cluster(fmt.Sprintf("cluster-with-a-long-name-%05d", i), shapes(1, "cpu=1 memory=900Mi", 9)))
	}
	var sets []broker.PodSet
	for i := range 8 {
		sets = append(sets, broker.PodSet{Name: fmt.Sprintf("set-%d", i), Count: 100, Requests: amounts("cpu=900m"), NodeSelector: map[string]string{"label": fmt.Sprint(long, i%2)}})
	}
	sets[0].NodeSelector = nil
	request := decide.Request{Requester: "rome", Want: capacity.OfPodSets(sets)}
	got := decide.Choose(request, snapshotOf(clusters))
	text, err := json.Marshal(got.Decision)
	expect.NoError(t, err)
	if got.Cluster == "" || len(got.Rejections) != 20 || got.Unlisted() != 4979 || len(text) > 16<<10 {
		t.Errorf("the decision has %d bytes, %d rejections, %d unlisted", len(text), len(got.Rejections), got.Unlisted())
	}
	if all := decide.Explain(request, snapshotOf(clusters)); len(all) != 4999 {
		t.Errorf("%d clusters are explained, want 4999", len(all))
	}
}

// Those that came closest are listed.
func TestRelevance(t *testing.T) {
	var clusters []oracleCluster
	for i := range 25 {
		clusters = append(clusters, cluster(fmt.Sprintf("a%02d", i), func(c *oracleCluster) { c.Spec.Lending.Enabled = false }))
	}
	clusters = append(clusters, cluster("partly"), cluster("full", totals("cpu=1", "")), cluster("paris", totals("cpu=9", ""), shapes(3, "cpu=1", 9)))
	got := decide.Choose(pods(3, "cpu=1"), snapshotOf(clusters))
	var listed []string
	for _, r := range got.Rejections {
		listed = append(listed, r.Cluster)
	}
	if len(listed) != 20 || !slices.Contains(listed, "partly") || !slices.Contains(listed, "full") {
		t.Errorf("listed are %v", listed)
	}
	if diff := cmp.Diff([]broker.RejectionCount{{Reason: "LendingDisabled", Count: 7}}, got.RejectionCounts); diff != "" {
		t.Errorf("counts (-want +got)\n%s", diff)
	}
}
