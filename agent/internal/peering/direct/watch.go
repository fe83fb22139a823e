package direct

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// CacheByObject limits the manager's cache to the Secrets of peerings, without
// their data, and the quotas of guests.
func CacheByObject(virtualNodeNamespace string) (map[client.Object]cache.ByObject, error) {
	peerings, err := labels.NewRequirement(broker.LabelProvider, selection.Exists, nil)
	if err != nil {
		return nil, fmt.Errorf("selecting peerings: %w", err)
	}
	guests, err := labels.NewRequirement(broker.LabelGuestsOf, selection.Exists, nil)
	if err != nil {
		return nil, fmt.Errorf("selecting quotas: %w", err)
	}
	return map[client.Object]cache.ByObject{
		&corev1.Secret{}: {
			Namespaces: map[string]cache.Config{virtualNodeNamespace: {LabelSelector: labels.NewSelector().Add(*peerings)}},
			Transform: func(object any) (any, error) {
				if secret, ok := object.(*corev1.Secret); ok {
					secret.Data, secret.ManagedFields = nil, nil
				}
				return object, nil
			},
		},
		&corev1.ResourceQuota{}: {Label: labels.NewSelector().Add(*guests)},
	}, nil
}

// clusterLabel returns a function for session.Watch that reads the cluster ID of
// managed objects from a label.
func clusterLabel(label string) func(client.Object) string {
	return func(object client.Object) string {
		if !session.IsManaged(object) {
			return ""
		}
		return object.GetLabels()[label]
	}
}

// SetupWithManager enqueues providers whose Secret or Node changes.
func (d *Driver) SetupWithManager(mgr ctrl.Manager) error {
	changed := func(_ context.Context, provider string) error { d.Enqueue(provider); return nil }
	return session.Watch(mgr, "direct-consumer", clusterLabel(broker.LabelProvider), changed, &corev1.Secret{}, &corev1.Node{})
}

// SetupWithManager enqueues consumers whose namespace or quota changes.
func (p *Provider) SetupWithManager(mgr ctrl.Manager) error {
	changed := func(_ context.Context, consumer string) error { p.Enqueue(consumer); return nil }
	return session.Watch(mgr, "direct-provider", clusterLabel(broker.LabelGuestsOf), changed, &corev1.Namespace{}, &corev1.ResourceQuota{})
}
