package consumer

import (
	"context"
	"fmt"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// providerOf is the provider that an object of a peering belongs to, "" if none.
func providerOf(object client.Object) string {
	labels := object.GetLabels()
	switch object.(type) {
	case *corev1.Node:
		return labels[broker.LabelProvider]
	case *corev1.Namespace:
		if _, tenant := labels[consts.TenantNamespaceLabel]; !tenant || !session.IsManaged(object) {
			return ""
		}
	}
	if labels[consts.ReplicationStatusLabel] == "true" {
		return "" // replicated here from a consumer
	}
	return labels[consts.RemoteClusterID]
}

// SetupWithManager enqueues providers whose objects change. It serves the webhook for the
// addresses of overflowed pods.
func (d *Driver) SetupWithManager(mgr ctrl.Manager) error {
	if d.Webhook && d.ProviderNetworks != nil {
		mgr.GetWebhookServer().Register(addressesPath, addressesHandler(d.ProviderNetworks.Of))
		d.ProviderNetworks.changed = d.Enqueue
		if err := mgr.Add(d.ProviderNetworks); err != nil {
			return fmt.Errorf("watching the networks of providers: %w", err)
		}
	}
	changed := func(_ context.Context, provider string) error { d.Enqueue(provider); return nil }
	return session.Watch(mgr, "liqo-consumer", providerOf, changed,
		&authv1beta1.Identity{}, &authv1beta1.ResourceSlice{}, &offloadingv1beta1.VirtualNode{}, &offloadingv1beta1.NamespaceMap{}, &corev1.Node{}, &corev1.Namespace{})
}
