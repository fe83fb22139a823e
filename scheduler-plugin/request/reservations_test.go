package request

import (
	"testing"
	"time"

	"k8s.io/client-go/tools/cache"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
)

// TestOwnWrites: what was written counts, alone and among all of its namespace, until the cache
// shows that version, a later one, or that it was deleted, and for some time at most.
func TestOwnWrites(t *testing.T) {
	version := func(v string) *broker.Reservation {
		r := demandtest.ReservationFor(demandtest.JobPod("crunch", "crunch-0", "1"), nil)
		r.ResourceVersion = v
		return r
	}
	key, _ := demand.KeyOfReservation(version(""))
	for name, tc := range map[string]struct {
		cached  *broker.Reservation
		later   time.Duration
		deleted bool
		want    string // version
	}{
		"created":               {want: "10"},
		"changed":               {cached: version("9"), want: "10"},
		"seen":                  {cached: version("10"), want: "10"},
		"changed by another":    {cached: version("11"), want: "11"},
		"created, and deleted":  {deleted: true},
		"changed, and reported": {cached: version("9"), deleted: true, want: "10"},
		"long ago":              {later: time.Minute},
		"long ago, changed":     {cached: version("9"), later: time.Minute, want: "9"},
	} {
		t.Run(name, func(t *testing.T) {
			now, all := clocktesting.NewFakeClock(time.Unix(1000, 0)), cache.NewIndexer(cache.MetaNamespaceKeyFunc, Indexers())
			s := NewReservations(nil, all, now)
			s.written[key] = written{version("10"), now.Now()}
			if tc.cached != nil {
				expect.NoError(t, all.Add(tc.cached))
			}
			if tc.deleted {
				s.dropDeleted(key)
			}
			now.Step(tc.later)
			for range 2 {
				got := ""
				if r := s.get(key, version("").Name); r != nil {
					got = r.ResourceVersion
				}
				listed, err := s.list(key.Namespace)
				if expect.NoError(t, err); got != tc.want || len(listed) > 1 || len(listed) == 0 != (tc.want == "") || len(listed) == 1 && listed[0].ResourceVersion != tc.want {
					t.Errorf("version %q of %v, want %q", got, listed, tc.want)
				}
			}
		})
	}
}
