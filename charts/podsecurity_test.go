package charts_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// TestPodSecurityOfGuests: guests must comply with restricted, whatever the driver, unless
// the value says baseline. The agent advertises what is enforced.
func TestPodSecurityOfGuests(t *testing.T) {
	for values, want := range map[string]string{
		"driver=liqo": "restricted", "driver=direct": "restricted",
		"driver=liqo,guests.podSecurity=baseline": "baseline", "driver=direct,guests.podSecurity=baseline": "baseline",
	} {
		t.Run(values, func(t *testing.T) {
			objects := render(t, "agent", slices.Concat(needed, strings.Split(values, ",")))
			flag := false
			for _, d := range only[appsv1.Deployment](t, objects, "Deployment") {
				flag = flag || d.Name == "spillway-agent" && slices.Contains(d.Spec.Template.Spec.Containers[0].Args, "--guests-pod-security="+want)
			}
			if !flag {
				t.Errorf("the agent has no flag --guests-pod-security=%s", want)
			}
			if strings.Contains(values, "direct") {
				return // the agent labels the namespaces
			}
			for _, policy := range only[admissionv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy") {
				nonRoot := slices.ContainsFunc(policy.Spec.Validations, func(v admissionv1.Validation) bool {
					return strings.Contains(v.Message, "set securityContext.runAsNonRoot")
				})
				if policy.Name == "spillway-guests" && nonRoot != (want == "restricted") {
					t.Errorf("policy spillway-guests requires runAsNonRoot: %t", nonRoot)
				}
			}
		})
	}
}

// podSecurityCases are pods that comply with restricted, with baseline only, or with neither,
// beside podSecurityAttacks.
var podSecurityCases = []podAttack{
	{"complying", func(*corev1.PodSpec) {}, ""},
	{"ordinary", func(s *corev1.PodSpec) { s.SecurityContext, s.Containers[0].SecurityContext = nil, nil }, ""},
	{"complying in each container", func(s *corev1.PodSpec) {
		s.Containers[0].SecurityContext.RunAsNonRoot, s.Containers[0].SecurityContext.SeccompProfile = s.SecurityContext.RunAsNonRoot, s.SecurityContext.SeccompProfile
		s.SecurityContext = nil
	}, ""},
	{"an init container without context", func(s *corev1.PodSpec) { s.InitContainers = []corev1.Container{{Name: "i", Image: "i"}} }, ""},
	{"a user", func(s *corev1.PodSpec) { s.SecurityContext.RunAsUser = ptr.To[int64](1000) }, ""},
	{"user root", func(s *corev1.PodSpec) { s.SecurityContext.RunAsUser = ptr.To[int64](0) }, ""},
	{"user root in the container", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext.RunAsUser = ptr.To[int64](0) }, ""},
	{"root in the container", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext.RunAsNonRoot = ptr.To(false) }, ""},
	{"root but in the container", func(s *corev1.PodSpec) {
		s.SecurityContext.RunAsNonRoot, s.Containers[0].SecurityContext.RunAsNonRoot = ptr.To(false), ptr.To(true)
	}, ""},
	{"binding low ports", capability("NET_BIND_SERVICE"), ""},
	{"a capability of the default", capability("CHOWN"), ""},
	{"no profile", func(s *corev1.PodSpec) { s.SecurityContext.SeccompProfile = nil }, ""},
	{"a profile of the node", func(s *corev1.PodSpec) {
		s.SecurityContext.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost, LocalhostProfile: ptr.To("own.json")}
	}, ""},
	{"no AppArmor", func(s *corev1.PodSpec) {
		s.SecurityContext.AppArmorProfile = &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeUnconfined}
	}, ""},
	{"an SELinux type", func(s *corev1.PodSpec) {
		s.Containers[0].SecurityContext.SELinuxOptions = &corev1.SELinuxOptions{Type: "spc_t"}
	}, ""},
	{"an SELinux type of containers", func(s *corev1.PodSpec) {
		s.Containers[0].SecurityContext.SELinuxOptions = &corev1.SELinuxOptions{Type: "container_t"}
	}, ""},
	{"an image volume", volume(corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "i"}}), ""},
	{"a projected volume", volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}), ""},
}

// TestPodSecurityOfPods: which pods are asked for as pods that comply is what the Pod
// Security admission of an API server says: a pod that violates baseline does not overflow,
// and one that violates only restricted goes to a provider with baseline.
func TestPodSecurityOfPods(t *testing.T) {
	api, err := client.New(controlplane.Start(t), client.Options{})
	expect.NoError(t, err)
	for _, standard := range []string{"restricted", "baseline"} {
		expect.NoError(t, api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: standard, Labels: map[string]string{"pod-security.kubernetes.io/enforce": standard}}}))
		expect.NoError(t, api.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: within(standard, "default")}))
	}
	for _, c := range slices.Concat(podSecurityCases, podSecurityAttacks) {
		spec := guestSpec()
		c.change(&spec)
		admitted := func(namespace string) (bool, error) {
			err := api.Create(t.Context(), &corev1.Pod{ObjectMeta: within(namespace, "p"), Spec: spec}, client.DryRunAll)
			if err != nil && !strings.Contains(err.Error(), "violates PodSecurity") {
				return false, fmt.Errorf("%s: %w", c.name, err)
			}
			return err == nil, nil
		}
		restricted, err := admitted("restricted")
		expect.NoError(t, err)
		baseline, err := admitted("baseline")
		expect.NoError(t, err)
		overflows, reason := demand.Admissible(&corev1.Pod{Spec: spec})
		// With a user namespace of its own, baseline admits an unmasked /proc. Providers do not.
		if strict := c.name == "an unmasked /proc"; overflows != (baseline && !strict) {
			t.Errorf("%s: the API server admits it with baseline: %t, and it may overflow: %t (%s)", c.name, baseline, overflows, reason)
		}
		if standard := guest.PodSecurity(&spec); overflows && (standard == "restricted") != restricted {
			t.Errorf("%s: the API server admits it with restricted: %t, and it is taken for %s", c.name, restricted, standard)
		}
	}
}
