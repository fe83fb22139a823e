package whatif_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/whatif"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/rehearsal"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var update = flag.Bool("update", false, "Write the golden files.")

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// cluster advertises one node with free cores.
func cluster(id, free, price string) broker.ClusterAdvertisement {
	amount := broker.FromList(expect.Resources("cpu", free, "memory", "64Gi"))
	return broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: id}, Spec: broker.ClusterAdvertisementSpec{
		ClusterID: id, Region: "eu-" + id, Lending: broker.Lending{Enabled: true}, Resources: broker.AdvertisedResources{Capacity: amount, Allocatable: amount},
		NodeClasses: []broker.NodeClass{{Name: "std", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: amount, Pods: 110}}}},
		Cost:        &broker.Cost{CPUCost: price, MemoryCost: "0", Currency: "EUR"},
	}, Status: broker.ClusterAdvertisementStatus{Active: true}}
}

// waits is a Reservation of oslo in the queue.
func waits(name string, pods int32) broker.Reservation {
	return broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "oslo-" + name, UID: "u-" + "1", CreationTimestamp: metav1.Time{Time: now.Add(-time.Hour)}, Generation: 1,
		Labels: map[string]string{broker.LabelRequester: "oslo", broker.LabelSourceNamespace: "ml", broker.LabelSourceName: name}},
		Spec: broker.ReservationSpec{RequesterID: "oslo", PodSets: []broker.PodSet{{Name: "pods", Count: pods, Requests: broker.FromList(expect.Resources("cpu", "4"))}}},
		Status: broker.ReservationStatus{Phase: broker.ReservationPending, Conditions: []metav1.Condition{
			{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, LastTransitionTime: metav1.Time{Time: now.Add(-time.Hour)}}}}}
}

// manifest returns an object with pods of 2 cores.
func manifest(kind, name, more string) string {
	version, replicas := "apps/v1", "replicas: 3"
	if kind == "Job" {
		version, replicas = "batch/v1", "parallelism: 3"
	}
	return fmt.Sprintf(`{apiVersion: %s, kind: %s, metadata: {name: "%s"}, spec: {%s, template: {metadata: {labels: {app: web%s}}, spec: {containers: [{name: web, image: web, resources: {limits: {cpu: 2, memory: 1Gi}}}]}}}}`,
		version, kind, name, replicas, more)
}

// gang adds a label of the pods.
const gang = `, scheduling.x-k8s.io/pod-group: train`

// scenario is an input in the making.
type scenario struct {
	namespace *explain.Observed
	ads       []broker.ClusterAdvertisement
	queue     []broker.Reservation
	configs   []broker.BrokerConfig
	noHub     string
	least     *int32
	documents []string
}

func (s *scenario) run(t *testing.T) whatif.Answers {
	in := whatif.Input{Cluster: "rome", Namespaces: map[string]*explain.Observed{"shop": s.namespace}, NoHub: s.noHub}
	for _, document := range s.documents {
		raw, err := yaml.YAMLToJSON([]byte(document))
		expect.NoError(t, err)
		object := &unstructured.Unstructured{}
		expect.NoError(t, object.UnmarshalJSON(raw))
		w, ok, err := whatif.Of(object, "shop")
		expect.NoError(t, err)
		if !ok {
			t.Fatalf("%s has no pods", document)
		}
		w.Least = s.least
		in.Workloads = append(in.Workloads, w)
	}
	if s.noHub == "" {
		in.Hub = rehearsal.New(now, s.ads, s.queue, s.configs)
	}
	return whatif.Run(in)
}

// world is a hub of four clusters, and namespace shop of rome.
func world() *scenario {
	closed := cluster("vienna", "64", "0.01")
	closed.Spec.Lending.Consumers = []string{"oslo"}
	stale := cluster("turin", "64", "0.01")
	stale.Status.Active = false
	return &scenario{
		ads: []broker.ClusterAdvertisement{cluster("rome", "2", "0"), cluster("paris", "16", "0.10"), cluster("berlin", "8", "0.04"), closed, stale},
		namespace: &explain.Observed{
			Namespace: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}},
			Policies:  []broker.OverflowPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Spec: broker.OverflowPolicySpec{MaxResources: ptr.To(broker.FromList(expect.Resources("cpu", "40")))}}},
		},
		documents: []string{manifest("Deployment", "web", "")},
	}
}

func TestRun(t *testing.T) {
	for name, of := range map[string]struct {
		placed bool
		change func(*scenario)
	}{
		"placed": {true, func(*scenario) {}},
		"divided": {true, func(s *scenario) {
			s.documents = []string{strings.Replace(s.documents[0], "replicas: 3", "replicas: 11", 1)}
		}},
		"spread": {false, func(s *scenario) {
			s.documents = []string{strings.Replace(s.documents[0], "replicas: 3", "replicas: 12", 1)}
			s.namespace.Policies[0].Spec.Placement = &broker.Placement{Spread: &broker.Spread{Over: broker.SpreadOverRegion, MaxSkew: 1}}
			s.ads[3].Spec.Lending.Consumers, s.ads[3].Spec.Region = nil, ""
		}},
		"data": {true, func(s *scenario) {
			s.namespace.Policies[0].Spec.Placement = &broker.Placement{DataRegions: []string{"eu-paris"}, TransferPrice: &broker.TransferPrice{PricePerHour: "0.20", Currency: "EUR"}}
			s.namespace.Policies[0].Spec.Budget = &broker.Budget{MaxPricePerHour: "0.70", Currency: "EUR"}
		}},
		"partly": {false, func(s *scenario) {
			s.documents = []string{strings.Replace(s.documents[0], "replicas: 3", "replicas: 14", 1)}
		}},
		"one-by-one": {true, func(s *scenario) { s.documents = append(s.documents, manifest("StatefulSet", "db", "")) }},
		"shared":     {true, func(s *scenario) { s.documents = []string{manifest("Job", "a", ""), manifest("Job", "b", "")} }},
		"kept-free":  {false, func(s *scenario) { s.queue = []broker.Reservation{waits("train", 6)} }},
		"kept-for-none": {true, func(s *scenario) {
			s.queue = []broker.Reservation{waits("huge", 6)}
			s.queue[0].Spec.MinAvailable = 600
			s.queue[0].Spec.PodSets[0].Count = 600
		}},
		"gang": {true, func(s *scenario) {
			s.least = ptr.To[int32](4)
			s.documents = []string{manifest("Job", "a", gang), manifest("Deployment", "b", gang)}
		}},
		"gang-too-small": {false, func(s *scenario) { s.least = ptr.To[int32](4); s.documents = []string{manifest("Job", "a", gang)} }},
		"limited": {false, func(s *scenario) {
			s.namespace.Policies[0].Spec.MaxResources = ptr.To(broker.FromList(expect.Resources("cpu", "5")))
		}},
		"limited-by-sum": {false, func(s *scenario) {
			s.namespace.Policies[0].Spec.MaxResources = ptr.To(broker.FromList(expect.Resources("cpu", "6")))
			s.documents = append(s.documents, manifest("StatefulSet", "db", ""))
		}},
		"over-budget": {false, func(s *scenario) {
			s.namespace.Policies[0].Spec.Budget = &broker.Budget{MaxPricePerHour: "0.20", Currency: "EUR"}
		}},
		"excluded": {true, func(s *scenario) {
			s.namespace.Policies[0].Spec.Placement = &broker.Placement{ExcludeClusters: []string{"berlin"}}
		}},
		"weights": {true, func(s *scenario) {
			s.configs = []broker.BrokerConfig{{ObjectMeta: metav1.ObjectMeta{Name: "default"}, Spec: broker.BrokerConfigSpec{Weights: &broker.ScoreWeights{Resources: 100}}}}
		}},
		"not-opted-in": {false, func(s *scenario) { s.namespace.Namespace.Labels = nil }},
		"daemonset":    {false, func(s *scenario) { s.documents = []string{manifest("DaemonSet", "log", "")} }},
		"no-hub": {false, func(s *scenario) {
			s.noHub = "you may not list clusteradvertisements.broker.fluidos.eu in namespace spillway-system, in the cluster of context hub"
		}},
		"empty-hub": {false, func(s *scenario) { s.ads = nil }},
		"no-permission": {true, func(s *scenario) {
			s.namespace = &explain.Observed{Unreadable: []explain.Unreadable{{What: explain.Namespaces, Permission: "get namespaces in namespace shop"}, {What: explain.Policies, Permission: "list " + explain.Policies}}}
		}},
		"by-hand": {false, func(s *scenario) {
			s.documents = []string{`{apiVersion: broker.fluidos.eu/v1alpha1, kind: Reservation, metadata: {name: warm}, spec: {requestedResources: {cpu: 2}, targetClusterID: vienna}}`,
				`{apiVersion: broker.fluidos.eu/v1alpha1, kind: Reservation, metadata: {name: hot}, spec: {requestedResources: {cpu: 20}}}`}
		}},
		"hostile": {false, func(s *scenario) {
			s.ads = []broker.ClusterAdvertisement{cluster("paris\x1b[2J", "0", "1\u202e")}
			s.documents = []string{manifest("Deployment", `web\u001b[2J`, ""),
				`{apiVersion: example.com/v1, kind: "Fleet\u001b[2J", metadata: {name: f}, spec: {template: {spec: {containers: [{name: c, resources: {requests: {"example.com/a\u001b[2J": 1}}}]}}}}`}
		}},
		"left-out": {false, func(s *scenario) {
			s.queue = []broker.Reservation{waits("train", 6)}
			s.queue[0].Spec.RequesterID = "rome"
			s.configs = []broker.BrokerConfig{{ObjectMeta: metav1.ObjectMeta{Name: "default"}, Spec: broker.BrokerConfigSpec{Weights: &broker.ScoreWeights{Resources: 80, Reliability: 20},
				Quotas: &broker.Quotas{ReservationsPerCluster: ptr.To[int32](1)}}}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := world()
			of.change(s)
			answers := s.run(t)
			if placed, _ := answers.Placed(); placed != of.placed {
				t.Errorf("placed: %t", placed)
			}
			got := answers.Text(explain.Style{Width: 100})
			if strings.ContainsAny(got, "\x1b\u202e") {
				t.Errorf("it has characters that change how others are shown: %q", got)
			}
			if _, err := json.Marshal(answers); err != nil {
				t.Error(err)
			}
			path := filepath.Join("testdata", name+".golden")
			if *update {
				expect.NoError(t, os.WriteFile(path, []byte(got), 0o644))
			}
			want, err := os.ReadFile(path)
			expect.NoError(t, err)
			if got != string(want) {
				t.Errorf("%s differs; -update writes it. Now:\n%s", path, got)
			}
		})
	}
}

// TestOf: what has pods, and how many.
func TestOf(t *testing.T) {
	for document, want := range map[string]int32{
		`{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c}]}}`:                                                                      1,
		`{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}, spec: {template: {spec: {containers: [{name: c}]}}}}`:                                      1,
		`{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}, spec: {replicas: -4, template: {spec: {containers: [{name: c}]}}}}`:                        0,
		`{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}, spec: {replicas: 9000000, template: {spec: {containers: [{name: c}]}}}}`:                   100_000,
		`{apiVersion: batch/v1, kind: Job, metadata: {name: j}, spec: {parallelism: 5, completions: 2, template: {spec: {containers: [{name: c}]}}}}`:            2,
		`{apiVersion: batch/v1, kind: CronJob, metadata: {name: j}, spec: {jobTemplate: {spec: {parallelism: 4, template: {spec: {containers: [{name: c}]}}}}}}`: 4,
		`{apiVersion: example.com/v1, kind: Fleet, metadata: {name: f}, spec: {replicas: 2, template: {spec: {containers: [{name: c}]}}}}`:                       2,
		`{apiVersion: v1, kind: Service, metadata: {name: s}, spec: {ports: []}}`:                                                                                -1,
		`{apiVersion: v1, kind: ConfigMap, metadata: {name: s}}`:                                                                                                 -1,
		`{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {}}`:                                                                                             -2,
		`{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: yes}}`:                                                                              -2,
	} {
		raw, err := yaml.YAMLToJSON([]byte(document))
		expect.NoError(t, err)
		object := &unstructured.Unstructured{}
		expect.NoError(t, object.UnmarshalJSON(raw))
		got := int32(-1)
		if w, ok, err := whatif.Of(object, "shop"); err != nil {
			got = -2
		} else if ok {
			got = w.Count
		}
		if got != want {
			t.Errorf("%s has %d pods, want %d", document, got, want)
		}
	}
}
