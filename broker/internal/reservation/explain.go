package reservation

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// Explain reports, for each cluster, why it would not be chosen now: for what is missing
// of the Reservation or, if nothing is, for all that it requests. Who waits before it in
// the queue does not count. The requester may see it as decide.ForConsumer shows it. It
// returns NotFound (apierrors.IsNotFound) if the requester has no Reservation of that name.
func (r *Reconciler) Explain(ctx context.Context, requester, name string) ([]broker.ClusterRejection, error) {
	reservation, err := r.known(ctx, name)
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	if err != nil || reservation.Spec.RequesterID != requester {
		return nil, notFound(name)
	}
	config, err := r.config(ctx)
	if err != nil {
		return nil, err
	}
	in := r.snapshotOf(reservation, config)
	p := newPlan(in)
	if p.missing.Empty() {
		p.missing = in.requested()
	}
	return decide.Explain(p.request(in)), nil
}
