package provider

import (
	"testing"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestDecide(t *testing.T) {
	held := expect.Resources("cpu", "2", "memory", "4Gi", "pods", "4")
	cases := map[string]struct {
		reason    string
		requested corev1.ResourceList
		total     corev1.ResourceList
		finished  corev1.ResourceList
		second    bool
		want      corev1.ResourceList
		denied    bool
		cordoned  bool
	}{
		"within the total":        {reason: "exactly what is requested", requested: expect.Resources("cpu", "500m", "memory", "1Gi", "pods", "1"), total: held, want: expect.Resources("cpu", "500m", "memory", "1Gi", "pods", "1")},
		"all of it":               {reason: "up to the last unit", requested: held, total: held, want: held},
		"more than held":          {reason: "denied, and cut to the total", requested: expect.Resources("cpu", "3", "memory", "1Gi", "pods", "1"), total: held, want: expect.Resources("cpu", "2", "memory", "1Gi", "pods", "1"), denied: true},
		"a resource not held":     {reason: "no hold, no GPU", requested: expect.Resources("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "1", "pods", "1"), total: held, want: expect.Resources("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "0", "pods", "1"), denied: true},
		"parked with nothing":     {reason: "a parked node needs almost nothing, but no guest starts", requested: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0"), total: expect.Resources("pods", "0"), want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0"), cordoned: true},
		"parked with holds":       {reason: "the consumer has not grown it yet", requested: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0"), total: held, want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0")},
		"everything with nothing": {reason: "without a hold nothing is granted", requested: held, total: nil, want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0"), denied: true, cordoned: true},
		"finished guests":         {reason: "Liqo counts them, the consumer's scheduler does not", requested: held, total: held, finished: expect.Resources("cpu", "1", "memory", "1Gi"), want: expect.Resources("cpu", "3", "memory", "5Gi", "pods", "4")},
		"a second slice":          {reason: "a hold is granted once", requested: held, total: held, second: true, want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0"), denied: true, cordoned: true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := decide(tc.requested, tc.total, tc.finished, !tc.second)
			if !session.Equal(got.resources, tc.want) {
				t.Errorf("%s: granted %v, want %v", tc.reason, got.resources, tc.want)
			}
			if (got.status == authv1beta1.ResourceSliceConditionDenied) != tc.denied || got.cordoned != tc.cordoned {
				t.Errorf("%s: got %+v", tc.reason, got)
			}
			if got.message == "" || got.reason == "" {
				t.Errorf("without a reason: %+v", got)
			}
		})
	}
}
