package plan

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestQuotaChargesUntilConfirmed: what a provider has not confirmed to be released counts.
func TestQuotaChargesUntilConfirmed(t *testing.T) {
	cpus := func(cpu string) broker.HeldCapacity {
		return broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", cpu))}
	}
	before := cpus("3")
	ad := &broker.ClusterAdvertisement{Spec: broker.ClusterAdvertisementSpec{ClusterID: "paris"}}
	ad.Status.Holds = []broker.Hold{{ReservationUID: "released", ReservationName: "released", Requester: "rome", Unconfirmed: &before}}
	in := Input{
		Reservation:    &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "r", UID: "r"}, Spec: broker.ReservationSpec{RequesterID: "rome"}},
		Advertisements: []*broker.ClusterAdvertisement{ad},
	}
	in.Settings.Capacity = capacity.Floor(expect.Resources("cpu", "4"))
	if held := in.held()[corev1.ResourceCPU]; held != 3000 {
		t.Errorf("it holds cpu %dm before the release is confirmed, want 3000m", held)
	}
	if within := in.withinQuota(cpus("2")); !within.Empty() {
		t.Errorf("%v is within the quota", within)
	}
	if within := in.withinQuota(cpus("1")); within.Empty() {
		t.Error("nothing is within the quota")
	}
}
