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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// The networks are those that Liqo has connected, in the namespace of their cluster, and those that
// are given; they are written for the policy. Without Liqo's types there are only the latter.
func TestProviderNetworks(t *testing.T) {
	always := netip.MustParsePrefix("10.9.0.0/16")
	without := NewProviderNetworks(liqotest.NewClient(t, controlplane.Start(t)), "default", []netip.Prefix{always})
	if _, known := without.Of("spillway-paris"); known {
		t.Error("known before they were read")
	}
	expect.NoError(t, without.update(t.Context()))
	if got, known := without.Of("spillway-paris"); !known || !slices.Equal(got, []netip.Prefix{always}) {
		t.Errorf("without Liqo: %v", got)
	}
	c := liqotest.NewClient(t, controlplane.Start(t, liqotest.CRDs(t)))
	for _, configuration := range []struct{ namespace, cluster, mapped string }{
		{"liqo-tenant-paris", "paris", "10.71.0.0/16"}, {"liqo-tenant-berlin", "berlin", ""}, {"liqo-tenant-berlin", "oslo", "10.1.0.0/16"},
	} {
		err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: configuration.namespace}})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		created := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"remote": map[string]any{"cidr": map[string]any{"pod": []any{"10.1.0.0/16"}}}}}}
		created.SetAPIVersion("networking.liqo.io/v1beta1")
		created.SetKind("Configuration")
		created.SetNamespace(configuration.namespace)
		created.SetName(configuration.cluster)
		created.SetLabels(map[string]string{"liqo.io/remote-cluster-id": configuration.cluster})
		expect.NoError(t, c.Create(t.Context(), created))
		if configuration.mapped != "" {
			expect.NoError(t, unstructured.SetNestedStringSlice(created.Object, []string{configuration.mapped}, "status", "remote", "cidr", "pod"))
			expect.NoError(t, c.Status().Update(t.Context(), created))
		}
	}
	networks := NewProviderNetworks(c, "default", []netip.Prefix{always})
	for range 2 { // it creates the ConfigMap, and leaves it
		expect.NoError(t, networks.update(t.Context()))
	}
	for node, want := range map[string][]netip.Prefix{"spillway-paris": {always, netip.MustParsePrefix("10.71.0.0/16")}, "spillway-berlin": {always}, "spillway-oslo": {always}} {
		if got, known := networks.Of(node); !known || !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", node, got, want)
		}
	}
	unconnected := NewProviderNetworks(c, "default", nil)
	for provider, want := range map[string]bool{"paris": false, "berlin": true} {
		if none, err := unconnected.none(t.Context(), provider); err != nil || none != want {
			t.Errorf("%s has no networks: %t (%v)", provider, none, err)
		}
	}
	stored := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: networksConfigMap}}
	expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(stored), stored))
	if diff := cmp.Diff(map[string]string{"spillway-paris": "10.71.0.0/16"}, stored.Data); diff != "" {
		t.Errorf("the ConfigMap (-want +got):\n%s", diff)
	}
	var changed []string
	networks.changed = func(cluster string) { changed = append(changed, cluster) }
	stored.Data = map[string]string{"spillway-paris": "0.0.0.0/0"}
	expect.NoError(t, c.Update(t.Context(), stored))
	expect.NoError(t, networks.update(t.Context()))
	expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(stored), stored))
	if stored.Data["spillway-paris"] != "10.71.0.0/16" {
		t.Errorf("what another has written stays: %v", stored.Data)
	}
	paris := &unstructured.Unstructured{}
	paris.SetAPIVersion("networking.liqo.io/v1beta1")
	paris.SetKind("Configuration")
	paris.SetNamespace("liqo-tenant-paris")
	paris.SetName("paris")
	expect.NoError(t, c.Delete(t.Context(), paris))
	if expect.NoError(t, networks.update(t.Context())); !slices.Equal(changed, []string{"paris"}) {
		t.Errorf("networks of %v have changed, want paris", changed)
	}
}

// Liqo's virtual kubelet writes the address that the provider reports, also one of another:
// the pod runs, without that address.
func TestAddressesWebhook(t *testing.T) {
	c := liqotest.NewClient(t, controlplane.Start(t))
	networks := map[string][]netip.Prefix{
		"spillway-paris": {netip.MustParsePrefix("10.2.0.0/16"), netip.MustParsePrefix("fd01::/64")}, "spillway-berlin": {netip.MustParsePrefix("10.1.0.0/16")},
	}
	server := httptest.NewTLSServer(addressesHandler(func(node string) ([]netip.Prefix, bool) { return networks[node], node != "unread" }))
	t.Cleanup(server.Close)
	expect.NoError(t, c.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "default"}}))
	unread := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "unread"}, Spec: corev1.PodSpec{NodeName: "unread", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	expect.NoError(t, c.Create(t.Context(), unread))
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: corev1.PodSpec{NodeName: "spillway-paris", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	expect.NoError(t, c.Create(t.Context(), pod))
	pod.Status.Conditions = []corev1.PodCondition{{Type: broker.PodOverflow, Status: corev1.ConditionTrue, Reason: "Overflowed"}}
	expect.NoError(t, c.Status().Update(t.Context(), pod))
	report := func(addresses ...string) corev1.PodStatus {
		t.Helper()
		reported := pod.DeepCopy()
		reported.Status.Phase, reported.Status.HostIP, reported.Status.HostIPs = corev1.PodRunning, "10.1.0.1", []corev1.HostIP{{IP: "10.1.0.1"}}
		for _, ip := range addresses {
			reported.Status.PodIPs = append(reported.Status.PodIPs, corev1.PodIP{IP: ip})
		}
		reported.Status.PodIP = addresses[0]
		reported.Status.Conditions = []corev1.PodCondition{{Type: broker.PodOverflow, Status: corev1.ConditionFalse, Reason: "Forged"}, {Type: corev1.PodReady, Status: corev1.ConditionTrue}}
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
				URL: ptr.To(server.URL + addressesPath), CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
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
	unread.Status.Phase, unread.Status.PodIP, unread.Status.PodIPs = corev1.PodRunning, "10.1.2.3", []corev1.PodIP{{IP: "10.1.2.3"}}
	if expect.NoError(t, c.Status().Update(t.Context(), unread, client.DryRunAll)); unread.Status.PodIP == "" {
		t.Error("an address is taken off before the networks are known")
	}
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
		// The scheduler's condition is this cluster's, whatever the provider reports.
		reasons := map[corev1.PodConditionType]string{}
		for _, c := range status.Conditions {
			reasons[c.Type] = c.Reason
		}
		if _, ready := reasons[corev1.PodReady]; !ready || reasons[broker.PodOverflow] != "Overflowed" || len(status.Conditions) != 2 {
			t.Errorf("%s: the conditions are %v", name, status.Conditions)
		}
		if status.Phase != corev1.PodRunning || status.HostIP != "10.1.0.1" {
			t.Errorf("%s: the pod is %s on host %s", name, status.Phase, status.HostIP)
		}
	}
}
