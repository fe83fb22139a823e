package stream

import (
	"fmt"
	"testing"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestOldestStreamEnds(t *testing.T) {
	b := NewBroadcaster()
	oldest := b.Subscribe("rome", "", 16)
	youngest := oldest
	for range 16 {
		youngest = b.Subscribe("rome", "", 16)
	}
	select {
	case <-oldest.Dropped:
	default:
		t.Fatal("the oldest stream has not ended")
	}
	oldest.Close()
	if oldest.Newest() || !youngest.Newest() || len(b.subscriptions["rome"]) != 16 {
		t.Fatal("the youngest stream is not the newest")
	}
}

// TestManyChanges: with more changes than a stream keeps, it compares all its views.
func TestManyChanges(t *testing.T) {
	views, listed := []string{"a", "b"}, 0
	source := &Tracker[string]{
		Views: func(id string) []string {
			if id != "" {
				t.Errorf("one view is read: %s", id)
			}
			listed++
			return views
		},
		ID: func(view string) string { return view },
		Wrap: func(views []string) (event protocol.Event) {
			for _, id := range views {
				event.Consumer = append(event.Consumer, protocol.ConsumerView{ID: id})
			}
			return event
		},
	}
	b := NewBroadcaster()
	subscription := b.Subscribe("rome", protocol.RoleRequester, 16)
	if relist, err := source.Events(subscription); err != nil || len(relist) != 1 || len(relist[0].Consumer) != 2 {
		t.Fatalf("want a Relist of both, got %+v, %v", relist, err)
	}
	notify := func() {
		for i := range maxDirty + 1 {
			b.Notify("rome", protocol.RoleRequester, fmt.Sprint("other-", i))
		}
		if len(subscription.dirty) > maxDirty || !subscription.overflowed {
			t.Fatalf("the stream keeps %d changes", len(subscription.dirty))
		}
	}
	notify()
	if events, err := source.Events(subscription); err != nil || events != nil || listed != 2 {
		t.Fatalf("nothing has changed, got %+v, %v after %d lists", events, err, listed)
	}
	notify()
	views = []string{"b", "c"}
	events, err := source.Events(subscription)
	expect.NoError(t, err)
	if len(events) != 2 || events[0].Type != protocol.EventDelete || events[0].ID != "a" || len(events[1].Consumer) != 1 || events[1].Consumer[0].ID != "c" {
		t.Fatalf("got %+v", events)
	}
}
