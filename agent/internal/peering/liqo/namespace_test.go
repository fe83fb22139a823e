package liqo

import (
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestOpenKubeletsAreLogged: a NetworkPolicy that keeps no pod from the virtual kubelets is
// not made in silence.
func TestOpenKubeletsAreLogged(t *testing.T) {
	c := newClient(t, controlplane.Start(t))
	var lines []string
	options := Options{Options: session.Options{Client: c, ClusterID: "rome", Log: funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})}}
	const warning = "admits every pod"
	prepare := func(o *Options, peer string) {
		t.Helper()
		expect.NoError(t, client.IgnoreAlreadyExists(c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: peer}})))
		lines = nil
		expect.NoError(t, o.ensureKubeletPolicy(t.Context(), metav1.ObjectMeta{Name: "spillway-agent", Namespace: peer}))
	}
	prepare(&options, "paris")
	if len(lines) != 1 || !strings.Contains(lines[0], warning) || !strings.Contains(lines[0], "liqo.podCIDRs") || !strings.Contains(lines[0], "paris") {
		t.Errorf("without networks of pods the agent logs %q", lines)
	}
	expect.NoError(t, c.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: corev1.NodeSpec{PodCIDR: "10.1.0.0/24", PodCIDRs: []string{"10.1.0.0/24"}}}))
	prepare(&options, "paris")
	if len(lines) != 0 {
		t.Errorf("with the nodes' networks the agent logs %q", lines)
	}
	options.PodCIDRs = []string{"10.0.0.0/8"}
	prepare(&options, "berlin")
	if len(lines) != 0 {
		t.Errorf("with the given networks the agent logs %q", lines)
	}
}

func TestPodCIDRs(t *testing.T) {
	for _, test := range []struct {
		what  string
		nodes [][]string
		want  []string
	}{
		{what: "no node"},
		{what: "nodes without networks", nodes: [][]string{nil, {}}},
		{what: "one node", nodes: [][]string{{"10.1.3.0/24", "fd00:1::/64"}}, want: []string{"10.1.3.0/24", "fd00:1::/64"}},
		{what: "halves of one network", nodes: [][]string{{"10.1.1.0/24"}, {"10.1.0.0/24"}}, want: []string{"10.1.0.0/23"}},
		{what: "neighbours that are not", nodes: [][]string{{"10.1.1.0/24"}, {"10.1.2.0/24"}}, want: []string{"10.1.1.0/24", "10.1.2.0/24"}},
		{what: "quarters in any order", nodes: [][]string{{"10.1.2.0/24"}, {"10.1.1.0/24"}, {"10.1.3.0/24"}, {"10.1.0.0/24"}, {"10.1.4.0/24"}}, want: []string{"10.1.0.0/22", "10.1.4.0/24"}},
		{what: "the same twice", nodes: [][]string{{"10.1.2.0/24"}, {"10.1.2.0/24"}}, want: []string{"10.1.2.0/24"}},
		{what: "IPv6", nodes: [][]string{{"fd00:0:0:1::/64"}, {"fd00::/64"}}, want: []string{"fd00::/63"}},
	} {
		var nodes []corev1.Node
		for _, cidrs := range test.nodes {
			nodes = append(nodes, corev1.Node{Spec: corev1.NodeSpec{PodCIDRs: cidrs}})
		}
		if got := podCIDRs(nodes); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", test.what, got, test.want)
		}
	}
	policy := kubeletPolicy([]string{"10.1.0.0/16", "fd00::/64"})
	for i, want := range []string{"10.1.0.0/16", "fd00::/64"} {
		if from := policy.Ingress[0].From[i].IPBlock; !slices.Equal(from.Except, []string{want}) {
			t.Errorf("the policy admits %+v, want all but %s", from, want)
		}
	}
}
