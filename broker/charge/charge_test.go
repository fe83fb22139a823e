package charge_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/spillway-dev/spillway/broker/charge"
)

func TestLabel(t *testing.T) {
	short, id := "rome-0b6e", "rome-"+strings.Repeat("0123456789", 7)
	if charge.Label(short) != short {
		t.Error("an ID that fits a label was changed")
	}
	if errs := validation.IsValidLabelValue(charge.Label(id)); len(errs) > 0 || charge.Label(id) == charge.Label(id+"x") {
		t.Errorf("%q: %v", charge.Label(id), errs)
	}
}

// TestOf: what a pod uses of these holds.
func TestOf(t *testing.T) {
	type (
		pod  = charge.Pod[string]
		hold = charge.Hold[string]
	)
	pool, web, twin, db, gone := hold{Namespace: "bank", Label: "pool", ByHand: true}, hold{Namespace: "shop", Label: "web", Key: "web"},
		hold{Namespace: "shop", Label: "twin", Key: "web"}, hold{Namespace: "shop", Label: "db", Key: "db"}, hold{Namespace: "shop", Label: "gone"}
	for name, tc := range map[string]struct {
		reason string
		pod    pod
		want   string
	}{
		"by hand":                 {"of whatever namespace and owner", pod{Namespace: "shop", Label: "pool", Key: "web", Keyed: true}, "pool"},
		"by hand, owner unknown":  {"the label suffices", pod{Namespace: "shop", Label: "pool"}, "pool"},
		"its owner's":             {"the one of its key, whatever that is called now", pod{Namespace: "shop", Label: "before", Key: "db", Keyed: true}, "db"},
		"without a label":         {"the one of its key", pod{Namespace: "shop", Key: "db", Keyed: true}, "db"},
		"another's label":         {"its key goes before the label of one that was not made by hand", pod{Namespace: "shop", Label: "web", Key: "db", Keyed: true}, "db"},
		"several of its key":      {"the one that its label names", pod{Namespace: "shop", Label: "twin", Key: "web", Keyed: true}, "twin"},
		"several, none named":     {"the first", pod{Namespace: "shop", Label: "before", Key: "web", Keyed: true}, "web"},
		"owner unknown":           {"the one of its namespace that its label names", pod{Namespace: "shop", Label: "db"}, "db"},
		"owner without any":       {"what it was bound for, although another owner has adopted it", pod{Namespace: "shop", Label: "db", Key: "new", Keyed: true}, "db"},
		"Reservation is gone":     {"by the label, as long as its pods run", pod{Namespace: "shop", Label: "gone", Key: "new", Keyed: true}, "gone"},
		"of another namespace":    {"no one may use a hold of another namespace by its name", pod{Namespace: "bank", Label: "db"}, ""},
		"nothing":                 {"neither its owner nor its label has one", pod{Namespace: "shop", Label: "before", Key: "new", Keyed: true}, ""},
		"neither owner nor label": {"it uses none", pod{Namespace: "shop"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			all := []hold{pool, web, twin, db, gone}
			got := ""
			if i, ok := charge.Of(tc.pod, charge.NewIndex(all)); ok {
				got = all[i].Label
			}
			if got != tc.want {
				t.Errorf("it uses %q, want %q: %s", got, tc.want, tc.reason)
			}
		})
	}
}
