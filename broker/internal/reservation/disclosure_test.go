package reservation

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/plan"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// secretsOf are what identifies a cluster of which a consumer must learn nothing.
func secretsOf(spec *broker.ClusterAdvertisementSpec) []string {
	return []string{spec.ClusterID, spec.ClusterName, spec.Region, spec.Zone, spec.EndpointURL, spec.Cost.Currency}
}

// seenByConsumer is all that the broker says to the consumer about a Reservation, without
// times.
func (h *hub) seenByConsumer(name string) string {
	h.Helper()
	r := h.reservations[name]
	status := *r.Status.DeepCopy()
	status.Decision = decide.ForConsumer(status.Decision)
	status.ExpiresAt, status.ReservedAt, status.QueueTime, status.QueuePosition = nil, nil, nil, 0
	for i := range status.Conditions {
		status.Conditions[i].LastTransitionTime = metav1.Time{}
	}
	in := h.input(r.DeepCopy(), h.settings)
	want := plan.New(in).Missing
	if want.Empty() {
		want = in.Requested()
	}
	in.Choice = h.choice(in, want)
	text, err := json.Marshal([]any{status, decide.ForConsumer(&broker.Decision{Rejections: decide.Explain(plan.New(in).Request(in, want))})})
	if err != nil {
		h.Fatal(err)
	}
	return string(text)
}

// TestConsumersLearnOfProvidersOnly: whatever a consumer requests, it learns nothing of
// clusters that neither lend to it nor hold capacity for it, except how many there are. One
// that it names itself is as if it did not exist.
func TestConsumersLearnOfProvidersOnly(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := newHub(t)
		letters := func(i int) string { return string([]byte{'q', byte('a' + i/26), byte('a' + i%26)}) }
		h.advertise("rome", "4")
		var ids []string
		for i := range rapid.IntRange(0, 30).Draw(rt, "clusters") {
			id := "cluster-" + letters(i)
			ids = append(ids, id)
			h.advertise(id, rapid.SampledFrom([]string{"1", "4", "9"}).Draw(rt, "cpu"))
			h.change(id, func(ad *broker.ClusterAdvertisement) {
				ad.Spec.ClusterName, ad.Spec.Region, ad.Spec.Zone = "name-"+letters(i), "region-"+letters(i), "zone-"+letters(i)
				ad.Spec.EndpointURL = "https://" + letters(i) + ".example:6443"
				ad.Spec.Cost = &broker.Cost{CPUCost: "0.1", Currency: strings.ToUpper(letters(i))}
			})
		}
		h.ask("held", rapid.Int32Range(1, 9).Draw(rt, "held"), "1")
		for _, a := range h.reservations["held"].Status.Allocations {
			h.answer(a.Cluster, "held", rapid.Bool().Draw(rt, "accepted"))
		}
		advertising := []string{"rome"}
		wait := func() {
			h.clock.Step(time.Minute)
			for _, id := range advertising {
				h.receive(id, h.clock.Now())
			}
		}
		closed := map[string]*broker.ClusterAdvertisementSpec{}
		for _, id := range ids {
			terms := rapid.SampledFrom([]broker.Lending{
				{Enabled: true}, {Enabled: true, Consumers: []string{"oslo", "rome"}}, {Enabled: true, PodSecurity: broker.PodSecurityRestricted},
				{Enabled: true, Consumers: []string{"oslo"}}, {}, {Consumers: []string{"rome"}},
			}).Draw(rt, "lending")
			h.change(id, func(ad *broker.ClusterAdvertisement) { ad.Spec.Lending = terms })
			if rapid.IntRange(0, 3).Draw(rt, "silent") == 0 {
				h.receive(id, h.clock.Now().Add(-time.Hour))
			} else {
				advertising = append(advertising, id)
			}
			ad := h.store.Advertisement(id)
			if holds := slices.ContainsFunc(ad.Status.Holds, func(hold broker.Hold) bool { return hold.Requester == "rome" }); !holds &&
				(!terms.Enabled || len(terms.Consumers) > 0 && !slices.Contains(terms.Consumers, "rome")) {
				closed[id] = &ad.Spec
			}
		}
		h.change("rome", func(ad *broker.ClusterAdvertisement) {
			ad.Spec.Unreachable = rapid.SliceOfDistinct(rapid.SampledFrom(append(ids, "nowhere")), rapid.ID).Draw(rt, "unreachable")
		})
		for i := range 3 {
			name, pin := fmt.Sprint("r", i), ""
			h.ask(name, rapid.Int32Range(1, 30).Draw(rt, "count"), rapid.SampledFrom([]string{"100m", "1", "20"}).Draw(rt, "each"), func(s *broker.ReservationSpec) {
				if rapid.Bool().Draw(rt, "pinned") {
					pin = rapid.SampledFrom(append(ids, "nowhere")).Draw(rt, "pin")
					s.TargetClusterID = pin
				}
				if rapid.Bool().Draw(rt, "placed") {
					s.Placement = &broker.Placement{Regions: []string{"eu"}}
				}
				if rapid.Bool().Draw(rt, "budget") {
					s.Budget = &broker.Budget{MaxPricePerHour: "0.3", Currency: "EUR"}
				}
				if rapid.Bool().Draw(rt, "deadline") {
					s.Deadline = &metav1.Duration{Duration: time.Second}
				}
				if rapid.Bool().Draw(rt, "total") {
					s.RequestedResources, s.PodSets = &s.PodSets[0].Requests, nil
				} else if rapid.Bool().Draw(rt, "security") {
					s.PodSets[0].PodSecurity = broker.PodSecurityBaseline
				}
			})
			for _, a := range h.reservations[name].Status.Allocations {
				h.answer(a.Cluster, name, rapid.Bool().Draw(rt, "accepted"))
			}
			wait()
			h.reconcile(name)
			seen := h.seenByConsumer(name)
			for id, spec := range closed {
				for _, secret := range secretsOf(spec) {
					if strings.Contains(seen, secret) && !(id == pin && secret == id) {
						rt.Fatalf("rome learns %s of %s: %s", secret, id, seen)
					}
				}
			}
			if closed[pin] == nil {
				continue
			}
			// The same request, for a cluster that does not exist.
			other := "other-" + name
			h.ask(other, 1, "1", func(s *broker.ReservationSpec) {
				*s = *h.reservations[name].Spec.DeepCopy()
				s.TargetClusterID = "nowhere"
			})
			wait()
			h.reconcile(other)
			if got, want := strings.ReplaceAll(seen, pin, "nowhere"), h.seenByConsumer(other); got != want {
				rt.Fatalf("a cluster that does not lend to rome, and one that does not exist\n%s\n%s", got, want)
			}
		}
	})
}

// What others wait for is kept free for them: consumers that ask for amounts do not learn how much
// that is, nor who waits.
func TestConsumersDoNotLearnWhatOthersWaitFor(t *testing.T) {
	amounts := func(cpu, memory string) broker.ResourceQuantities {
		return broker.FromList(expect.Resources("cpu", cpu, "memory", memory))
	}
	total := func(cpu string) func(*broker.ReservationSpec) {
		return func(s *broker.ReservationSpec) { s.RequestedResources, s.PodSets = ptr.To(cpus(cpu)), nil }
	}
	seen := map[string]string{}
	for _, cpu := range []string{"5", "6"} {
		h := newHub(t)
		h.advertise("paris", "16")
		h.change("paris", func(ad *broker.ClusterAdvertisement) {
			ad.Spec.Resources.Allocatable = amounts("16", "16Gi")
			ad.Spec.NodeClasses[0].FreeShapes[0].Free = amounts("16", "16Gi")
			ad.Status.Holds = append(ad.Status.Holds, broker.Hold{
				ReservationUID: "held", ReservationName: "held", Requester: "bern", Attempt: 1,
				Promised: capacity.OfPodSets([]broker.PodSet{{Name: "pods", Count: 1, Requests: amounts("8", "12Gi")}}),
			})
		})
		h.ask("waits", 1, cpu, func(s *broker.ReservationSpec) {
			s.RequesterID, s.PodSets[0].Requests = "oslo", amounts(cpu, "8Gi")
		})
		h.ask("total", 1, "1", total("7"))
		h.ask("large", 1, "1", total("9"))
		h.expectCondition("total", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "Insufficient cpu: requested 7, and what is free is kept for requests before it.")
		h.expectCondition("large", broker.ConditionQueued, plan.ReasonInsufficientCapacity, "Insufficient cpu: requested 9, available 8.")
		seen[cpu] = h.seenByConsumer("total") + h.seenByConsumer("large")
	}
	if seen["5"] != seen["6"] {
		t.Errorf("it depends on what others wait for:\n%s\n%s", seen["5"], seen["6"])
	}
}
