package networks

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// Nodes are listed in any order, and may have an address twice.
func TestMergeInAnyOrder(t *testing.T) {
	want := []string{"10.0.0.0/31"}
	for _, texts := range [][]string{
		{"10.0.0.0", "10.0.0.0", "10.0.0.1", "10.0.0.1"}, {"10.0.0.1", "10.0.0.1", "10.0.0.0", "10.0.0.0"}, {"10.0.0.1", "10.0.0.0", "10.0.0.1", "10.0.0.0"},
	} {
		if got := Texts(merge(Parse(texts...))); !slices.Equal(got, want) {
			t.Errorf("%v: got %v, want %v", texts, got, want)
		}
	}
}

func TestOutside(t *testing.T) {
	networks := Parse("10.0.0.0/24", "fd00::/64")
	got := outside(networks, []netip.Addr{netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("10.0.1.7"), netip.MustParseAddr("fd00::7"), netip.MustParseAddr("fd01::7")})
	if want := []netip.Addr{netip.MustParseAddr("10.0.1.7"), netip.MustParseAddr("fd01::7")}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestNetworksOfPods(t *testing.T) {
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
		{what: "one within another", nodes: [][]string{{"10.1.3.0/24"}, {"10.1.0.0/16"}, {"10.2.0.0/24"}}, want: []string{"10.1.0.0/16", "10.2.0.0/24"}},
		{what: "one within neighbours", nodes: [][]string{{"10.1.1.0/25"}, {"10.1.0.0/24"}, {"10.1.1.0/24"}}, want: []string{"10.1.0.0/23"}},
		{what: "IPv6", nodes: [][]string{{"fd00:0:0:1::/64"}, {"fd00::/64"}}, want: []string{"fd00::/63"}},
	} {
		var nodes []corev1.Node
		for _, cidrs := range test.nodes {
			nodes = append(nodes, corev1.Node{Spec: corev1.NodeSpec{PodCIDRs: cidrs}})
		}
		if got := Texts(OfPods(nodes)); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", test.what, got, test.want)
		}
	}
}
