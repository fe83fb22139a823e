package answers_test

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/e2e/expect"
)

const wait, answerIn = 30 * time.Second, 30 * time.Second

var start = time.Unix(1_000_000, 0)

func at(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }

func pods(count int32, name, cpu string) broker.HeldCapacity {
	return capacity.OfPodSets([]broker.PodSet{{Name: name, Count: count, Requests: broker.FromList(expect.Resources("cpu", cpu))}})
}

func withPodSecurity(standard string, c broker.HeldCapacity) broker.HeldCapacity {
	c.PodSets[0].PodSecurity = standard
	return c
}

type check struct {
	uid      types.UID
	cluster  string
	want     broker.HeldCapacity
	at       time.Time
	rejected string
}

type memoryCase struct {
	happened func(*answers.Memory)
	checks   []check
}

func TestMemory(t *testing.T) {
	runMemory(t, map[string]memoryCase{
		"a refusal is remembered for the shape, for every Reservation": {
			func(m *answers.Memory) { m.Refused("paris", "rome", pods(2, "a", "1"), "full", wait, at(0)) },
			[]check{
				{"r", "paris", pods(2, "other-name", "1"), at(1), answers.ReasonRefused},
				{"s", "paris", pods(5, "a", "1"), at(29), answers.ReasonRefused},
				{"s", "paris", pods(1, "a", "1"), at(1), ""},
				{"s", "paris", pods(2, "a", "2"), at(1), ""},
				{"s", "berlin", pods(2, "a", "1"), at(1), ""},
				{"s", "paris", pods(2, "a", "1"), at(30), ""},
			},
		},
		"another wait counts from the next refusal": {
			func(m *answers.Memory) {
				m.Refused("paris", "rome", pods(2, "a", "1"), "full", wait, at(0))
				m.Refused("paris", "rome", pods(2, "a", "1"), "full", 10*wait, at(30))
			},
			[]check{
				{"s", "paris", pods(2, "a", "1"), at(329), answers.ReasonRefused},
				{"s", "paris", pods(2, "a", "1"), at(330), ""},
			},
		},
		"what a consumer cannot use concerns its Reservation only, whatever the provider answers": {
			func(m *answers.Memory) {
				m.Unusable("paris", "r", 1, "taken", wait, at(0))
				m.Answered("paris", "r", at(1), at(1))
				m.Accepted("paris", pods(2, "a", "1"), at(1))
			},
			[]check{
				{"r", "paris", pods(2, "a", "1"), at(29), answers.ReasonUnusable},
				{"r", "paris", pods(7, "a", "3"), at(29), answers.ReasonUnusable},
				{"s", "paris", pods(2, "a", "1"), at(1), ""},
				{"r", "berlin", pods(2, "a", "1"), at(1), ""},
				{"r", "paris", pods(2, "a", "1"), at(30), ""},
			},
		},
		"what a consumer can use again is asked again": {
			func(m *answers.Memory) {
				m.Unusable("paris", "r", 1, "taken", wait, at(0))
				m.Usable("paris", "r")
			},
			[]check{{"r", "paris", pods(2, "a", "1"), at(1), ""}},
		},
		"pods of another Pod Security Standard are of another shape": {
			func(m *answers.Memory) {
				m.Refused("paris", "rome", withPodSecurity("baseline", pods(2, "a", "1")), "violates", wait, at(0))
			},
			[]check{
				{"r", "paris", withPodSecurity("baseline", pods(2, "a", "1")), at(1), answers.ReasonRefused},
				{"r", "paris", withPodSecurity("restricted", pods(2, "a", "1")), at(1), ""},
			},
		},
		"an acceptance of the shape ends the memory of its refusal": {
			func(m *answers.Memory) {
				m.Refused("paris", "rome", pods(2, "a", "1"), "full", wait, at(0))
				m.Accepted("paris", pods(1, "b", "1"), at(1))
			},
			[]check{{"r", "paris", pods(2, "a", "1"), at(1), ""}},
		},
		"one asks again, the others wait for the answer": {
			func(m *answers.Memory) {
				m.Refused("paris", "rome", pods(2, "a", "1"), "full", wait, at(0))
				m.Asked("paris", "r", pods(2, "a", "1"), at(31))
			},
			[]check{
				{"r", "paris", pods(2, "a", "1"), at(32), ""},
				{"s", "paris", pods(2, "a", "1"), at(32), answers.ReasonRefused},
				{"s", "paris", pods(2, "a", "1"), at(61), ""},
			},
		},
		"each further refusal counts for longer": {
			func(m *answers.Memory) {
				m.Refused("paris", "rome", pods(2, "a", "1"), "full", wait, at(0))
				m.Refused("paris", "rome", pods(2, "a", "1"), "full", wait, at(30))
			},
			[]check{{"r", "paris", pods(2, "a", "1"), at(89), answers.ReasonRefused}, {"r", "paris", pods(2, "a", "1"), at(90), ""}},
		},
		"a cluster that is forgotten is like a new one": {
			func(m *answers.Memory) { m.Missed("paris", "r", at(-30), false, wait, at(0)); m.Forget("paris") },
			[]check{{"r", "paris", pods(2, "a", "1"), at(1), ""}},
		},
	})
}

// TestWordsOfRefusals: what a provider says to one consumer is not repeated to others, which
// ask for such pods.
func TestWordsOfRefusals(t *testing.T) {
	m := answers.New()
	refuse := func(consumer, message string, second int) {
		m.Refused("paris", consumer, pods(2, "a", "1"), message, wait, at(second))
	}
	expectMessage := func(consumer, want string, second int) {
		t.Helper()
		rejections, _ := m.Rejections(consumer, "r", pods(2, "b", "1"), answerIn, at(second))
		if got := rejections["paris"]; got.Reason != answers.ReasonRefused || got.Message != want {
			t.Errorf("%s: %+v", consumer, got)
		}
	}
	const others = "The provider has refused such pods. It is asked again later."
	refuse("rome", "\"rome may not\"", 0)
	expectMessage("rome", "The provider refused: \"rome may not\". It is asked again later.", 1)
	expectMessage("oslo", others, 1)
	// Refused at about the same time, which is no news.
	refuse("oslo", "\"full\"", 1)
	expectMessage("oslo", "The provider refused: \"full\". It is asked again later.", 2)
	expectMessage("rome", "The provider refused: \"rome may not\". It is asked again later.", 2)
	for i := range 100 {
		refuse(fmt.Sprint("c", i), "no", 3)
	}
	expectMessage("c99", others, 4)
	// A later refusal is about a later time.
	refuse("oslo", "\"again\"", 40)
	expectMessage("rome", others, 41)
}

func TestSilence(t *testing.T) {
	runMemory(t, map[string]memoryCase{
		"a provider that does not answer is asked for nothing": {
			func(m *answers.Memory) { m.Missed("paris", "r", at(-30), false, wait, at(0)) },
			[]check{
				{"r", "paris", pods(1, "a", "1"), at(1), answers.ReasonNotAnswering},
				{"r", "paris", broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", "1"))}, at(1), answers.ReasonNotAnswering},
				{"r", "paris", pods(1, "a", "1"), at(30), ""},
			},
		},
		"its next answer ends that": {
			func(m *answers.Memory) {
				m.Missed("paris", "r", at(-30), false, wait, at(0))
				m.Answered("paris", "s", at(-60), at(1))
			},
			[]check{{"r", "paris", pods(1, "a", "1"), at(1), ""}},
		},
		"one that waits for a Reservation's guests is not silent for others": {
			func(m *answers.Memory) { m.Missed("paris", "r", at(-30), true, wait, at(0)) },
			[]check{
				{"r", "paris", pods(1, "a", "1"), at(29), answers.ReasonNotAnswering},
				{"s", "paris", pods(1, "a", "1"), at(1), ""},
				{"r", "paris", pods(1, "a", "1"), at(30), ""},
			},
		},
		"nor is one that has answered others since": {
			func(m *answers.Memory) {
				m.Answered("paris", "s", at(-60), at(-10))
				m.Missed("paris", "r", at(-30), false, wait, at(0))
			},
			[]check{{"r", "paris", pods(1, "a", "1"), at(1), answers.ReasonNotAnswering}, {"s", "paris", pods(1, "a", "1"), at(1), ""}},
		},
		"one that answered before is silent": {
			func(m *answers.Memory) {
				m.Answered("paris", "s", at(-60), at(-40))
				m.Missed("paris", "r", at(-30), false, wait, at(0))
			},
			[]check{{"s", "paris", pods(1, "a", "1"), at(1), answers.ReasonNotAnswering}},
		},
	})
}

func TestProgress(t *testing.T) {
	for name, tc := range map[string]struct {
		progress answers.Progress
		want     time.Time
	}{
		"no answer at all":                           {answers.Progress{}, at(30)},
		"the last answer was before the request":     {answers.Progress{At: at(-1), Asked: at(-5)}, at(30)},
		"it answers what was asked before":           {answers.Progress{At: at(29), Asked: at(-40)}, at(59)},
		"it answers what was asked at the same time": {answers.Progress{At: at(29), Asked: at(0)}, at(59)},
		"it answers what was asked a little later":   {answers.Progress{At: at(45), Asked: at(30)}, at(75)},
		"it answers what was asked much later":       {answers.Progress{At: at(45), Asked: at(31)}, at(30)},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.progress.Due(at(0), 30*time.Second); !got.Equal(tc.want) {
				t.Errorf("due at %s, want %s", got, tc.want)
			}
		})
	}
	m := answers.New()
	m.Answered("paris", "r", at(5), at(6))
	m.Answered("paris", "s", at(2), at(7))
	m.Released("paris", "released")
	if got := m.Progress("paris"); !got.At.Equal(at(7)) || !got.Asked.Equal(at(5)) {
		t.Errorf("got %+v", got)
	}
}

func runMemory(t *testing.T, cases map[string]memoryCase) {
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			m := answers.New()
			tc.happened(m)
			for i, c := range tc.checks {
				all, until := m.Rejections("rome", c.uid, c.want, answerIn, c.at)
				if got := all[c.cluster].Reason; got != c.rejected || (len(all) > 0) != until.After(c.at) {
					t.Errorf("check %d: rejected with %q until %s, want %q", i, got, until, c.rejected)
				}
			}
		})
	}
}

// TestRounds: a provider that refuses everything costs few rounds, however many
// Reservations of the shape there are.
func TestRounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := answers.New()
		reservations, seconds := rapid.IntRange(1, 100).Draw(t, "reservations"), 100
		rounds := 0
		for second := range seconds {
			for i := range reservations {
				uid := types.UID(fmt.Sprint(i))
				if rejected, _ := m.Rejections("rome", uid, pods(1, "a", "1"), answerIn, at(second)); len(rejected) == 0 {
					rounds++
					m.Asked("paris", uid, pods(1, "a", "1"), at(second))
					m.Refused("paris", "rome", pods(1, "a", "1"), "full", wait, at(second))
				}
			}
		}
		if rounds > 3 {
			t.Fatalf("%d rounds in %d s", rounds, seconds)
		}
	})
}

// TestMemoryIsBounded: a consumer that varies its shapes does not make the broker remember
// all of them. The shapes that were refused last are kept, and what the provider does not
// answer.
func TestMemoryIsBounded(t *testing.T) {
	m := answers.New()
	const shapes = 10_000
	m.Missed("paris", "r", at(-30), false, time.Hour, at(0))
	for i := range shapes {
		m.Refused("paris", "rome", pods(1, "a", fmt.Sprintf("%dm", i+1)), "full", time.Hour, at(0))
	}
	if n := m.Len("paris"); n > answers.MaxEntries+1 {
		t.Fatalf("%d entries are kept", n)
	}
	m.Answered("paris", "r", at(-60), at(0))
	for i, want := range map[int]string{0: "", shapes - 1: answers.ReasonRefused, shapes - answers.MaxEntries/2: answers.ReasonRefused} {
		rejected, _ := m.Rejections("rome", "r", pods(1, "a", fmt.Sprintf("%dm", i+1)), answerIn, at(1))
		if got := len(rejected) > 0; got != (want != "") {
			t.Errorf("shape %d: %+v", i, rejected)
		}
	}
	// What has ended long ago is not kept.
	m.Refused("paris", "rome", pods(1, "a", "9999m"), "full", wait, at(1_000_000))
	if n := m.Len("paris"); n != 1 {
		t.Errorf("%d entries are kept", n)
	}
}

// TestQuietPeriod: what happens after a quiet period counts like the first.
func TestQuietPeriod(t *testing.T) {
	for name, happens := range map[string]func(m *answers.Memory, pods broker.HeldCapacity, second int){
		"refusal": func(m *answers.Memory, pods broker.HeldCapacity, second int) {
			m.Refused("paris", "rome", pods, "full", wait, at(second))
		},
		"silence": func(m *answers.Memory, _ broker.HeldCapacity, second int) {
			m.Missed("paris", "r", at(second-30), false, wait, at(second))
		},
	} {
		m := answers.New()
		few, many := pods(2, "a", "1"), pods(9, "a", "1")
		happens(m, few, 0)
		happens(m, few, 30)
		if rejected, until := m.Rejections("rome", "r", few, answerIn, at(31)); len(rejected) == 0 || !until.Equal(at(90)) {
			t.Errorf("%s, the second time: until %s", name, until)
		}
		happens(m, many, 10_000)
		if rejected, until := m.Rejections("rome", "r", many, answerIn, at(10_001)); len(rejected) == 0 || !until.Equal(at(10_030)) {
			t.Errorf("%s, after a quiet period: until %s", name, until)
		}
		if rejected, _ := m.Rejections("rome", "r", few, answerIn, at(10_001)); name == "refusal" && len(rejected) > 0 {
			t.Errorf("fewer pods than were refused after a quiet period are rejected: %+v", rejected)
		}
	}
}

func TestDeadline(t *testing.T) {
	for count, want := range map[int32]time.Duration{1: 30 * time.Second, 249: 30 * time.Second, 250: time.Minute, 1000: 150 * time.Second, 1_000_000: 5 * time.Minute} {
		if got := answers.Deadline(30*time.Second, pods(count, "a", "1")); got != want {
			t.Errorf("the deadline for %d pods is %v, want %v", count, got, want)
		}
	}
	total := broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", "1000"))}
	if got := answers.Deadline(30*time.Second, total); got != 30*time.Second {
		t.Errorf("the deadline for a total is %v, want 30s", got)
	}
}
