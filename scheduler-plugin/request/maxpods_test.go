package request

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		"huge limit":                {broker.ResourceQuantities{Memory: q("8Ei")}, nil, 1<<31 - 1, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if n, short := maxPods(set.Requests.List(), tc.limit, tc.others); n != tc.want || short != tc.short {
				t.Errorf("got %d %s, want %d %s", n, short, tc.want, tc.short)
			}
		})
	}
}

// TestAllowed: what the policy of a namespace allows a request beside the others. A gang has one
// leader and four workers, and another worker with other requests: it is requested as a whole.
func TestAllowed(t *testing.T) {
	sets := func(count ...int32) (all []broker.PodSet) {
		for i, cpu := range []string{"500m", "200m", "300m"} {
			if count[i] > 0 {
				all = append(all, broker.PodSet{Name: cpu, Count: count[i], Requests: broker.FromList(expect.Resources("cpu", cpu))})
			}
		}
		return all
	}
	web := func(pods int32) []broker.PodSet {
		return []broker.PodSet{{Name: "pods", Count: pods, Requests: broker.FromList(expect.Resources("cpu", "100m"))}}
	}
	for name, tc := range map[string]struct {
		limit       string
		has, others []broker.PodSet
		wants       []broker.PodSet
		allowed     int32
	}{
		"one without a limit":              {"", nil, nil, web(10), 10},
		"one alone":                        {"1", nil, nil, web(10), 10},
		"one beside a gang":                {"2", nil, sets(1, 4, 0), web(10), 7},
		"nothing is left":                  {"1", nil, sets(1, 4, 0), web(10), 0},
		"one that grows":                   {"2", web(5), sets(1, 4, 0), web(10), 7},
		"the limit was lowered":            {"1", web(8), sets(1, 4, 0), web(10), 8},
		"the limit was lowered to nothing": {"0", web(8), nil, web(8), 8},
		"a gang":                           {"1600m", nil, nil, sets(1, 4, 1), 1},
		"a gang that does not fit":         {"1599m", nil, nil, sets(1, 4, 1), 0},
		"a gang beside another request":    {"1700m", nil, web(1), sets(1, 4, 1), 1},
		"a gang that has a part":           {"1600m", sets(1, 4, 0), nil, sets(1, 4, 1), 1},
		"a gang that has a part, no more":  {"1599m", sets(1, 4, 0), nil, sets(1, 4, 1), 0},
		"a gang that has all":              {"1", sets(1, 4, 1), nil, sets(1, 4, 1), 1},
		"what is limited is not requested": {"gpu", nil, nil, web(10), 10},
	} {
		t.Run(name, func(t *testing.T) {
			policy := &broker.OverflowPolicy{}
			switch tc.limit {
			case "":
			case "gpu":
				policy.Spec.MaxResources = &broker.ResourceQuantities{GPU: ptr.To(resource.MustParse("0"))}
			default:
				limit := broker.FromList(expect.Resources("cpu", "1"))
				*limit.CPU = resource.MustParse(tc.limit)
				policy.Spec.MaxResources = &limit
			}
			reservation := func(name string, sets []broker.PodSet) *broker.Reservation {
				return &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: broker.ReservationSpec{PodSets: sets}}
			}
			cached, current := newIndexer(reservation("others", tc.others)), (*broker.Reservation)(nil)
			if tc.has != nil {
				current = reservation("own", tc.has)
				expect.NoError(t, cached.Add(current))
			}
			c, _ := testController(t, newIndexer())
			c.Reservations = NewReservations(nil, cached, c.Clock)
			request := demand.Request{Key: demand.Key{Namespace: "shop"}, PodSets: tc.wants}
			if units, _, err := c.allowed(policy, request, "own", current); err != nil || units != tc.allowed {
				t.Errorf("%d are allowed (%v), want %d", units, err, tc.allowed)
			}
		})
	}
}
