package liqo_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Whatever is known of the networks of pods, no pod reaches the virtual kubelets. Where it is
// nothing, only control plane nodes do, and a log line says what to set.
func TestKubeletsAreClosed(t *testing.T) {
	c := liqotest.NewClient(t, controlplane.Start(t))
	var lines []string
	options := liqo.Options{Options: session.Options{Client: c, ClusterID: "rome", Log: funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})}}
	expectPolicy := func(what string, o *liqo.Options, logged bool, want ...networkingv1.IPBlock) {
		t.Helper()
		lines = nil
		expect.NoError(t, o.Complete())
		_, _, err := o.EnsureTenantNamespace(t.Context(), "paris", liqo.AnnotationSession, 1)
		expect.NoError(t, err)
		var got []networkingv1.IPBlock
		spec := liqotest.Read(t, c, "liqo-tenant-paris", "spillway-agent", &networkingv1.NetworkPolicy{}).Spec
		for _, rule := range spec.Ingress {
			if len(rule.From) == 0 || len(rule.Ports) != 1 || rule.Ports[0].Port.IntValue() != 10250 {
				t.Errorf("%s: the policy has rule %+v", what, rule)
			}
			for _, peer := range rule.From {
				got = append(got, *peer.IPBlock)
			}
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || !slices.Equal(spec.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}) {
			t.Errorf("%s: a policy for %v admits (-want +got):\n%s", what, spec.PolicyTypes, diff)
		}
		if text := strings.Join(lines, " "); logged != (len(lines) == 1 && strings.Contains(text, "liqo.podCIDRs") && strings.Contains(text, "paris")) {
			t.Errorf("%s: the agent logs %q", what, lines)
		}
	}
	expectPolicy("no node", &options, true)

	for name, labels := range map[string]map[string]string{"worker": nil, "first": {"node-role.kubernetes.io/control-plane": ""}} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
		expect.NoError(t, c.Create(t.Context(), node))
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}}
		if name == "first" {
			node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "fd00::1"})
		} else {
			node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "192.0.2.2"})
		}
		expect.NoError(t, c.Status().Update(t.Context(), node))
	}
	expectPolicy("nodes without networks of pods", &options, true, networkingv1.IPBlock{CIDR: "192.0.2.1/32"}, networkingv1.IPBlock{CIDR: "fd00::1/128"})

	expect.NoError(t, c.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: corev1.NodeSpec{PodCIDR: "10.1.0.0/24", PodCIDRs: []string{"10.1.0.0/24"}}}))
	expectPolicy("the nodes' networks", &options, false, networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{"10.1.0.0/24"}}, networkingv1.IPBlock{CIDR: "::/0"})
	options.PodCIDRs = []string{"10.0.0.0/8", "fd00::/64"}
	expectPolicy("the given networks", &options, false, networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{"10.0.0.0/8"}}, networkingv1.IPBlock{CIDR: "::/0", Except: []string{"fd00::/64"}})
}
