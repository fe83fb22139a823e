package charts_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	podsecurity "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// TestPodSecurityOfGuests: guests must comply with restricted, whatever the driver, unless
// the value says baseline. The agent labels the namespaces with it, and with Liqo, which makes
// them, guests are refused before that.
func TestPodSecurityOfGuests(t *testing.T) {
	for values, want := range map[string]string{
		"driver=liqo": "restricted", "driver=direct": "restricted",
		"driver=liqo,guests.podSecurity=baseline": "baseline", "driver=direct,guests.podSecurity=baseline": "baseline",
	} {
		t.Run(values, func(t *testing.T) {
			text, err := template(t, "agent", slices.Concat(needed, strings.Split(values, ",")))
			expect.NoError(t, err)
			if !strings.Contains(text, "- --guests-pod-security="+want+"\n") {
				t.Errorf("the agent has no flag --guests-pod-security=%s", want)
			}
			labelled := strings.Contains(text, "variables.labels[?'pod-security.kubernetes.io/enforce'].orValue('') == '"+want+"'")
			if labelled != strings.Contains(values, "liqo") {
				t.Errorf("guests are refused in a namespace without label pod-security.kubernetes.io/enforce=%s: %t", want, labelled)
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
	{"a volume of the network", volume(corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: "nfs.example.org", Path: "/"}}), ""},
	{"root in a user namespace", func(s *corev1.PodSpec) {
		s.SecurityContext.RunAsUser, s.HostUsers = ptr.To[int64](0), ptr.To(false)
	}, ""},
	{"probes of itself", func(s *corev1.PodSpec) {
		get := &corev1.HTTPGetAction{Port: intstr.FromInt32(80)}
		s.Containers[0].LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: get}}
		s.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: 80}}}
		s.Containers[0].StartupProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}}
		s.Containers[0].Lifecycle = &corev1.Lifecycle{
			PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}, PreStop: &corev1.LifecycleHandler{HTTPGet: get},
		}
	}, ""},
	// The API server has no such pods.
	{"a process of a Windows node", func(s *corev1.PodSpec) {
		s.SecurityContext.WindowsOptions = &corev1.WindowsSecurityContextOptions{HostProcess: ptr.To(true)}
	}, ""},
	{"an unmasked /proc of the node's users", func(s *corev1.PodSpec) {
		s.Containers[0].SecurityContext.ProcMount = ptr.To(corev1.UnmaskedProcMount)
	}, ""},
}

// stricter are pods that a standard admits, and providers or the scheduler do not.
var stricter = map[string][]string{
	// With a user namespace of its own. Liqo does not carry hostUsers.
	"an unmasked /proc": {"baseline"}, "root in a user namespace": {"restricted"},
	// Only volumes that every cluster can provide.
	"a volume of the network": {"baseline"},
}

// violated returns the checks of a Pod Security Standard that a pod violates, by the code
// of Kubernetes.
func violated(standard string, spec *corev1.PodSpec) (ids []policy.CheckID) {
	checks := policy.DefaultChecks()
	overridden := map[policy.CheckID]bool{}
	newest := func(check policy.Check) policy.VersionedCheck { return check.Versions[len(check.Versions)-1] }
	if standard == "restricted" {
		for _, check := range checks {
			for _, id := range newest(check).OverrideCheckIDs {
				overridden[id] = true
			}
		}
	}
	for _, check := range checks {
		if check.Level == podsecurity.LevelRestricted && standard != "restricted" || overridden[check.ID] {
			continue
		}
		if !newest(check).CheckPod(&metav1.ObjectMeta{}, spec).Allowed {
			ids = append(ids, check.ID)
		}
	}
	return ids
}

// TestPodSecurityOfPods: which pods are asked for as pods that comply is what the Pod
// Security admission of an API server says: a pod that violates baseline does not overflow,
// and one that violates only restricted goes to a provider with baseline. For each check of the
// standards there is a pod that it alone refuses.
func TestPodSecurityOfPods(t *testing.T) {
	api, err := client.New(controlplane.Start(t), client.Options{})
	expect.NoError(t, err)
	for _, standard := range []string{"restricted", "baseline"} {
		expect.NoError(t, api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: standard, Labels: map[string]string{"pod-security.kubernetes.io/enforce": standard}}}))
		expect.NoError(t, api.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: within(standard, "default")}))
	}
	alone := map[policy.CheckID]bool{}
	for _, c := range slices.Concat(podSecurityCases, podSecurityAttacks) {
		spec := guestSpec()
		c.change(&spec)
		for _, standard := range []string{"restricted", "baseline"} {
			if ids := violated(standard, &spec); len(ids) == 1 {
				alone[ids[0]] = true
			}
		}
		admitted := func(namespace string) (bool, error) {
			err := api.Create(t.Context(), &corev1.Pod{ObjectMeta: within(namespace, "p"), Spec: spec}, client.DryRunAll)
			if err != nil && !strings.Contains(err.Error(), "violates PodSecurity") {
				return false, fmt.Errorf("%s: %w", c.name, err)
			}
			return err == nil, nil
		}
		restricted, err := admitted("restricted")
		if apierrors.IsInvalid(err) {
			continue
		}
		expect.NoError(t, err)
		baseline, err := admitted("baseline")
		expect.NoError(t, err)
		overflows, reason := demand.Admissible(&corev1.Pod{Spec: spec})
		strict := func(standard string) bool { return slices.Contains(stricter[c.name], standard) }
		if overflows != (baseline && !strict("baseline")) {
			t.Errorf("%s: the API server admits it with baseline: %t, and it may overflow: %t (%s)", c.name, baseline, overflows, reason)
		}
		if standard := guest.PodSecurity(&spec); overflows && (standard == "restricted") != (restricted && !strict("restricted")) {
			t.Errorf("%s: the API server admits it with restricted: %t, and it is taken for %s", c.name, restricted, standard)
		}
	}
	for _, check := range policy.DefaultChecks() {
		if !alone[check.ID] {
			t.Errorf("no pod is refused by check %s alone", check.ID)
		}
	}
}
