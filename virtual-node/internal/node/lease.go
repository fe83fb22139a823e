package node

import (
	"context"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// labelNewLease is on a Lease from when it gets its provider's label until it is renewed. With
// it the chart's policy compares the Lease's name with those of all real nodes.
const labelNewLease = broker.Group + "/new-lease"

// leases writes the Lease of a virtual node with its provider's label, without which the chart's
// policy denies the write: a real node may have the name of a virtual one. A Lease of a former
// version has no label.
type leases struct {
	coordination.LeaseInterface
	provider string
}

func (l leases) Create(ctx context.Context, lease *coordinationv1.Lease, options metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return l.LeaseInterface.Create(ctx, l.labelled(lease), options)
}

func (l leases) Update(ctx context.Context, lease *coordinationv1.Lease, options metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return l.LeaseInterface.Update(ctx, l.labelled(lease), options)
}

// labelled returns a lease with the labels of its next write.
func (l leases) labelled(lease *coordinationv1.Lease) *coordinationv1.Lease {
	lease = lease.DeepCopy()
	if lease.Labels[broker.LabelProvider] == l.provider {
		delete(lease.Labels, labelNewLease)
		return lease
	}
	metav1.SetMetaDataLabel(&lease.ObjectMeta, broker.LabelProvider, l.provider)
	metav1.SetMetaDataLabel(&lease.ObjectMeta, labelNewLease, "true")
	return lease
}
