package direct

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// labelAccess marks the namespaces in which virtual-node has permissions: the chart's policy
// limits there, and only there, what it may do with pods.
const labelAccess = broker.Group + "/virtual-node"

// accessLabels are those of the RoleBindings that permit virtual-node to run the pods of a
// namespace.
func accessLabels() map[string]string {
	return map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, nodeconfig.LabelComponent: "direct-access"}
}

// allowNamespaces permits virtual-node to report the pods of namespaces, and to read their
// ConfigMaps and Secrets. Those in which that fails, as by a quota, a policy or a webhook of
// the namespace, are returned: they concern no other.
func (d *Driver) allowNamespaces(ctx context.Context, namespaces []string) (refused map[string]peering.Unmapped, err error) {
	refused = map[string]peering.Unmapped{}
	if len(namespaces) == 0 {
		return refused, nil
	}
	bindings, err := d.accessBindings(ctx)
	if err != nil {
		return nil, err
	}
	marked, err := d.markedNamespaces(ctx)
	if err != nil {
		return nil, err
	}
	allowed := map[string]bool{}
	for i := range bindings {
		allowed[bindings[i].Namespace] = marked[bindings[i].Namespace]
	}
	for _, namespace := range namespaces {
		if allowed[namespace] {
			continue
		}
		// No pod can start in a namespace that is gone or being deleted.
		if err := d.allowNamespace(ctx, namespace); err != nil && !apierrors.IsNotFound(err) && !terminating(err) {
			refused[namespace] = peering.Unmapped{Reason: "NamespaceAccessRefused", Final: session.Refused(err),
				Message: fmt.Sprintf("%s cannot be permitted to run pods of namespace %s: %v; let %s create RoleBinding %s there, or use another namespace",
					virtualNodeAccount, namespace, err, d.ServiceAccount, virtualNodeAccount)}
		}
	}
	return refused, nil
}

// allowNamespace labels a namespace before it permits anything there.
func (d *Driver) allowNamespace(ctx context.Context, namespace string) error {
	if err := d.mark(ctx, namespace, `"true"`); err != nil {
		return err
	}
	return oncePoliciesKnow(func() error {
		return client.IgnoreAlreadyExists(d.Client.Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: virtualNodeAccount, Labels: accessLabels()},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: virtualNodeNamespaceRole},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: d.ServiceAccount.Namespace, Name: virtualNodeAccount}},
		}))
	})
}

// mark sets labelAccess of a namespace to a JSON value.
func (d *Driver) mark(ctx context.Context, namespace, value string) error {
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, labelAccess, value)
	return d.Client.Patch(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, client.RawPatch(types.MergePatchType, patch))
}

// oncePoliciesKnow makes a request that the chart's policies deny until the API server has
// seen the write before it.
func oncePoliciesKnow(request func() error) error {
	backoff := wait.Backoff{Duration: 20 * time.Millisecond, Factor: 2, Steps: 7}
	return retry.OnError(backoff, func(err error) bool { return apierrors.IsForbidden(err) && !terminating(err) }, request)
}

func terminating(err error) bool {
	return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}

// revokeNamespaces undoes allowNamespaces for namespaces that no peering lists any
// more, neither as stored nor as last requested.
func (d *Driver) revokeNamespaces(ctx context.Context) error {
	bindings, err := d.accessBindings(ctx)
	if err != nil {
		return err
	}
	marked, err := d.markedNamespaces(ctx)
	if err != nil || len(bindings) == 0 && len(marked) == 0 {
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
	// What concerns one namespace holds up no other.
	var errs []error
	for i := range bindings {
		if used[bindings[i].Namespace] {
			continue
		}
		if err := session.Delete(ctx, d.Client, &bindings[i]); err != nil {
			errs = append(errs, fmt.Errorf("revoking access of %s to namespace %s: %w", virtualNodeAccount, bindings[i].Namespace, err))
		}
	}
	for namespace := range marked {
		if used[namespace] {
			continue
		}
		err := oncePoliciesKnow(func() error { return client.IgnoreNotFound(d.mark(ctx, namespace, "null")) })
		if apierrors.IsForbidden(err) {
			// Somebody else keeps a RoleBinding of that name there: the label stays with it.
			log.FromContext(ctx).Info("A label of a namespace cannot be removed yet", "namespace", namespace, "label", labelAccess, "reason", err.Error())
		} else if err != nil {
			errs = append(errs, fmt.Errorf("removing label %s of namespace %s: %w", labelAccess, namespace, err))
		}
	}
	return errors.Join(errs...)
}

// markedNamespaces are the names of those with labelAccess.
func (d *Driver) markedNamespaces(ctx context.Context) (map[string]bool, error) {
	var namespaces corev1.NamespaceList
	if err := d.Client.List(ctx, &namespaces, client.HasLabels{labelAccess}); err != nil {
		return nil, fmt.Errorf("listing namespaces with label %s: %w", labelAccess, err)
	}
	marked := map[string]bool{}
	for i := range namespaces.Items {
		marked[namespaces.Items[i].Name] = true
	}
	return marked, nil
}

func (d *Driver) accessBindings(ctx context.Context) ([]rbacv1.RoleBinding, error) {
	var bindings rbacv1.RoleBindingList
	if err := d.Client.List(ctx, &bindings, client.MatchingLabels(accessLabels())); err != nil {
		return nil, fmt.Errorf("listing role bindings of %s: %w", virtualNodeAccount, err)
	}
	return bindings.Items, nil
}
