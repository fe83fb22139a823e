package direct

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// accessLabels are those of the RoleBindings that let virtual-node read a
// namespace.
func accessLabels() map[string]string {
	return map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, nodeconfig.LabelComponent: "direct-access"}
}

// allowNamespaces lets virtual-node read the ConfigMaps and Secrets of namespaces
// whose pods it is to run.
func (d *Driver) allowNamespaces(ctx context.Context, namespaces []string) error {
	if len(namespaces) == 0 {
		return nil
	}
	bindings, err := d.accessBindings(ctx)
	if err != nil {
		return err
	}
	allowed := map[string]bool{}
	for i := range bindings {
		allowed[bindings[i].Namespace] = true
	}
	for _, namespace := range namespaces {
		if allowed[namespace] {
			continue
		}
		err := d.Client.Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: VirtualNodeAccount, Labels: accessLabels()},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: VirtualNodeNamespaceRole},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: d.ServiceAccount.Namespace, Name: VirtualNodeAccount}},
		})
		// No pod can start in a namespace that is gone or being deleted.
		if err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return fmt.Errorf("allowing %s to read namespace %s: %w", VirtualNodeAccount, namespace, err)
		}
	}
	return nil
}

// revokeNamespaces undoes allowNamespaces for namespaces that no peering lists any
// more, neither as stored nor as last requested.
func (d *Driver) revokeNamespaces(ctx context.Context) error {
	bindings, err := d.accessBindings(ctx)
	if err != nil || len(bindings) == 0 {
		return err
	}
	records, err := d.records(ctx)
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, r := range records {
		if r.state != stateActive {
			continue
		}
		for _, namespace := range r.Capacity.Namespaces {
			used[namespace] = true
		}
	}
	d.mu.Lock()
	for _, namespaces := range d.wanted {
		for _, namespace := range namespaces {
			used[namespace] = true
		}
	}
	d.mu.Unlock()
	for i := range bindings {
		if used[bindings[i].Namespace] {
			continue
		}
		if err := session.Delete(ctx, d.Client, &bindings[i]); err != nil {
			return fmt.Errorf("revoking access of %s to namespace %s: %w", VirtualNodeAccount, bindings[i].Namespace, err)
		}
	}
	return nil
}

func (d *Driver) accessBindings(ctx context.Context) ([]rbacv1.RoleBinding, error) {
	var bindings rbacv1.RoleBindingList
	if err := d.Client.List(ctx, &bindings, client.MatchingLabels(accessLabels())); err != nil {
		return nil, fmt.Errorf("listing role bindings of %s: %w", VirtualNodeAccount, err)
	}
	return bindings.Items, nil
}
