package provider

import (
	"encoding/pem"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/manifests"
)

// guestChange is how a ShadowPod differs from one without resources and affinity, and how the
// result does.
type guestChange struct{ from, to func(*corev1.PodSpec) }

func guestChanges() map[string]guestChange {
	both := func(change func(*corev1.PodSpec)) guestChange { return guestChange{change, change} }
	spread := &corev1.PodAntiAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{
		Weight: 1, PodAffinityTerm: corev1.PodAffinityTerm{TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}}}
	preferred := []corev1.PreferredSchedulingTerm{{Weight: 3, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpExists}}}}}
	own := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
		{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}}},
		{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"n"}}}},
	}}
	return map[string]guestChange{
		"nothing": both(func(*corev1.PodSpec) {}),
		"Liqo's spreading": {
			func(s *corev1.PodSpec) { s.Affinity = &corev1.Affinity{PodAntiAffinity: spread} },
			func(s *corev1.PodSpec) { s.Affinity.PodAntiAffinity = spread },
		},
		"preferred nodes": {
			func(s *corev1.PodSpec) {
				s.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: preferred}}
			},
			func(s *corev1.PodSpec) {
				s.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution = preferred
			},
		},
		"nodes that Liqo's VirtualNode selects": {
			func(s *corev1.PodSpec) {
				s.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: own}}
			},
			func(s *corev1.PodSpec) {
				s.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = guest.NodeAffinity(own)
			},
		},
		"requests": {
			func(s *corev1.PodSpec) {
				s.Containers[0].Resources.Requests = expect.Resources("cpu", "1", "memory", "1Gi")
			},
			func(s *corev1.PodSpec) {
				s.Containers[0].Resources = corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1", "memory", "1Gi"), Limits: expect.Resources("memory", "2304Mi")}
			},
		},
		"limits": both(func(s *corev1.PodSpec) {
			s.Containers[0].Resources = corev1.ResourceRequirements{Requests: expect.Resources("memory", "1Gi"), Limits: expect.Resources("memory", "4Gi")}
		}),
		"no devices": {
			func(s *corev1.PodSpec) {
				s.Containers[0].Resources = corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1", "nvidia.com/gpu", "0"), Limits: expect.Resources("nvidia.com/gpu", "0")}
			},
			func(s *corev1.PodSpec) {
				s.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("1")
			},
		},
		"an init container": {
			func(s *corev1.PodSpec) {
				s.InitContainers = []corev1.Container{{Name: "i", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1"), Limits: expect.Resources("cpu", "1")}}}
			},
			func(s *corev1.PodSpec) {
				half := corev1.ResourceRequirements{Requests: expect.Resources("memory", "0"), Limits: expect.Resources("memory", "128Mi")}
				s.Containers[0].Resources = half
				s.InitContainers = []corev1.Container{{Name: "i", Image: "i", Resources: *half.DeepCopy()}}
				s.InitContainers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("1")
				s.InitContainers[0].Resources.Limits[corev1.ResourceCPU] = resource.MustParse("1")
			},
		},
		"a sidecar": {
			func(s *corev1.PodSpec) {
				s.Containers[0].Resources.Requests = expect.Resources("cpu", "100m")
				s.InitContainers = []corev1.Container{sidecar("s", "200m")}
			},
			func(s *corev1.PodSpec) {
				s.InitContainers = []corev1.Container{sidecar("s", "200m")}
				s.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("100m")
				s.InitContainers[0].Resources.Requests[corev1.ResourceMemory] = resource.MustParse("0")
				for _, c := range []*corev1.Container{&s.Containers[0], &s.InitContainers[0]} {
					c.Resources.Limits = expect.Resources("memory", "128Mi")
				}
			},
		},
		"an emptyDir in memory": {
			func(s *corev1.PodSpec) { s.Volumes = []corev1.Volume{inMemory(nil)} },
			func(s *corev1.PodSpec) { s.Volumes = []corev1.Volume{inMemory(ptr.To(resource.MustParse("256Mi")))} },
		},
		"a bounded emptyDir in memory": both(func(s *corev1.PodSpec) { s.Volumes = []corev1.Volume{inMemory(ptr.To(resource.MustParse("1Mi")))} }),
		// Those that Liqo copies, of which only what was judged may be carried.
		"tolerations": {
			func(s *corev1.PodSpec) {
				s.Tolerations = []corev1.Toleration{exists(""), exists("nvidia.com/gpu"), exists("node-role.kubernetes.io/control-plane"), exists(corev1.TaintNodeUnschedulable),
					exists(broker.TaintOverflow), exists(corev1.TaintNodeNotReady)}
			},
			func(s *corev1.PodSpec) { s.Tolerations = []corev1.Toleration{exists("nvidia.com/gpu")} },
		},
	}
}

func exists(key string) corev1.Toleration {
	return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists}
}

func inMemory(limit *resource.Quantity) corev1.Volume {
	return corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: limit}}}
}

func sidecar(name, cpu string) corev1.Container {
	return corev1.Container{
		Name: name, Image: "i", RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways),
		Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)},
	}
}

// installGuestsPolicies creates the chart's policies for guests.
func installGuestsPolicies(t *testing.T, core client.Client) {
	t.Helper()
	objects, err := manifests.Chart(t.Context(), "agent",
		"--set", "clusterID=paris,lend.enabled=false,guests.podSecurity=baseline,join.token=t,broker.url=https://192.0.2.1:8443,broker.caHash=sha256:"+strings.Repeat("0", 64))
	expect.NoError(t, err)
	created := 0
	for _, object := range objects {
		if name := object.GetName(); name == "spillway-guests" || name == "spillway-guest-requests" {
			expect.NoError(t, core.Create(t.Context(), object))
			created++
		}
	}
	if created != 4 {
		t.Fatalf("the chart has %d objects of the policies for guests, want two and their bindings", created)
	}
}

// The pod that Liqo creates of a ShadowPod preempts none and waits for its place. The chart's
// policies admit what the webhook makes of the pods that may overflow.
func TestGuestsWebhook(t *testing.T) {
	config := controlplane.Start(t, liqotest.CRDs(t))
	c := liqotest.NewClient(t, config)
	core, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	expect.NoError(t, core.Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: guest.PriorityClass}, PreemptionPolicy: ptr.To(corev1.PreemptNever)}))
	installGuestsPolicies(t, core)
	changes := guestChanges()
	for handOver, consumer := range map[bool]string{true: "rome", false: "berlin"} {
		namespace := "shop-" + consumer
		server := httptest.NewTLSServer(guestsHandler(handOver))
		t.Cleanup(server.Close)
		expect.NoError(t, core.Create(t.Context(), &admissionv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "guests-of-" + consumer},
			Webhooks: []admissionv1.MutatingWebhook{{
				Name: "guests.broker.fluidos.eu", AdmissionReviewVersions: []string{"v1"}, SideEffects: ptr.To(admissionv1.SideEffectClassNone),
				ClientConfig: admissionv1.WebhookClientConfig{
					URL: ptr.To(server.URL + guestsPath), CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
				},
				Rules: []admissionv1.RuleWithOperations{{
					Operations: []admissionv1.OperationType{admissionv1.OperationAll},
					Rule:       admissionv1.Rule{APIGroups: []string{"offloading.liqo.io"}, APIVersions: []string{"*"}, Resources: []string{"shadowpods"}},
				}},
				NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{consts.RemoteClusterID: consumer}},
			}},
		}))
		expect.NoError(t, core.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{
			consts.RemoteClusterID: consumer, labelLimited: "true", labelPodSecurity: broker.PodSecurityBaseline,
		}}}))
		expect.NoError(t, core.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: namespace}}))
		shadow := func() *offloadingv1beta1.ShadowPod {
			return &offloadingv1beta1.ShadowPod{ObjectMeta: metav1.ObjectMeta{Name: "g", Namespace: namespace}, Spec: offloadingv1beta1.ShadowPodSpec{
				Pod: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}, AutomountServiceAccountToken: ptr.To(false)},
			}}
		}
		expect.Eventually(t, "the webhook to be in effect", func() (bool, string) {
			dry := shadow()
			// The policy refuses guests that the webhook has missed.
			err := c.Create(t.Context(), dry, client.DryRunAll)
			return err == nil && dry.Spec.Pod.PriorityClassName != "", fmt.Sprint(err)
		})
		expect.Eventually(t, "the policy to be in effect", func() (bool, string) {
			refused := shadow()
			refused.Spec.Pod.SchedulerName = "own"
			err := c.Create(t.Context(), refused, client.DryRunAll)
			return apierrors.IsForbidden(err), fmt.Sprint(err)
		})
		for name, change := range changes {
			changed := shadow()
			change.from(&changed.Spec.Pod)
			if err := c.Create(t.Context(), changed, client.DryRunAll); err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			want := corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}, Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: guest.NodeAffinity(nil),
			}}, AutomountServiceAccountToken: ptr.To(false), PriorityClassName: guest.PriorityClass}
			want.Containers[0].Resources = corev1.ResourceRequirements{Requests: expect.Resources("memory", "0"), Limits: expect.Resources("memory", "256Mi")}
			if handOver {
				want.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
			}
			change.to(&want)
			if diff := cmp.Diff(want, changed.Spec.Pod, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s: the pod (-want +got):\n%s", name, diff)
			}
		}
		of := shadow()
		of.Annotations = map[string]string{guest.AnnotationEvict: "false", "note": "x"}
		expect.NoError(t, c.Create(t.Context(), of))
		// Liqo's virtual kubelet and its controllers only change labels, annotations and the status.
		before := of.DeepCopy()
		of.Labels, of.Annotations[guest.AnnotationEvict] = map[string]string{"app": "web"}, "false"
		expect.NoError(t, c.Update(t.Context(), of))
		if of.Labels["app"] != "web" || !cmp.Equal(of.Spec, before.Spec) {
			t.Errorf("after an update the ShadowPod has labels %v, and its spec changes:\n%s", of.Labels, cmp.Diff(before.Spec, of.Spec))
		}
		for at, annotations := range map[string]map[string]string{"created": before.Annotations, "updated": of.Annotations} {
			if diff := cmp.Diff(map[string]string{guest.AnnotationEvict: "true", "note": "x"}, annotations); diff != "" {
				t.Errorf("annotations of a ShadowPod that is %s to keep its node (-want +got):\n%s", at, diff)
			}
		}

		// As Liqo's controller does.
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: of.Name, Namespace: of.Namespace}, Spec: of.Spec.Pod}
		expect.NoError(t, core.Create(t.Context(), pod))
		if *pod.Spec.PreemptionPolicy != corev1.PreemptNever || *pod.Spec.Priority != 0 {
			t.Errorf("the guest has priority %d and preempts: %s", *pod.Spec.Priority, *pod.Spec.PreemptionPolicy)
		}
		if gates := pod.Spec.SchedulingGates; handOver != (len(gates) == 1 && gates[0].Name == broker.GateHandOver) {
			t.Errorf("hand-over %t: the guest has gates %v", handOver, gates)
		}
		// The API server takes a limit for the request where there is none.
		if request := pod.Spec.Containers[0].Resources.Requests.Memory(); !request.IsZero() {
			t.Errorf("the guest requests %s of memory, and its pod none", request)
		}
	}
}
