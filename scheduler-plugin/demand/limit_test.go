package demand_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func TestMaxPods(t *testing.T) {
	q := func(s string) *resource.Quantity { return ptr.To(resource.MustParse(s)) }
	set := broker.PodSet{Requests: broker.ResourceQuantities{CPU: q("300m"), Memory: q("1Gi")}}
	cases := map[string]struct {
		limit  broker.ResourceQuantities
		others corev1.ResourceList
		want   int32
		short  corev1.ResourceName
	}{
		"whole pods only":           {broker.ResourceQuantities{CPU: q("1")}, nil, 3, "cpu"},
		"beside other Reservations": {broker.ResourceQuantities{CPU: q("1")}, expect.Resources("cpu", "500m"), 1, "cpu"},
		"scarcest resource":         {broker.ResourceQuantities{CPU: q("10"), Memory: q("2Gi")}, nil, 2, "memory"},
		"limit exceeded already":    {broker.ResourceQuantities{CPU: q("1")}, expect.Resources("cpu", "2"), 0, "cpu"},
		"limit of zero":             {broker.ResourceQuantities{CPU: q("0")}, nil, 0, "cpu"},
		"resource not requested":    {broker.ResourceQuantities{GPU: q("0")}, nil, 1<<31 - 1, ""},
		"huge limit":                {broker.ResourceQuantities{Memory: q("8Ei")}, nil, 8589934, "memory"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if n, short := demand.MaxPods(set.Requests.List(), tc.limit, tc.others); n != tc.want || short != tc.short {
				t.Errorf("got %d %s, want %d %s", n, short, tc.want, tc.short)
			}
		})
	}
}
