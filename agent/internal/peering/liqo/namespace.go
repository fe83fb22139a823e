package liqo

import (
	"context"
	"fmt"
	"strings"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// reasonConflict is the reason where objects of a peering exist that Spillway did
// not make.
const reasonConflict = "PeeringConflict"

// setSession writes a session number to an annotation of a tenant namespace; 0
// removes the annotation.
func setSession(ctx context.Context, c client.Client, namespace *corev1.Namespace, annotation string, number int64) error {
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

// ensureTenantNamespace returns the namespace for a peer, creating it if needed. A
// session that it already has is kept. The progress is nil if the namespace can be
// used.
func (o *Options) ensureTenantNamespace(ctx context.Context, peer, annotation string, number int64) (*corev1.Namespace, *peering.Progress, error) {
	name := tenantNamespace(peer)
	namespace, err := session.Find(ctx, o.Client, "", name, &corev1.Namespace{})
	if err != nil {
		return nil, nil, fmt.Errorf("reading namespace %s: %w", name, err)
	}
	if namespace == nil {
		namespace = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Annotations: map[string]string{annotation: session.FormatNumber(number)},
			// Virtual kubelets must start in it whatever the cluster's default.
			Labels: managedLabels(peer, map[string]string{
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
		return nil, ptr.To(peering.Waiting(reasonConflict, fmt.Sprintf("namespace %s already exists and is not managed by Spillway; unpeer %s with liqoctl to let Spillway peer it", name, peer))), nil
	case !namespace.DeletionTimestamp.IsZero():
		return nil, ptr.To(peering.Waiting(session.ReasonTerminating, "namespace "+name+" of the previous peering is still being deleted")), nil
	}
	if session.Number(namespace, annotation) == 0 {
		if err := setSession(ctx, o.Client, namespace, annotation, number); err != nil {
			return nil, nil, err
		}
	}
	return namespace, nil, o.prepare(ctx, namespace)
}

// prepare creates in a tenant namespace the agent's RoleBinding and the
// NetworkPolicy for the virtual kubelets.
func (o *Options) prepare(ctx context.Context, namespace *corev1.Namespace) error {
	if _, done := o.prepared.Load(namespace.UID); done {
		return nil
	}
	meta := metav1.ObjectMeta{Name: "spillway-agent", Namespace: namespace.Name, Labels: managedLabels(namespace.Labels[consts.RemoteClusterID])}
	var objects []client.Object
	if o.TenantRole != "" {
		objects = append(objects, &rbacv1.RoleBinding{
			ObjectMeta: meta,
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: o.TenantRole},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: o.ServiceAccount.Namespace, Name: o.ServiceAccount.Name}},
		})
	}
	if len(o.PodCIDRs) > 0 {
		objects = append(objects, &networkingv1.NetworkPolicy{ObjectMeta: meta, Spec: o.kubeletPolicy()})
	}
	for _, object := range objects {
		if err := o.Client.Create(ctx, object); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("preparing namespace %s: %w", namespace.Name, err)
		}
	}
	o.prepared.Store(namespace.UID, true)
	return nil
}

// kubeletPolicy lets nodes, and with them the API server, reach the virtual
// kubelets, but not pods. An address block can except only CIDRs of its own family.
func (o *Options) kubeletPolicy() networkingv1.NetworkPolicySpec {
	isIPv6 := func(cidr string) bool { return strings.Contains(cidr, ":") }
	var from []networkingv1.NetworkPolicyPeer
	for _, all := range []string{"0.0.0.0/0", "::/0"} {
		block := &networkingv1.IPBlock{CIDR: all}
		for _, cidr := range o.PodCIDRs {
			if isIPv6(cidr) == isIPv6(all) {
				block.Except = append(block.Except, cidr)
			}
		}
		from = append(from, networkingv1.NetworkPolicyPeer{IPBlock: block})
	}
	return networkingv1.NetworkPolicySpec{
		PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{consts.OffloadingComponentKey: consts.VirtualKubeletComponentValue}},
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{
			From:  from,
			Ports: []networkingv1.NetworkPolicyPort{{Port: ptr.To(intstr.FromInt32(kubeletPort))}},
		}},
	}
}
