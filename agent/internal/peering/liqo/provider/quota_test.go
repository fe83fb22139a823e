package provider

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func containers(all ...corev1.Container) []corev1.Container { return all }

// container requests an amount of CPU, and is limited to it if limit is given.
func container(request string, limit ...string) corev1.Container {
	c := corev1.Container{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", request)}}
	for _, l := range limit {
		c.Resources.Limits = expect.Resources("cpu", l)
	}
	return c
}

// quotaOf is what Liqo counts for a pod, as getQuotaFromShadowPod in its webhook for ShadowPods: the
// sum of its containers or its largest init container, by resource. To Liqo a sidecar is an init
// container like others, and it compares init containers in whole units: of 100m and 900m of CPU
// it takes the first.
func quotaOf(pod *corev1.PodSpec) corev1.ResourceList {
	sum, largest := corev1.ResourceList{}, corev1.ResourceList{}
	for i := range pod.Containers {
		broker.AddTo(sum, pod.Containers[i].Resources.Requests)
	}
	for i := range pod.InitContainers {
		for name, amount := range pod.InitContainers[i].Resources.Requests {
			if have, ok := largest[name]; !ok || have.Value() < amount.Value() {
				largest[name] = amount
			}
		}
	}
	return capacity.Larger(sum, largest)
}

func TestQuotaOf(t *testing.T) {
	both := container("100m")
	both.Resources.Requests[corev1.ResourceMemory] = resource.MustParse("1Gi")
	large := container("2500m")
	large.Resources.Requests[corev1.ResourceMemory] = resource.MustParse("2Gi")
	for name, c := range map[string]struct {
		pod  corev1.PodSpec
		want corev1.ResourceList
	}{
		"all containers":                   {corev1.PodSpec{Containers: containers(both, container("200m"))}, expect.Resources("cpu", "300m", "memory", "1Gi")},
		"the largest init container":       {corev1.PodSpec{Containers: containers(both), InitContainers: containers(container("1"), large, container("2"))}, expect.Resources("cpu", "2500m", "memory", "2Gi")},
		"smaller init containers":          {corev1.PodSpec{Containers: containers(container("3")), InitContainers: containers(large)}, expect.Resources("cpu", "3", "memory", "2Gi")},
		"a sidecar like an init container": {corev1.PodSpec{Containers: containers(container("100m")), InitContainers: containers(sidecar("s", "90m"))}, expect.Resources("cpu", "100m")},
		"whole units":                      {corev1.PodSpec{Containers: containers(container("1m")), InitContainers: containers(container("100m"), container("900m"))}, expect.Resources("cpu", "100m")},
	} {
		if got := quotaOf(&c.pod); !session.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

const gpu corev1.ResourceName = "nvidia.com/gpu"

func drawContainer(t *rapid.T, name string) corev1.Container {
	c := corev1.Container{Name: name}
	r := &c.Resources
	draw := func(name corev1.ResourceName, amounts ...string) {
		amount := rapid.SampledFrom(append(amounts, "")).Draw(t, string(name))
		if amount == "" {
			return
		}
		if r.Requests == nil {
			r.Requests = corev1.ResourceList{}
		}
		r.Requests[name] = resource.MustParse(amount)
	}
	draw(corev1.ResourceCPU, "0", "1m", "100m", "250m", "999m", "1", "1500m", "2")
	draw(corev1.ResourceMemory, "0", "1", "64Mi", "1Gi")
	draw(gpu, "1", "2")
	return c
}

// Liqo counts no more than the scheduler does: of a Quota as large as the grant, each pod within the
// grant finds enough.
func TestQuotaOfIsWithinRequests(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var pod corev1.PodSpec
		for i := range rapid.IntRange(1, 3).Draw(t, "containers") {
			pod.Containers = append(pod.Containers, drawContainer(t, fmt.Sprintf("c%d", i)))
		}
		for i := range rapid.IntRange(0, 4).Draw(t, "init containers") {
			c := drawContainer(t, fmt.Sprintf("i%d", i))
			if rapid.Bool().Draw(t, "sidecar") {
				c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
			}
			pod.InitContainers = append(pod.InitContainers, c)
		}
		requests := requestsOf(&pod)
		for name, counted := range quotaOf(&pod) {
			if have, listed := requests[name]; !listed || counted.Cmp(have) > 0 {
				t.Fatalf("Liqo counts %s of %s, the scheduler %s", counted.String(), name, have.String())
			}
		}
	})
}

// refusal is the answer of Liqo's webhook for ShadowPods to the only guest of a Quota, "" if it
// is admitted: as checkResources there.
func refusal(quota *offloadingv1beta1.Quota, pod *corev1.PodSpec) string {
	counted := quotaOf(pod)
	for _, name := range slices.Sorted(maps.Keys(counted)) {
		amount := counted[name]
		free, listed := quota.Spec.Resources[name]
		switch {
		case !listed:
			return fmt.Sprintf("%s quota limit not found for this peering", name)
		case free.Cmp(amount) < 0:
			return fmt.Sprintf("peering %s quota usage exceeded - free %s / requested %s", name, free.String(), amount.String())
		}
	}
	return ""
}

// TestZerosAreAdmitted: Liqo admits guests that request nothing of a resource, whether or not it
// is granted.
func TestZerosAreAdmitted(t *testing.T) {
	held := expect.Resources("cpu", "500m", "memory", "512Mi", "pods", "2")
	quota := &offloadingv1beta1.Quota{Spec: offloadingv1beta1.QuotaSpec{Resources: decide(held, held, nil, true).resources}}
	admitted := func(change func(*corev1.PodSpec)) string {
		pod := &corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}, {Name: "d"}}, InitContainers: []corev1.Container{{Name: "i"}, sidecar("s", "10m")}}
		change(pod)
		makeGuest(pod, false)
		return refusal(quota, pod)
	}
	for name, r := range map[string]corev1.ResourceRequirements{
		"a device":               {Requests: expect.Resources("cpu", "100m", "nvidia.com/gpu", "0"), Limits: expect.Resources("nvidia.com/gpu", "0")},
		"only zeros":             {Requests: expect.Resources("cpu", "0", "memory", "0", "ephemeral-storage", "0", "hugepages-2Mi", "0Mi", "example.com/fpga", "0m")},
		"storage below a limit":  {Requests: expect.Resources("ephemeral-storage", "0"), Limits: expect.Resources("ephemeral-storage", "1Gi")},
		"a container of no size": {},
	} {
		for kind, change := range map[string]func(*corev1.PodSpec){
			"container":      func(pod *corev1.PodSpec) { pod.Containers[1].Resources = *r.DeepCopy() },
			"init container": func(pod *corev1.PodSpec) { pod.InitContainers[0].Resources = *r.DeepCopy() },
			"sidecar":        func(pod *corev1.PodSpec) { pod.InitContainers[1].Resources = *r.DeepCopy() },
		} {
			if message := admitted(change); message != "" {
				t.Errorf("%s that requests zero (%s): %s", kind, name, message)
			}
		}
	}
	refused := func(pod *corev1.PodSpec) {
		pod.Containers[0].Resources = corev1.ResourceRequirements{Requests: expect.Resources("nvidia.com/gpu", "1"), Limits: expect.Resources("nvidia.com/gpu", "1")}
	}
	if message := admitted(refused); message != "nvidia.com/gpu quota limit not found for this peering" {
		t.Errorf("a device that is not granted: %q", message)
	}
}
