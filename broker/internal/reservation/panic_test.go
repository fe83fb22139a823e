package reservation

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestPanicLeavesNoQueue lets a change panic, from which its caller recovers: the next
// change to the same ledger must not wait for a writer that is gone.
func TestPanicLeavesNoQueue(t *testing.T) {
	known := newStore(clock.RealClock{})
	known.putAdvertisement(&broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{Name: "paris", ResourceVersion: "1"},
		Spec:       broker.ClusterAdvertisementSpec{ClusterID: "paris"},
	})
	c := newCommitter(Clients{}, known, &Specs{}, func(name string) client.ObjectKey { return client.ObjectKey{Name: name} }, clock.RealClock{})
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the change did not panic")
			}
		}()
		_, _ = c.commit(t.Context(), "paris", func(*broker.ClusterAdvertisement) (edited, error) { panic("a fault in a change") })
	}()
	if len(c.queues) > 0 {
		t.Errorf("%d queues have no writer", len(c.queues))
	}
}
