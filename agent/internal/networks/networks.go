package networks

import (
	"cmp"
	"net"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// ofNodes returns the addresses of nodes and the networks of their pods.
func ofNodes(nodes []corev1.Node) []netip.Prefix {
	all := OfPods(nodes)
	for i := range nodes {
		for _, address := range nodes[i].Status.Addresses {
			all = append(all, Parse(address.Address)...)
		}
	}
	return all
}

// OfPods returns the networks of the nodes' pods, in as few as have the same addresses.
func OfPods(nodes []corev1.Node) []netip.Prefix {
	var all []netip.Prefix
	for i := range nodes {
		all = append(all, Parse(nodes[i].Spec.PodCIDRs...)...)
	}
	return merge(all)
}

// Parse returns the networks that texts name by a CIDR or an address. Other texts, such as
// names of hosts, are left out.
func Parse(texts ...string) []netip.Prefix {
	var parsed []netip.Prefix
	for _, text := range texts {
		if prefix, err := netip.ParsePrefix(text); err == nil {
			parsed = append(parsed, prefix.Masked())
		} else if address, err := netip.ParseAddr(text); err == nil {
			address = address.Unmap().WithZone("")
			parsed = append(parsed, netip.PrefixFrom(address, address.BitLen()))
		}
	}
	return parsed
}

// containing returns the candidates that contain one of the networks.
func containing(networks, candidates []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(candidates), func(c netip.Prefix) bool {
		return !slices.ContainsFunc(networks, func(n netip.Prefix) bool { return c.Bits() <= n.Bits() && c.Contains(n.Addr()) })
	})
}

// outside returns the addresses that are in none of the networks.
func outside(networks []netip.Prefix, addresses []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(addresses), func(a netip.Addr) bool {
		return slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(a) })
	})
}

// Interfaces returns the global addresses of this process's interfaces: in a pod, its own.
func Interfaces() []netip.Addr {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil // it is only to warn
	}
	var addresses []netip.Addr
	for _, address := range all {
		if prefix, err := netip.ParsePrefix(address.String()); err == nil && prefix.Addr().IsGlobalUnicast() {
			addresses = append(addresses, prefix.Addr().Unmap())
		}
	}
	return addresses
}

// Texts are networks as CIDRs.
func Texts(networks []netip.Prefix) []string {
	var texts []string
	for _, network := range networks {
		texts = append(texts, network.String())
	}
	return texts
}

// merge returns as few networks as have the same addresses, sorted by their texts. The order of
// the argument does not matter.
func merge(networks []netip.Prefix) []netip.Prefix {
	networks = slices.Clone(networks)
	slices.SortFunc(networks, func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), cmp.Compare(a.String(), b.String()))
	})
	all := map[netip.Prefix]bool{}
	for _, prefix := range networks {
		if within(prefix, all) {
			continue
		}
		for {
			parent := netip.PrefixFrom(prefix.Addr(), prefix.Bits()-1).Masked()
			sibling := sibling(prefix, parent)
			if prefix.Bits() <= 1 || !all[sibling] {
				break
			}
			delete(all, sibling)
			prefix = parent
		}
		all[prefix] = true
	}
	var merged []netip.Prefix
	for prefix := range all {
		merged = append(merged, prefix)
	}
	slices.SortFunc(merged, func(a, b netip.Prefix) int { return cmp.Compare(a.String(), b.String()) })
	return merged
}

// within reports whether a prefix, or one that contains it, is among others.
func within(prefix netip.Prefix, others map[netip.Prefix]bool) bool {
	for bits := range prefix.Bits() + 1 {
		if others[netip.PrefixFrom(prefix.Addr(), bits).Masked()] {
			return true
		}
	}
	return false
}

// sibling is the other half of a prefix's parent.
func sibling(prefix, parent netip.Prefix) netip.Prefix {
	if prefix.Addr() != parent.Addr() {
		return netip.PrefixFrom(parent.Addr(), prefix.Bits())
	}
	bytes := prefix.Addr().AsSlice()
	bytes[(prefix.Bits()-1)/8] |= 0x80 >> ((prefix.Bits() - 1) % 8)
	address, _ := netip.AddrFromSlice(bytes)
	return netip.PrefixFrom(address, prefix.Bits())
}
