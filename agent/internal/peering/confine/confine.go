// Package confine limits what guests can do in a namespace of the provider, whatever
// the driver that made the namespace: their network, the resources of containers that
// say nothing of them, and the number of objects that a consumer may keep there.
package confine

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/spillway-dev/spillway/broker/guest"
)

const (
	// Quota is the name of the ResourceQuota and of the LimitRange in a namespace for
	// guests. The chart's policies refuse guests where there is no such quota.
	Quota = "spillway-guests"
	// denyPolicy and allowPolicy are the names of the NetworkPolicies.
	denyPolicy, allowPolicy = "spillway-deny", "spillway-allow"
)

// Networks are those that guests may exchange traffic with. All other traffic is denied.
type Networks struct {
	// IngressFrom and EgressTo are networks (CIDR) that may connect to guests, and that
	// guests may connect to.
	IngressFrom, EgressTo []string
	// Peers are pods of this cluster that guests may connect to and that may connect to
	// guests.
	Peers []networkingv1.NetworkPolicyPeer
	// DNS is whether guests may use the DNS of this cluster.
	DNS bool
}

// Validate reports the first network that is not one.
func (n Networks) Validate() error {
	for _, cidrs := range [][]string{n.IngressFrom, n.EgressTo} {
		for _, cidr := range cidrs {
			prefix, err := netip.ParsePrefix(strings.TrimSpace(cidr))
			if err != nil {
				return fmt.Errorf("%q is not a network such as 10.0.0.0/8: %w", cidr, err)
			}
			if prefix.Masked() != prefix {
				return fmt.Errorf("%q has bits set beyond its prefix length; use %s", cidr, prefix.Masked())
			}
		}
	}
	return nil
}

// allowed is the NetworkPolicy that allows the networks. It denies everything if there
// are none.
func (n Networks) allowed() networkingv1.NetworkPolicySpec {
	spec := networkingv1.NetworkPolicySpec{}
	if from := append(ipBlocks(n.IngressFrom), n.Peers...); len(from) > 0 {
		spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: from}}
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeIngress)
	}
	if to := append(ipBlocks(n.EgressTo), n.Peers...); len(to) > 0 {
		spec.Egress = append(spec.Egress, networkingv1.NetworkPolicyEgressRule{To: to})
	}
	if n.DNS {
		spec.Egress = append(spec.Egress, dns())
	}
	if len(spec.Egress) > 0 {
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeEgress)
	}
	if len(spec.PolicyTypes) == 0 {
		spec.PolicyTypes = both
	}
	return spec
}

var both = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}

// dns allows queries to the cluster's DNS servers.
func dns() networkingv1.NetworkPolicyEgressRule {
	port := func(protocol corev1.Protocol) networkingv1.NetworkPolicyPort {
		return networkingv1.NetworkPolicyPort{Protocol: ptr.To(protocol), Port: ptr.To(intstr.FromInt32(53))}
	}
	return networkingv1.NetworkPolicyEgressRule{
		To: []networkingv1.NetworkPolicyPeer{{
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: metav1.NamespaceSystem}},
			PodSelector:       &metav1.LabelSelector{MatchLabels: map[string]string{"k8s-app": "kube-dns"}},
		}},
		Ports: []networkingv1.NetworkPolicyPort{port(corev1.ProtocolUDP), port(corev1.ProtocolTCP)},
	}
}

func ipBlocks(cidrs []string) []networkingv1.NetworkPolicyPeer {
	var peers []networkingv1.NetworkPolicyPeer
	for _, cidr := range cidrs {
		peers = append(peers, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr}})
	}
	return peers
}

// Namespace is a namespace for guests.
type Namespace struct {
	Client client.Client
	Name   string
	// Labels of everything that is made in it.
	Labels map[string]string
}

// EnsureNetworkPolicies denies guests all traffic but that with the networks.
func (n Namespace) EnsureNetworkPolicies(ctx context.Context, networks Networks) error {
	for name, spec := range map[string]networkingv1.NetworkPolicySpec{denyPolicy: {PolicyTypes: both}, allowPolicy: networks.allowed()} {
		policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: n.Name, Name: name}}
		if err := n.Ensure(ctx, policy, func() { policy.Spec = spec }); err != nil {
			return err
		}
	}
	return nil
}

// EnsureLimits gives containers without requests, such as those that another admission
// plugin of this cluster adds to a guest, requests of nothing, and those without a
// memory limit the given one, or none if it is zero.
func (n Namespace) EnsureLimits(ctx context.Context, memory resource.Quantity) error {
	limits := &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Namespace: n.Name, Name: Quota}}
	zero := resource.Quantity{Format: resource.DecimalSI}
	return n.Ensure(ctx, limits, func() {
		item := corev1.LimitRangeItem{Type: corev1.LimitTypeContainer, DefaultRequest: corev1.ResourceList{}}
		for _, name := range guest.Listed() {
			item.DefaultRequest[name] = zero
		}
		if !memory.IsZero() {
			item.Default = corev1.ResourceList{corev1.ResourceMemory: memory}
		}
		limits.Spec.Limits = []corev1.LimitRangeItem{item}
	})
}

// Ensure creates or corrects an object in the namespace.
func (n Namespace) Ensure(ctx context.Context, object client.Object, mutate func()) error {
	_, err := controllerutil.CreateOrUpdate(ctx, n.Client, object, func() error {
		labels := map[string]string{}
		maps.Copy(labels, object.GetLabels())
		maps.Copy(labels, n.Labels)
		object.SetLabels(labels)
		mutate()
		return nil
	})
	if err != nil {
		return fmt.Errorf("ensuring %T %s/%s: %w", object, n.Name, object.GetName(), err)
	}
	return nil
}

// Objects is the number of objects that a consumer may keep in a namespace, as the hard
// limits of a quota: ConfigMaps, Secrets and Services take up the provider's etcd, and
// what opens the provider's cluster or takes its storage is not granted at all.
type Objects struct {
	// Sources is how many ConfigMaps, and how many Secrets, and Services how many Services.
	Sources, Services int64
}

// Requests is what the pods of a namespace may request together, as the hard limits of a quota.
// CPU, memory and ephemeral storage are always limited, other resources only if granted. A quota
// counts a pod that is being deleted until its time is over.
func Requests(total corev1.ResourceList) corev1.ResourceList {
	hard := corev1.ResourceList{}
	for _, name := range guest.Listed() {
		hard[corev1.DefaultResourceRequestsPrefix+name] = resource.Quantity{Format: resource.DecimalSI}
	}
	for name, amount := range total {
		if name != corev1.ResourcePods {
			name = corev1.DefaultResourceRequestsPrefix + name
		}
		hard[name] = amount.DeepCopy()
	}
	return hard
}

// Hard returns the hard limits.
func (o Objects) Hard() corev1.ResourceList {
	count := func(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }
	return corev1.ResourceList{
		"count/configmaps": count(o.Sources), "count/secrets": count(o.Sources), "count/services": count(o.Services),
		"services.nodeports": count(0), "services.loadbalancers": count(0), "count/persistentvolumeclaims": count(0),
	}
}
