package liqo

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
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

// What Liqo counts, as getQuotaFromShadowPod in its webhook for ShadowPods.
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

// What a pod requests changes only where Liqo would not count all of it, and the requests of
// sidecars only where no init container runs before them.
func TestMakeCounted(t *testing.T) {
	for name, c := range map[string]struct{ from, want corev1.PodSpec }{
		"init containers of different sizes": {
			corev1.PodSpec{Containers: containers(container("1m")), InitContainers: containers(container("1"), container("2500m"))},
			corev1.PodSpec{Containers: containers(container("1m")), InitContainers: containers(container("1"), container("2500m"))},
		},
		"init containers of about the same size": {
			corev1.PodSpec{Containers: containers(container("1m")), InitContainers: containers(container("100m", "200m"), container("900m"))},
			corev1.PodSpec{Containers: containers(container("1m")), InitContainers: containers(container("900m", "900m"), container("900m"))},
		},
		"a sidecar without requests": {
			corev1.PodSpec{Containers: containers(container("1m")), InitContainers: containers(sidecar("s", "0"))},
			corev1.PodSpec{Containers: containers(container("1m")), InitContainers: containers(sidecar("s", "0"))},
		},
		"sidecars after an init container": {
			corev1.PodSpec{Containers: containers(container("100m")), InitContainers: containers(container("10m"), sidecar("s", "200m"), container("2"), sidecar("t", "50m"))},
			corev1.PodSpec{Containers: containers(container("100m")), InitContainers: containers(container("2200m"), sidecar("s", "200m"), container("2"), sidecar("t", "50m"))},
		},
		"sidecars alone": {
			corev1.PodSpec{Containers: containers(container("100m", "500m"), container("1")), InitContainers: containers(sidecar("s", "300m"), sidecar("t", "200m"))},
			corev1.PodSpec{Containers: containers(container("600m", "600m"), container("1")), InitContainers: containers(sidecar("s", "0"), sidecar("t", "0"))},
		},
		"a sidecar before an init container": {
			corev1.PodSpec{Containers: containers(container("100m")), InitContainers: containers(sidecar("s", "300m"), container("1"), sidecar("t", "50m"))},
			corev1.PodSpec{Containers: containers(container("400m")), InitContainers: containers(sidecar("s", "0"), container("1300m"), sidecar("t", "50m"))},
		},
	} {
		t.Run(name, func(t *testing.T) {
			makeCounted(&c.from)
			if diff := cmp.Diff(c.want, c.from); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
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
		request(r, name, resource.MustParse(amount))
		if rapid.Bool().Draw(t, "limited") {
			if r.Limits == nil {
				r.Limits = corev1.ResourceList{}
			}
			r.Limits[name] = resource.MustParse(amount)
		}
	}
	draw(corev1.ResourceCPU, "0", "1m", "100m", "250m", "999m", "1", "1500m", "2")
	draw(corev1.ResourceMemory, "0", "1", "64Mi", "1Gi")
	draw(gpu, "1", "2")
	return c
}

// Liqo counts all that the scheduler counts, which stays the same, but for devices of
// sidecars. No limit is below its request.
func TestMakeCountedProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var pod corev1.PodSpec
		for i := range rapid.IntRange(1, 3).Draw(t, "containers") {
			pod.Containers = append(pod.Containers, drawContainer(t, fmt.Sprintf("c%d", i)))
		}
		devices := false
		for i := range rapid.IntRange(0, 4).Draw(t, "init containers") {
			c := drawContainer(t, fmt.Sprintf("i%d", i))
			if rapid.Bool().Draw(t, "sidecar") {
				c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
				_, of := c.Resources.Requests[gpu]
				devices = devices || of
			}
			pod.InitContainers = append(pod.InitContainers, c)
		}
		before := requestsOf(&pod)
		makeCounted(&pod)
		after, counted := requestsOf(&pod), quotaOf(&pod)
		if !session.Equal(before, after) {
			t.Fatalf("the pod requested %v, and requests %v", before, after)
		}
		if devices {
			delete(counted, gpu)
			delete(after, gpu)
		}
		if !session.Equal(counted, after) {
			t.Fatalf("Liqo counts %v of %v", counted, after)
		}
		for _, of := range [][]corev1.Container{pod.Containers, pod.InitContainers} {
			for i := range of {
				for name, limit := range of[i].Resources.Limits {
					if request := of[i].Resources.Requests[name]; limit.Cmp(request) < 0 {
						t.Fatalf("container %s requests %s %s and is limited to %s", of[i].Name, request.String(), name, limit.String())
					}
				}
			}
		}
	})
}
