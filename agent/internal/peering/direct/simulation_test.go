package direct

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// simulation is what the driver relies on in real clusters: virtual-node and the
// node lifecycle controller in rome, the quota and namespace controllers.
type simulation struct {
	t           *testing.T
	rome, paris client.Client

	mu sync.Mutex
	// stopped is whether virtual-node does not run.
	stopped bool
	// unreachable is the reason for which virtual-node reports the Node not Ready.
	unreachable string
}

func (s *simulation) set(change func(*simulation)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// step simulates one round; conflicts are retried in the next.
func (s *simulation) step(ctx context.Context) {
	for what, step := range map[string]func(context.Context) error{"virtual-node": s.virtualNode, "quotas": s.quotas, "namespaces": s.namespaces} {
		err := step(ctx)
		if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) {
			s.t.Logf("simulating %s: %v", what, err)
		}
	}
}

// virtualNode keeps a Node for each Secret that it can see.
func (s *simulation) virtualNode(ctx context.Context) error {
	// Held throughout, so that nothing is under way once it is stopped.
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil
	}
	var secrets corev1.SecretList
	if err := s.rome.List(ctx, &secrets, client.InNamespace(virtualNodeNamespace), client.MatchingLabels{nodeconfig.LabelComponent: nodeconfig.Component}); err != nil {
		return err
	}
	configs := map[string]nodeconfig.Config{}
	for i := range secrets.Items {
		config, err := nodeconfig.FromSecret(&secrets.Items[i])
		if err != nil {
			return err
		}
		configs[broker.VirtualNodeName(config.Provider)] = config
	}
	var nodes corev1.NodeList
	if err := s.rome.List(ctx, &nodes, client.MatchingLabels{broker.LabelNodeType: broker.NodeTypeVirtual}); err != nil {
		return err
	}
	existing := map[string]bool{}
	var failed error
	for i := range nodes.Items {
		node := &nodes.Items[i]
		existing[node.Name] = true
		config, configured := configs[node.Name]
		switch {
		case configured && (!config.Terminating || s.unreachable != ""):
			failed = errors.Join(failed, s.updateNode(ctx, node, config, s.unreachable))
		case session.IsManaged(node):
			failed = errors.Join(failed, client.IgnoreNotFound(s.rome.Delete(ctx, node)))
		}
	}
	for name, config := range configs {
		if existing[name] || config.Terminating {
			continue
		}
		failed = errors.Join(failed, s.rome.Create(ctx, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: nodeLabels(config)},
			Spec:       corev1.NodeSpec{Taints: []corev1.Taint{{Key: broker.TaintOverflow, Value: config.Provider, Effect: corev1.TaintEffectNoSchedule}}},
		}))
	}
	return failed
}

// nodeLabels are those that virtual-node gives a Node.
func nodeLabels(config nodeconfig.Config) map[string]string {
	labels := map[string]string{
		broker.LabelProvider: config.Provider, broker.LabelNodeType: broker.NodeTypeVirtual, broker.LabelManagedBy: broker.ManagedBySpillway,
		corev1.LabelNodeExcludeBalancers: "true",
	}
	maps.Copy(labels, config.Capacity.Labels)
	return labels
}

// updateNode updates a Node's labels and status as virtual-node does, its taints as the node
// lifecycle controller does, and its lease.
func (s *simulation) updateNode(ctx context.Context, node *corev1.Node, config nodeconfig.Config, unreachable string) error {
	ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Ready"}
	if unreachable != "" {
		ready = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: unreachable, Message: "the provider reports " + unreachable}
	}
	var failed error
	spec := node.DeepCopy()
	spec.Spec.Taints = slices.DeleteFunc(spec.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key != broker.TaintOverflow })
	spec.Labels = nodeLabels(config)
	if len(spec.Spec.Taints) != len(node.Spec.Taints) || !maps.Equal(spec.Labels, node.Labels) {
		failed = s.rome.Update(ctx, spec)
	}
	status := node.DeepCopy()
	status.Status.Capacity, status.Status.Allocatable = config.Capacity.Resources, config.Capacity.Resources
	status.Status.Conditions = []corev1.NodeCondition{ready}
	if failed == nil && (!session.Equal(status.Status.Allocatable, node.Status.Allocatable) || session.Ready(node).Reason != ready.Reason) {
		status.ResourceVersion = spec.ResourceVersion
		failed = s.rome.Status().Update(ctx, status)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: node.Name}}
	err := s.rome.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	lease.Spec.RenewTime = ptr.To(metav1.NowMicro())
	if apierrors.IsNotFound(err) {
		return errors.Join(failed, s.rome.Create(ctx, lease))
	}
	return errors.Join(failed, err, s.rome.Update(ctx, lease))
}

// quotas copies limits to the status, from which the API server enforces them.
func (s *simulation) quotas(ctx context.Context) error {
	var quotas corev1.ResourceQuotaList
	if err := s.paris.List(ctx, &quotas); err != nil {
		return err
	}
	var failed error
	for i := range quotas.Items {
		quota := &quotas.Items[i]
		if identical(quota.Spec.Hard, quota.Status.Hard) {
			continue
		}
		used := corev1.ResourceList{}
		for name := range quota.Spec.Hard {
			used[name] = quota.Status.Used[name]
		}
		quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: used}
		failed = errors.Join(failed, s.paris.Status().Update(ctx, quota))
	}
	return failed
}

// namespaces empties and finalizes those that are being deleted, in both clusters.
func (s *simulation) namespaces(ctx context.Context) error {
	var failed error
	for _, c := range []client.Client{s.rome, s.paris} {
		var namespaces corev1.NamespaceList
		if err := c.List(ctx, &namespaces); err != nil {
			return err
		}
		for i := range namespaces.Items {
			namespace := &namespaces.Items[i]
			if namespace.DeletionTimestamp.IsZero() {
				continue
			}
			in := client.InNamespace(namespace.Name)
			for _, kind := range []client.Object{&corev1.Pod{}, &corev1.Secret{}, &corev1.ResourceQuota{}, &corev1.ServiceAccount{}, &rbacv1.RoleBinding{}, &networkingv1.NetworkPolicy{}} {
				failed = errors.Join(failed, c.DeleteAllOf(ctx, kind, in, client.GracePeriodSeconds(0)))
			}
			namespace.Spec.Finalizers = nil
			failed = errors.Join(failed, c.SubResource("finalize").Update(ctx, namespace))
		}
	}
	return failed
}

// managedObjects lists what Spillway made in a cluster.
func managedObjects(ctx context.Context, c client.Client) ([]string, error) {
	var found []string
	for _, list := range []client.ObjectList{
		&corev1.SecretList{}, &corev1.NodeList{}, &corev1.NamespaceList{}, &rbacv1.RoleBindingList{},
		&corev1.ResourceQuotaList{}, &networkingv1.NetworkPolicyList{}, &corev1.ServiceAccountList{},
	} {
		if err := c.List(ctx, list, session.Managed); err != nil {
			return nil, fmt.Errorf("listing %T: %w", list, err)
		}
		if err := meta.EachListItem(list, func(item runtime.Object) error {
			object := item.(client.Object)
			found = append(found, fmt.Sprintf("%T %s/%s", object, object.GetNamespace(), object.GetName()))
			return nil
		}); err != nil {
			return nil, err
		}
	}
	slices.Sort(found)
	return found, nil
}
