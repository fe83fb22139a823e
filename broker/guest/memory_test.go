package guest

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// Limits are lowered only where those of the whole pod are too much, and never below what a
// container without a limit may use.
func TestLowerMemory(t *testing.T) {
	for name, c := range map[string]struct {
		// containers are what each requests and is limited to, and want the limits that it gets.
		containers [][2]string
		want       []string
	}{
		"equal to the requests":                {[][2]string{{"1Gi", "1Gi"}}, []string{"1Gi"}},
		"twice the requests and the share":     {[][2]string{{"1Gi", "2304Mi"}}, []string{"2304Mi"}},
		"more":                                 {[][2]string{{"1Gi", "2305Mi"}}, []string{"2304Mi"}},
		"no requests":                          {[][2]string{{"0", "1Ti"}}, []string{"256Mi"}},
		"one that another leaves room for":     {[][2]string{{"1Gi", "1Gi"}, {"0", "1Gi"}}, []string{"1Gi", "1Gi"}},
		"one for which there is no more room":  {[][2]string{{"1Gi", "1Gi"}, {"0", "2Gi"}}, []string{"1Gi", "128Mi"}},
		"several, of which one is within both": {[][2]string{{"1Gi", "1Ti"}, {"64Mi", "256Mi"}}, []string{"2176Mi", "256Mi"}},
	} {
		t.Run(name, func(t *testing.T) {
			var pod corev1.PodSpec
			for i, amounts := range c.containers {
				container := corev1.Container{Resources: corev1.ResourceRequirements{Requests: expect.Resources("memory", amounts[0]), Limits: expect.Resources("memory", amounts[1])}}
				if i == 0 {
					pod.Containers = append(pod.Containers, container)
				} else {
					pod.InitContainers = append(pod.InitContainers, container)
				}
			}
			LowerMemory(&pod)
			var got []string
			for _, container := range append(pod.Containers, pod.InitContainers...) {
				got = append(got, container.Resources.Limits.Memory().String())
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("limits (-want +got):\n%s", diff)
			}
		})
	}
}
