package consumer

import (
	"encoding/pem"
	"net/http/httptest"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Liqo is installed with one network of pods or several. Without its types there is none.
func TestPodNetworks(t *testing.T) {
	if got, err := PodNetworks(t.Context(), liqotest.NewClient(t, controlplane.Start(t)), "liqo"); err != nil || len(got) > 0 {
		t.Errorf("without Liqo: %v, %v", got, err)
	}
	c := liqotest.NewClient(t, controlplane.Start(t, liqotest.CRDs(t)))
	for name, network := range map[string]struct{ kind, cidr string }{
		"pod-cidr-10-244-0-0-16": {"pod-cidr", "10.244.0.0/16"}, "pod-cidr-10-200-0-0-16": {"pod-cidr", "10.200.0.0/16"},
		"service-cidr": {"service-cidr", "10.96.0.0/16"}, "external-cidr": {"external-cidr", "10.70.0.0/16"},
	} {
		for _, namespace := range []string{"default", "kube-system"} {
			if namespace == "kube-system" && network.cidr != "10.200.0.0/16" {
				continue
			}
			created := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"cidr": network.cidr}}}
			created.SetGroupVersionKind(networkKind)
			created.SetNamespace(namespace)
			created.SetName(name)
			created.SetLabels(map[string]string{"ipam.liqo.io/network-type": network.kind})
			expect.NoError(t, c.Create(t.Context(), created))
		}
	}
	for namespace, want := range map[string][]string{"default": {"10.200.0.0/16", "10.244.0.0/16"}, "kube-system": {"10.200.0.0/16"}, "liqo": nil} {
		got, err := PodNetworks(t.Context(), c, namespace)
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("namespace %s: %v, %v, want %v", namespace, got, err, want)
		}
	}
}

// Liqo's virtual kubelet writes the address that the provider reports, also one of this cluster:
// the pod runs, without that address.
func TestAddressesWebhook(t *testing.T) {
	c := liqotest.NewClient(t, controlplane.Start(t))
	own := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/108")}
	server := httptest.NewTLSServer(AddressesHandler(func() []netip.Prefix { return own }))
	t.Cleanup(server.Close)
	expect.NoError(t, c.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "default"}}))
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	expect.NoError(t, c.Create(t.Context(), pod))
	report := func(addresses ...string) corev1.PodStatus {
		t.Helper()
		reported := pod.DeepCopy()
		reported.Status.Phase, reported.Status.HostIP, reported.Status.HostIPs = corev1.PodRunning, "10.1.0.1", []corev1.HostIP{{IP: "10.1.0.1"}}
		for _, ip := range addresses {
			reported.Status.PodIPs = append(reported.Status.PodIPs, corev1.PodIP{IP: ip})
		}
		reported.Status.PodIP = addresses[0]
		expect.NoError(t, c.Status().Update(t.Context(), reported, client.DryRunAll))
		return reported.Status
	}
	if status := report("10.1.2.3"); status.PodIP != "10.1.2.3" {
		t.Fatalf("without the webhook the pod has address %q", status.PodIP)
	}
	expect.NoError(t, c.Create(t.Context(), &admissionv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "addresses"},
		Webhooks: []admissionv1.MutatingWebhook{{
			Name: "addresses.broker.fluidos.eu", AdmissionReviewVersions: []string{"v1"}, SideEffects: ptr.To(admissionv1.SideEffectClassNone),
			ClientConfig: admissionv1.WebhookClientConfig{
				URL: ptr.To(server.URL + AddressesPath), CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
			},
			Rules: []admissionv1.RuleWithOperations{{
				Operations: []admissionv1.OperationType{admissionv1.Update},
				Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods/status"}},
			}},
		}},
	}))
	expect.Eventually(t, "the webhook to be in effect", func() (bool, string) {
		return report("10.1.2.3").PodIP == "", "the pod has the address"
	})
	for name, test := range map[string]struct{ reported, want []string }{
		"a pod of this cluster":        {reported: []string{"10.1.2.3"}},
		"a Service of this cluster":    {reported: []string{"fd00::1"}},
		"the node that connects":       {reported: []string{"127.0.0.1"}},
		"the provider's":               {reported: []string{"10.2.2.3", "fd01::1"}, want: []string{"10.2.2.3", "fd01::1"}},
		"the provider's and one of it": {reported: []string{"10.1.2.3", "fd01::1"}, want: []string{"fd01::1"}},
	} {
		status := report(test.reported...)
		var got []string
		for _, p := range status.PodIPs {
			got = append(got, p.IP)
		}
		if diff := cmp.Diff(test.want, got); diff != "" || status.PodIP != append(test.want, "")[0] {
			t.Errorf("%s: pod IP %q, pod IPs (-want +got):\n%s", name, status.PodIP, diff)
		}
		if status.Phase != corev1.PodRunning || status.HostIP != "10.1.0.1" {
			t.Errorf("%s: the pod is %s on host %s", name, status.Phase, status.HostIP)
		}
	}
}
