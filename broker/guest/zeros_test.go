package guest_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// A guest names no resource of which it requests nothing, but those that every quota lists.
func TestDropZeros(t *testing.T) {
	list := expect.Resources
	type resources = corev1.ResourceRequirements
	for name, c := range map[string]struct{ from, want resources }{
		"a device":            {resources{Requests: list("nvidia.com/gpu", "0", "cpu", "1"), Limits: list("nvidia.com/gpu", "0")}, resources{Requests: list("cpu", "1")}},
		"huge pages":          {resources{Requests: list("hugepages-2Mi", "0Mi"), Limits: list("hugepages-2Mi", "0Mi")}, resources{}},
		"in other notations":  {resources{Requests: list("a.io/a", "0m", "a.io/b", "0Gi", "a.io/c", "0e3")}, resources{}},
		"what is used":        {resources{Requests: list("nvidia.com/gpu", "1"), Limits: list("nvidia.com/gpu", "1")}, resources{Requests: list("nvidia.com/gpu", "1"), Limits: list("nvidia.com/gpu", "1")}},
		"only one of the two": {resources{Requests: list("nvidia.com/gpu", "0"), Limits: list("nvidia.com/gpu", "1")}, resources{Limits: list("nvidia.com/gpu", "1")}},
		// The API server would take the limit for the request.
		"below a limit": {
			resources{Requests: list("cpu", "0", "memory", "0", "ephemeral-storage", "0"), Limits: list("cpu", "1", "memory", "1Gi", "ephemeral-storage", "1Gi")},
			resources{Requests: list("cpu", "0", "memory", "0", "ephemeral-storage", "0"), Limits: list("cpu", "1", "memory", "1Gi", "ephemeral-storage", "1Gi")},
		},
		"nothing": {},
	} {
		of := func(r resources) *corev1.PodSpec {
			return &corev1.PodSpec{
				InitContainers: []corev1.Container{{Resources: *r.DeepCopy()}}, Containers: []corev1.Container{{}, {Resources: *r.DeepCopy()}}, Resources: r.DeepCopy(),
			}
		}
		got := of(c.from)
		guest.DropZeros(got)
		if diff := cmp.Diff(of(c.want), got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
