// Package expect holds what the tests of all packages share: waiting for a
// condition with a deadline, ending a test on an error, and building resource
// lists. It is the only place where a test sleeps.
package expect

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

const (
	// Deadline is how long Eventually waits. It is generous, because tests run
	// beside other work; a passing test does not use it.
	Deadline = 3 * time.Minute
	interval = 20 * time.Millisecond
)

// NoError ends the test if err is not nil.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Eventually polls check until it reports ok, and ends the test with the last
// observed state after Deadline.
func Eventually(t testing.TB, what string, check func() (ok bool, state string)) {
	t.Helper()
	EventuallyWithin(t, Deadline, what, check)
}

// EventuallyWithin is Eventually with a deadline of its own.
func EventuallyWithin(t testing.TB, deadline time.Duration, what string, check func() (ok bool, state string)) {
	t.Helper()
	end := time.Now().Add(deadline)
	for {
		ok, state := check()
		if ok {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("timed out after %s waiting for %s: %s", deadline, what, state)
		}
		time.Sleep(interval)
	}
}

// Consistently polls check for the given period and ends the test as soon as it
// does not report ok. Use it only where no positive event shows that nothing
// happens.
func Consistently(t testing.TB, period time.Duration, what string, check func() (ok bool, state string)) {
	t.Helper()
	for end := time.Now().Add(period); time.Now().Before(end); time.Sleep(interval) {
		if ok, state := check(); !ok {
			t.Fatalf("expected %s for %s: %s", what, period, state)
		}
	}
}

// Resources builds a resource list from pairs of names and quantities, as in
// Resources("cpu", "500m", "memory", "1Gi").
func Resources(pairs ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i+1 < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}

// ProcessExists reports whether a process exists that is not a zombie.
func ProcessExists(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(rest, "Z")
}
