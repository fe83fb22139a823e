package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	quota "k8s.io/apiserver/pkg/quota/v1"
	nodeutil "k8s.io/component-helpers/node/util"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Find reads an object into "into" and returns it, nil if it does not exist.
func Find[T client.Object](ctx context.Context, c client.Reader, namespace, name string, into T) (T, error) {
	if err := c.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, into); err != nil {
		var none T
		return none, client.IgnoreNotFound(err)
	}
	return into, nil
}

// Delete deletes exactly the object that was read, by its UID. An object that is
// gone is no error; one that is being deleted is left alone unless there are
// options.
func Delete(ctx context.Context, c client.Client, object client.Object, options ...client.DeleteOption) error {
	if !object.GetDeletionTimestamp().IsZero() && len(options) == 0 {
		return nil
	}
	uid := object.GetUID()
	return client.IgnoreNotFound(c.Delete(ctx, object, append(options, client.Preconditions{UID: &uid})...))
}

// Refused reports whether the API server refuses an object whatever it does again, as a quota, a
// policy or a webhook does; webhooks need not give a reason that client-go knows. Where it
// refuses what a namespace needs, that is no reason to stop for others.
func Refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsTooManyRequests(err) || apierrors.IsUnauthorized(err) {
		return false
	}
	code := status.Status().Code
	return code >= 400 && code < 500
}

// BindRole binds a ClusterRole to this agent in a namespace, and nothing if it has no name.
func (o *Options) BindRole(ctx context.Context, role string, binding metav1.ObjectMeta) error {
	if role == "" {
		return nil
	}
	err := o.Client.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: binding,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: o.ServiceAccount.Namespace, Name: o.ServiceAccount.Name}},
	})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("binding role %s in namespace %s: %w", role, binding.Namespace, err)
	}
	return nil
}

// IsManaged reports whether Spillway made an object.
func IsManaged(object metav1.Object) bool {
	return object.GetLabels()[broker.LabelManagedBy] == broker.ManagedBySpillway
}

// Managed selects the objects that Spillway made.
var Managed = client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}

// Node reads the Node for a provider's capacity, nil if it does not exist. The
// caller checks whose it is.
func Node(ctx context.Context, c client.Reader, provider string) (*corev1.Node, error) {
	node, err := Find(ctx, c, "", broker.VirtualNodeName(provider), &corev1.Node{})
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", broker.VirtualNodeName(provider), err)
	}
	return node, nil
}

// NodeNameTaken is the Progress where another node has the virtual node's name.
func NodeNameTaken(provider string) peering.Progress {
	return peering.Waiting("NodeNameTaken", "node "+broker.VirtualNodeName(provider)+" already exists and is not managed by Spillway; rename or delete it")
}

// Ready is a node's condition Ready, Unknown if it has none.
func Ready(node *corev1.Node) corev1.NodeCondition {
	if _, ready := nodeutil.GetNodeCondition(&node.Status, corev1.NodeReady); ready != nil {
		return *ready
	}
	return corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}
}

// ParkedResources is what a parked node shows with every driver, without "pods".
func ParkedResources() corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(1, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(1<<20, resource.BinarySI),
	}
}

// Equal reports whether two lists have equal amounts, where absent is zero.
func Equal(a, b corev1.ResourceList) bool {
	return quota.Equals(quota.RemoveZeros(a), quota.RemoveZeros(b))
}

// NodePending describes why a provider's node, nil if it does not exist, is not yet
// Ready with exactly the allocatable resources; "" if it is. A cordon is the administrator's,
// and does not count.
func NodePending(node *corev1.Node, provider string, allocatable corev1.ResourceList) string {
	if node == nil {
		return "does not exist yet"
	}
	tainted := slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool {
		return taint.Key == broker.TaintOverflow && taint.Value == provider && taint.Effect == corev1.TaintEffectNoSchedule
	})
	_, domain := node.Labels[corev1.LabelHostname]
	ready := Ready(node)
	switch {
	case !node.DeletionTimestamp.IsZero():
		return "is being deleted"
	case !tainted || node.Labels[broker.LabelProvider] != provider || node.Labels[broker.LabelNodeType] != broker.NodeTypeVirtual:
		return "does not have Spillway's taint and labels yet"
	case ready.Status != corev1.ConditionTrue && ready.Message != "":
		return "is not Ready: " + ready.Message
	case ready.Status != corev1.ConditionTrue:
		return "is not Ready yet"
	case !Equal(node.Status.Allocatable, allocatable):
		return "does not show the capacity yet"
	case domain:
		return "still has label " + corev1.LabelHostname
	}
	for _, taint := range node.Spec.Taints {
		if strings.HasPrefix(taint.Key, "node.kubernetes.io/") && taint.Key != corev1.TaintNodeUnschedulable {
			return "still has taint " + taint.Key
		}
	}
	return ""
}

// Toleration is that of the taint that every virtual node of a provider has.
func Toleration(provider string) corev1.Toleration {
	return corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: provider, Effect: corev1.TaintEffectNoSchedule}
}
