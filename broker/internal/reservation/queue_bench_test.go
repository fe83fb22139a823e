package reservation

import (
	"fmt"
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/plan"
)

// BenchmarkDecisionBehindQueue measures a decision behind 1,000 Reservations of one
// tenant that wait, in 50 clusters.
func BenchmarkDecisionBehindQueue(b *testing.B) {
	for name, cpu := range map[string]string{"larger than any node": "5", "no matching node": "1", "placeable": "4", "placeable in one cluster": "1", "pinned to one cluster": "1"} {
		b.Run(name, func(b *testing.B) {
			h := newHub(b)
			for i := range 50 {
				id := fmt.Sprintf("c%02d", i)
				h.advertise(id, "16")
				h.change(id, nodes(4, "4"))
				h.change(id, func(ad *broker.ClusterAdvertisement) {
					ad.Spec.NodeClasses[0].FreeShapes[0].Free = cpus("3")
					ad.Spec.ObservedHolds = []broker.ObservedHold{{Requester: "oslo", Used: cpus("4"), Pods: 4}}
					largest := cpus("4")
					ad.Spec.NodeClasses[0].LargestNode = &largest
				})
			}
			h.change("c00", func(ad *broker.ClusterAdvertisement) {
				ad.Spec.NodeClasses[0].Labels = map[string]string{"disk": "rare"}
			})
			config := h.settings
			h.settings.Queueing = broker.QueueingNone
			for i := range 1000 {
				h.ask(fmt.Sprint("waiting-", i), 1, cpu, func(s *broker.ReservationSpec) {
					switch name {
					case "no matching node":
						s.PodSets[0].NodeSelector = map[string]string{"disk": "none"}
					case "placeable in one cluster":
						s.PodSets[0].NodeSelector = map[string]string{"disk": "rare"}
					case "pinned to one cluster":
						s.TargetClusterID = "c00"
					}
				})
				for j := range 50 {
					h.receive(fmt.Sprintf("c%02d", j), h.clock.Now())
				}
			}
			h.settings = config
			for i := range 1000 {
				h.note(h.input(h.reservations[fmt.Sprint("waiting-", i)], h.settings))
			}
			h.ask("r", 1, "100")
			h.reservations["r"].Spec.PodSets[0].Requests = cpus("1")
			b.ResetTimer()
			for b.Loop() {
				// Each decision changes the ledger of one cluster.
				h.change("c01", func(*broker.ClusterAdvertisement) {})
				plan.New(h.input(h.reservations["r"].DeepCopy(), h.settings))
			}
		})
	}
}
