package request

import (
	"io"
	"reflect"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
)

// TestDecide: what is done about a request for four pods, whatever has been gathered of it.
func TestDecide(t *testing.T) {
	sets := func(pods int32) []broker.PodSet {
		return []broker.PodSet{{Name: "web", Count: pods, Requests: broker.FromList(expect.Resources("cpu", "1"))}}
	}
	request := demand.Request{Key: demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "web"}, PodSets: sets(4)}
	requests := func(pods int32, change ...func(*broker.Reservation)) *broker.Reservation {
		r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Labels: map[string]string{broker.LabelOwnerUID: "web", broker.LabelShape: "web"}}}
		for r.Spec.PodSets = sets(pods); len(change) > 0; change = change[1:] {
			change[0](r)
		}
		return r
	}
	another := func(r *broker.Reservation) { r.Labels[broker.LabelOwnerUID] = "another" }
	terminating := func(r *broker.Reservation) { r.DeletionTimestamp = &metav1.Time{} }
	failed := func(r *broker.Reservation) { r.Status.Phase = broker.ReservationFailed }
	limit := broker.FromList(expect.Resources("cpu", "5"))
	policy := &broker.OverflowPolicy{Spec: broker.OverflowPolicySpec{MaxResources: &limit}}
	yes, no := ptr.To(true), ptr.To(false)
	for name, tc := range map[string]struct {
		reason string
		in     input
		// want is without the event, of which event is the reason, and without all of its
		// request but the number of pods.
		want  decision
		pods  int32
		event string
	}{
		"no Reservation":          {reason: "it is created", want: decision{write: true, limited: no}, pods: 4},
		"one of fewer pods":       {reason: "its count is raised", in: input{current: requests(3)}, want: decision{write: true, limited: no}, pods: 4},
		"one of all":              {reason: "it is requested already", in: input{current: requests(4), raiseIn: time.Second}, want: decision{limited: no}},
		"one that is undecided":   {reason: "more pods may come", in: input{current: requests(3), raiseIn: time.Second}, want: decision{requeueAfter: time.Second}},
		"one that is decided":     {reason: "nothing is to be waited for", in: input{current: requests(3, failed), raiseIn: time.Second}, want: decision{write: true, limited: no}, pods: 4},
		"another owner's":         {reason: "it is not to be changed", in: input{current: requests(4, another)}, want: decision{limited: yes}, event: "OverflowFailed"},
		"one being deleted":       {reason: "it is created again then", in: input{current: requests(4, terminating)}, want: decision{requeueAfter: retryAfter}},
		"one deleted, and used":   {reason: "that may take long", in: input{current: requests(4, terminating), users: 1}, want: decision{limited: yes, requeueAfter: retryAfter}, event: "OverflowFailed"},
		"one for former pods":     {reason: "the agent deletes it", in: input{current: requests(3), outdated: true}, want: decision{requeueAfter: retryAfter}, event: "OverflowOutdated"},
		"a limit for some":        {reason: "the others wait", in: input{policy: policy, others: expect.Resources("cpu", "2")}, want: decision{write: true, limited: yes, requeueAfter: blockedRetryAfter}, pods: 3, event: reasonCapped},
		"a limit for what it has": {reason: "the others wait", in: input{current: requests(3), policy: policy, others: expect.Resources("cpu", "4")}, want: decision{limited: yes, requeueAfter: blockedRetryAfter}, pods: 3, event: reasonCapped},
		"a limit for none":        {reason: "all wait", in: input{policy: policy, others: expect.Resources("cpu", "5")}, want: decision{limited: yes, requeueAfter: blockedRetryAfter}, event: reasonCapped},
		"an unknown policy":       {reason: "it may have a limit", in: input{err: io.EOF}, want: decision{err: io.EOF, requeueAfter: retryAfter}, event: "OverflowFailed"},
	} {
		t.Run(name, func(t *testing.T) {
			tc.in.request = request
			got, event := decide(tc.in), ""
			if got.event != nil {
				event = got.event.reason
			}
			pods := got.request.Pods()
			got.request, got.event = demand.Request{}, nil
			if !reflect.DeepEqual(got, tc.want) || pods != tc.pods || event != tc.event {
				t.Errorf("%+v for %d pods with event %q, want %+v for %d with %q, because %s", got, pods, event, tc.want, tc.pods, tc.event, tc.reason)
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
			request := demand.Request{Key: demand.Key{Namespace: "shop"}, PodSets: tc.wants}
			cached := demandtest.NewIndexer(reservation("others", tc.others))
			if tc.has != nil {
				expect.NoError(t, cached.Add(reservation(request.Key.Name(""), tc.has)))
			}
			c, _ := testController(t, demandtest.NewIndexer())
			c.Reservations, c.Policies = NewReservations(nil, cached, c.Clock), newPolicies(policy)
			in := c.gather(request)
			if units, _ := allowed(in, request); in.err != nil || units != tc.allowed {
				t.Errorf("%d are allowed (%v), want %d", units, in.err, tc.allowed)
			}
		})
	}
}
