package reservation

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Each field of the BrokerConfig that concerns Reservations is set while the broker runs. The list
// of all fields is in package settings.

// set stores a BrokerConfig, which applies from now on.
func (h *hub) set(change func(*broker.BrokerConfigSpec)) {
	h.versions++
	config := &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Name: settings.Name, UID: settings.Name, ResourceVersion: fmt.Sprint(h.versions)}}
	change(&config.Spec)
	h.store.Note(config, false)
	h.settings = h.store.Settings()
}

// pass lets time pass, after which the broker hears from the clusters.
func (h *hub) pass(time time.Duration, clusters ...string) {
	h.clock.Step(time)
	for _, cluster := range clusters {
		h.receive(cluster, h.clock.Now())
	}
}

func lasting(d time.Duration) *metav1.Duration { return &metav1.Duration{Duration: d} }

func TestConfigWeights(t *testing.T) {
	h := newHub(t)
	h.advertise("berlin", "40")
	h.advertise("paris", "4")
	h.change("berlin", func(ad *broker.ClusterAdvertisement) { ad.Spec.Cost = &broker.Cost{CPUCost: "0.20", Currency: "EUR"} })
	h.change("paris", func(ad *broker.ClusterAdvertisement) { ad.Spec.Cost = &broker.Cost{CPUCost: "0.10", Currency: "EUR"} })
	h.ask("before", 1, "1")
	h.expectPods("berlin", "before", 0, 0)
	h.expectPods("paris", "before", 1, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.Weights = &broker.ScoreWeights{Resources: 80, Cost: 20} })
	h.ask("r", 1, "1")
	want := []broker.ClusterScore{
		{Cluster: "berlin", Score: "78.00", Detail: "resources 78.00 of 80 (98 % stay available), cost 0.00 of 20 (0.20 EUR per hour)"},
		{Cluster: "paris", Score: "60.00", Detail: "resources 40.00 of 80 (50 % stay available), cost 20.00 of 20 (0.10 EUR per hour)"},
	}
	if diff := cmp.Diff(want, h.reservations["r"].Status.Decision.Scores); diff != "" {
		t.Errorf("scores (-want +got)\n%s", diff)
	}
	h.expectPods("berlin", "r", 1, 0)
}

// TestConfigReliability: a provider that has refused is the second choice while that is recent.
func TestConfigReliability(t *testing.T) {
	h := newHub(t)
	h.advertise("berlin", "10")
	h.ask("refused", 1, "2")
	h.answer("berlin", "refused", false)
	h.advertise("paris", "5")
	h.ask("before", 1, "1")
	h.expectPods("berlin", "before", 1, 0)
	h.answer("berlin", "before", true)
	h.set(func(s *broker.BrokerConfigSpec) { s.Weights = &broker.ScoreWeights{Reliability: 100} })
	h.ask("r", 1, "1")
	h.expectPods("paris", "r", 1, 0)
	want := []broker.ClusterScore{
		{Cluster: "paris", Score: "100.00", Detail: "reliability 100.00 of 100 (not asked of late)"},
		{Cluster: "berlin", Score: "66.67", Detail: "reliability 66.67 of 100 (50 % delivered of late)"},
	}
	if diff := cmp.Diff(want, h.reservations["r"].Status.Decision.Scores); diff != "" {
		t.Errorf("scores (-want +got)\n%s", diff)
	}
}

func TestConfigLatency(t *testing.T) {
	h := newHub(t)
	for _, cluster := range []string{"berlin", "oslo", "paris", "rome"} {
		h.advertise(cluster, "10")
	}
	h.change("rome", func(ad *broker.ClusterAdvertisement) {
		ad.Spec.Latencies = []broker.ProviderLatency{{Cluster: "berlin", Milliseconds: 90}, {Cluster: "paris", Milliseconds: 10}}
	})
	h.ask("before", 1, "1")
	h.expectPods("berlin", "before", 1, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.Weights = &broker.ScoreWeights{Latency: 100} })
	h.ask("r", 1, "1")
	h.expectPods("paris", "r", 1, 0)
	want := []broker.ClusterScore{
		{Cluster: "paris", Score: "83.33", Detail: "latency 83.33 of 100 (10 ms)"},
		{Cluster: "oslo", Score: "50.00", Detail: "latency 50.00 of 100 (not measured)"},
		{Cluster: "berlin", Score: "35.71", Detail: "latency 35.71 of 100 (90 ms)"},
	}
	if diff := cmp.Diff(want, h.reservations["r"].Status.Decision.Scores); diff != "" {
		t.Errorf("scores (-want +got)\n%s", diff)
	}
}

// TestConfigExchangeRates: what a Reservation holds counts in the currency of its budget, too.
func TestConfigExchangeRates(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "3")
	h.change("paris", func(ad *broker.ClusterAdvertisement) { ad.Spec.Cost = &broker.Cost{CPUCost: "1", Currency: "USD"} })
	budget := func(s *broker.ReservationSpec) { s.Budget = &broker.Budget{MaxPricePerHour: "2", Currency: "EUR"} }
	h.ask("r", 1, "1", budget)
	h.expectPods("paris", "r", 0, 0)
	h.set(func(s *broker.BrokerConfigSpec) {
		s.ExchangeRates = []broker.ExchangeRate{{Currency: "EUR", Rate: "1.25", Date: "2026-11-27"}, {Currency: "USD", Rate: "1", Date: "2026-11-28"}}
	})
	h.reconcile("r")
	h.expectPods("paris", "r", 1, 0)
	h.answer("paris", "r", true)
	h.grow("r", 1)
	h.expectPods("paris", "r", 2, 0)
	h.answer("paris", "r", true)
	h.grow("r", 1)
	h.expectPods("paris", "r", 2, 0)
	h.expectCondition("r", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "The price is 2.40 EUR per hour at the rates of 2026-11-27; the budget is 2.00 EUR.")
}

func TestConfigStaleAfter(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 1, "1")
	h.answer("paris", "r", true)
	h.advertise("berlin", "10")
	h.pass(2*time.Minute, "rome", "berlin")
	h.reconcile("r")
	h.expectPods("berlin", "r", 0, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.StaleAfter = lasting(time.Minute) })
	h.reconcile("r")
	h.expectPods("berlin", "r", 1, 0)
}

func TestConfigFreshFor(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.clock.Step(time.Minute)
	h.ask("before", 1, "1")
	h.expectPods("paris", "before", 1, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.FreshFor = lasting(30 * time.Second) })
	h.ask("r", 1, "1")
	h.expectPods("paris", "r", 0, 0)
	if got := h.reservations["r"].Status.Decision.Rejections; len(got) != 1 || got[0].Reason != decide.ReasonAdvertisementTooOld {
		t.Errorf("rejections are %+v", got)
	}
}

func (h *hub) expectLease(name string, want *metav1.Duration) {
	h.Helper()
	h.reconcile(name)
	if got := h.reservations[name].Status.LeaseDuration; (got == nil) != (want == nil) || got != nil && *got != *want {
		h.Errorf("the lease of %s is %v, want %v", name, got, want)
	}
}

func TestConfigMaxDuration(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("long", 1, "1", func(s *broker.ReservationSpec) { s.Duration = lasting(time.Hour) })
	h.ask("without", 1, "1")
	h.expectLease("long", lasting(time.Hour))
	h.expectLease("without", nil)
	h.set(func(s *broker.BrokerConfigSpec) { s.MaxDuration = lasting(10 * time.Minute) })
	h.expectLease("long", lasting(10*time.Minute))
	h.expectLease("without", lasting(10*time.Minute))
}

// TestConfigDefaultDuration: it is the lease of those that name none, and ends when no pod has used
// the capacity for so long, however often the consumer advertises.
func TestConfigDefaultDuration(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("long", 1, "1", func(s *broker.ReservationSpec) { s.Duration = lasting(time.Hour) })
	h.answer("paris", "long", true)
	h.ask("without", 1, "1")
	h.answer("paris", "without", true)
	h.set(func(s *broker.BrokerConfigSpec) { s.DefaultDuration = lasting(10 * time.Minute) })
	h.expectLease("long", lasting(time.Hour))
	h.expectLease("without", lasting(10*time.Minute))
	h.pass(9*time.Minute, "rome", "paris")
	h.reconcile("without")
	h.expectPods("paris", "without", 1, 0)
	h.pass(10*time.Minute, "rome", "paris")
	h.reconcile("without")
	h.expectCondition("without", broker.ConditionReady, plan.ReasonExpired, "The lease of 10m0s has ended")
	h.set(func(s *broker.BrokerConfigSpec) {
		s.DefaultDuration, s.MaxDuration = lasting(10*time.Minute), lasting(5*time.Minute)
	})
	h.expectLease("long", lasting(5*time.Minute))
	h.ask("later", 1, "1")
	h.expectLease("later", lasting(5*time.Minute))
}

func TestConfigDefaultLease(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 1, "1")
	h.answer("paris", "r", true)
	h.pass(6*time.Minute, "paris")
	h.reconcile("r")
	h.expectPods("paris", "r", 1, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.DefaultLease = lasting(5 * time.Minute) })
	h.reconcile("r")
	h.expectCondition("r", broker.ConditionReady, plan.ReasonConsumerSilent, "has not heard from rome for 5m0s")
}

func TestConfigProofDeadline(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.ask("r", 1, "1")
	h.pass(20*time.Second, "paris")
	h.reconcile("r")
	h.expectPods("paris", "r", 1, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.ProofDeadline = lasting(10 * time.Second) })
	h.reconcile("r")
	h.expectPods("paris", "r", 0, 1)
}

func TestConfigRetryAfter(t *testing.T) {
	h := newHub(t)
	h.set(func(s *broker.BrokerConfigSpec) { s.RetryAfter = lasting(10 * time.Minute) })
	h.advertise("paris", "10")
	h.ask("r", 1, "1")
	h.pass(30*time.Second, "paris")
	h.reconcile("r")
	h.expectPods("paris", "r", 0, 1)
	h.answer("paris", "r", true) // confirms the release only
	h.pass(9*time.Minute, "paris")
	h.reconcile("r")
	h.expectPods("paris", "r", 0, 0)
	h.pass(time.Minute, "paris")
	h.reconcile("r")
	h.expectPods("paris", "r", 1, 0)
}

func TestConfigQueueing(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "16")
	h.change("paris", holdings(2))
	h.ask("large", 1, "16")
	h.ask("small", 1, "1")
	h.expectPods("paris", "small", 0, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.Queueing = broker.QueueingNone })
	h.reconcile("small")
	h.expectPods("paris", "small", 1, 0)
}

func TestConfigKeepFreeFor(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "16")
	h.change("paris", holdings(2))
	h.ask("large", 1, "16")
	h.ask("small", 1, "1")
	h.pass(2*time.Minute, "rome", "paris")
	h.reconcile("large")
	h.reconcile("small")
	h.expectPods("paris", "small", 0, 0)
	h.set(func(s *broker.BrokerConfigSpec) { s.KeepFreeFor = lasting(time.Minute) })
	h.reconcile("large")
	h.reconcile("small")
	h.expectPods("paris", "small", 1, 0)
}

// TestConfigCapacityPerCluster: what providers hold for a consumer is bounded. What exceeds the quota
// waits, says so, and holds back no other consumer.
func TestConfigCapacityPerCluster(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "4500m")
	h.advertise("berlin", "4")
	quota := func(amount broker.ResourceQuantities) {
		h.set(func(s *broker.BrokerConfigSpec) { s.Quotas = &broker.Quotas{CapacityPerCluster: &amount} })
	}
	h.ask("before", 3, "1")
	h.expectPods("paris", "before", 3, 0)
	h.answer("paris", "before", true)
	quota(cpus("4"))
	h.ask("part", 2, "1", func(s *broker.ReservationSpec) { s.Priority = 1 })
	h.expectPods("berlin", "part", 1, 0)
	h.answer("berlin", "part", true)
	h.expectCondition("part", broker.ConditionQueued, plan.ReasonQuotaReached, "1 pod is waiting: rome has cpu 4 of 4 (quotas.capacityPerCluster of the BrokerConfig).")
	h.ask("of-oslo", 4, "1", func(s *broker.ReservationSpec) { s.RequesterID = "oslo" })
	h.expectPods("berlin", "of-oslo", 3, 0)
	h.expectPods("paris", "of-oslo", 1, 0)
	h.answer("paris", "of-oslo", true)
	h.answer("berlin", "of-oslo", true)
	h.advertise("lima", "1")
	quota(cpus("5"))
	h.reconcile("part")
	h.expectPods("lima", "part", 1, 0)
	h.answer("lima", "part", true)
	// Another provider instead of one that is lost is within the quota.
	h.advertise("madrid", "9")
	h.pass(11*time.Minute, "rome", "oslo", "paris", "lima", "madrid")
	h.reconcile("part")
	h.expectPods("berlin", "part", 1, 0)
	h.expectPods("madrid", "part", 1, 0)
	// A quota of none.
	quota(broker.ResourceQuantities{GPU: resource.NewQuantity(0, resource.DecimalSI)})
	h.change("madrid", func(ad *broker.ClusterAdvertisement) {
		ad.Spec.Resources.Allocatable = broker.FromList(expect.Resources("cpu", "9", "nvidia.com/gpu", "8"))
		ad.Spec.NodeClasses[0].FreeShapes[0].Free = ad.Spec.Resources.Allocatable
	})
	h.ask("cpus", 3, "1")
	h.expectPods("madrid", "cpus", 3, 0)
	h.ask("gpus", 1, "1", func(s *broker.ReservationSpec) {
		s.PodSets[0].Requests.GPU = resource.NewQuantity(1, resource.DecimalSI)
	})
	h.expectCondition("gpus", broker.ConditionQueued, plan.ReasonQuotaReached, "rome has nvidia.com/gpu 0 of 0 (")
}

// TestQuotaPlacing: while a Reservation of a consumer with a quota is placed, its others that would be
// placed come later. Those that would not, and other consumers, do not wait.
func TestQuotaPlacing(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "4")
	h.set(func(s *broker.BrokerConfigSpec) { s.Quotas = &broker.Quotas{CapacityPerCluster: new(cpus("8"))} })
	h.ask("large", 1, "8")
	h.ask("held", 1, "1")
	h.reservations["held"].Spec.PodSets[0].Count++
	h.store.PutReservation(h.reservations["held"].DeepCopy())
	waits := func(name string) bool {
		t.Helper()
		result, err := h.Reconciler.reconcile(t.Context(), name)
		expect.NoError(t, err)
		return result.RequeueAfter == 20*time.Millisecond
	}
	h.placing.Store("rome", true)
	if waits("large") || !waits("held") {
		t.Error("not only that which would be placed waits for another one of its consumer")
	}
	h.placing.Delete("rome")
	h.placing.Store("oslo", true)
	if waits("held") {
		t.Error("it waits for another consumer")
	}
	if _, busy := h.placing.Load("rome"); busy {
		t.Error("it is being placed for ever")
	}
}

// TestFairShare: of the same priority, the consumer that holds less of its quota is first, but an old
// Reservation is not passed for ever.
func TestFairShare(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "10")
	h.set(func(s *broker.BrokerConfigSpec) { s.Quotas = &broker.Quotas{CapacityPerCluster: new(cpus("12"))} })
	h.ask("held", 8, "1")
	h.answer("paris", "held", true)
	of := func(requester string) func(*broker.ReservationSpec) {
		return func(s *broker.ReservationSpec) { s.RequesterID = requester }
	}
	h.ask("of-rome", 1, "3")
	h.ask("of-oslo", 1, "4", of("oslo"))
	first := func(want string) {
		t.Helper()
		for _, name := range []string{"of-rome", "of-oslo"} {
			h.reconcile(name)
		}
		if got := h.input(h.reservations[want], h.settings).Position; got != 1 {
			t.Errorf("%s is number %d", want, got)
		}
	}
	first("of-oslo")
	h.pass(7*time.Minute, "rome", "oslo", "paris")
	h.ask("later", 1, "4", of("oslo"))
	first("of-oslo")
	if got, want := h.input(h.reservations["later"], h.settings).Position, int32(3); got != want {
		t.Errorf("a later one of a consumer without a share is number %d, want %d", got, want)
	}
}

func TestConfigMaxPriority(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	h.ask("older", 1, "2", func(s *broker.ReservationSpec) { s.Priority = 10 })
	h.ask("higher", 1, "2", func(s *broker.ReservationSpec) { s.Priority = 20 })
	expectFirst := func(want string) {
		t.Helper()
		h.reconcile("older")
		h.reconcile("higher")
		if got := h.input(h.reservations[want], h.settings).Position; got != 1 {
			t.Errorf("%s is number %d", want, got)
		}
	}
	expectFirst("higher")
	h.set(func(s *broker.BrokerConfigSpec) { s.Quotas = &broker.Quotas{MaxPriority: new(int32(10))} })
	expectFirst("older")
}
