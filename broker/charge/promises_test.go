package charge_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/capacity/capacitytest"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var set, pods, total = capacitytest.Set, capacitytest.Pods, capacitytest.Total

// promises are holds, the first with label "r1", the next with "r2".
func promises(held ...broker.HeldCapacity) (out []charge.Promise) {
	for i, h := range held {
		out = append(out, charge.Promise{Name: fmt.Sprint("r", i+1), Held: h})
	}
	return out
}

// running are guests, each as the label of its hold, which may be "-" for none, and its CPU.
func running(guests ...string) (out []charge.Guest) {
	for _, text := range guests {
		label, cpu, _ := strings.Cut(text, " ")
		out = append(out, charge.Guest{Requests: expect.Resources("cpu", cpu), Label: strings.TrimPrefix(label, "-")})
	}
	return out
}

func TestUnused(t *testing.T) {
	cpu := func(count int32, each string) broker.HeldCapacity {
		return pods(set("a", count, expect.Resources("cpu", each)))
	}
	cases := map[string]struct {
		reason string
		held   []broker.HeldCapacity
		guests []charge.Guest
		want   string
	}{
		"none runs":      {reason: "all is unused", held: []broker.HeldCapacity{pods(set("a", 2, expect.Resources("cpu", "1")))}, want: "2 pods, cpu 2"},
		"one runs":       {reason: "matched by its requests", held: []broker.HeldCapacity{pods(set("a", 2, expect.Resources("cpu", "1")))}, guests: running("- 1000m"), want: "1 pods, cpu 1"},
		"the right one":  {reason: "an exact match goes before one that is merely large enough", held: []broker.HeldCapacity{pods(set("a", 1, expect.Resources("cpu", "2"))), pods(set("b", 1, expect.Resources("cpu", "1")))}, guests: running("- 2"), want: "0 pods, nothing; 1 pods, cpu 1"},
		"a smaller one":  {reason: "it uses the smallest promised pod that is large enough", held: []broker.HeldCapacity{pods(set("a", 1, expect.Resources("cpu", "4")), set("b", 1, expect.Resources("cpu", "2")))}, guests: running("- 1"), want: "1 pods, cpu 4"},
		"a total":        {reason: "used by guests that match no promised pod", held: []broker.HeldCapacity{total(expect.Resources("cpu", "4", "memory", "1Gi"))}, guests: running("- 1", "- 1"), want: "0 pods, cpu 2, memory 1Gi"},
		"more than held": {reason: "a guest that does not fit uses nothing", held: []broker.HeldCapacity{total(expect.Resources("cpu", "1"))}, guests: running("- 3"), want: "0 pods, cpu 1"},
		"two totals":     {reason: "a guest uses one of them, which it fits", held: []broker.HeldCapacity{total(expect.Resources("cpu", "1")), total(expect.Resources("cpu", "2"))}, guests: running("- 2"), want: "0 pods, cpu 1; 0 pods, nothing"},

		"its own hold":               {reason: "of equal requests, the label decides", held: []broker.HeldCapacity{cpu(2, "1"), cpu(2, "1")}, guests: running("r2 1", "r2 1"), want: "2 pods, cpu 2; 0 pods, nothing"},
		"a label without a hold":     {reason: "as without a label", held: []broker.HeldCapacity{cpu(2, "1"), cpu(2, "1")}, guests: running("gone 1"), want: "1 pods, cpu 1; 2 pods, cpu 2"},
		"those without a label":      {reason: "they take what those with one leave", held: []broker.HeldCapacity{cpu(1, "1"), cpu(1, "1")}, guests: running("- 1", "r1 1"), want: "0 pods, nothing; 0 pods, nothing"},
		"more than its own hold":     {reason: "what its own hold lacks is taken from another one", held: []broker.HeldCapacity{cpu(1, "1"), cpu(2, "1")}, guests: running("r1 1", "r1 1"), want: "0 pods, nothing; 1 pods, cpu 1"},
		"a larger pod of its own":    {reason: "before an equal one of another hold", held: []broker.HeldCapacity{cpu(1, "1"), cpu(1, "2")}, guests: running("r2 1"), want: "1 pods, cpu 1; 0 pods, nothing"},
		"its own total":              {reason: "before an equal pod of another hold, and another total", held: []broker.HeldCapacity{cpu(1, "1"), total(expect.Resources("cpu", "2")), total(expect.Resources("cpu", "2"))}, guests: running("r3 1"), want: "1 pods, cpu 1; 0 pods, cpu 2; 0 pods, cpu 1"},
		"more than its own total":    {reason: "those that its total does not cover use what the others have", held: []broker.HeldCapacity{cpu(1, "1"), total(expect.Resources("cpu", "1")), total(expect.Resources("cpu", "2"))}, guests: running("r2 1", "r2 1", "r2 1"), want: "0 pods, nothing; 0 pods, nothing; 0 pods, cpu 1"},
		"parts of a total":           {reason: "the other total is not used, in whatever form the amounts are kept", held: []broker.HeldCapacity{total(expect.Resources("cpu", "700m")), total(expect.Resources("cpu", "100m"))}, guests: running("r1 100m", "- 500m"), want: "0 pods, cpu 100m; 0 pods, cpu 100m"},
		"the total of another label": {reason: "a total that is in use is not used twice", held: []broker.HeldCapacity{total(expect.Resources("cpu", "2"))}, guests: running("r1 1", "- 2"), want: "0 pods, cpu 1"},

		"one pod in place of many":  {reason: "a pod that is larger than each that is promised has no place", held: []broker.HeldCapacity{cpu(10, "100m")}, guests: running("- 1000m"), want: "10 pods, cpu 1"},
		"many in place of one":      {reason: "the first uses it, the other has no place", held: []broker.HeldCapacity{cpu(1, "1")}, guests: running("- 400m", "- 400m"), want: "0 pods, nothing"},
		"beside those that match":   {reason: "these use their own pods", held: []broker.HeldCapacity{cpu(10, "100m")}, guests: running("- 100m", "- 500m", "- 100m"), want: "8 pods, cpu 800m"},
		"beyond all that is held":   {reason: "never below what others left", held: []broker.HeldCapacity{cpu(3, "100m")}, guests: running("- 4"), want: "3 pods, cpu 300m"},
		"a total for another shape": {reason: "a total may be used by guests of any shape", held: []broker.HeldCapacity{cpu(10, "100m"), total(expect.Resources("cpu", "500m"))}, guests: running("- 300m"), want: "10 pods, cpu 1; 0 pods, cpu 200m"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, u := range charge.Unused(promises(tc.held...), tc.guests) {
				got = append(got, fmt.Sprintf("%d pods, %s", u.Pods(), u.Totals))
			}
			if strings.Join(got, "; ") != tc.want {
				t.Errorf("%s: got %q, want %q", tc.reason, strings.Join(got, "; "), tc.want)
			}
		})
	}
}

// TestUnusedInEachResource: a guest uses only what has each resource that it requests.
func TestUnusedInEachResource(t *testing.T) {
	both := func(cpu, memory string) corev1.ResourceList { return expect.Resources("cpu", cpu, "memory", memory) }
	shapes := pods(set("a", 10, both("100m", "1Gi")))
	cases := map[string]struct {
		held  []broker.HeldCapacity
		guest charge.Guest
		want  string
	}{
		"most of one resource":       {[]broker.HeldCapacity{shapes}, charge.Guest{Requests: both("200m", "7Gi")}, "cpu 1, memory 10Gi"},
		"one resource only":          {[]broker.HeldCapacity{shapes}, charge.Guest{Requests: expect.Resources("memory", "1Gi")}, "cpu 900m, memory 9Gi"},
		"one that no pod has":        {[]broker.HeldCapacity{shapes}, charge.Guest{Requests: expect.Resources("nvidia.com/gpu", "1")}, "cpu 1, memory 10Gi"},
		"a total without it":         {[]broker.HeldCapacity{total(expect.Resources("cpu", "4")), shapes}, charge.Guest{Requests: both("1", "4Gi"), Label: "r1"}, "cpu 4; cpu 1, memory 10Gi"},
		"another total that has all": {[]broker.HeldCapacity{total(expect.Resources("cpu", "4")), total(both("1", "6Gi"))}, charge.Guest{Requests: both("1", "4Gi"), Label: "r1"}, "cpu 4; memory 2Gi"},
		"nothing of a total":         {[]broker.HeldCapacity{total(both("1", "2Gi"))}, charge.Guest{Label: "r1"}, "cpu 1, memory 2Gi"},
	}
	for name, tc := range cases {
		var got []string
		for _, u := range charge.Unused(promises(tc.held...), []charge.Guest{tc.guest}) {
			got = append(got, u.Totals.String())
		}
		if strings.Join(got, "; ") != tc.want {
			t.Errorf("%s: got %q, want %q", name, strings.Join(got, "; "), tc.want)
		}
	}
}

// TestUnusedIsWithinTheGrant: guests that have a place and the placeholders of what they do not use
// request no more together than is granted; and a further guest, of whatever shape, leaves no more
// unused than before.
func TestUnusedIsWithinTheGrant(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		kinds := map[corev1.ResourceName]int64{corev1.ResourceCPU: 100, corev1.ResourceMemory: 1000 << 20, broker.ResourceGPU: 1000}
		draw := func(label string, most int64) corev1.ResourceList {
			amounts := capacity.Vector{}
			for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, broker.ResourceGPU} {
				if n := rapid.Int64Range(0, most).Draw(t, label+" "+string(name)); n > 0 {
					amounts[name] = n * kinds[name]
				}
			}
			return amounts.List()
		}
		var held []broker.HeldCapacity
		granted := capacity.Vector{}
		for i := range rapid.IntRange(1, 4).Draw(t, "holds") {
			if rapid.Bool().Draw(t, "divisible") {
				held = append(held, total(draw("total", 20)))
			} else {
				var sets []broker.PodSet
				for j := range rapid.IntRange(1, 3).Draw(t, "sets") {
					sets = append(sets, set(fmt.Sprint("set", j), rapid.Int32Range(0, 10).Draw(t, "count"), draw("pod", 4)))
				}
				held = append(held, broker.HeldCapacity{PodSets: sets, Totals: capacity.OfPodSets(sets).Totals})
			}
			granted.Add(capacity.Ceil(held[i].Totals.List()), 1)
		}
		var guests []charge.Guest
		for range rapid.IntRange(0, 20).Draw(t, "guests") {
			guest := charge.Guest{Requests: draw("guest", 12), Label: rapid.SampledFrom([]string{"", "r1", "r2", "gone"}).Draw(t, "label")}
			if hasPlace(promises(held...), guests, guest) {
				guests = append(guests, guest)
			}
		}

		var before []broker.HeldCapacity
		for n := range len(guests) + 1 {
			unused, together := charge.Unused(promises(held...), guests[:n]), capacity.Vector{}
			left := capacity.Vector{}
			for _, guest := range guests[:n] {
				together.Add(capacity.Ceil(guest.Requests), 1)
			}
			for _, u := range unused {
				together.Add(capacity.Ceil(u.Totals.List()), 1)
				left.Add(capacity.Ceil(u.Totals.List()), 1)
			}
			if !together.IsZero() && together.FitsIn(granted) == 0 {
				t.Fatalf("%d guests and what they do not use: %v, granted are %v", n, together.List(), granted.List())
			}
			if n > 0 && !left.IsZero() {
				most := capacity.Vector{}
				for _, u := range before {
					most.Add(capacity.Ceil(u.Totals.List()), 1)
				}
				if left.FitsIn(most) == 0 {
					t.Fatalf("with guest %d %v are unused, without it %v", n, left.List(), most.List())
				}
			}
			before = unused
		}
	})
}

// hasPlace reports whether a guest uses a part of what others leave.
func hasPlace(promises []charge.Promise, others []charge.Guest, next charge.Guest) bool {
	u := charge.New(promises)
	for _, guest := range others {
		u.Add(guest)
	}
	_, ok := u.Take(next)
	return ok
}
