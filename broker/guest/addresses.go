package guest

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// perHost are global addresses that mean another host, or a service of the cloud for it, on each
// node. Others of that kind are link-local. A guest that has one of them, as in 100.64.0.0/10, has no
// address at home.
var perHost = []netip.Prefix{
	netip.MustParsePrefix("168.63.129.16/32"),   // Azure
	netip.MustParsePrefix("100.100.100.200/32"), // Alibaba Cloud
	netip.MustParsePrefix("192.0.0.0/24"),       // IETF protocol assignments, RFC 6890
	netip.MustParsePrefix("fd00:ec2::/64"),      // AWS
	netip.MustParsePrefix("fd20:ce::254/128"),   // Google Cloud
	netip.MustParsePrefix("64:ff9b::/96"),       // NAT64, RFC 6052: IPv4 addresses by another name
	netip.MustParsePrefix("64:ff9b:1::/48"),     // NAT64, RFC 8215
}

// PerHost are networks in which no guest has an address, whatever networks its provider has. The
// chart's policy has the same.
func PerHost() []netip.Prefix { return slices.Clone(perHost) }

// ParseNetworks returns the networks (CIDR) that a text names, separated by commas.
func ParseNetworks(text string) ([]netip.Prefix, error) {
	var networks []netip.Prefix
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		network, err := netip.ParsePrefix(item)
		if err != nil {
			return nil, fmt.Errorf("%q is not a network such as 10.0.0.0/8", item)
		}
		networks = append(networks, network.Masked())
	}
	return networks, nil
}

// Addresses returns, of what a provider reports of a guest's addresses, the first one of each IP
// family: the first of these by itself, and all. Services of the consumer send traffic to them: they
// count only in the networks of the provider's pods, and not if they mean another host on each node.
func Addresses(reported string, more []corev1.PodIP, networks []netip.Prefix) (first string, all []corev1.PodIP) {
	if len(more) == 0 {
		more = []corev1.PodIP{{IP: reported}}
	}
	contains := func(ip netip.Addr) func(netip.Prefix) bool {
		return func(n netip.Prefix) bool { return n.Contains(ip) }
	}
	families := map[bool]bool{}
	for _, of := range more {
		ip, err := netip.ParseAddr(of.IP)
		if err != nil || ip.Zone() != "" || ip.Is4In6() || !ip.IsGlobalUnicast() || families[ip.Is4()] ||
			!slices.ContainsFunc(networks, contains(ip)) || slices.ContainsFunc(perHost, contains(ip)) {
			continue
		}
		families[ip.Is4()] = true
		first, all = cmp.Or(first, ip.String()), append(all, corev1.PodIP{IP: ip.String()})
	}
	return first, all
}
