package queue_test

import (
	"fmt"
	"math/big"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/queue"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var start = time.Unix(1_000_000, 0)

func entry(name string, priority int32, age int, want broker.HeldCapacity) queue.Entry {
	return queue.Entry{
		Name: name, UID: types.UID(name), Priority: priority, Since: start.Add(-time.Duration(age) * time.Second),
		Request: decide.Request{Requester: "rome", Want: want},
	}
}

func pods(count int32, cpu string, change ...func(*broker.PodSet)) broker.HeldCapacity {
	set := broker.PodSet{Name: "pods", Count: count, Requests: broker.FromList(expect.Resources("cpu", cpu))}
	for _, f := range change {
		f(&set)
	}
	return capacity.OfPodSets([]broker.PodSet{set})
}

func names(entries []*queue.Entry) []string {
	out := []string{}
	for _, e := range entries {
		out = append(out, e.Name)
	}
	return out
}

func any(*queue.Entry) bool { return true }

func TestOrder(t *testing.T) {
	q := queue.New()
	set := func(e queue.Entry) { e.KeepFree = true; q.Set(e) }
	set(entry("young", 0, 1, pods(1, "1")))
	set(entry("old", 0, 9, pods(1, "1")))
	set(entry("urgent", 5, 0, pods(1, "1")))
	set(entry("low", -5, 99, pods(1, "1")))
	if got := names(q.Next(99, any)); !slices.Equal(got, []string{"urgent", "old", "young", "low"}) {
		t.Errorf("the order is %v", got)
	}
	if got := q.Position(entry("new", 0, 0, pods(1, "1"))); got != 4 {
		t.Errorf("a new one is number %d", got)
	}
	if first := q.First(entry("young", 0, 1, pods(1, "1"))); first == nil || first.Name != "urgent" {
		t.Errorf("the first before young is %v", first)
	}
	if first := q.First(entry("urgent", 5, 0, pods(1, "1"))); first != nil {
		t.Errorf("the first before the first is %v", first)
	}
	// A raised priority replaces the entry.
	set(entry("low", 9, 99, pods(1, "1")))
	if !q.Remove("urgent") || q.Remove("urgent") || q.Len() != 3 || q.Next(1, any)[0].Name != "low" {
		t.Errorf("after the changes: %v", names(q.Next(99, any)))
	}
}

// TestQueueIsSorted: whatever happened, the queue has each name once, in order.
func TestQueueIsSorted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q, want := queue.New(), map[string]queue.Entry{}
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			name := fmt.Sprint(rapid.IntRange(0, 9).Draw(t, "name"))
			if rapid.Bool().Draw(t, "remove") {
				q.Remove(name)
				delete(want, name)
				continue
			}
			e := entry(name, rapid.Int32Range(-1, 1).Draw(t, "priority"), rapid.IntRange(0, 2).Draw(t, "age"), pods(1, "1"))
			e.KeepFree = rapid.Bool().Draw(t, "placeable")
			position, first := q.Position(e), q.First(e)
			q.Set(e)
			want[name] = e
			if after := q.Position(e); position != after || first != q.First(e) {
				t.Fatalf("%s is number %d behind %v, and %d behind %v once it is set", name, position, first, after, q.First(e))
			}
		}
		got := q.Next(999, any)
		if len(got) != len(want) || q.Len() != len(want) {
			t.Fatalf("%d entries, want %d", len(got), len(want))
		}
		var first *queue.Entry
		for i, e := range got {
			if q.First(*e) != first || q.Position(*e) != i+1 || want[e.Name].Priority != e.Priority {
				t.Fatalf("%s is number %d behind %v", e.Name, i, q.First(*e))
			}
			if first == nil && e.KeepFree {
				first = e
			}
		}
	})
}

// Capacity is kept free for what could be placed one day only.
func TestFirst(t *testing.T) {
	q := queue.New()
	for i := range 200 {
		e := entry(fmt.Sprintf("e%03d", i), 0, 200-i, pods(1, "1"))
		e.KeepFree = i%2 == 1
		q.Set(e)
	}
	last := entry("last", 0, 0, pods(1, "1"))
	first := q.First(last)
	if first.Name != "e001" || q.Position(last) != 201 {
		t.Errorf("the first before number %d is %s", q.Position(last), first.Name)
	}
	// The same entry again is the same, so that what is known of it stays.
	same := entry("e001", 0, 199, pods(1, "1"))
	same.KeepFree = true
	q.Set(same)
	if q.First(last) != first {
		t.Error("an entry without a change was replaced")
	}
	same.KeepFree = false
	q.Set(same)
	if got := q.First(last).Name; got != "e003" || q.Len() != 200 {
		t.Errorf("the first is %s of %d", got, q.Len())
	}
}

// The first ones are listed each time, and all others in turn, also while the queue
// changes.
func TestNext(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := queue.New()
		waiting := rapid.IntRange(0, 60).Draw(t, "waiting")
		for i := range waiting {
			q.Set(entry(fmt.Sprintf("e%02d", i), 0, 99-i, pods(1, "1")))
		}
		odd := func(e *queue.Entry) bool { return e.Name[2]%2 == 1 }
		matching := q.Next(1000, odd)
		if len(matching) != waiting/2 {
			t.Fatalf("%d of %d match", len(matching), waiting)
		}
		n := rapid.IntRange(2, 9).Draw(t, "n")
		listed := map[string]int{}
		calls := 2*waiting/n + 3
		for range calls {
			if waiting > 0 && rapid.Bool().Draw(t, "change") {
				// An entry that does not match comes and goes.
				q.Remove("e00")
				q.Set(entry("e00", rapid.Int32Range(-1, 1).Draw(t, "priority"), 99, pods(1, "1")))
			}
			next := q.Next(n, odd)
			if len(next) != min(n, len(matching)) {
				t.Fatalf("%d are listed, want %d of %d", len(next), n, len(matching))
			}
			for i, e := range next {
				listed[e.Name]++
				if i < (n+1)/2 && e.Name != matching[i].Name {
					t.Fatalf("number %d is %s, want %s", i, e.Name, matching[i].Name)
				}
			}
		}
		for _, e := range matching {
			if listed[e.Name] == 0 {
				t.Fatalf("%s is never listed in %d calls: %v", e.Name, calls, listed)
			}
		}
	})
}

func TestProfits(t *testing.T) {
	available := capacity.Floor(expect.Resources("cpu", "50m"))
	total := broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", "60m"))}
	for name, tc := range map[string]struct {
		want    broker.HeldCapacity
		profits bool
	}{
		"a pod does not fit":            {pods(5, "100m"), false},
		"a part fits":                   {pods(5, "50m"), true},
		"a divisible total is one part": {total, false},
	} {
		q := queue.New()
		q.Set(entry("e", 0, 1, tc.want))
		if got := q.Next(1, any)[0].Profits(available); got != tc.profits {
			t.Errorf("%s: profits is %t", name, got)
		}
	}
}

// TestSame: an entry is replaced if what its Reservation costs has changed.
func TestSame(t *testing.T) {
	q := queue.New()
	for _, cost := range []int64{1, 1, 2} {
		q.Set(queue.Entry{Name: "r", UID: "r", Request: decide.Request{Committed: big.NewRat(cost, 2)}})
		if all := q.Entries(); len(all) != 1 || all[0].Request.Committed.Cmp(big.NewRat(cost, 2)) != 0 {
			t.Errorf("the entries are %+v, want one that costs %d/2", all, cost)
		}
	}
}
