package liqo

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// ReasonConflict is the reason where objects of a peering exist that Spillway did
// not make.
const ReasonConflict = "PeeringConflict"

// SetSession writes a session number to an annotation of a tenant namespace; 0
// removes the annotation.
func SetSession(ctx context.Context, c client.Client, namespace *corev1.Namespace, annotation string, number int64) error {
	before := namespace.DeepCopy()
	metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, annotation, session.FormatNumber(number))
	if number == 0 {
		delete(namespace.Annotations, annotation)
	}
	if err := c.Patch(ctx, namespace, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("storing the session in namespace %s: %w", namespace.Name, err)
	}
	return nil
}

// EnsureTenantNamespace returns the namespace for a peer, creating it if needed. A
// session that it already has is kept. The progress is nil if the namespace can be
// used.
func (o *Options) EnsureTenantNamespace(ctx context.Context, peer, annotation string, number int64) (*corev1.Namespace, *peering.Progress, error) {
	name := TenantNamespace(peer)
	namespace, err := session.Find(ctx, o.Client, "", name, &corev1.Namespace{})
	if err != nil {
		return nil, nil, fmt.Errorf("reading namespace %s: %w", name, err)
	}
	if namespace == nil {
		namespace = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Annotations: map[string]string{annotation: session.FormatNumber(number)},
			// Virtual kubelets must start in it whatever the cluster's default.
			Labels: ManagedLabels(peer, map[string]string{
				consts.TenantNamespaceLabel:         "true",
				consts.PodSecurityAuditLevelLabel:   consts.PodSecurityLevelPrivileged,
				consts.PodSecurityEnforceLevelLabel: consts.PodSecurityLevelPrivileged,
				consts.PodSecurityWarnLevelLabel:    consts.PodSecurityLevelPrivileged,
			}),
		}}
		if err := o.Client.Create(ctx, namespace); err != nil {
			return nil, nil, fmt.Errorf("creating namespace %s: %w", name, err)
		}
	}
	switch {
	case !session.IsManaged(namespace):
		return nil, ptr.To(peering.Waiting(ReasonConflict, fmt.Sprintf("namespace %s already exists and is not managed by Spillway; unpeer %s with liqoctl to let Spillway peer it", name, peer))), nil
	case !namespace.DeletionTimestamp.IsZero():
		return nil, ptr.To(peering.Waiting(session.ReasonTerminating, "namespace "+name+" of the previous peering is still being deleted")), nil
	}
	if session.Number(namespace, annotation) == 0 {
		if err := SetSession(ctx, o.Client, namespace, annotation, number); err != nil {
			return nil, nil, err
		}
	}
	return namespace, nil, o.prepare(ctx, namespace)
}

// kubeletPort is where Liqo's virtual kubelet serves logs and exec, without
// authentication.
const kubeletPort = 10250

// preparedFor is how long the networks of nodes are not read again.
const preparedFor = 10 * time.Minute

// prepare creates in a tenant namespace the agent's RoleBinding and the
// NetworkPolicy for the virtual kubelets.
func (o *Options) prepare(ctx context.Context, namespace *corev1.Namespace) error {
	now := o.Clock.Now()
	if at, done := o.prepared.Load(namespace.UID); done && now.Sub(at.(time.Time)) < preparedFor {
		return nil
	}
	meta := metav1.ObjectMeta{Name: "spillway-agent", Namespace: namespace.Name, Labels: ManagedLabels(namespace.Labels[consts.RemoteClusterID])}
	if err := o.BindRole(ctx, o.TenantRole, meta); err != nil {
		return err
	}
	if err := o.ensureKubeletPolicy(ctx, meta); err != nil {
		return fmt.Errorf("closing the virtual kubelets' port in namespace %s: %w", namespace.Name, err)
	}
	o.prepared.Store(namespace.UID, now)
	return nil
}

// ensureKubeletPolicy creates or corrects the NetworkPolicy for the virtual kubelets.
func (o *Options) ensureKubeletPolicy(ctx context.Context, meta metav1.ObjectMeta) error {
	if o.OpenKubelets {
		return nil
	}
	cidrs, controlPlanes := o.PodCIDRs, []string(nil)
	if len(cidrs) == 0 {
		var nodes corev1.NodeList
		if err := o.Client.List(ctx, &nodes); err != nil {
			return fmt.Errorf("listing nodes: %w", err)
		}
		cidrs, controlPlanes = podNetworks(nodes.Items), controlPlaneAddresses(nodes.Items)
	}
	if len(cidrs) == 0 {
		o.Log.Info("The NetworkPolicy admits only control plane nodes to Liqo's virtual kubelets: the networks of pods are unknown, since nodes have no spec.podCIDRs. If kubectl logs and exec do not work for overflowed pods, set the chart's value liqo.podCIDRs", "namespace", meta.Namespace, "controlPlanes", controlPlanes)
	}
	want := kubeletPolicy(cidrs, controlPlanes)
	policy := &networkingv1.NetworkPolicy{ObjectMeta: meta, Spec: want}
	err := o.Client.Create(ctx, policy)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if err := o.Client.Get(ctx, client.ObjectKeyFromObject(policy), policy); err != nil || equality.Semantic.DeepEqual(policy.Spec, want) {
		return err
	}
	policy.Spec = want
	return o.Client.Update(ctx, policy)
}

// podNetworks are the networks of the nodes' pods, in as few as have the same addresses.
func podNetworks(nodes []corev1.Node) []string {
	var all netipx.IPSetBuilder
	for i := range nodes {
		for _, cidr := range nodes[i].Spec.PodCIDRs {
			if network, err := netip.ParsePrefix(cidr); err == nil {
				all.AddPrefix(network)
			}
		}
	}
	set, err := all.IPSet()
	if err != nil {
		return nil // what cannot be parsed was left out
	}
	var texts []string
	for _, network := range set.Prefixes() {
		texts = append(texts, network.String())
	}
	return texts
}

// controlPlaneAddresses are the addresses of nodes that API servers run on, as networks.
func controlPlaneAddresses(nodes []corev1.Node) []string {
	var all []string
	for i := range nodes {
		if _, controlPlane := nodes[i].Labels["node-role.kubernetes.io/control-plane"]; !controlPlane {
			continue
		}
		for _, address := range nodes[i].Status.Addresses {
			if ip, err := netip.ParseAddr(address.Address); err == nil && address.Type == corev1.NodeInternalIP {
				all = append(all, netip.PrefixFrom(ip, ip.BitLen()).String())
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// kubeletPolicy lets nodes, and with them the API server, reach the virtual kubelets, but not
// the pods of the given networks. If these are unknown, only the given addresses of control
// planes reach them, and no one without such addresses.
func kubeletPolicy(cidrs, controlPlanes []string) networkingv1.NetworkPolicySpec {
	var from []networkingv1.NetworkPolicyPeer
	if len(cidrs) > 0 {
		from = allBut(cidrs)
	} else {
		for _, address := range controlPlanes {
			from = append(from, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: address}})
		}
	}
	policy := networkingv1.NetworkPolicySpec{
		PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{consts.OffloadingComponentKey: consts.VirtualKubeletComponentValue}},
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
	}
	if len(from) > 0 { // A rule without peers admits everyone.
		policy.Ingress = []networkingv1.NetworkPolicyIngressRule{{
			From:  from,
			Ports: []networkingv1.NetworkPolicyPort{{Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(intstr.FromInt32(kubeletPort))}},
		}}
	}
	return policy
}

// allBut are all addresses but those of the given networks. An address block can except only
// CIDRs of its own family.
func allBut(cidrs []string) (peers []networkingv1.NetworkPolicyPeer) {
	isIPv6 := func(cidr string) bool { return strings.Contains(cidr, ":") }
	for _, all := range []string{"0.0.0.0/0", "::/0"} {
		block := &networkingv1.IPBlock{CIDR: all}
		for _, cidr := range cidrs {
			if isIPv6(cidr) == isIPv6(all) {
				block.Except = append(block.Except, cidr)
			}
		}
		peers = append(peers, networkingv1.NetworkPolicyPeer{IPBlock: block})
	}
	return peers
}

// ForeignCluster is Liqo's summary of a peer, nil if it does not exist, and whether
// the networks of the two clusters are connected, which Spillway does not undo.
func (o *Options) ForeignCluster(ctx context.Context, peer string) (*liqov1beta1.ForeignCluster, bool, error) {
	foreign, err := session.Find(ctx, o.Client, "", peer, &liqov1beta1.ForeignCluster{})
	return foreign, foreign != nil && foreign.Status.Modules.Networking.Enabled, err
}
