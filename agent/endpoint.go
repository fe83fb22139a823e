package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// apiServerService is the Service of the API server in every cluster, and the name of its
// EndpointSlice.
const apiServerService = "kubernetes"

// findEndpoint looks for the endpoint of this cluster's API server if none is set.
func (o *options) findEndpoint(ctx context.Context, live client.Reader, config *rest.Config) {
	if o.apiServerEndpoint == "" {
		var source string
		o.apiServerEndpoint, source = findEndpoint(ctx, live, config)
		ctrl.Log.Info("Looked for this cluster's API server endpoint: --api-server-endpoint is not set", "endpoint", o.apiServerEndpoint, "source", source)
	}
}

// findEndpoint returns an address at which other clusters may reach this cluster's API
// server, and where it is from: that of the agent's kubeconfig, unless the agent runs in
// the cluster; that of ConfigMap kube-public/cluster-info, which kubeadm writes; or that
// of the API server's EndpointSlice. It is empty if there is none.
func findEndpoint(ctx context.Context, live client.Reader, config *rest.Config) (endpoint, source string) {
	var service corev1.Service
	if err := live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: apiServerService}, &service); err != nil {
		ctrl.Log.V(1).Info("The API server's Service is unknown", "reason", err.Error())
	}
	if endpoint = external(config.Host, service.Spec.ClusterIPs); endpoint != "" {
		return endpoint, "kubeconfig"
	}
	var info corev1.ConfigMap
	if err := live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespacePublic, Name: "cluster-info"}, &info); err == nil {
		if endpoint = external(serverOf(info.Data["kubeconfig"]), service.Spec.ClusterIPs); endpoint != "" {
			return endpoint, "cluster-info"
		}
	}
	var slice discoveryv1.EndpointSlice
	if err := live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: apiServerService}, &slice); err == nil {
		return external(addressOf(&slice), service.Spec.ClusterIPs), "EndpointSlice"
	}
	return "", ""
}

// external returns the address of an API server, https://<host>:<port>, or "" if it is no
// address for other clusters: that of the cluster's own Service, or of the same machine.
func external(server string, clusterIPs []string) string {
	at, err := url.Parse(server)
	if err != nil || at.Scheme != "https" || at.Hostname() == "" || slices.Contains(clusterIPs, at.Hostname()) {
		return ""
	}
	switch at.Hostname() {
	case "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc":
		return ""
	}
	if ip, err := netip.ParseAddr(at.Hostname()); err == nil && (ip.IsLoopback() || ip.IsUnspecified() || ip.IsLinkLocalUnicast()) {
		return ""
	}
	port := cmp.Or(at.Port(), "443")
	return "https://" + net.JoinHostPort(at.Hostname(), port)
}

// serverOf returns the server of a kubeconfig's only cluster, "" for none.
func serverOf(kubeconfig string) string {
	config, err := clientcmd.Load([]byte(kubeconfig))
	if err != nil || len(config.Clusters) != 1 {
		return ""
	}
	for _, cluster := range config.Clusters {
		return cluster.Server
	}
	return ""
}

// addressOf returns the first address of an EndpointSlice, "" for none.
func addressOf(slice *discoveryv1.EndpointSlice) string {
	var addresses []string
	for _, endpoint := range slice.Endpoints {
		if ptr.Deref(endpoint.Conditions.Ready, true) {
			addresses = append(addresses, endpoint.Addresses...)
		}
	}
	if len(addresses) == 0 || len(slice.Ports) == 0 || slice.Ports[0].Port == nil {
		return ""
	}
	return fmt.Sprintf("https://%s", net.JoinHostPort(slices.Min(addresses), strconv.Itoa(int(*slice.Ports[0].Port))))
}
