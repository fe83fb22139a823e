package provider

import (
	"context"
	"strings"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// labelOrigin on a ShadowPod is the consumer's cluster ID.
const labelOrigin = "offloading.liqo.io/origin"

// consumerOf is the consumer whose ResourceSlices an object's change concerns, ""
// if none.
func consumerOf(object client.Object) string {
	labels := object.GetLabels()
	switch object := object.(type) {
	case *corev1.Namespace:
		if !isGuestNamespace(object) {
			return ""
		}
		return labels[consts.RemoteClusterID]
	case *authv1beta1.ResourceSlice:
		if labels[consts.ReplicationStatusLabel] != "true" || object.Spec.Class != liqo.SliceClass {
			return ""
		}
		return labels[consts.ReplicationOriginLabel]
	case *offloadingv1beta1.Quota:
		consumer, _ := strings.CutPrefix(object.Namespace, liqo.TenantNamespace(""))
		return consumer
	case *offloadingv1beta1.ShadowPod:
		if object.Status.Phase != corev1.PodSucceeded && object.Status.Phase != corev1.PodFailed {
			return "" // within its hold
		}
		return labels[labelOrigin]
	}
	return ""
}

// SetupWithManager answers consumers' ResourceSlices when they change, limits the guests of
// new namespaces, and enqueues their consumers. It serves the webhook for guests.
func (p *Provider) SetupWithManager(mgr ctrl.Manager) error {
	if p.Webhook {
		mgr.GetWebhookServer().Register(guestsPath, guestsHandler(p.HandOver))
	}
	return session.Watch(mgr, "liqo-provider", consumerOf, p.changed, &authv1beta1.ResourceSlice{}, &offloadingv1beta1.Quota{}, &offloadingv1beta1.ShadowPod{}, &corev1.Namespace{})
}

// changed applies the grant of a consumer after a change of its objects. Its errors are
// retried soon, those of missing permissions too: no event tells when the role that the
// agent has bound to itself in a new namespace is in effect.
func (p *Provider) changed(ctx context.Context, consumer string) error {
	if _, known := p.grants.Get(consumer); !known {
		return nil
	}
	if err := p.confineGuests(ctx, consumer); err != nil {
		return err
	}
	progress, err := p.answerSlices(ctx, consumer)
	if err == nil && progress.Done {
		p.Enqueue(consumer)
	}
	return err
}
