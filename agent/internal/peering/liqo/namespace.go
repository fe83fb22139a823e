package liqo

import (
	"context"
	"fmt"
	"strconv"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

// Reasons for which a link has to wait, that more than one step gives.
const (
	reasonPeeredByOthers = "PeeredByOthers"
	reasonTerminating    = "Terminating"
)

// get reads an object, and reports false where there is none.
func get[T client.Object](ctx context.Context, c client.Client, namespace, name string, into T) (T, bool, error) {
	err := c.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, into)
	if err != nil {
		return into, false, client.IgnoreNotFound(err)
	}
	return into, true, nil
}

// remove deletes exactly the object that was read; gone already is fine.
func remove(ctx context.Context, c client.Client, object client.Object, options ...client.DeleteOption) error {
	if !object.GetDeletionTimestamp().IsZero() && len(options) == 0 {
		return nil
	}
	uid := object.GetUID()
	return client.IgnoreNotFound(c.Delete(ctx, object, append(options, client.Preconditions{UID: &uid})...))
}

// sessionOf reads a session from an annotation of a tenant namespace, 0 where
// there is none.
func sessionOf(namespace *corev1.Namespace, annotation string) int64 {
	session, err := strconv.ParseInt(namespace.Annotations[annotation], 10, 64)
	if err != nil {
		return 0
	}
	return session
}

// setSession writes it; 0 removes it.
func setSession(ctx context.Context, c client.Client, namespace *corev1.Namespace, annotation string, session int64) error {
	before := namespace.DeepCopy()
	if namespace.Annotations == nil {
		namespace.Annotations = map[string]string{}
	}
	if session == 0 {
		delete(namespace.Annotations, annotation)
	} else {
		namespace.Annotations[annotation] = strconv.FormatInt(session, 10)
	}
	if err := c.Patch(ctx, namespace, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("noting the session in namespace %s: %w", namespace.Name, err)
	}
	return nil
}

// ensureTenantNamespace makes the namespace for a peer with a session, or finds
// the one that is there. The progress is nil when it can be used.
func (o *Options) ensureTenantNamespace(ctx context.Context, peer, annotation string, session int64) (*corev1.Namespace, *peering.Progress, error) {
	name := tenantNamespace(peer)
	namespace, found, err := get(ctx, o.Client, "", name, &corev1.Namespace{})
	if err != nil {
		return nil, nil, fmt.Errorf("reading namespace %s: %w", name, err)
	}
	if !found {
		namespace = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Annotations: map[string]string{annotation: strconv.FormatInt(session, 10)},
			// Virtual kubelets are to start in it whatever the cluster's standard.
			Labels: ours(peer, map[string]string{
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
	case !isOurs(namespace):
		return nil, ptr.To(peering.Waiting(reasonPeeredByOthers,
			fmt.Sprintf("Namespace %s exists and is not Spillway's: unpeer %s with liqoctl, or leave it to whoever peered it", name, peer))), nil
	case !namespace.DeletionTimestamp.IsZero():
		return nil, ptr.To(peering.Waiting(reasonTerminating, "Namespace "+name+" of an earlier peering is still going")), nil
	}
	if sessionOf(namespace, annotation) == 0 {
		if err := setSession(ctx, o.Client, namespace, annotation, session); err != nil {
			return nil, nil, err
		}
	}
	return namespace, nil, o.furnish(ctx, namespace)
}

// furnish puts into a tenant namespace what this program needs there: its own
// permissions, and a wall around the virtual kubelets.
func (o *Options) furnish(ctx context.Context, namespace *corev1.Namespace) error {
	if _, done := o.furnished.Load(namespace.UID); done {
		return nil
	}
	meta := metav1.ObjectMeta{Name: "spillway-agent", Namespace: namespace.Name, Labels: ours(namespace.Labels[consts.RemoteClusterID])}
	var objects []client.Object
	if o.TenantRole != "" {
		objects = append(objects, &rbacv1.RoleBinding{
			ObjectMeta: meta,
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: o.TenantRole},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: o.ServiceAccount.Namespace, Name: o.ServiceAccount.Name}},
		})
	}
	if len(o.PodCIDRs) > 0 {
		// Nodes, and with them the API server, may come in; pods may not. An
		// address block of the other family than a CIDR's cannot except it.
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
		objects = append(objects, &networkingv1.NetworkPolicy{
			ObjectMeta: meta,
			Spec: networkingv1.NetworkPolicySpec{
				PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{consts.OffloadingComponentKey: consts.VirtualKubeletComponentValue}},
				PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
				Ingress: []networkingv1.NetworkPolicyIngressRule{{
					From:  from,
					Ports: []networkingv1.NetworkPolicyPort{{Port: ptr.To(intstr.FromInt32(kubeletPort))}},
				}},
			},
		})
	}
	for _, object := range objects {
		if err := o.Client.Create(ctx, object); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("furnishing namespace %s: %w", namespace.Name, err)
		}
	}
	o.furnished.Store(namespace.UID, true)
	return nil
}

func isIPv6(cidr string) bool {
	for _, c := range cidr {
		if c == ':' {
			return true
		}
	}
	return false
}
