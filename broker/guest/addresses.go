package guest

import (
	"net/netip"
	"slices"
)

// Addresses returns the first address of each IP family among those that a provider reports
// for a guest or its node. Services of the consumer send traffic to them: a provider cannot
// direct it to an address that means another host on each node, or to one of the consumer's
// own networks.
func Addresses(reported []string, own []netip.Prefix) []string {
	var out []string
	families := map[bool]bool{}
	for _, text := range reported {
		ip, err := netip.ParseAddr(text)
		if err != nil || ip.Zone() != "" || ip.Is4In6() || !ip.IsGlobalUnicast() || families[ip.Is4()] ||
			slices.ContainsFunc(own, func(n netip.Prefix) bool { return n.Contains(ip) }) {
			continue
		}
		families[ip.Is4()] = true
		out = append(out, ip.String())
	}
	return out
}
