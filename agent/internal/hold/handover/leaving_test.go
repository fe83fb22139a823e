package handover_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/spillway-dev/spillway/agent/internal/hold/handover"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// guestsOn returns guests, by "<name> <node> <cpu>" and words such as "hold=r1", of which the
// later ones are newer.
func guestsOn(all ...string) (out inventory.Places) {
	for i, text := range all {
		fields := strings.Fields(text)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fields[0], UID: types.UID(fields[0]), CreationTimestamp: metav1.Unix(int64(i), 0)}}
		if fields[1] != "-" {
			pod.Spec.NodeName = fields[1]
		}
		for _, word := range fields[3:] {
			switch word {
			case "marked":
				pod.Status.Conditions = []corev1.PodCondition{{Type: broker.PodMustLeave, Status: corev1.ConditionTrue}}
			case "terminating":
				pod.DeletionTimestamp = ptr.To(metav1.Unix(1, 0))
			}
			if label, ok := strings.CutPrefix(word, "hold="); ok {
				pod.Labels = map[string]string{broker.LabelHold: label}
			}
		}
		out.Guests, out.Requests = append(out.Guests, pod), append(out.Requests, expect.Resources("cpu", fields[2]))
	}
	return out
}

// promises are holds, the first with label "r1", the next with "r2".
func promises(held ...broker.HeldCapacity) (out []charge.Promise) {
	for i, h := range held {
		out = append(out, charge.Promise{Name: fmt.Sprint("r", i+1), Held: h})
	}
	return out
}

func notCordoned(node string) bool { return node != "cordoned" }

func TestLeaving(t *testing.T) {
	small, large := set("small", 2, expect.Resources("cpu", "1")), set("large", 1, expect.Resources("cpu", "2"))
	for name, tc := range map[string]struct {
		reason string
		guests inventory.Places
		held   []broker.HeldCapacity
		want   string
	}{
		"all have a place":      {"a place elsewhere is held for each", guestsOn("a node 1", "b cordoned 1"), []broker.HeldCapacity{pods(small)}, ""},
		"one has none":          {"the newest leaves", guestsOn("a node 1", "b cordoned 1", "c cordoned 1"), []broker.HeldCapacity{pods(small)}, "c"},
		"nothing is held":       {"only those on the cordoned node leave", guestsOn("a node 1", "b cordoned 1"), nil, "b"},
		"those that have left":  {"they and those without a node need no place", guestsOn("a node 1 terminating", "b cordoned 1 terminating", "c - 1", "d cordoned 1", "e cordoned 1"), []broker.HeldCapacity{pods(small)}, ""},
		"marked before":         {"it is the same one again, although another is newer", guestsOn("a node 1", "b cordoned 1 marked", "c cordoned 1"), []broker.HeldCapacity{pods(small)}, "b"},
		"shapes":                {"each shape has its own places, of any hold", guestsOn("a node 1", "b cordoned 2", "c cordoned 1", "d cordoned 1"), []broker.HeldCapacity{pods(large), pods(small)}, "d"},
		"its own hold":          {"those whose hold has lost its capacity leave, not the newest", guestsOn("a cordoned 1 hold=r1", "b cordoned 1 hold=r2"), []broker.HeldCapacity{{}, pods(small)}, "a"},
		"another hold has room": {"the consumer lowers only the hold that has lost capacity", guestsOn("a node 1 hold=r1", "b cordoned 1 hold=r1"), []broker.HeldCapacity{pods(set("one", 1, expect.Resources("cpu", "1"))), pods(small)}, "b"},
		"a hold that is gone":   {"its guests use what others have", guestsOn("a cordoned 1 hold=gone"), []broker.HeldCapacity{pods(small)}, ""},
		"a total":               {"what fits a divisible total stays", guestsOn("a node 1", "b cordoned 1", "c cordoned 1"), []broker.HeldCapacity{total(expect.Resources("cpu", "2"))}, "c"},
	} {
		t.Run(name, func(t *testing.T) {
			must, _ := handover.Leaving(tc.guests, notCordoned, promises(tc.held...))
			if got := fmt.Sprint(slices.Sorted(maps.Keys(must))); got != "["+tc.want+"]" {
				t.Errorf("%s: %s must leave, want %s", tc.reason, got, tc.want)
			}
		})
	}
}

// TestLeavingProperties: as many guests on the cordoned node leave as have no place, no other
// one does, and the same ones once they are marked.
func TestLeavingProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var all []string
		good, exposed := 0, 0
		for i := range rapid.IntRange(0, 12).Draw(t, "guests") {
			node := "node"
			if rapid.Bool().Draw(t, "cordoned") {
				node, exposed = "cordoned", exposed+1
			} else {
				good++
			}
			all = append(all, fmt.Sprintf("g%d %s 1", i, node))
		}
		held := rapid.Int32Range(0, 12).Draw(t, "held")
		holds := promises(pods(set("pods", held, expect.Resources("cpu", "1"))))
		guests := guestsOn(all...)
		must, seen := handover.Leaving(guests, notCordoned, holds)
		if want := max(0, exposed-max(0, int(held)-good)); len(must) != want || seen != exposed {
			t.Fatalf("%d of %d guests must leave, want %d of %d", len(must), seen, want, exposed)
		}
		for _, pod := range guests.Guests {
			if must[pod.UID] && pod.Spec.NodeName == "node" {
				t.Fatalf("%s must leave a node that is not cordoned", pod.Name)
			}
			if must[pod.UID] {
				pod.Status.Conditions = []corev1.PodCondition{{Type: broker.PodMustLeave, Status: corev1.ConditionTrue}}
			}
		}
		if again, _ := handover.Leaving(guests, notCordoned, holds); !maps.Equal(again, must) {
			t.Fatalf("%v must leave, and once they are marked %v", must, again)
		}
	})
}
