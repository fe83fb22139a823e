package node

import (
	"context"
	"maps"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// echo returns Leases as they are written.
type echo struct{ coordination.LeaseInterface }

func (echo) Create(_ context.Context, lease *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return lease, nil
}

func (echo) Update(_ context.Context, lease *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return lease, nil
}

// A Lease gets its provider's label when it is created, or renewed after a former version has
// created it, together with the label by which a policy compares it with real nodes; the next
// renewal removes that.
func TestLabelsOfALease(t *testing.T) {
	ctx, client := t.Context(), leases{echo{}, "paris"}
	unlabelled := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"example.com/x": "y"}}}
	created, err := client.Create(ctx, unlabelled, metav1.CreateOptions{})
	expect.NoError(t, err)
	former, err := client.Update(ctx, unlabelled, metav1.UpdateOptions{})
	expect.NoError(t, err)
	for name, lease := range map[string]*coordinationv1.Lease{"created": created, "of a former version": former} {
		want := map[string]string{"example.com/x": "y", "broker.fluidos.eu/provider": "paris", "broker.fluidos.eu/new-lease": "true"}
		if !maps.Equal(lease.Labels, want) {
			t.Errorf("%s: got labels %v, want %v", name, lease.Labels, want)
		}
		delete(want, "broker.fluidos.eu/new-lease")
		for range 2 {
			lease, err = client.Update(ctx, lease, metav1.UpdateOptions{})
			expect.NoError(t, err)
			if !maps.Equal(lease.Labels, want) {
				t.Errorf("%s, renewed: got labels %v, want %v", name, lease.Labels, want)
			}
		}
	}
	if len(unlabelled.Labels) != 1 {
		t.Errorf("the caller's Lease has labels %v", unlabelled.Labels)
	}
}
