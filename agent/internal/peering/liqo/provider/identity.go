package provider

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/liqotech/liqo/pkg/consts"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// identityPage bounds how many bindings are read at a time.
const identityPage = 500

// identityTaken returns the binding that gives permissions to a user or group of this
// cluster with a consumer's name, "" for none. Liqo makes the consumer's cluster ID a
// user and a group here, which would have these permissions.
func (p *Provider) identityTaken(ctx context.Context, consumer string) (binding string, err error) {
	for _, list := range []client.ObjectList{&rbacv1.ClusterRoleBindingList{}, &rbacv1.RoleBindingList{}} {
		for more := true; more; more = list.GetContinue() != "" {
			if err := p.Client.List(ctx, list, client.Limit(identityPage), client.Continue(list.GetContinue())); err != nil {
				return "", fmt.Errorf("listing bindings of user or group %s: %w", consumer, err)
			}
			if binding := bindingOf(list, consumer); binding != "" {
				return binding, nil
			}
		}
	}
	return "", nil
}

func bindingOf(list client.ObjectList, consumer string) string {
	switch list := list.(type) {
	case *rbacv1.ClusterRoleBindingList:
		for _, b := range list.Items {
			if names(b.Subjects, b.RoleRef, b.Labels, consumer) {
				return "ClusterRoleBinding " + b.Name
			}
		}
	case *rbacv1.RoleBindingList:
		for _, b := range list.Items {
			if names(b.Subjects, b.RoleRef, b.Labels, consumer) {
				return "RoleBinding " + b.Namespace + "/" + b.Name
			}
		}
	}
	return ""
}

// names reports whether a binding that is not Liqo's own for this peer has a user or
// group with a name as its subject.
func names(subjects []rbacv1.Subject, role rbacv1.RoleRef, labels map[string]string, name string) bool {
	if labels[consts.RemoteClusterID] == name && strings.HasPrefix(role.Name, "liqo-") {
		return false
	}
	return slices.ContainsFunc(subjects, func(s rbacv1.Subject) bool {
		return s.Name == name && (s.Kind == rbacv1.UserKind || s.Kind == rbacv1.GroupKind)
	})
}
