package commit

import (
	"context"
	"errors"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// Hub is where the broker's objects are.
type Hub struct {
	// Client writes to the API server. Its reads may lag behind.
	Client client.Client
	// Live reads from the API server.
	Live client.Reader
	// Namespace of the objects.
	Namespace string
}

// Key is that of an object in the hub.
func (h Hub) Key(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: h.Namespace, Name: name}
}

// The delay before a reconcile is retried after a conflict doubles with each further one.
const (
	conflictRetryAfter    = 20 * time.Millisecond
	maxConflictRetryAfter = 5 * time.Second
)

// Conflicts count how often a write of an object failed in a row because another writer was
// first.
type Conflicts struct {
	counts workqueue.TypedRateLimiter[string]
}

// NewConflicts returns Conflicts without any.
func NewConflicts() Conflicts {
	return Conflicts{workqueue.NewTypedItemExponentialFailureRateLimiter[string](conflictRetryAfter, maxConflictRetryAfter)}
}

// Requeue requeues an object if another writer was first: after a short delay, which doubles
// each time until the caller forgets the object.
func (c Conflicts) Requeue(ctx context.Context, object string, err error) (ctrl.Result, error) {
	if !isConflict(err) {
		return ctrl.Result{}, err
	}
	LockConflicts.Inc()
	retryAfter := c.counts.When(object)
	log.FromContext(ctx).V(1).Info("Requeueing because of a concurrent write", "reason", err.Error(), "retryAfter", retryAfter.String())
	return ctrl.Result{RequeueAfter: retryAfter}, nil
}

// Forget ends the conflicts of an object.
func (c Conflicts) Forget(object string) { c.counts.Forget(object) }

// isConflict reports whether a compare-and-swap failed because of a concurrent write.
func isConflict(err error) bool {
	var insufficient *ledger.InsufficientError
	var full *ledger.FullError
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || errors.Is(err, ErrOutdated) || errors.As(err, &insufficient) || errors.As(err, &full)
}
