package returnhome

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// guest is a candidate that has stayed an hour, with room.
func guest(namespace, owner, name string, change ...func(*Candidate)) Candidate {
	c := Candidate{
		Pod: types.UID(name), Namespace: namespace, Name: name, Owner: types.UID(owner), Since: start.Add(-time.Hour), Room: true,
		After: time.Minute, MinimumStay: 10 * time.Minute,
	}
	for _, f := range change {
		f(&c)
	}
	return c
}

// observeFor plans every ten seconds and returns the last result.
func observeFor(p *Planner, from time.Time, period time.Duration, candidates ...Candidate) (next *Candidate, now time.Time) {
	for now = from; ; now = now.Add(10 * time.Second) {
		if next = p.Plan(now, candidates); now.Sub(from) >= period {
			return next, now
		}
	}
}

func TestPlan(t *testing.T) {
	noRoom := func(c *Candidate) { c.Room = false }
	cases := map[string]struct {
		reason     string
		before     func(p *Planner)
		period     time.Duration
		candidates []Candidate
		want       string
	}{
		"after its time":       {"room has stayed for After", nil, time.Minute, []Candidate{guest("a", "x", "x-1")}, "x-1"},
		"too early":            {"room has to stay for After", nil, 50 * time.Second, []Candidate{guest("a", "x", "x-1")}, ""},
		"no room":              {"the replacement would overflow again", nil, time.Hour, []Candidate{guest("a", "x", "x-1", noRoom)}, ""},
		"has just overflowed":  {"the minimum stay is not over", nil, time.Minute, []Candidate{guest("a", "x", "x-1", func(c *Candidate) { c.Since = start })}, ""},
		"its stay ends":        {"the minimum stay is over", nil, 10 * time.Minute, []Candidate{guest("a", "x", "x-1", func(c *Candidate) { c.Since = start })}, "x-1"},
		"expensive first":      {"it gives back what costs most", nil, time.Minute, []Candidate{guest("a", "x", "x-1"), guest("a", "y", "y-1", func(c *Candidate) { c.Price = 0.5 })}, "y-1"},
		"longest stay first":   {"prices are equal", nil, time.Minute, []Candidate{guest("a", "x", "x-1"), guest("a", "x", "x-2", func(c *Candidate) { c.Since = start.Add(-2 * time.Hour) })}, "x-2"},
		"one without room":     {"others do not wait for it", nil, time.Minute, []Candidate{guest("a", "x", "x-1", noRoom), guest("a", "y", "y-1")}, "y-1"},
		"another is moving":    {"one at a time", func(p *Planner) { p.Start(start, guest("b", "z", "z-1")) }, time.Hour, []Candidate{guest("a", "x", "x-1")}, ""},
		"its owner had a turn": {"owners take turns, whatever their prices", func(p *Planner) { returned(p, start, guest("a", "y", "y-0")) }, time.Minute, []Candidate{guest("a", "x", "x-1"), guest("a", "y", "y-1", func(c *Candidate) { c.Price = 1 })}, "x-1"},
		"namespaces take turns": {"many owners in one namespace do not delay another", func(p *Planner) { returned(p, start, guest("a", "x", "x-0")) }, time.Minute,
			[]Candidate{guest("a", "y", "y-1"), guest("a", "z", "z-1"), guest("b", "w", "w-1")}, "w-1"},
		"its owner rests": {"the last replacement overflowed again", func(p *Planner) { failed(p, start, guest("a", "x", "x-0")) }, firstBackOff - 10*time.Second, []Candidate{guest("a", "x", "x-1")}, ""},
		"it has rested":   {"the back-off is over", func(p *Planner) { failed(p, start, guest("a", "x", "x-0")) }, firstBackOff, []Candidate{guest("a", "x", "x-1")}, "x-1"},
		"twice":           {"the back-off doubles", func(p *Planner) { failed(p, start, guest("a", "x", "x-0")); failed(p, start, guest("a", "x", "x-0")) }, 2*firstBackOff - 10*time.Second, []Candidate{guest("a", "x", "x-1")}, ""},
		"success resets":  {"the back-off is for failures in a row", func(p *Planner) { failed(p, start, guest("a", "x", "x-0")); returned(p, start, guest("a", "x", "x-0")) }, time.Minute, []Candidate{guest("a", "x", "x-1")}, "x-1"},
		"fails after success": {"the back-off is the first again", func(p *Planner) {
			x := guest("a", "x", "x-0")
			failed(p, start, x)
			returned(p, start, x)
			failed(p, start, x)
		}, firstBackOff, []Candidate{guest("a", "x", "x-1")}, "x-1"},
		"its owner had no pods": {"it rests nevertheless", func(p *Planner) {
			failed(p, start, guest("a", "x", "x-0"))
			p.Plan(start, nil)
		}, time.Minute, []Candidate{guest("a", "x", "x-1")}, ""},
		"refused": {"a PodDisruptionBudget may allow it later", func(p *Planner) { p.Refused(start.Add(time.Minute), guest("a", "x", "x-1")) }, time.Minute, []Candidate{guest("a", "x", "x-1")}, ""},
		"not evicted": {"the eviction got no answer, and did not take place", func(p *Planner) {
			p.Start(start, guest("a", "x", "x-1"))
			p.NotEvicted(start.Add(time.Minute))
		}, time.Minute, []Candidate{guest("a", "x", "x-1"), guest("a", "y", "y-1")}, "y-1"},
		"others go on":     {"the owner of another is blocked", func(p *Planner) { p.Refused(start.Add(time.Minute), guest("a", "x", "x-1")) }, time.Minute, []Candidate{guest("a", "x", "x-1"), guest("a", "y", "y-1")}, "y-1"},
		"refused long ago": {"it is tried again", func(p *Planner) { p.Refused(start, guest("a", "x", "x-1")) }, time.Minute, []Candidate{guest("a", "x", "x-1")}, "x-1"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := New()
			if tc.before != nil {
				tc.before(p)
			}
			got := ""
			if next, _ := observeFor(p, start, tc.period, tc.candidates...); next != nil {
				got = next.Name
			}
			if got != tc.want {
				t.Errorf("%s: got %q, want %q", tc.reason, got, tc.want)
			}
		})
	}
}

func returned(p *Planner, now time.Time, c Candidate) {
	p.Start(now, c)
	p.Settle(now, &Replacement{Bound: true, Ready: true})
}

func failed(p *Planner, now time.Time, c Candidate) {
	p.Start(now, c)
	p.Settle(now, &Replacement{Bound: true, Abroad: true})
}

// TestRoomThatVanishes: the time of room begins again, also if it was not observed.
func TestRoomThatVanishes(t *testing.T) {
	c := guest("a", "x", "x-1")
	without := c
	without.Room = false
	p := New()
	_, now := observeFor(p, start, 50*time.Second, c)
	p.Plan(now.Add(time.Second), []Candidate{without})
	if next, _ := observeFor(p, now.Add(2*time.Second), 50*time.Second, c); next != nil {
		t.Error("it moved although the room had vanished")
	}
	p = New()
	p.Plan(start, []Candidate{c})
	if next := p.Plan(start.Add(maxGap+time.Second), []Candidate{c}); next != nil {
		t.Error("it moved although nothing was observed for longer than a minute")
	}
}

func TestSettle(t *testing.T) {
	c := guest("a", "x", "x-1", func(c *Candidate) { c.Termination = time.Hour })
	home, ready, abroad := &Replacement{Bound: true}, &Replacement{Bound: true, Ready: true}, &Replacement{Bound: true, Abroad: true, Ready: true}
	type observation struct {
		after time.Duration
		found *Replacement
	}
	cases := map[string]struct {
		reason       string
		observations []observation
		want         Outcome
	}{
		"ready":                {"it has returned", []observation{{time.Second, nil}, {2 * time.Second, home}, {time.Minute, ready}}, Returned},
		"bound":                {"the next one waits until it is ready", []observation{{time.Second, home}}, ""},
		"never ready":          {"the deadline begins when it is bound", []observation{{time.Minute, home}, {time.Minute + ReadyTimeout, home}}, NotReady},
		"late":                 {"the deadline is not over", []observation{{maxTermination + bindTimeout - time.Second, nil}}, ""},
		"never replaced":       {"a long termination counts for five minutes only", []observation{{maxTermination + bindTimeout, nil}}, NotBound},
		"pending":              {"a replacement without a node counts as none", []observation{{maxTermination + bindTimeout, &Replacement{}}}, NotBound},
		"overflowed again":     {"it is on a virtual node", []observation{{time.Second, abroad}}, Overflowed},
		"replaced once more":   {"the pod that returned was replaced by one that overflowed", []observation{{time.Second, home}, {time.Minute, abroad}}, Overflowed},
		"bound, then vanished": {"the deadline stays", []observation{{time.Minute, home}, {2 * time.Minute, nil}, {time.Minute + ReadyTimeout, nil}}, NotReady},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := New()
			p.Start(start, c)
			var got Outcome
			for _, o := range tc.observations {
				got, _, _ = p.Settle(start.Add(o.after), o.found)
			}
			if got != tc.want || (p.Moving() == nil) != (tc.want != "") {
				t.Errorf("%s: got %q, moving %v; want %q", tc.reason, got, p.Moving(), tc.want)
			}
		})
	}
}

// world is a cluster at random times, and what a move has to comply with.
type world struct {
	*Planner
	now        time.Time
	candidates []Candidate
	// observations of room by pod, and since when there is one of each.
	roomSince    map[types.UID]time.Time
	lastObserved time.Time
	restsUntil   map[types.UID]time.Time
	lastMove     map[string]time.Time
	moving       bool
	made         int
}

// TestMoves: whatever happens, there is one move at a time, none before the minimum stay,
// none unless there was room in all observations for its time, none while its owner
// rests, and no namespace moves a pod while another one waits longer for its turn.
func TestMoves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{Planner: New(), now: start, roomSince: map[types.UID]time.Time{}, restsUntil: map[types.UID]time.Time{}, lastMove: map[string]time.Time{}}
		for range rapid.IntRange(1, 6).Draw(t, "pods") {
			w.add(t)
		}
		t.Repeat(map[string]func(*rapid.T){
			"time passes": func(t *rapid.T) {
				w.now = w.now.Add(time.Duration(rapid.Int64Range(1, 90).Draw(t, "seconds")) * time.Second)
			},
			"a pod overflows": func(t *rapid.T) {
				if len(w.candidates) < 10 {
					w.add(t)
				}
			},
			"room changes": func(t *rapid.T) {
				if len(w.candidates) > 0 {
					i := rapid.IntRange(0, len(w.candidates)-1).Draw(t, "pod")
					w.candidates[i].Room = !w.candidates[i].Room
				}
			},
			"plan":   w.plan,
			"settle": w.settle,
		})
	})
}

func (w *world) add(t *rapid.T) {
	w.made++
	w.candidates = append(w.candidates, Candidate{
		Pod: types.UID(fmt.Sprint("p", w.made)), Name: fmt.Sprint("p", w.made), Since: w.now, Room: rapid.Bool().Draw(t, "room"),
		Namespace: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "namespace"), Owner: types.UID(rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "owner")),
		Price: float64(rapid.IntRange(0, 3).Draw(t, "price")),
		After: time.Duration(rapid.IntRange(1, 120).Draw(t, "after")) * time.Second, MinimumStay: time.Duration(rapid.IntRange(1, 600).Draw(t, "stay")) * time.Second,
	})
}

// permitted reports whether a candidate may move by the observations.
func (w *world) permitted(c *Candidate) bool {
	since, room := w.roomSince[c.Pod]
	return room && w.now.Sub(since) >= c.After && w.now.Sub(c.Since) >= c.MinimumStay && !w.now.Before(w.restsUntil[c.Owner])
}

func (w *world) plan(t *rapid.T) {
	if w.now.Sub(w.lastObserved) > maxGap {
		clear(w.roomSince)
	}
	w.lastObserved = w.now
	for _, c := range w.candidates {
		if _, known := w.roomSince[c.Pod]; !c.Room {
			delete(w.roomSince, c.Pod)
		} else if !known {
			w.roomSince[c.Pod] = w.now
		}
	}
	next := w.Plan(w.now, w.candidates)
	waits := slices.ContainsFunc(w.candidates, func(c Candidate) bool { return w.permitted(&c) })
	switch {
	case next == nil && waits && !w.moving:
		t.Fatal("a pod that may move does not")
	case next == nil:
		return
	case w.moving:
		t.Fatal("two moves at a time")
	case !w.permitted(next):
		t.Fatalf("%+v moves; room since %s, its owner rests until %s, now %s", next, w.roomSince[next.Pod], w.restsUntil[next.Owner], w.now)
	}
	for _, c := range w.candidates {
		if w.permitted(&c) && w.lastMove[c.Namespace].Before(w.lastMove[next.Namespace]) {
			t.Fatalf("namespace %s is before its turn: %s has waited longer", next.Namespace, c.Namespace)
		}
	}
	chosen := *next
	w.lastMove[chosen.Namespace] = w.now
	if rapid.Bool().Draw(t, "refused") {
		w.restsUntil[chosen.Owner] = w.Refused(w.now, chosen)
		if rest := w.restsUntil[chosen.Owner].Sub(w.now); rest < firstRetry || rest > MaxRetry {
			t.Fatalf("refused, and rests for %s", rest)
		}
		return
	}
	w.Start(w.now, chosen)
	w.moving = true
	w.candidates = slices.DeleteFunc(w.candidates, func(c Candidate) bool { return c.Pod == chosen.Pod })
	delete(w.roomSince, chosen.Pod)
}

func (w *world) settle(t *rapid.T) {
	owner := types.UID("")
	if m := w.Moving(); m != nil {
		owner = m.Owner
	}
	found := rapid.SampledFrom([]*Replacement{nil, {}, {Bound: true}, {Bound: true, Ready: true}, {Bound: true, Abroad: true}}).Draw(t, "replacement")
	outcome, retryAt, ended := w.Settle(w.now, found)
	if !ended {
		return
	}
	if !w.moving {
		t.Fatal("a move ended that had not begun")
	}
	w.moving = false
	w.restsUntil[owner] = retryAt
	if rest := retryAt.Sub(w.now); outcome != Returned && (rest < firstBackOff || rest > maxBackOff) {
		t.Fatalf("%s, and rests for %s", outcome, rest)
	}
}

// TestFlapping: an owner whose pods overflow again each time, and a cluster that shows
// room all the time, result in few evictions.
func TestFlapping(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pods := rapid.IntRange(1, 5).Draw(t, "pods")
		outcomes := rapid.SampledFrom([][]*Replacement{
			{{Bound: true, Abroad: true}}, {nil}, {{Bound: true}},
			{{Bound: true, Abroad: true}, nil, {Bound: true}},
		}).Draw(t, "replacements")
		p, now := New(), start
		var all []Candidate
		for i := range pods {
			all = append(all, guest("a", "x", fmt.Sprint("x-", i)))
		}
		moves, ends := 0, start.Add(3*24*time.Hour)
		for ; now.Before(ends); now = now.Add(50 * time.Second) {
			p.Settle(now, outcomes[moves%len(outcomes)])
			if next := p.Plan(now, all); next != nil {
				moves++
				p.Start(now, *next)
			}
		}
		// Six doublings until maxBackOff, then one move in that time.
		if most := 8 + int(ends.Sub(start)/maxBackOff); moves > most || moves < 13 {
			t.Fatalf("%d moves in three days, want 13 to %d", moves, most)
		}
	})
}

func TestPeriod(t *testing.T) {
	for _, tc := range []struct {
		after []time.Duration
		want  time.Duration
	}{
		{nil, 10 * time.Second}, {[]time.Duration{5 * time.Minute, 20 * time.Second}, 5 * time.Second}, {[]time.Duration{0}, 250 * time.Millisecond}, {[]time.Duration{time.Hour}, 10 * time.Second},
	} {
		var candidates []Candidate
		for _, after := range tc.after {
			candidates = append(candidates, Candidate{After: after})
		}
		if got := Period(candidates); got != tc.want {
			t.Errorf("%v: got %s, want %s", tc.after, got, tc.want)
		}
	}
}
