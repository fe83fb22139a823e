package charts_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// TestPage: the broker's page is off by default. Then the pod network reaches it only if it is exposed,
// and never through the Service of the agents.
func TestPage(t *testing.T) {
	for name, c := range map[string]struct {
		values             []string
		flag               string
		delegated, service bool
		volumes            int
	}{
		"off":                       {[]string{"networkPolicy.enabled=true"}, "", false, false, 0},
		"for port-forward":          {[]string{"networkPolicy.enabled=true", "page.enabled=true"}, "--page-bind-address=127.0.0.1:8444", true, false, 0},
		"exposed":                   {[]string{"networkPolicy.enabled=true", "page.enabled=true", "page.expose=true"}, "--page-bind-address=:8444", true, true, 0},
		"with its own certificate":  {[]string{"networkPolicy.enabled=true", "page.enabled=true", "page.expose=true", "page.tlsSecret=mine"}, "--page-bind-address=:8444", true, true, 1},
		"with that and the brokers": {[]string{"networkPolicy.enabled=true", "page.enabled=true", "page.expose=true", "page.tlsSecret=mine", "tls.existingSecret=other"}, "--page-bind-address=:8444", true, true, 2},
	} {
		t.Run(name, func(t *testing.T) {
			objects := render(t, "broker", append(c.values, "history.enabled=false"))
			broker := only[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			flags := slices.DeleteFunc(slices.Clone(broker.Containers[0].Args), func(arg string) bool { return !strings.HasPrefix(arg, "--page-bind") })
			if got := strings.Join(flags, " "); got != c.flag {
				t.Errorf("the flag is %q, want %q", got, c.flag)
			}
			if len(broker.Volumes) != c.volumes || len(broker.Containers[0].VolumeMounts) != c.volumes {
				t.Errorf("%d volumes, %d mounts, want %d", len(broker.Volumes), len(broker.Containers[0].VolumeMounts), c.volumes)
			}
			for _, volume := range broker.Volumes {
				if optional := volume.Secret != nil && volume.Secret.Optional != nil && *volume.Secret.Optional; optional != (volume.Name == "page") {
					t.Errorf("the broker starts without volume %s: %t", volume.Name, optional)
				}
			}
			delegated := slices.ContainsFunc(only[rbacv1.ClusterRoleBinding](t, objects, "ClusterRoleBinding"), func(b rbacv1.ClusterRoleBinding) bool {
				return b.RoleRef.Name == "system:auth-delegator"
			})
			if delegated != c.delegated {
				t.Errorf("the broker may review tokens: %t", delegated)
			}
			for _, service := range only[corev1.Service](t, objects, "Service") {
				ports := slices.ContainsFunc(service.Spec.Ports, func(p corev1.ServicePort) bool { return p.TargetPort.StrVal == "page" })
				if of := service.Name == "spillway-broker-page"; ports != of || of && (!c.service || service.Spec.Type != corev1.ServiceTypeClusterIP) {
					t.Errorf("Service %s, of type %s, leads to the page: %t", service.Name, service.Spec.Type, ports)
				}
			}
			policy := only[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy")[0]
			if open := slices.ContainsFunc(policy.Spec.Ingress[0].Ports, func(p networkingv1.NetworkPolicyPort) bool { return p.Port.IntValue() == 8444 }); open != c.service {
				t.Errorf("the NetworkPolicy lets others to the page: %t", open)
			}
			role := slices.ContainsFunc(only[rbacv1.Role](t, objects, "Role"), func(r rbacv1.Role) bool { return r.Name == "spillway-broker-page" })
			if role != c.delegated {
				t.Errorf("there is a Role for who may sign in: %t", role)
			}
		})
	}
}
