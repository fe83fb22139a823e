package direct

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// played is what stands around the driver in real clusters, played: virtual-node
// and node lifecycle at home, quotas and namespaces at the provider.
type played struct {
	t    *testing.T
	home client.Client
	away client.Client

	mu sync.Mutex
	// off stops virtual-node, unreachable has it report that.
	off         bool
	unreachable string
}

func (p *played) set(change func(*played)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(p)
}

// run plays until ctx ends.
func (p *played) run(ctx context.Context) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		for what, step := range map[string]func(context.Context) error{"virtual-node": p.virtualNode, "quotas": p.quotas, "namespaces": p.namespaces} {
			err := step(ctx)
			if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) {
				p.t.Logf("playing %s: %v", what, err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// virtualNode keeps a Node for each link that it can see, by the link alone.
func (p *played) virtualNode(ctx context.Context) error {
	// Held throughout: once it is off, nothing of it is under way any more.
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.off {
		return nil
	}
	unreachable := p.unreachable
	var secrets corev1.SecretList
	if err := p.home.List(ctx, &secrets, client.InNamespace(linkNamespace), client.MatchingLabels{nodeconfig.LabelComponent: nodeconfig.Component}); err != nil {
		return err
	}
	links := map[string]nodeconfig.Config{}
	for i := range secrets.Items {
		l, err := nodeconfig.FromSecret(&secrets.Items[i])
		if err != nil {
			return err
		}
		links[broker.VirtualNodeName(l.Provider)] = l
	}
	var nodes corev1.NodeList
	if err := p.home.List(ctx, &nodes, client.MatchingLabels{broker.LabelNodeType: broker.NodeTypeVirtual}); err != nil {
		return err
	}
	standing := map[string]*corev1.Node{}
	var failed error
	for i := range nodes.Items {
		node := &nodes.Items[i]
		standing[node.Name] = node
		l, linked := links[node.Name]
		if linked && (!l.Ending || unreachable != "") {
			failed = errors.Join(failed, p.keep(ctx, node, l, unreachable))
			continue
		}
		if node.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway {
			failed = errors.Join(failed, client.IgnoreNotFound(p.home.Delete(ctx, node)))
		}
	}
	for name, l := range links {
		if standing[name] != nil || l.Ending {
			continue
		}
		failed = errors.Join(failed, p.home.Create(ctx, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
				broker.LabelProvider: l.Provider, broker.LabelNodeType: broker.NodeTypeVirtual, broker.LabelManagedBy: broker.ManagedBySpillway,
			}},
			Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: broker.TaintOverflow, Value: l.Provider, Effect: corev1.TaintEffectNoSchedule}}},
		}))
	}
	return failed
}

// keep brings a Node in line, as virtual-node does with the node's status and
// the node lifecycle controller with its taints.
func (p *played) keep(ctx context.Context, node *corev1.Node, l nodeconfig.Config, unreachable string) error {
	ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Ready"}
	if unreachable != "" {
		ready = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: unreachable, Message: "the provider says " + unreachable}
	}
	var failed error
	spec := node.DeepCopy()
	spec.Spec.Unschedulable = l.Capacity.Parked
	spec.Spec.Taints = slices.DeleteFunc(spec.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key != broker.TaintOverflow })
	if spec.Spec.Unschedulable != node.Spec.Unschedulable || len(spec.Spec.Taints) != len(node.Spec.Taints) {
		failed = p.home.Update(ctx, spec)
	}
	status := node.DeepCopy()
	status.Status.Capacity, status.Status.Allocatable = l.Capacity.Resources, l.Capacity.Resources
	status.Status.Conditions = []corev1.NodeCondition{ready}
	if failed == nil && (!same(status.Status.Allocatable, node.Status.Allocatable) || readiness(node).Reason != ready.Reason) {
		status.ResourceVersion = spec.ResourceVersion
		failed = p.home.Status().Update(ctx, status)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: node.Name}}
	err := p.home.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	lease.Spec.RenewTime = ptr.To(metav1.NowMicro())
	if apierrors.IsNotFound(err) {
		return errors.Join(failed, p.home.Create(ctx, lease))
	}
	return errors.Join(failed, err, p.home.Update(ctx, lease))
}

// quotas counts, as the API server wants it before a quota bounds anything.
func (p *played) quotas(ctx context.Context) error {
	var quotas corev1.ResourceQuotaList
	if err := p.away.List(ctx, &quotas); err != nil {
		return err
	}
	var failed error
	for i := range quotas.Items {
		quota := &quotas.Items[i]
		if exactly(quota.Spec.Hard, quota.Status.Hard) {
			continue
		}
		used := corev1.ResourceList{}
		for name := range quota.Spec.Hard {
			used[name] = quota.Status.Used[name]
		}
		quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: used}
		failed = errors.Join(failed, p.away.Status().Update(ctx, quota))
	}
	return failed
}

// namespaces empties those that are going, in both clusters.
func (p *played) namespaces(ctx context.Context) error {
	var failed error
	for _, c := range []client.Client{p.home, p.away} {
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

// left names what a cluster holds of a link.
func left(ctx context.Context, c client.Client) ([]string, error) {
	var found []string
	for kind, list := range map[string]client.ObjectList{
		"Secret": &corev1.SecretList{}, "Node": &corev1.NodeList{}, "Namespace": &corev1.NamespaceList{}, "RoleBinding": &rbacv1.RoleBindingList{},
		"ResourceQuota": &corev1.ResourceQuotaList{}, "NetworkPolicy": &networkingv1.NetworkPolicyList{}, "ServiceAccount": &corev1.ServiceAccountList{},
	} {
		if err := c.List(ctx, list, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}); err != nil {
			return nil, fmt.Errorf("listing %s: %w", kind, err)
		}
		for _, name := range namesIn(list) {
			found = append(found, kind+" "+name)
		}
	}
	slices.Sort(found)
	return found, nil
}

func namesIn(list client.ObjectList) []string {
	names := map[string]bool{}
	switch list := list.(type) {
	case *corev1.SecretList:
		for i := range list.Items {
			names[list.Items[i].Name] = true
		}
	case *corev1.NodeList:
		for i := range list.Items {
			names[list.Items[i].Name] = true
		}
	case *corev1.NamespaceList:
		for i := range list.Items {
			names[list.Items[i].Name] = true
		}
	case *rbacv1.RoleBindingList:
		for i := range list.Items {
			names[list.Items[i].Namespace+"/"+list.Items[i].Name] = true
		}
	case *corev1.ResourceQuotaList:
		for i := range list.Items {
			names[list.Items[i].Name] = true
		}
	case *networkingv1.NetworkPolicyList:
		for i := range list.Items {
			names[list.Items[i].Name] = true
		}
	case *corev1.ServiceAccountList:
		for i := range list.Items {
			names[list.Items[i].Name] = true
		}
	}
	return slices.Collect(maps.Keys(names))
}
