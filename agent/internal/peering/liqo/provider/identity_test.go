package provider

import (
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// A consumer does not get the permissions of a user or group that has its name.
func TestIdentityTaken(t *testing.T) {
	role := rbacv1.RoleRef{Kind: "ClusterRole", Name: "cluster-admin"}
	clusterWide := func(subject rbacv1.Subject) client.ObjectList {
		return &rbacv1.ClusterRoleBindingList{Items: []rbacv1.ClusterRoleBinding{{ObjectMeta: metav1.ObjectMeta{Name: "b"}, RoleRef: role, Subjects: []rbacv1.Subject{subject}}}}
	}
	namespaced := func(role string, labels map[string]string) client.ObjectList {
		return &rbacv1.RoleBindingList{Items: []rbacv1.RoleBinding{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "b", Labels: labels}, RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: role},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.GroupKind, Name: "rome"}},
		}}}
	}
	peer := map[string]string{"liqo.io/remote-cluster-id": "rome"}
	for name, c := range map[string]struct {
		list client.ObjectList
		want string
	}{
		"a group":                   {clusterWide(rbacv1.Subject{Kind: rbacv1.GroupKind, Name: "rome"}), "ClusterRoleBinding b"},
		"a user":                    {clusterWide(rbacv1.Subject{Kind: rbacv1.UserKind, Name: "rome"}), "ClusterRoleBinding b"},
		"another group":             {clusterWide(rbacv1.Subject{Kind: rbacv1.GroupKind, Name: "oslo"}), ""},
		"a ServiceAccount":          {clusterWide(rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: "x", Name: "rome"}), ""},
		"in a namespace":            {namespaced("edit", nil), "RoleBinding shop/b"},
		"of Liqo for this peer":     {namespaced("liqo-virtual-kubelet-remote", peer), ""},
		"labelled as one of Liqo":   {namespaced("edit", peer), "RoleBinding shop/b"},
		"of Liqo for another peer":  {namespaced("liqo-virtual-kubelet-remote", map[string]string{"liqo.io/remote-cluster-id": "oslo"}), "RoleBinding shop/b"},
		"no bindings in namespaces": {&rbacv1.RoleBindingList{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := bindingOf(c.list, "rome"); got != c.want {
				t.Errorf("want %q, got %q", c.want, got)
			}
		})
	}
}
