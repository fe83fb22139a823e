package queue_test

import (
	"fmt"
	"slices"
	"strings"
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
	set := func(e queue.Entry) { e.Placeable = true; q.Set(e) }
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
	if got := names(q.Ahead(entry("young", 0, 1, pods(1, "1")))); !slices.Equal(got, []string{"urgent", "old"}) {
		t.Errorf("ahead of young: %v", got)
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
			e.Placeable = rapid.Bool().Draw(t, "placeable")
			position, ahead := q.Position(e), q.Ahead(e)
			q.Set(e)
			want[name] = e
			if after := q.Position(e); position != after || !slices.Equal(ahead, q.Ahead(e)) {
				t.Fatalf("%s is number %d with %d ahead, and %d with %d once it is set", name, position, len(ahead), after, len(q.Ahead(e)))
			}
		}
		got := q.Next(999, any)
		if len(got) != len(want) || q.Len() != len(want) {
			t.Fatalf("%d entries, want %d", len(got), len(want))
		}
		placeable := 0
		for i, e := range got {
			before := len(q.Ahead(*e))
			if before != placeable || q.Position(*e) != i+1 || want[e.Name].Priority != e.Priority {
				t.Fatalf("%s is number %d with %d ahead", e.Name, i, before)
			}
			if e.Placeable {
				placeable++
			}
		}
	})
}

// Only what could be placed one day is ahead of others.
func TestAhead(t *testing.T) {
	q := queue.New()
	for i := range 200 {
		e := entry(fmt.Sprintf("e%03d", i), 0, 200-i, pods(1, "1"))
		e.Placeable = i%2 == 1
		q.Set(e)
	}
	last := entry("last", 0, 0, pods(1, "1"))
	ahead := q.Ahead(last)
	if len(ahead) != 100 || ahead[0].Name != "e001" || ahead[99].Name != "e199" || q.Position(last) != 201 {
		t.Errorf("%d are ahead of number %d: %v", len(ahead), q.Position(last), names(ahead))
	}
	// The same entry again is the same, so that what is known of it stays.
	same := entry("e001", 0, 199, pods(1, "1"))
	same.Placeable = true
	q.Set(same)
	if q.Ahead(last)[0] != ahead[0] {
		t.Error("an entry without a change was replaced")
	}
	same.Placeable = false
	q.Set(same)
	if got := q.Ahead(last)[0].Name; got != "e003" || q.Len() != 200 {
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

// Capacity is kept free as long as ever more of it is available, and for a term after that.
func TestTerms(t *testing.T) {
	const length = 10 * time.Minute
	type step struct {
		at        time.Duration
		entry     string
		available string
		keeps     bool
	}
	for name, steps := range map[string][]step{
		"nothing more becomes available": {{0, "a", "4", true}, {9 * time.Minute, "a", "4", true}, {10 * time.Minute, "a", "4", false}, {time.Hour, "a", "4", false}},
		"less and then as much again":    {{0, "a", "4", true}, {8 * time.Minute, "a", "1", true}, {9 * time.Minute, "a", "4", true}, {10 * time.Minute, "a", "4", false}},
		"ever more":                      {{0, "a", "0", true}, {9 * time.Minute, "a", "1", true}, {18 * time.Minute, "a", "2", true}, {27 * time.Minute, "a", "3", true}, {37 * time.Minute, "a", "3", false}},
		"more after the end":             {{0, "a", "4", true}, {10 * time.Minute, "a", "4", false}, {11 * time.Minute, "a", "1", false}, {12 * time.Minute, "a", "5", true}, {21 * time.Minute, "a", "1", true}, {22 * time.Minute, "a", "1", false}},
		"seen again late, with more":     {{0, "a", "4", true}, {time.Hour, "a", "5", true}},
		"a later one of the same requester": {{0, "a", "4", true}, {10 * time.Minute, "a", "4", false}, {11 * time.Minute, "b", "4", false}, {19 * time.Minute, "b", "5", false},
			{20 * time.Minute, "b", "5", true}, {29 * time.Minute, "b", "5", true}, {30 * time.Minute, "b", "5", false}},
		"an earlier one of the same requester": {{0, "a", "4", true}, {5 * time.Minute, "b", "4", true}, {10 * time.Minute, "a", "4", false}, {14 * time.Minute, "b", "4", true}, {15 * time.Minute, "b", "4", false}},
		"one of another requester":             {{0, "a", "4", true}, {10 * time.Minute, "a", "4", false}, {11 * time.Minute, "other", "4", true}},
		"after one before it was placed":       {{0, "first", "9", true}, {0, "a", "9", true}, {9 * time.Minute, "place first", "", false}, {9 * time.Minute, "a", "1", true}, {18 * time.Minute, "a", "2", true}, {27 * time.Minute, "a", "2", true}, {28 * time.Minute, "a", "2", false}},
		"after one behind it was placed":       {{0, "a", "9", true}, {0, "last", "9", true}, {9 * time.Minute, "place last", "", false}, {10 * time.Minute, "a", "1", false}},
	} {
		t.Run(name, func(t *testing.T) {
			q := queue.New()
			ages := map[string]int{"first": 9, "a": 5, "b": 4, "other": 3, "last": 1}
			for _, s := range steps {
				if placed, ok := strings.CutPrefix(s.entry, "place "); ok {
					if !q.Placed(placed, start.Add(s.at)) {
						t.Errorf("%s was not in the queue", placed)
					}
					continue
				}
				e := entry(s.entry, 0, ages[s.entry], pods(1, "1"))
				if s.entry == "other" {
					e.Request.Requester = "oslo"
				}
				keeps, _ := q.KeepsFree(e, length, start.Add(s.at), func() capacity.Vector {
					return capacity.Floor(expect.Resources("cpu", s.available))
				})
				e.Placeable = keeps
				q.Set(e)
				if keeps != s.keeps {
					t.Errorf("%s at %s: capacity is kept free %t", s.entry, s.at, keeps)
				}
			}
		})
	}
	q := queue.New()
	for _, after := range []time.Duration{0, time.Hour} {
		if keeps, _ := q.KeepsFree(entry("a", 0, 1, pods(1, "1")), 0, start.Add(after), nil); !keeps {
			t.Error("a term of no length ends")
		}
	}
}
