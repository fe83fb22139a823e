package controlplane_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// TestReservationRules checks the CRD's own validation on a real API server.
func TestReservationRules(t *testing.T) {
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	if err := broker.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	q := func(s string) *resource.Quantity { v := resource.MustParse(s); return &v }
	pods := []broker.PodSet{{Name: "web", Count: 2, Requests: broker.ResourceQuantities{CPU: q("300m")}}}
	selecting := func(operator metav1.LabelSelectorOperator, values ...string) broker.ReservationSpec {
		return broker.ReservationSpec{PodSets: pods, PodSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "app", Operator: metav1.LabelSelectorOpExists}, {Key: "tier", Operator: operator, Values: values},
		}}}
	}
	cases := map[string]struct {
		spec broker.ReservationSpec
		want string
	}{
		"pod sets":           {spec: broker.ReservationSpec{RequesterID: "rome", PodSets: pods}},
		"a divisible total":  {spec: broker.ReservationSpec{RequestedResources: &broker.ResourceQuantities{CPU: q("2"), Memory: q("1Gi")}}},
		"neither":            {spec: broker.ReservationSpec{RequesterID: "rome"}, want: "exactly one of"},
		"negative":           {spec: broker.ReservationSpec{RequestedResources: &broker.ResourceQuantities{CPU: q("-1")}}, want: "cpu must be a quantity of 0 or more"},
		"pinned to itself":   {spec: broker.ReservationSpec{RequesterID: "rome", TargetClusterID: "rome", PodSets: pods}, want: "requester itself"},
		"bad name of a set":  {spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "Web!", Count: 1}}}, want: "podSets[0].name"},
		"selects pods":       {spec: selecting(metav1.LabelSelectorOpNotIn, "web", "db")},
		"In nothing":         {spec: selecting(metav1.LabelSelectorOpIn), want: "podSelector"},
		"NotIn nothing":      {spec: selecting(metav1.LabelSelectorOpNotIn), want: "podSelector"},
		"Exists with values": {spec: selecting(metav1.LabelSelectorOpExists, "web"), want: "podSelector"},
		"unknown operator":   {spec: selecting("Near", "web"), want: "podSelector"},
		"both of them given": {spec: broker.ReservationSpec{PodSets: pods, RequestedResources: &broker.ResourceQuantities{CPU: q("1")}}, want: "exactly one of"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			err := c.Create(t.Context(), &broker.Reservation{ObjectMeta: metav1.ObjectMeta{GenerateName: "r-", Namespace: "default"}, Spec: tc.spec})
			switch {
			case tc.want == "" && err != nil:
				t.Fatalf("refused: %v", err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Fatalf("want an error with %q, got %v", tc.want, err)
			}
		})
	}
	t.Run("requests are immutable, counts are not", func(t *testing.T) {
		r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "immutable", Namespace: "default"}, Spec: broker.ReservationSpec{PodSets: pods}}
		if err := c.Create(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		r.Spec.PodSets[0].Count = 5
		if err := c.Update(t.Context(), r); err != nil {
			t.Fatalf("a count could not change: %v", err)
		}
		r.Spec.PodSets[0].Requests.CPU = q("400m")
		if err := c.Update(t.Context(), r); err == nil || !strings.Contains(err.Error(), "is immutable: change its count") {
			t.Fatalf("want a refusal, got %v", err)
		}
	})
}
