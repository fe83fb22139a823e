package server

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestUpdate shows which changes of a Reservation the broker takes over.
func TestUpdate(t *testing.T) {
	cpu := resource.MustParse("1")
	reservation := func(change func(*broker.ReservationSpec)) *broker.Reservation {
		r := &broker.Reservation{Spec: broker.ReservationSpec{
			RequesterID: "rome", Priority: 5,
			PodSets: []broker.PodSet{{Name: "web", Count: 3, Requests: broker.ResourceQuantities{CPU: &cpu}}},
		}}
		change(&r.Spec)
		return r
	}
	for _, tc := range []struct {
		name    string
		change  func(*broker.ReservationSpec)
		changed bool
		refused string
	}{
		{"nothing", func(*broker.ReservationSpec) {}, false, ""},
		{"the count", func(s *broker.ReservationSpec) { s.PodSets[0].Count = 2 }, true, ""},
		{"the priority, which follows the pending pods", func(s *broker.ReservationSpec) { s.Priority = 9 }, true, ""},
		{"the deadline", func(s *broker.ReservationSpec) { s.Deadline = &metav1.Duration{Duration: time.Minute} }, true, ""},
		{"the least number of pods", func(s *broker.ReservationSpec) { s.MinAvailable = 2 }, true, ""},
		{"another pod set, of a gang of several shapes", func(s *broker.ReservationSpec) {
			s.PodSets = append([]broker.PodSet{{Name: "leader", Count: 1, Requests: s.PodSets[0].Requests}}, s.PodSets...)
		}, true, ""},
		{"what its pods comply with", func(s *broker.ReservationSpec) { s.PodSets[0].PodSecurity = broker.PodSecurityRestricted }, false, "immutable"},
		{"a removed pod set", func(s *broker.ReservationSpec) { s.PodSets[0].Name = "leader" }, false, "immutable"},
		{"the duration", func(s *broker.ReservationSpec) { s.Duration = &metav1.Duration{Duration: time.Minute} }, false, "immutable"},
		{"the shape", func(s *broker.ReservationSpec) { s.PodSets[0].NodeSelector = map[string]string{"zone": "a"} }, false, "immutable"},
		{"the target", func(s *broker.ReservationSpec) { s.TargetClusterID = "paris" }, false, "immutable"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			stored, want := reservation(func(*broker.ReservationSpec) {}), reservation(tc.change)
			changed, err := update(stored, want)
			switch {
			case tc.refused == "" && err != nil, tc.refused != "" && (err == nil || !strings.Contains(err.Error(), tc.refused)):
				t.Fatalf("want refusal %q, got %v", tc.refused, err)
			case changed != tc.changed:
				t.Fatalf("changed is %v, want %v", changed, tc.changed)
			case changed && !equality.Semantic.DeepEqual(stored.Spec, want.Spec):
				t.Errorf("stored %+v", stored.Spec)
			}
		})
	}
}
