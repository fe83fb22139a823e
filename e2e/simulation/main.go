// Command simulation runs the production code of the broker and of the agents against
// API servers in memory: two brokers, three clusters, a scheduler that decides which
// call, watch event, request or message comes next, and faults. Invariants are checked
// after every step. The same seed is always the same run.
package main

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// tooLong is when a schedule is taken for stuck, in real time: also on a busy machine,
// one takes seconds.
const tooLong = 10 * time.Minute

func main() {
	// Bubbles need a testing.T, so the schedules run as the test of a testing program.
	testing.Init()
	debug.SetGCPercent(400)
	schedules := flag.Int("schedules", 10000, "number of schedules without planted faults, and the maximum for each planted fault")
	first := flag.Uint64("first", 1, "seed of the first schedule")
	seed := flag.Uint64("seed", 0, "run only this seed, and print its steps")
	planted := flag.Bool("plants", true, "also run the planted faults")
	fault := flag.String("plant", "", "run only this planted fault, or with -seed the seed with it")
	flag.Parse()
	if *fault != "" && plantNamed(*fault).name == "" {
		fmt.Printf("sim: there is no planted fault %q: they are", *fault)
		for _, p := range plants {
			fmt.Printf(" %q", p.name)
		}
		fmt.Println()
		os.Exit(2)
	}
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "simulation", F: func(t *testing.T) {
		ok := false
		if *seed != 0 {
			ok = replay(t, *seed, *fault)
		} else {
			ok = simulate(t, *first, *schedules, *fault, *planted)
		}
		// Before the testing program prints a result of its own.
		if !ok {
			os.Exit(1)
		}
		os.Exit(0)
	}}}, nil, nil)
}

// plantNamed is a planted fault; the empty one if there is none of that name.
func plantNamed(name string) plant {
	if at := slices.IndexFunc(plants, func(p plant) bool { return p.name == name }); at >= 0 {
		return plants[at]
	}
	return plant{}
}

// replay prints the steps of one seed.
func replay(t *testing.T, seed uint64, fault string) bool {
	r := inBubble(t, newSchedule(seed), plantNamed(fault), func(line string) { fmt.Println(line) })
	if r.violation != nil {
		fmt.Printf("VIOLATION of %q: %s\n", r.violation.invariant, r.violation.message)
	}
	return r.violation == nil
}

// simulate runs schedules without planted faults, and then each planted fault until a
// schedule finds it. It reports whether all is as it should be.
func simulate(t *testing.T, first uint64, schedules int, only string, withPlants bool) bool {
	violations, caught, planted := 0, 0, 0
	began := time.Now()
	if only == "" {
		steps, kinds := 0, map[string]int{}
		each(t, first, schedules, func(seed uint64) bool {
			s := newSchedule(seed)
			r := inBubble(t, s, plant{}, nil)
			report.Lock()
			defer report.Unlock()
			steps += r.steps
			if r.violation != nil {
				violations++
				kinds[r.violation.invariant]++
				if kinds[r.violation.invariant] <= maxReported {
					describe(t, s, plant{}, r.violation)
				}
			}
			return true
		})
		took := time.Since(began)
		for _, invariant := range slices.Sorted(maps.Keys(kinds)) {
			fmt.Printf("sim: %d violations of %q\n", kinds[invariant], invariant)
		}
		fmt.Printf("sim: %d schedules with %d steps in %s, %.0f schedules a second\n", schedules, steps, took.Round(time.Second), float64(schedules)/took.Seconds())
	}
	for _, p := range plants {
		if only != "" && p.name != only || !withPlants {
			continue
		}
		planted++
		if find(t, schedules, p) {
			caught++
		}
	}
	fmt.Printf("sim: %d schedules, %d violations, %d planted, %d caught\n", schedules, violations, planted, caught)
	return violations == 0 && caught == planted
}

// maxReported is how many violations of each invariant are shrunk and printed.
const maxReported = 2

// report serializes what workers print and count.
var report sync.Mutex

// find runs schedules with a planted fault until an invariant is violated.
func find(t *testing.T, schedules int, p plant) bool {
	var found *violation
	var by uint64
	each(t, 1, schedules, func(seed uint64) bool {
		s := newSchedule(seed)
		r := inBubble(t, s, p, nil)
		// A schedule that finds a fault of the production code has not found the planted one.
		finds := r.violation != nil && inBubble(t, s, plant{}, nil).violation == nil
		report.Lock()
		defer report.Unlock()
		if finds && (found == nil || seed < by) {
			found, by = r.violation, seed
		}
		return found == nil
	})
	if found == nil {
		fmt.Printf("sim: planted fault %q was not found\n", p.name)
		return false
	}
	fmt.Printf("sim: planted fault %q found by seed %d: %s\n", p.name, by, found.invariant)
	return true
}

// describe prints a violation with its schedule, shrunk.
func describe(t *testing.T, s schedule, p plant, v *violation) {
	smaller := shrink(s, func(s schedule) bool {
		r := inBubble(t, s, p, nil)
		return r.violation != nil && r.violation.invariant == v.invariant
	})
	r := inBubble(t, smaller, p, nil)
	fmt.Printf("VIOLATION of %q: %s\n%s\nReplay: make sim SEED=%d\n", v.invariant, r.violation.message, smaller, s.seed)
}

// each calls a function with so many seeds on all CPUs, until it returns false.
func each(t *testing.T, first uint64, schedules int, do func(seed uint64) bool) {
	var mu sync.Mutex
	next, done := first, false
	take := func() uint64 {
		mu.Lock()
		defer mu.Unlock()
		if done || next >= first+uint64(schedules) {
			return 0
		}
		next++
		return next - 1
	}
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed := take(); seed != 0; seed = take() {
				if !do(seed) {
					mu.Lock()
					done = true
					mu.Unlock()
				}
			}
		})
	}
	workers.Wait()
}

// inBubble runs a schedule in a bubble of its own. One that does not end is a lock that
// is held while a call waits: it panics with all stacks.
func inBubble(t *testing.T, s schedule, p plant, verbose func(string)) (r result) {
	watchdog := time.AfterFunc(tooLong, func() {
		buffer := make([]byte, 1<<20)
		panic(fmt.Sprintf("seed %d with %q does not end:\n%s", s.seed, p.name, buffer[:runtime.Stack(buffer, true)]))
	})
	defer watchdog.Stop()
	synctest.Test(t, func(*testing.T) { r = run(s, p, verbose) })
	return r
}
