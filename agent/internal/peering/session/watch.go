package session

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Watch adds a controller that calls changed with a cluster ID when one of the
// objects that belong to that cluster changes. clusterOf returns an object's
// cluster ID, "" if the object belongs to none.
func Watch(mgr ctrl.Manager, name string, clusterOf func(client.Object) string, changed func(ctx context.Context, clusterID string) error, objects ...client.Object) error {
	enqueue := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, object client.Object) []reconcile.Request {
		if id := clusterOf(object); id != "" {
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: id}}}
		}
		return nil
	})
	relevant := builder.WithPredicates(predicate.NewPredicateFuncs(func(object client.Object) bool { return clusterOf(object) != "" }))
	b := ctrl.NewControllerManagedBy(mgr).Named(name)
	for _, object := range objects {
		b = b.Watches(object, enqueue, relevant)
	}
	err := b.Complete(reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		return reconcile.Result{}, changed(ctx, request.Name)
	}))
	if err != nil {
		return fmt.Errorf("watching objects of %s: %w", name, err)
	}
	return nil
}
