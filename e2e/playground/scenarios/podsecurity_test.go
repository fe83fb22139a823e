package scenarios_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestPodSecurityOfProviders: paris, which would be preferred, requires that guests comply
// with the Pod Security Standard restricted, and berlin only with baseline. A pod that
// complies runs in paris, another one of the same requests in berlin; if there is no room in
// berlin, the event names the fields to set.
func TestPodSecurityOfProviders(t *testing.T) {
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "8", "memory", "16Gi")},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "8Gi")},
	})
	s.upgrade("paris", func(ad *broker.ClusterAdvertisement) bool { return ad.Spec.Lending.PodSecurity == "restricted" }, "guests.podSecurity=restricted")
	s.optedIn("shop")
	fields := "set runAsNonRoot to true, allowPrivilegeEscalation to false, capabilities.drop to [ALL] and seccompProfile.type to RuntimeDefault"
	s.create("root", nil)
	s.runs("root", "berlin", "berlin-1")
	s.rejected("paris", "PodSecurityViolated", fields)
	s.create("complying", comply)
	s.runs("complying", "paris", "paris-1")

	s.create("large", func(spec *corev1.PodSpec) {
		spec.Containers[0].Resources.Requests = expect.Resources("cpu", "3", "memory", "16Mi")
	})
	s.explained("large", "OverflowQueued", "paris: Its guests must comply with the Pod Security Standard restricted", fields, "guests.podSecurity to baseline", "berlin: ", "Insufficient cpu")
	s.waits("large")
}

// comply makes a pod comply with the Pod Security Standard restricted.
func comply(spec *corev1.PodSpec) {
	spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
	spec.Containers[0].SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
}
