package direct

import (
	"context"
	"fmt"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// labels of the RoleBindings that open a namespace to virtual-node.
func accessLabels() map[string]string {
	return map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, nodeconfig.LabelComponent: "direct-access"}
}

// allowNamespaces lets virtual-node read the ConfigMaps and Secrets of
// namespaces whose pods it is to run.
func (d *Driver) allowNamespaces(ctx context.Context, namespaces []string) error {
	if len(namespaces) == 0 {
		return nil
	}
	open, err := d.openNamespaces(ctx)
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for i := range open {
		there[open[i].Namespace] = true
	}
	for _, namespace := range namespaces {
		if there[namespace] {
			continue
		}
		err := d.Client.Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: VirtualNodeAccount, Labels: accessLabels()},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: VirtualNodeNamespaceRole},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: d.ServiceAccount.Namespace, Name: VirtualNodeAccount}},
		})
		// A namespace that is gone or going needs it no more.
		if err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, namespaceTerminating) {
			return fmt.Errorf("letting %s read what pods of namespace %s mount: %w", VirtualNodeAccount, namespace, err)
		}
	}
	return nil
}

// closeNamespaces takes that away where no link names the namespace any more,
// neither as stored nor as last asked for.
func (d *Driver) closeNamespaces(ctx context.Context) error {
	open, err := d.openNamespaces(ctx)
	if err != nil || len(open) == 0 {
		return err
	}
	records, err := d.records(ctx)
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, r := range records {
		if r.state != stateLinked {
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
	for i := range open {
		if used[open[i].Namespace] {
			continue
		}
		if err := remove(ctx, d.Client, &open[i]); err != nil {
			return fmt.Errorf("closing namespace %s to %s: %w", open[i].Namespace, VirtualNodeAccount, err)
		}
	}
	return nil
}

func (d *Driver) openNamespaces(ctx context.Context) ([]rbacv1.RoleBinding, error) {
	var bindings rbacv1.RoleBindingList
	if err := d.Client.List(ctx, &bindings, client.MatchingLabels(accessLabels())); err != nil {
		return nil, fmt.Errorf("listing the namespaces that %s reads: %w", VirtualNodeAccount, err)
	}
	return bindings.Items, nil
}
