package provider

import (
	"context"
	"errors"
	"fmt"
	"strings"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// Teardown removes everything that was made for a consumer: first what was
// replicated from it, then its permission to replicate, then the rest.
func (p *Provider) Teardown(ctx context.Context, consumer string) (progress peering.Progress, err error) {
	defer func() {
		if err != nil {
			progress, err = peering.Progress{}, fmt.Errorf("removing the peering with consumer %s: %w", consumer, err)
		}
	}()
	if err := session.ValidateClusterID(consumer); err != nil {
		return progress, err
	}
	foreign, shared, err := p.ForeignCluster(ctx, consumer)
	if err != nil {
		return progress, err
	}
	namespace, err := session.Find(ctx, p.Client, "", liqo.TenantNamespace(consumer), &corev1.Namespace{})
	removed := peering.Done("Removed", "the peering with consumer "+consumer+" is removed")
	switch {
	case err != nil:
		return progress, err
	case namespace == nil && foreign != nil && !shared:
		return peering.Waiting("ForeignClusterTerminating", "waiting for ForeignCluster "+consumer+" to be deleted"), session.Delete(ctx, p.Client, foreign)
	case namespace == nil:
		return removed, nil
	case !session.IsManaged(namespace):
		return peering.Done("NotManaged", "namespace "+namespace.Name+" is not managed by Spillway"), nil
	case !namespace.DeletionTimestamp.IsZero():
		return namespaceTerminating(namespace), nil
	}
	shared = shared || session.Number(namespace, liqo.AnnotationSession) != 0
	if shared && session.Number(namespace, liqo.AnnotationProviderSession) == 0 {
		return removed, nil
	}
	if waiting, err := p.removeTenant(ctx, consumer); err != nil || waiting != nil {
		return ptr.Deref(waiting, progress), err
	}
	if err := p.deleteSecrets(ctx, consumer); err != nil {
		return progress, err
	}
	if shared {
		return removed, liqo.SetSession(ctx, p.Client, namespace, liqo.AnnotationProviderSession, 0)
	}
	return namespaceTerminating(namespace), session.Delete(ctx, p.Client, namespace)
}

func namespaceTerminating(namespace *corev1.Namespace) peering.Progress {
	return peering.Waiting("NamespaceTerminating", "waiting for namespace "+namespace.Name+" to be deleted")
}

// removeTenant removes what was replicated from a consumer, and then its Tenant. The
// progress is nil if both are gone.
func (p *Provider) removeTenant(ctx context.Context, consumer string) (*peering.Progress, error) {
	tenant, err := p.tenant(ctx, consumer)
	if err != nil {
		return nil, err
	}
	replicated, err := p.replicated(ctx, consumer)
	if err != nil {
		return nil, err
	}
	if len(replicated) == 0 {
		if tenant == nil {
			return nil, nil
		}
		waiting := peering.Waiting("TenantTerminating", "waiting for Liqo to revoke the permissions of consumer "+consumer)
		return &waiting, session.Delete(ctx, p.Client, tenant)
	}
	// The consumer has deleted its objects or is unreachable. A drained Tenant keeps
	// it from replicating them again.
	if tenant != nil && session.IsManaged(tenant) && tenant.DeletionTimestamp.IsZero() && tenant.Spec.TenantCondition != authv1beta1.TenantConditionDrained {
		before := tenant.DeepCopy()
		tenant.Spec.TenantCondition = authv1beta1.TenantConditionDrained
		if err := p.Client.Patch(ctx, tenant, client.MergeFrom(before)); err != nil {
			return nil, err
		}
	}
	var names []string
	for _, object := range replicated {
		err = errors.Join(err, session.Delete(ctx, p.Client, object))
		names = append(names, strings.TrimPrefix(fmt.Sprintf("%T", object), "*v1beta1.")+" "+object.GetName())
	}
	waiting := peering.Waiting("ReplicatedObjectsTerminating", "waiting for "+strings.Join(names, ", ")+" to be deleted")
	return &waiting, err
}

// deleteSecrets deletes a consumer's nonce and the certificates that Liqo keeps. The
// kubeconfigs in the same namespace belong to the other direction.
func (p *Provider) deleteSecrets(ctx context.Context, consumer string) error {
	var secrets corev1.SecretList
	if err := p.Client.List(ctx, &secrets, client.InNamespace(liqo.TenantNamespace(consumer)), client.MatchingLabels{consts.RemoteClusterID: consumer}); err != nil {
		return err
	}
	var failed error
	for i := range secrets.Items {
		if _, kubeconfig := secrets.Items[i].Labels[consts.IdentityTypeLabelKey]; !kubeconfig {
			failed = errors.Join(failed, session.Delete(ctx, p.Client, &secrets.Items[i]))
		}
	}
	return failed
}

// replicated are the objects that a consumer's crd-replicator made here, and the
// Quotas made of them.
func (p *Provider) replicated(ctx context.Context, consumer string) ([]client.Object, error) {
	var objects []client.Object
	in := client.InNamespace(liqo.TenantNamespace(consumer))
	for _, list := range []client.ObjectList{&offloadingv1beta1.NamespaceMapList{}, &authv1beta1.ResourceSliceList{}, &authv1beta1.RenewList{}, &offloadingv1beta1.QuotaList{}} {
		options := []client.ListOption{in, replicatedFrom(consumer)}
		if _, quotas := list.(*offloadingv1beta1.QuotaList); quotas {
			options = options[:1]
		}
		if err := p.Client.List(ctx, list, options...); err != nil {
			return nil, fmt.Errorf("listing objects replicated from %s: %w", consumer, err)
		}
		if err := meta.EachListItem(list, func(item runtime.Object) error {
			objects = append(objects, item.(client.Object))
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return objects, nil
}
