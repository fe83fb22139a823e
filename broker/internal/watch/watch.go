// Package watch turns events of watches into names to reconcile.
package watch

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/store"
)

// Signal has at most one event, which no watch sees.
type Signal struct {
	C         chan event.GenericEvent
	namespace string
}

// NewSignal returns a Signal without an event.
func NewSignal(namespace string) Signal { return Signal{make(chan event.GenericEvent, 1), namespace} }

// Send adds an event, unless there is one that is not handled yet: both enqueue the same.
func (s Signal) Send() {
	select {
	case s.C <- event.GenericEvent{Object: &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace}}}:
	default:
	}
}

// Namespace is a filter for the objects of a namespace.
func Namespace(namespace string) predicate.Predicate {
	return predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetNamespace() == namespace })
}

// ByName adapts a function that reconciles the object of one name.
func ByName(f func(ctx context.Context, name string) (ctrl.Result, error)) reconcile.Func {
	return func(ctx context.Context, request ctrl.Request) (ctrl.Result, error) { return f(ctx, request.Name) }
}

// Requests are those for the objects of these names.
func Requests(namespace string, names []string) []reconcile.Request {
	requests := make([]reconcile.Request, len(names))
	for i, name := range names {
		requests[i].NamespacedName = types.NamespacedName{Namespace: namespace, Name: name}
	}
	return requests
}

// Events calls a function with the versions before and after each event, nil for none, once the
// store has it: the other watches of the object may come later.
func Events[T client.Object](s *store.Store, changed func(before, after T, enqueue func(names ...string))) handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	handle := func(before, after T, object client.Object, deleted bool, q queue) {
		s.Note(object, deleted)
		changed(before, after, func(names ...string) {
			for _, request := range Requests(object.GetNamespace(), names) {
				q.Add(request)
			}
		})
	}
	var none T
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
			handle(none, e.Object.(T), e.Object, false, q)
		},
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			handle(e.ObjectOld.(T), e.ObjectNew.(T), e.ObjectNew, false, q)
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) {
			handle(e.Object.(T), none, e.Object, true, q)
		},
	}
}
