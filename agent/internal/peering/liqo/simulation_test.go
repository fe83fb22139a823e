package liqo_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// simulation has the observable effects, on two real API servers, of Liqo's
// controllers, its crd-replicator and its virtual kubelet, and of Kubernetes' garbage
// collector, namespace and node controllers. The real ones run in the lab.
type simulation struct {
	t           *testing.T
	rome, paris client.Client
	// lost is whether crd-replicator has lost track of its copies.
	lost atomic.Bool
	// applied are the labels that Liqo's kubelet has taken from the VirtualNode.
	applied map[string]string
}

const (
	tenantFinalizer      = "simulated/tenant"
	virtualNodeFinalizer = "simulated/virtual-node"
	mapFinalizer         = "simulated/namespace-map"
	offloadingFinalizer  = "simulated/offloading"

	// crd-replicator's own.
	replicatorFinalizer       = "crdreplicator.liqo.io/resource"
	replicatorSecretFinalizer = "crdreplicator.liqo.io/operator"
)

// step simulates one round. Conflicts with the code under test are retried in the
// next.
func (s *simulation) step(ctx context.Context) {
	for _, step := range []func(context.Context) error{
		s.identities, s.virtualNodes, s.offloadings, s.replicate, s.credentials,
		s.tenants, s.resourceSlices, s.namespaceMaps,
		func(ctx context.Context) error { return s.namespaces(ctx, s.rome) },
		func(ctx context.Context) error { return s.namespaces(ctx, s.paris) },
	} {
		err := step(ctx)
		if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			s.t.Errorf("simulating Liqo: %v", err)
			return
		}
	}
}

// all lists the objects of a kind.
func all[T any, L interface {
	client.ObjectList
	*T
}](ctx context.Context, c client.Client, options ...client.ListOption) (L, error) {
	list := L(new(T))
	return list, c.List(ctx, list, options...)
}

// change patches an object with what change does to it.
func change[T client.Object](ctx context.Context, c client.Client, object T, change func(T)) error {
	before := object.DeepCopyObject().(T)
	change(object)
	return c.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

func finalize[T client.Object](ctx context.Context, c client.Client, object T, finalizer string) error {
	if !controllerutil.ContainsFinalizer(object, finalizer) {
		return nil
	}
	return change(ctx, c, object, func(o T) { controllerutil.RemoveFinalizer(o, finalizer) })
}

// foreign creates the ForeignCluster that Liqo has for every peer.
func foreign(ctx context.Context, c client.Client, peer string) error {
	existing, err := session.Find(ctx, c, "", peer, &liqov1beta1.ForeignCluster{})
	if err != nil || existing != nil {
		return err
	}
	return c.Create(ctx, &liqov1beta1.ForeignCluster{
		ObjectMeta: metav1.ObjectMeta{Name: peer, Labels: map[string]string{consts.RemoteClusterID: peer}},
		Spec:       liqov1beta1.ForeignClusterSpec{ClusterID: liqov1beta1.ClusterID(peer)},
	})
}

// identities get a Secret and, for the control plane, a Renew.
func (s *simulation) identities(ctx context.Context) error {
	list, err := all[authv1beta1.IdentityList](ctx, s.rome)
	if err != nil {
		return err
	}
	for i := range list.Items {
		identity := &list.Items[i]
		if identity.Status.KubeconfigSecretRef != nil || !identity.DeletionTimestamp.IsZero() {
			continue
		}
		if err := foreign(ctx, s.rome, "paris"); err != nil {
			return err
		}
		meta := metav1.ObjectMeta{Namespace: identity.Namespace, Labels: map[string]string{
			consts.RemoteClusterID: "paris", consts.IdentityTypeLabelKey: string(identity.Spec.Type),
			consts.ReplicationRequestedLabel: "true", consts.ReplicationDestinationLabel: "paris",
		}}
		secret := &corev1.Secret{ObjectMeta: *meta.DeepCopy()}
		secret.Name = "kubeconfig-" + identity.Name
		if identity.Spec.Type == authv1beta1.ControlPlaneIdentityType {
			secret.Finalizers = []string{replicatorSecretFinalizer}
			renew := &authv1beta1.Renew{ObjectMeta: meta}
			renew.Name = identity.Name
			renew.Finalizers = []string{replicatorFinalizer}
			if err := s.rome.Create(ctx, renew); err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
		if err := s.rome.Create(ctx, secret); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		identity.Status.KubeconfigSecretRef = &corev1.LocalObjectReference{Name: secret.Name}
		if err := s.rome.Status().Update(ctx, identity); err != nil {
			return err
		}
	}
	return nil
}

// virtualNodes get a kubelet, a Node and a NamespaceMap.
func (s *simulation) virtualNodes(ctx context.Context) error {
	list, err := all[offloadingv1beta1.VirtualNodeList](ctx, s.rome)
	if err != nil {
		return err
	}
	for i := range list.Items {
		vn := &list.Items[i]
		kubelet := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: vn.Namespace, Name: "vk-" + vn.Name, Labels: map[string]string{
			consts.OffloadingComponentKey: consts.VirtualKubeletComponentValue, consts.VirtualNodeLabel: vn.Name,
		}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		pod, err := session.Find(ctx, s.rome, kubelet.Namespace, kubelet.Name, &corev1.Pod{})
		if err != nil {
			return err
		}
		running := pod != nil
		node, err := session.Find(ctx, s.rome, "", vn.Name, &corev1.Node{})
		if err != nil {
			return err
		}
		nm := &offloadingv1beta1.NamespaceMap{ObjectMeta: metav1.ObjectMeta{Namespace: vn.Namespace, Name: "paris", Finalizers: []string{replicatorFinalizer}, Labels: map[string]string{
			consts.RemoteClusterID: "paris", consts.ReplicationRequestedLabel: "true", consts.ReplicationDestinationLabel: "paris",
		}}}
		switch {
		case !vn.DeletionTimestamp.IsZero():
			if running {
				s.t.Errorf("the virtual node was deleted before its kubelet terminated")
			}
			if node != nil {
				if err := s.rome.Delete(ctx, node); err != nil {
					return err
				}
			}
			if err := client.IgnoreNotFound(s.rome.Delete(ctx, nm)); err != nil {
				return err
			}
			if err := finalize(ctx, s.rome, vn, virtualNodeFinalizer); err != nil {
				return err
			}
			continue
		case vn.Spec.Template == nil:
			if err := change(ctx, s.rome, vn, func(vn *offloadingv1beta1.VirtualNode) {
				controllerutil.AddFinalizer(vn, virtualNodeFinalizer)
				vn.Spec.Template = &offloadingv1beta1.DeploymentTemplate{Spec: appsv1.DeploymentSpec{
					Replicas: ptr.To[int32](1), Selector: &metav1.LabelSelector{}, Template: corev1.PodTemplateSpec{Spec: kubelet.Spec},
				}}
			}); err != nil {
				return err
			}
		case *vn.Spec.Template.Spec.Replicas == 0:
			if running {
				if err := s.rome.Delete(ctx, kubelet, client.GracePeriodSeconds(0)); err != nil {
					return err
				}
			}
			continue
		case !running:
			if err := s.rome.Create(ctx, kubelet); err != nil {
				return err
			}
		}
		if err := s.rome.Create(ctx, nm); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		if node == nil {
			node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: vn.Name, Labels: map[string]string{corev1.LabelHostname: vn.Name}}}
			maps.Copy(node.Labels, vn.Spec.Labels)
			s.applied = maps.Clone(vn.Spec.Labels)
			node.Spec.Taints = append(slices.Clone(vn.Spec.Taints), corev1.Taint{Key: consts.VirtualNodeTolerationKey, Value: "true", Effect: corev1.TaintEffectNoExecute})
			if err := s.rome.Create(ctx, node); err != nil {
				return err
			}
		}
		if !maps.Equal(s.applied, vn.Spec.Labels) {
			// It takes back only what it has applied.
			if err := change(ctx, s.rome, node, func(n *corev1.Node) {
				maps.DeleteFunc(n.Labels, func(key, _ string) bool { _, applied := s.applied[key]; return applied })
				maps.Copy(n.Labels, vn.Spec.Labels)
			}); err != nil {
				return err
			}
			s.applied = maps.Clone(vn.Spec.Labels)
		}
		// The node lifecycle controller taints by condition.
		taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool { return strings.HasPrefix(t.Key, "node.kubernetes.io/") })
		if node.Spec.Unschedulable {
			taints = append(taints, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
		}
		if !slices.Equal(taints, node.Spec.Taints) {
			if err := change(ctx, s.rome, node, func(n *corev1.Node) { n.Spec.Taints = taints }); err != nil {
				return err
			}
		}
		allocatable := corev1.ResourceList{}
		maps.Copy(allocatable, node.Status.Allocatable)
		maps.Copy(allocatable, vn.Spec.ResourceQuota.Hard)
		if !session.Equal(allocatable, node.Status.Allocatable) || session.Ready(node).Status != corev1.ConditionTrue {
			node.Status.Allocatable, node.Status.Capacity = allocatable, allocatable
			node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
			if err := s.rome.Status().Update(ctx, node); err != nil {
				return err
			}
		}
	}
	return nil
}

// selects reports whether a NamespaceOffloading maps its namespace to the provider of a
// virtual node.
func selects(nso *offloadingv1beta1.NamespaceOffloading, vn *offloadingv1beta1.VirtualNode) bool {
	terms := nso.Spec.ClusterSelector.NodeSelectorTerms
	return len(terms) == 0 || slices.ContainsFunc(terms, func(term corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchExpressions, func(r corev1.NodeSelectorRequirement) bool {
			_, labelled := vn.Spec.Labels[r.Key]
			return r.Operator != corev1.NodeSelectorOpExists || !labelled
		})
	})
}

// offloadings fill the NamespaceMaps.
func (s *simulation) offloadings(ctx context.Context) error {
	list, err := all[offloadingv1beta1.NamespaceOffloadingList](ctx, s.rome)
	if err != nil {
		return err
	}
	nms, err := all[offloadingv1beta1.NamespaceMapList](ctx, s.rome)
	if err != nil {
		return err
	}
	nodes, err := all[offloadingv1beta1.VirtualNodeList](ctx, s.rome)
	if err != nil {
		return err
	}
	for i := range list.Items {
		nso := &list.Items[i]
		selected := nso.DeletionTimestamp.IsZero() && slices.ContainsFunc(nodes.Items, func(vn offloadingv1beta1.VirtualNode) bool { return selects(nso, &vn) })
		mapped := false
		for j := range nms.Items {
			nm := &nms.Items[j]
			_, desired := nm.Spec.DesiredMapping[nso.Namespace]
			_, current := nm.Status.CurrentMapping[nso.Namespace]
			mapped = mapped || desired || current
			if desired == selected || !nm.DeletionTimestamp.IsZero() {
				continue
			}
			if err := change(ctx, s.rome, nm, func(nm *offloadingv1beta1.NamespaceMap) {
				if !selected {
					delete(nm.Spec.DesiredMapping, nso.Namespace)
					return
				}
				if nm.Spec.DesiredMapping == nil {
					nm.Spec.DesiredMapping = map[string]string{}
				}
				nm.Spec.DesiredMapping[nso.Namespace] = nso.Namespace + "-rome"
			}); err != nil {
				return err
			}
		}
		if nso.DeletionTimestamp.IsZero() && !controllerutil.ContainsFinalizer(nso, offloadingFinalizer) {
			if err := change(ctx, s.rome, nso, func(o *offloadingv1beta1.NamespaceOffloading) { controllerutil.AddFinalizer(o, offloadingFinalizer) }); err != nil {
				return err
			}
		}
		if !nso.DeletionTimestamp.IsZero() && !mapped {
			if err := finalize(ctx, s.rome, nso, offloadingFinalizer); err != nil {
				return err
			}
		}
	}
	return nil
}

// replicate is crd-replicator: it copies specs to the provider and statuses back,
// and deletes the copy before the original.
func (s *simulation) replicate(ctx context.Context) error {
	if s.lost.Load() {
		return nil
	}
	copyOf := func(o client.Object) client.Object {
		o.SetNamespace("liqo-tenant-rome")
		o.SetResourceVersion("")
		o.SetUID("")
		o.SetFinalizers(nil)
		labels := maps.Clone(o.GetLabels())
		labels[consts.RemoteClusterID], labels[consts.ReplicationOriginLabel] = "rome", "rome"
		labels[consts.ReplicationStatusLabel], labels[consts.ReplicationRequestedLabel] = "true", "false"
		o.SetLabels(labels)
		return o
	}
	end := func(local, remote client.Object, found bool) error {
		if found {
			return client.IgnoreNotFound(s.paris.Delete(ctx, remote))
		}
		return finalize(ctx, s.rome, local, replicatorFinalizer)
	}
	requested := client.MatchingLabels{consts.ReplicationRequestedLabel: "true"}
	slicesInRome, err := all[authv1beta1.ResourceSliceList](ctx, s.rome, requested)
	if err != nil {
		return err
	}
	for i := range slicesInRome.Items {
		local := &slicesInRome.Items[i]
		remote, err := session.Find(ctx, s.paris, "liqo-tenant-rome", local.Name, &authv1beta1.ResourceSlice{})
		switch {
		case err != nil:
			return err
		case !local.DeletionTimestamp.IsZero():
			if err := end(local, remote, remote != nil); err != nil {
				return err
			}
			continue
		case len(local.Spec.CSR) == 0:
			if err := change(ctx, s.rome, local, func(o *authv1beta1.ResourceSlice) {
				o.Spec.CSR, o.Spec.ConsumerClusterID = []byte("csr"), ptr.To(liqov1beta1.ClusterID("rome"))
				controllerutil.AddFinalizer(o, replicatorFinalizer)
			}); err != nil {
				return err
			}
			continue
		case remote == nil:
			if err := s.paris.Create(ctx, copyOf(local.DeepCopy())); err != nil {
				return err
			}
			continue
		case !session.Equal(local.Spec.Resources, remote.Spec.Resources):
			if err := change(ctx, s.paris, remote, func(o *authv1beta1.ResourceSlice) { o.Spec = local.Spec }); err != nil {
				return err
			}
		}
		if fmt.Sprint(local.Status) != fmt.Sprint(remote.Status) {
			local.Status = remote.Status
			if err := s.rome.Status().Update(ctx, local); err != nil {
				return err
			}
		}
		if liqo.ConditionOf(local, authv1beta1.ResourceSliceConditionTypeAuthentication).Status == authv1beta1.ResourceSliceConditionAccepted {
			err := s.rome.Create(ctx, &authv1beta1.Identity{
				ObjectMeta: metav1.ObjectMeta{Namespace: local.Namespace, Name: "resourceslice-" + local.Name, Labels: map[string]string{consts.RemoteClusterID: "paris"}},
				Spec:       authv1beta1.IdentitySpec{ClusterID: "paris", Type: authv1beta1.ResourceSliceIdentityType},
			})
			if err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
	}
	mapsInRome, err := all[offloadingv1beta1.NamespaceMapList](ctx, s.rome, requested)
	if err != nil {
		return err
	}
	for i := range mapsInRome.Items {
		local := &mapsInRome.Items[i]
		remote, err := session.Find(ctx, s.paris, "liqo-tenant-rome", local.Name, &offloadingv1beta1.NamespaceMap{})
		switch {
		case err != nil:
			return err
		case !local.DeletionTimestamp.IsZero():
			if err := end(local, remote, remote != nil); err != nil {
				return err
			}
			continue
		case remote == nil:
			if err := s.paris.Create(ctx, copyOf(local.DeepCopy())); err != nil {
				return err
			}
			continue
		case !maps.Equal(local.Spec.DesiredMapping, remote.Spec.DesiredMapping):
			if err := change(ctx, s.paris, remote, func(m *offloadingv1beta1.NamespaceMap) { m.Spec = local.Spec }); err != nil {
				return err
			}
		}
		if !maps.Equal(local.Status.CurrentMapping, remote.Status.CurrentMapping) {
			local.Status = remote.Status
			if err := s.rome.Status().Update(ctx, local); err != nil {
				return err
			}
		}
	}
	return nil
}

// credentials are deleted with their identity, and that of a slice with the slice.
func (s *simulation) credentials(ctx context.Context) error {
	identities, err := all[authv1beta1.IdentityList](ctx, s.rome)
	if err != nil {
		return err
	}
	alive := map[string]bool{}
	for i := range identities.Items {
		identity := &identities.Items[i]
		if name, ok := strings.CutPrefix(identity.Name, "resourceslice-"); ok {
			if slice, err := session.Find(ctx, s.rome, identity.Namespace, name, &authv1beta1.ResourceSlice{}); err != nil {
				return err
			} else if slice == nil {
				if err := s.rome.Delete(ctx, identity); err != nil {
					return err
				}
				continue
			}
		}
		alive[identity.Name] = true
	}
	renews, err := all[authv1beta1.RenewList](ctx, s.rome)
	if err != nil {
		return err
	}
	for i := range renews.Items {
		if alive[renews.Items[i].Name] {
			continue
		}
		if err := s.rome.Delete(ctx, &renews.Items[i]); err != nil {
			return err
		}
		if !s.lost.Load() {
			if err := finalize(ctx, s.rome, &renews.Items[i], replicatorFinalizer); err != nil {
				return err
			}
		}
	}
	secrets, err := all[corev1.SecretList](ctx, s.rome, client.HasLabels{consts.IdentityTypeLabelKey})
	if err != nil {
		return err
	}
	for i := range secrets.Items {
		if alive[strings.TrimPrefix(secrets.Items[i].Name, "kubeconfig-")] {
			continue
		}
		if err := s.rome.Delete(ctx, &secrets.Items[i]); err != nil {
			return err
		}
		if !s.lost.Load() && len(renews.Items) == 0 {
			if err := finalize(ctx, s.rome, &secrets.Items[i], replicatorSecretFinalizer); err != nil {
				return err
			}
		}
	}
	return nil
}

// tenants get a certificate.
func (s *simulation) tenants(ctx context.Context) error {
	list, err := all[authv1beta1.TenantList](ctx, s.paris)
	if err != nil {
		return err
	}
	for i := range list.Items {
		tenant := &list.Items[i]
		switch {
		case !tenant.DeletionTimestamp.IsZero():
			err = finalize(ctx, s.paris, tenant, tenantFinalizer)
		case !controllerutil.ContainsFinalizer(tenant, tenantFinalizer):
			err = change(ctx, s.paris, tenant, func(t *authv1beta1.Tenant) { controllerutil.AddFinalizer(t, tenantFinalizer) })
		case tenant.Status.AuthParams == nil:
			if err := foreign(ctx, s.paris, "rome"); err != nil {
				return err
			}
			tenant.Status = authv1beta1.TenantStatus{TenantNamespace: tenant.Namespace, AuthParams: &authv1beta1.AuthParams{SignedCRT: []byte("certificate"), CA: []byte("ca"), APIServer: "https://192.0.2.1:6443"}}
			err = s.paris.Status().Update(ctx, tenant)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// userOf is the user of a consumer's slice: its name, and the beginning of the hash of the
// consumer's cluster ID.
func userOf(slice, consumer string) string {
	sum := sha256.Sum256([]byte(consumer))
	return fmt.Sprintf("%s-%x", slice, sum[:6])
}

// resourceSlices get a certificate, and accepted ones a Quota.
func (s *simulation) resourceSlices(ctx context.Context) error {
	list, err := all[authv1beta1.ResourceSliceList](ctx, s.paris)
	if err != nil {
		return err
	}
	users := map[string]bool{}
	for i := range list.Items {
		slice := &list.Items[i]
		users[userOf(slice.Name, "rome")] = true
		if liqo.ConditionOf(slice, authv1beta1.ResourceSliceConditionTypeAuthentication).Status == "" {
			slice.Status.Conditions = append(slice.Status.Conditions, authv1beta1.ResourceSliceCondition{Type: authv1beta1.ResourceSliceConditionTypeAuthentication, Status: authv1beta1.ResourceSliceConditionAccepted})
			if err := s.paris.Status().Update(ctx, slice); err != nil {
				return err
			}
		}
		if liqo.ConditionOf(slice, authv1beta1.ResourceSliceConditionTypeResources).Status != authv1beta1.ResourceSliceConditionAccepted {
			continue
		}
		user := userOf(slice.Name, "rome")
		quota, err := session.Find(ctx, s.paris, slice.Namespace, user, &offloadingv1beta1.Quota{})
		if err != nil {
			return err
		}
		want := offloadingv1beta1.QuotaSpec{User: user, LimitsEnforcement: offloadingv1beta1.NoLimitsEnforcement, Resources: slice.Status.Resources}
		if slice.Annotations[consts.CordonResourceAnnotation] == "true" {
			want.Cordoned = ptr.To(true)
		}
		switch {
		case quota == nil:
			err = s.paris.Create(ctx, &offloadingv1beta1.Quota{ObjectMeta: metav1.ObjectMeta{Namespace: slice.Namespace, Name: user}, Spec: want})
		case !session.Equal(quota.Spec.Resources, want.Resources) || ptr.Deref(quota.Spec.Cordoned, false) != ptr.Deref(want.Cordoned, false):
			quota.Spec = want
			err = s.paris.Update(ctx, quota)
		}
		if err != nil {
			return err
		}
	}
	quotas, err := all[offloadingv1beta1.QuotaList](ctx, s.paris)
	if err != nil {
		return err
	}
	for i := range quotas.Items {
		if !users[quotas.Items[i].Name] {
			if err := s.paris.Delete(ctx, &quotas.Items[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// namespaceMaps create and delete namespaces at the provider.
func (s *simulation) namespaceMaps(ctx context.Context) error {
	list, err := all[offloadingv1beta1.NamespaceMapList](ctx, s.paris)
	if err != nil {
		return err
	}
	for i := range list.Items {
		nm := &list.Items[i]
		if nm.DeletionTimestamp.IsZero() && !controllerutil.ContainsFinalizer(nm, mapFinalizer) {
			return change(ctx, s.paris, nm, func(m *offloadingv1beta1.NamespaceMap) { controllerutil.AddFinalizer(m, mapFinalizer) })
		}
		current := map[string]offloadingv1beta1.RemoteNamespaceStatus{}
		for local, remote := range nm.Spec.DesiredMapping {
			if !nm.DeletionTimestamp.IsZero() {
				break
			}
			if err := s.paris.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: remote, Labels: map[string]string{consts.RemoteClusterID: "rome"}}}); err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
			if existing, err := session.Find(ctx, s.paris, "", remote, &corev1.Namespace{}); err != nil {
				return err
			} else if existing != nil && existing.Labels[consts.RemoteClusterID] == "" {
				current[local] = offloadingv1beta1.RemoteNamespaceStatus{RemoteNamespace: remote, Phase: offloadingv1beta1.MappingCreationLoopBackOff}
				continue
			}
			current[local] = offloadingv1beta1.RemoteNamespaceStatus{RemoteNamespace: remote, Phase: offloadingv1beta1.MappingAccepted}
		}
		for local, status := range nm.Status.CurrentMapping {
			if _, ok := current[local]; ok || status.Phase == offloadingv1beta1.MappingCreationLoopBackOff {
				continue
			}
			namespace, err := session.Find(ctx, s.paris, "", status.RemoteNamespace, &corev1.Namespace{})
			if err != nil {
				return err
			}
			if namespace != nil {
				if err := session.Delete(ctx, s.paris, namespace); err != nil {
					return err
				}
				current[local] = offloadingv1beta1.RemoteNamespaceStatus{RemoteNamespace: status.RemoteNamespace, Phase: offloadingv1beta1.MappingTerminating}
			}
		}
		if !maps.Equal(current, nm.Status.CurrentMapping) {
			nm.Status.CurrentMapping = current
			if err := s.paris.Status().Update(ctx, nm); err != nil {
				return err
			}
		}
		if !nm.DeletionTimestamp.IsZero() && len(current) == 0 {
			if err := finalize(ctx, s.paris, nm, mapFinalizer); err != nil {
				return err
			}
		}
	}
	return nil
}

// namespaces that are being deleted are emptied and finalized.
func (s *simulation) namespaces(ctx context.Context, c client.Client) error {
	list, err := all[corev1.NamespaceList](ctx, c)
	if err != nil {
		return err
	}
	for i := range list.Items {
		namespace := &list.Items[i]
		if namespace.DeletionTimestamp.IsZero() {
			continue
		}
		in := client.InNamespace(namespace.Name)
		for _, object := range []client.Object{&authv1beta1.Identity{}, &authv1beta1.Tenant{}, &authv1beta1.ResourceSlice{}, &offloadingv1beta1.NamespaceMap{}, &offloadingv1beta1.NamespaceOffloading{}, &corev1.Secret{}} {
			if err := c.DeleteAllOf(ctx, object, in); err != nil {
				return err
			}
		}
		namespace.Spec.Finalizers = nil
		if err := c.SubResource("finalize").Update(ctx, namespace); err != nil {
			return err
		}
	}
	return nil
}
