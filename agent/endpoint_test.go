package main

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestExternal(t *testing.T) {
	own := []string{"10.96.0.1", "fd00::1"}
	for server, want := range map[string]string{
		"https://192.0.2.1:6443": "https://192.0.2.1:6443", "https://api.example.com": "https://api.example.com:443", "https://[2001:db8::1]:6443": "https://[2001:db8::1]:6443",
		"https://192.0.2.1:6443/": "https://192.0.2.1:6443",
		// Of this cluster or machine only.
		"https://10.96.0.1:443": "", "https://[fd00::1]:443": "", "https://127.0.0.1:6443": "", "https://[::1]:6443": "", "https://localhost:6443": "",
		"https://0.0.0.0:6443": "", "https://169.254.1.1:6443": "", "https://kubernetes.default.svc": "",
		// No address of an API server.
		"http://192.0.2.1:8080": "", "": "", "192.0.2.1:6443": "", "https://": "",
	} {
		if got := external(server, own); got != want {
			t.Errorf("%s: %q, want %q", server, got, want)
		}
	}
}

// movedTo reads the API server's EndpointSlice as if it had the addresses of another one: the API
// server keeps restoring its own.
type movedTo struct {
	client.Reader
	slice *discoveryv1.EndpointSlice
}

func (m movedTo) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	err := m.Reader.Get(ctx, key, object, options...)
	if read, ok := object.(*discoveryv1.EndpointSlice); ok {
		read.Endpoints, read.Ports = m.slice.Endpoints, m.slice.Ports
	}
	return err
}

// The endpoint is found in whatever the cluster has.
func TestFindEndpoint(t *testing.T) {
	config := controlplane.Start(t)
	c, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	inCluster := &rest.Config{Host: "https://kubernetes.default.svc"}
	find := func(config *rest.Config) string {
		endpoint, source := findEndpoint(t.Context(), c, config)
		return endpoint + " " + source
	}

	// The API server of the test has its own Service and EndpointSlice; it serves on the
	// address of this machine only, which is none for other clusters.
	slice := &discoveryv1.EndpointSlice{}
	expect.Eventually(t, "the API server's EndpointSlice", func() (bool, string) {
		err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "kubernetes"}, slice)
		return err == nil, "not yet"
	})
	if got := find(&rest.Config{Host: "https://192.0.2.1:6443"}); got != "https://192.0.2.1:6443 kubeconfig" {
		t.Errorf("outside of the cluster: %s", got)
	}
	other := slice.DeepCopy()
	other.ObjectMeta = metav1.ObjectMeta{Name: "other"}
	other.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.9"}}, {Addresses: []string{"192.0.2.3"}}, {Addresses: []string{"192.0.2.1"}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(false)}}}
	other.Ports = []discoveryv1.EndpointPort{{Port: ptr.To[int32](6443)}}
	if endpoint, source := findEndpoint(t.Context(), movedTo{c, other}, inCluster); endpoint != "https://192.0.2.3:6443" || source != "EndpointSlice" {
		t.Errorf("of an EndpointSlice: %s %s", endpoint, source)
	}
	// The namespace is made by the API server some time after its start.
	expect.Eventually(t, "a cluster-info", func() (bool, string) {
		err := c.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-public", Name: "cluster-info"}, Data: map[string]string{
			"kubeconfig": "apiVersion: v1\nkind: Config\nclusters: [{name: '', cluster: {server: 'https://api.example.com:6443'}}]\n",
		}})
		return err == nil, "not yet"
	})
	if got := find(inCluster); got != "https://api.example.com:6443 cluster-info" {
		t.Errorf("in the cluster: %s", got)
	}
}
