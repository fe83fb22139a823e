package charts_test

import (
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// virtualKubelets are the programs that write to the status of overflowed pods what a provider
// reports, by driver. Each gets its permissions as in a cluster.
var virtualKubelets = map[string]func(t *testing.T, config *rest.Config, admin client.Client) client.Client{
	// Liqo gives the ServiceAccount the name of the VirtualNode, and binds this role to it.
	"liqo": func(t *testing.T, config *rest.Config, admin client.Client) client.Client {
		text, err := os.ReadFile(filepath.Join(liqoDir(t), "files/liqo-virtual-kubelet-local-ClusterRole.yaml"))
		expect.NoError(t, err)
		role := &rbacv1.ClusterRole{}
		expect.NoError(t, yaml.Unmarshal(text, role))
		role.Name = "liqo-virtual-kubelet-local"
		expect.NoError(t, admin.Create(t.Context(), role))
		expect.NoError(t, admin.Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: named("spillway-paris"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "liqo-tenant-paris", Name: "spillway-paris"}},
		}))
		return impersonating(t, config, "system:serviceaccount:liqo-tenant-paris:spillway-paris", "system:serviceaccounts", "system:serviceaccounts:liqo-tenant-paris")
	},
	"direct": func(t *testing.T, config *rest.Config, admin client.Client) client.Client {
		expect.NoError(t, admin.Patch(t.Context(), &corev1.Namespace{ObjectMeta: named("default")},
			client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"labels":{"broker.fluidos.eu/virtual-node":"true"}}}`))))
		expect.NoError(t, admin.Create(t.Context(), roleBinding("default", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-virtual-node")))
		return as(t, config, "spillway-virtual-node")
	},
}

// A hostile provider reports as the addresses of its guests those of the consumer, or of another
// provider, to which the Services of the consumer would send traffic.
func TestAttacksByAProvider(t *testing.T) {
	for driver, virtualKubelet := range virtualKubelets {
		t.Run(driver, func(t *testing.T) {
			config := controlplane.StartOwn(t)
			ctx, admin := t.Context(), as(t, config, "")
			if driver == "liqo" {
				expect.NoError(t, admin.Create(ctx, &corev1.Namespace{ObjectMeta: named("liqo")}))
			}
			install(t, "install", "agent", kubeconfig(t, config), append([]string{"driver=" + driver, "providerNetworks={10.2.0.0/16,fd01::/64}"}, needed...))
			createWorkload(t, admin)
			provider := virtualKubelet(t, config, admin)
			if driver == "liqo" {
				agent := as(t, config, "spillway-agent") // as it writes what Liqo has connected
				eventually(t, "the agent writes the networks of providers", func() error {
					return agent.Patch(ctx, &corev1.ConfigMap{ObjectMeta: within(namespace, "spillway-provider-networks")},
						client.RawPatch("application/merge-patch+json", []byte(`{"data":{"`+broker.VirtualNodeName("paris")+`":"10.3.0.0/16","`+broker.VirtualNodeName("berlin")+`":"10.4.0.0/16"}}`)))
				})
			}
			eventually(t, "binding to a virtual node", bindOverflowed(t, as(t, config, "spillway-scheduler"), "overflowed"))
			report := func(c client.Client, name string, addresses ...string) func() error {
				return func() error {
					pod := &corev1.Pod{ObjectMeta: within("default", name)}
					if err := c.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
						return err
					}
					for _, ip := range addresses {
						pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: ip})
					}
					pod.Status.PodIP = addresses[0]
					pod.Status.Phase = corev1.PodRunning
					return c.Status().Update(ctx, pod, client.DryRunAll)
				}
			}
			eventually(t, "an address of the provider in a network with routes to it", report(provider, "overflowed", "10.2.3.4"))
			eventually(t, "addresses of both families", report(provider, "overflowed", "10.2.3.4", "fd01::1"))
			if driver == "liqo" {
				eventually(t, "an address in the network that Liqo has connected", report(provider, "overflowed", "10.3.2.1"))
			}
			kubelet := impersonating(t, config, "system:node:worker", "system:nodes", "system:masters")
			eventually(t, "an address of a pod of this cluster", report(kubelet, "local", "10.1.2.3"))

			addresses := []string{"spillway-pod-addresses"}
			attacks := []attack{
				{"a pod of the consumer", report(provider, "overflowed", "10.1.2.3"), addresses, "outside of its pod networks"},
				{"a node of the consumer", report(provider, "overflowed", "192.0.2.1"), addresses, "outside of its pod networks"},
				{"a Service of the consumer", report(provider, "overflowed", "fd00::a"), addresses, "outside of its pod networks"},
				{"an address of the consumer as the second", report(provider, "overflowed", "10.2.3.4", "fd00::a"), addresses, "outside of its pod networks"},
				{"another provider", report(provider, "overflowed", "10.4.2.3"), addresses, "outside of its pod networks"},
				{"the node that connects", report(provider, "overflowed", "127.0.0.1"), addresses, "that no pod can have"},
				{"the metadata of the consumer's cloud", report(provider, "overflowed", "169.254.169.254"), addresses, "that no pod can have"},
			}
			for _, network := range guest.PerHost() {
				attacks = append(attacks, attack{network.String(), report(provider, "overflowed", network.Addr().String()), addresses, "that no pod can have"})
			}
			runAttacks(t, []guard{policyGuard(t, admin, "spillway-pod-addresses")}, attacks)
		})
	}
}

// The webhook sees exactly what the policy would refuse, before it.
func TestAddressesWebhook(t *testing.T) {
	for mode, want := range map[string]int{"beside": 1, "none": 0} {
		found := 0
		for _, w := range webhooksOf(t, render(t, "agent", append([]string{"scheduler.mode=" + mode}, needed...)), "spillway-agent-guests") {
			if w.Name != "addresses.broker.fluidos.eu" {
				continue
			}
			found++
			if selector := metav1.FormatLabelSelector(w.ObjectSelector); selector != "broker.fluidos.eu/hold" || w.Rules[0].Resources[0] != "pods/status" {
				t.Errorf("it is called for %v of pods with %q", w.Rules, selector)
			}
		}
		if found != want {
			t.Errorf("with scheduler.mode=%s the chart has %d webhooks for addresses, want %d", mode, found, want)
		}
	}
}
