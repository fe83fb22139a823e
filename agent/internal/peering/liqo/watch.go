package liqo

import (
	"context"
	"fmt"
	"strings"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// watches enqueues the other cluster of every object that about names one for.
func watches(b *builder.Builder, about func(client.Object) string, objects ...client.Object) *builder.Builder {
	enqueue := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, object client.Object) []reconcile.Request {
		if id := about(object); id != "" {
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: id}}}
		}
		return nil
	})
	concerns := builder.WithPredicates(predicate.NewPredicateFuncs(func(object client.Object) bool { return about(object) != "" }))
	for _, object := range objects {
		b = b.Watches(object, enqueue, concerns)
	}
	return b
}

// SetupWithManager has Enqueue told of every change on the way to a provider.
func (d *Driver) SetupWithManager(mgr ctrl.Manager) error {
	about := func(object client.Object) string {
		labels := object.GetLabels()
		switch object.(type) {
		case *corev1.Node:
			return labels[broker.LabelProvider]
		case *corev1.Namespace:
			if _, tenant := labels[consts.TenantNamespaceLabel]; !tenant || !isOurs(object) {
				return ""
			}
		}
		if labels[consts.ReplicationStatusLabel] == "true" {
			return "" // a copy made by a consumer
		}
		return labels[consts.RemoteClusterID]
	}
	b := watches(ctrl.NewControllerManagedBy(mgr).Named("liqo-driver"), about,
		&authv1beta1.Identity{}, &authv1beta1.ResourceSlice{}, &offloadingv1beta1.VirtualNode{}, &offloadingv1beta1.NamespaceMap{}, &corev1.Node{}, &corev1.Namespace{})
	if err := b.Complete(reconcile.Func(func(_ context.Context, request reconcile.Request) (reconcile.Result, error) {
		d.Enqueue(request.Name)
		return reconcile.Result{}, nil
	})); err != nil {
		return fmt.Errorf("watching Liqo's objects: %w", err)
	}
	return nil
}

// SetupWithManager has consumers' slices answered as they change, and Enqueue told.
func (l *Provider) SetupWithManager(mgr ctrl.Manager) error {
	about := func(object client.Object) string {
		labels := object.GetLabels()
		switch object := object.(type) {
		case *authv1beta1.ResourceSlice:
			if labels[consts.ReplicationStatusLabel] != "true" || object.Spec.Class != SliceClass {
				return ""
			}
			return labels[consts.ReplicationOriginLabel]
		case *offloadingv1beta1.Quota:
			consumer, _ := strings.CutPrefix(object.Namespace, tenantNamespace(""))
			return consumer
		case *offloadingv1beta1.ShadowPod:
			if object.Status.Phase != corev1.PodSucceeded && object.Status.Phase != corev1.PodFailed {
				return "" // it holds of the Quota what its hold carries
			}
			return labels[labelOrigin]
		}
		return ""
	}
	b := watches(ctrl.NewControllerManagedBy(mgr).Named("liqo-lender"), about,
		&authv1beta1.ResourceSlice{}, &offloadingv1beta1.Quota{}, &offloadingv1beta1.ShadowPod{})
	if err := b.Complete(reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		if _, known := l.total(request.Name); !known {
			return reconcile.Result{}, nil
		}
		progress, err := l.answer(ctx, request.Name)
		if err == nil && progress.Done {
			l.Enqueue(request.Name)
		}
		return reconcile.Result{}, err
	})); err != nil {
		return fmt.Errorf("watching consumers' slices: %w", err)
	}
	return nil
}
