package commit

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestPanicLeavesNoQueue lets a change panic, from which its caller recovers: the next
// change to the same ledger must not wait for a writer that is gone.
func TestPanicLeavesNoQueue(t *testing.T) {
	c := New(Hub{}, clock.RealClock{})
	c.Store.PutAdvertisement(&broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{Name: "paris", ResourceVersion: "1"},
		Spec:       broker.ClusterAdvertisementSpec{ClusterID: "paris"},
	})
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the change did not panic")
			}
		}()
		_, _ = c.Commit(t.Context(), "paris", func(*broker.ClusterAdvertisement) (Edited, error) { panic("a fault in a change") })
	}()
	if len(c.queues) > 0 {
		t.Errorf("%d queues have no writer", len(c.queues))
	}
}

// Writes of small ledgers do not wait for each other. Those of large ones do: for as long
// as one takes, within bounds.
func TestPauseAfterWrite(t *testing.T) {
	for _, tc := range []struct {
		holds      int
		took, want time.Duration
	}{
		{holds: 0, took: time.Second, want: 0},
		{holds: 10, took: time.Second, want: 0},
		{holds: 1000, took: time.Millisecond, want: 100 * time.Millisecond},
		{holds: 1000, took: 300 * time.Millisecond, want: 300 * time.Millisecond},
		{holds: 100, took: commitTimeout, want: maxPause},
	} {
		ad := &broker.ClusterAdvertisement{Status: broker.ClusterAdvertisementStatus{Holds: make([]broker.Hold, tc.holds)}}
		if got := pauseAfter(ad, tc.took); got != tc.want {
			t.Errorf("a pause of %s after a write of %d holds that took %s, want %s", got, tc.holds, tc.took, tc.want)
		}
	}
}
