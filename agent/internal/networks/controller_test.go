package networks

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// The networks are those of nodes, with what is known to be around these, of Services, the API
// server and those configured, as they change, and as others change the ConfigMap.
func TestOwnNetworks(t *testing.T) {
	restConfig := controlplane.StartBare(t)
	c, err := client.New(restConfig, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)
	mgr, err := ctrl.NewManager(restConfig, ctrl.Options{
		Scheme: clientgoscheme.Scheme, Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false)},
	})
	expect.NoError(t, err)
	var services networkingv1.ServiceCIDRList
	var apiServer discoveryv1.EndpointSlice
	expect.Eventually(t, "the API server's own objects", func() (bool, string) {
		err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "kubernetes"}, &apiServer)
		if err == nil {
			err = c.List(t.Context(), &services)
		}
		return err == nil && len(services.Items) == 1, "no ServiceCIDR or EndpointSlice"
	})
	always := []string{"172.16.0.0/12", apiServer.Endpoints[0].Addresses[0] + "/32", services.Items[0].Spec.CIDRs[0]}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker"}, Spec: corev1.NodeSpec{PodCIDR: "10.244.0.0/24", PodCIDRs: []string{"10.244.0.0/24"}}}
	expect.NoError(t, c.Create(t.Context(), node))
	// Pods of other clusters may have addresses in the second: no node's pods have.
	var fails atomic.Bool
	podNetworks := func(context.Context) ([]string, error) {
		if fails.Load() {
			return nil, errors.New("it may not be read")
		}
		return []string{"10.244.0.0/16", "10.0.0.0/12"}, nil
	}
	r := New(Options{Live: c, Nodes: mgr.GetClient(), Namespace: "default", Configured: []string{"172.16.0.0/12"}, PodNetworks: podNetworks})
	expect.NoError(t, r.SetupWithManager(mgr))
	if r.Own() != nil {
		t.Errorf("networks %v are known before the first look", r.Own())
	}
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(t.Context()) }()
	t.Cleanup(func() { <-stopped })

	eventually := func(what string, more ...string) {
		t.Helper()
		want := Texts(merge(Parse(append(more, always...)...)))
		expect.Eventually(t, what, func() (bool, string) {
			var stored corev1.ConfigMap
			err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: ConfigMap}, &stored)
			text := stored.Data[Key]
			return err == nil && slices.Equal(Texts(r.Own()), want) && text == strings.Join(want, " "), "want " + strings.Join(want, " ") + ", got " + text
		})
	}
	eventually("the pods of nodes, and of those to come", "10.244.0.0/16")
	// The others are known without it, and those that were read before stay.
	fails.Store(true)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "worker"}, {Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeExternalIP, Address: "2001:db8::1"}}
	expect.NoError(t, c.Status().Update(t.Context(), node))
	eventually("the addresses of nodes", "10.244.0.0/16", "192.0.2.1/32", "2001:db8::1/128")
	expect.NoError(t, c.Create(t.Context(), &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.98.0.0/16"}}}))
	if err := c.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: ConfigMap}}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	expect.NoError(t, c.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "another"}, Spec: corev1.NodeSpec{PodCIDR: "10.243.1.0/24", PodCIDRs: []string{"10.243.1.0/24"}}}))
	eventually("a new node, and another network of Services", "10.243.1.0/24", "10.244.0.0/16", "192.0.2.1/32", "2001:db8::1/128", "10.98.0.0/16")
}
