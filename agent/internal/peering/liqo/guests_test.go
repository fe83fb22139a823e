package liqo

import (
	"encoding/pem"
	"net/http/httptest"
	"testing"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// The pod that Liqo creates of a ShadowPod preempts none and waits for its place.
func TestGuestsWebhook(t *testing.T) {
	config := controlplane.Start(t, liqoCRDs(t))
	c := newClient(t, config)
	core, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	expect.NoError(t, core.Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: guest.PriorityClass}, PreemptionPolicy: ptr.To(corev1.PreemptNever)}))
	for handOver, consumer := range map[bool]string{true: "rome", false: "berlin"} {
		namespace := "shop-" + consumer
		server := httptest.NewTLSServer(GuestsHandler(handOver))
		t.Cleanup(server.Close)
		expect.NoError(t, core.Create(t.Context(), &admissionv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "guests-of-" + consumer},
			Webhooks: []admissionv1.MutatingWebhook{{
				Name: "guests.broker.fluidos.eu", AdmissionReviewVersions: []string{"v1"}, SideEffects: ptr.To(admissionv1.SideEffectClassNone),
				ClientConfig: admissionv1.WebhookClientConfig{
					URL: ptr.To(server.URL + GuestsPath), CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
				},
				Rules: []admissionv1.RuleWithOperations{{
					Operations: []admissionv1.OperationType{admissionv1.OperationAll},
					Rule:       admissionv1.Rule{APIGroups: []string{"offloading.liqo.io"}, APIVersions: []string{"*"}, Resources: []string{"shadowpods"}},
				}},
				NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{consts.RemoteClusterID: consumer}},
			}},
		}))
		expect.NoError(t, core.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{consts.RemoteClusterID: consumer}}}))
		expect.NoError(t, core.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: namespace}}))
		shadow := func() *offloadingv1beta1.ShadowPod {
			return &offloadingv1beta1.ShadowPod{ObjectMeta: metav1.ObjectMeta{Name: "g", Namespace: namespace}, Spec: offloadingv1beta1.ShadowPodSpec{
				Pod: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}, AutomountServiceAccountToken: ptr.To(false)},
			}}
		}
		expect.Eventually(t, "the webhook to be in effect", func() (bool, string) {
			dry := shadow()
			expect.NoError(t, c.Create(t.Context(), dry, client.DryRunAll))
			return dry.Spec.Pod.PriorityClassName != "", ""
		})
		of := shadow()
		expect.NoError(t, c.Create(t.Context(), of))
		// Liqo's virtual kubelet and its controllers only change labels, annotations and the status.
		of.Labels = map[string]string{"app": "web"}
		expect.NoError(t, c.Update(t.Context(), of))

		// As Liqo's controller does.
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: of.Name, Namespace: of.Namespace}, Spec: of.Spec.Pod}
		expect.NoError(t, core.Create(t.Context(), pod))
		if *pod.Spec.PreemptionPolicy != corev1.PreemptNever || *pod.Spec.Priority != 0 {
			t.Errorf("the guest has priority %d and preempts: %s", *pod.Spec.Priority, *pod.Spec.PreemptionPolicy)
		}
		if gates := pod.Spec.SchedulingGates; handOver != (len(gates) == 1 && gates[0].Name == broker.GateHandOver) {
			t.Errorf("hand-over %t: the guest has gates %v", handOver, gates)
		}
	}
}
