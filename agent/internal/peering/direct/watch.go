package direct

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// CacheByObject keeps in the manager's cache only the Secrets that are links and
// the quotas of guests.
func CacheByObject(linkNamespace string) (map[client.Object]cache.ByObject, error) {
	link, err := labels.NewRequirement(broker.LabelProvider, selection.Exists, nil)
	if err != nil {
		return nil, fmt.Errorf("selecting links: %w", err)
	}
	guests, err := labels.NewRequirement(broker.LabelGuestsOf, selection.Exists, nil)
	if err != nil {
		return nil, fmt.Errorf("selecting quotas: %w", err)
	}
	return map[client.Object]cache.ByObject{
		&corev1.Secret{}: {
			Namespaces: map[string]cache.Config{linkNamespace: {LabelSelector: labels.NewSelector().Add(*link)}},
			// What a Secret holds is read from the API server itself when it is
			// needed.
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

// wakeOn has wake told of every change of objects that about names a cluster
// for.
func wakeOn(mgr ctrl.Manager, name string, wake func(string), about func(client.Object) string, objects ...client.Object) error {
	enqueue := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, object client.Object) []reconcile.Request {
		if id := about(object); id != "" {
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: id}}}
		}
		return nil
	})
	concerns := builder.WithPredicates(predicate.NewPredicateFuncs(func(object client.Object) bool { return about(object) != "" }))
	b := ctrl.NewControllerManagedBy(mgr).Named(name)
	for _, object := range objects {
		b = b.Watches(object, enqueue, concerns)
	}
	return b.Complete(reconcile.Func(func(_ context.Context, request reconcile.Request) (reconcile.Result, error) {
		wake(request.Name)
		return reconcile.Result{}, nil
	}))
}

// SetupWithManager has Enqueue told of every change of a link or its Node, and in
// time of every token that is to be renewed.
func (d *Driver) SetupWithManager(mgr ctrl.Manager) error {
	about := func(object client.Object) string {
		if !isOurs(object) {
			return ""
		}
		return object.GetLabels()[broker.LabelProvider]
	}
	if err := wakeOn(mgr, "direct-driver", d.Enqueue, about, &corev1.Secret{}, &corev1.Node{}); err != nil {
		return fmt.Errorf("watching links: %w", err)
	}
	return mgr.Add(renewing{func(ctx context.Context) error { return d.renew(ctx, mgr.GetClient()) }})
}

// renewing is a manager.Runnable for the leader only.
type renewing struct{ manager.RunnableFunc }

func (renewing) NeedLeaderElection() bool { return true }

// renewEvery is how often tokens are looked at: often enough for the shortest.
const renewEvery = MinTokenTTL / 60

// renew wakes the links whose token is due, whatever else goes on.
func (d *Driver) renew(ctx context.Context, reader client.Reader) error {
	ticker := time.NewTicker(renewEvery)
	defer ticker.Stop()
	for {
		var secrets corev1.SecretList
		if err := reader.List(ctx, &secrets, client.InNamespace(d.LinkNamespace)); err != nil && ctx.Err() == nil {
			d.Log.Error(err, "Looking for tokens to renew")
		}
		for _, provider := range due(secrets.Items, d.Clock.Now()) {
			d.Enqueue(provider)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// due lists the providers whose token is to be renewed by now.
func due(secrets []corev1.Secret, now time.Time) []string {
	var providers []string
	for i := range secrets {
		if r := parse(&secrets[i]); isOurs(&secrets[i]) && !r.renew.IsZero() && !now.Before(r.renew) {
			providers = append(providers, r.Provider)
		}
	}
	return providers
}

// SetupWithManager has Enqueue told of every change of a namespace for guests, and
// of what bounds them.
func (l *Provider) SetupWithManager(mgr ctrl.Manager) error {
	about := func(object client.Object) string {
		if !isOurs(object) {
			return ""
		}
		return object.GetLabels()[broker.LabelGuestsOf]
	}
	if err := wakeOn(mgr, "direct-lender", l.Enqueue, about, &corev1.Namespace{}, &corev1.ResourceQuota{}); err != nil {
		return fmt.Errorf("watching namespaces for guests: %w", err)
	}
	return nil
}
