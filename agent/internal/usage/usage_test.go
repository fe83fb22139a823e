package usage_test

import (
	"encoding/csv"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/usage"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func item(period, namespace, owner, provider, cpu, cost, saved string) protocol.UsageItem {
	of := protocol.UsageItem{Period: period, Namespace: namespace, Provider: provider, PromisedHours: map[string]string{"cpu": cpu, "memory": "8"}, UsedHours: map[string]string{"cpu": "0.5"}, Cost: cost, Saved: saved}
	of.OwnerKind, of.Owner, _ = strings.Cut(owner, "/")
	if cost != "" {
		of.Currency = "EUR"
	}
	return of
}

var copied = usage.Copy{
	AsOf: time.Date(2026, 3, 2, 10, 0, 0, 0, time.UTC),
	Days: []protocol.UsageItem{
		item("2026-03-01", "shop", "Deployment/web", "paris", "2.25", "0.1", "0.3"), item("2026-03-01", "shop", "Deployment/web", "berlin", "1", "0.2", "0.1"),
		item("2026-03-01", "shop", "", "paris", "4", "", ""), item("2026-03-02", "blog", "Job/build", "paris", "1", "0.1", ""),
	},
	Months: []protocol.UsageItem{item("2026-03", "shop", "Deployment/web", "paris", "100", "10", "-1")},
}

// TestText sums up the providers of an owner; what is not known is no figure.
func TestText(t *testing.T) {
	for name, c := range map[string]struct {
		selection usage.Selection
		want      string
	}{
		"days": {usage.Selection{}, `PERIOD      NAMESPACE  OWNER           PROVIDERS     CPU-H  USED  GIB-H  USED  COST      SAVED
2026-03-02  blog       Job/build       paris         1.00   0.50  8.00   -     0.10 EUR  -
2026-03-01  shop       -               paris         4.00   0.50  8.00   -     -         -
2026-03-01  shop       Deployment/web  berlin,paris  3.25   1.00  16.00  -     0.30 EUR  0.40 EUR
As of 2026-03-02T10:00:00Z.
`},
		"months of a namespace": {usage.Selection{Monthly: true, Namespace: "shop"}, `PERIOD   NAMESPACE  OWNER           PROVIDERS  CPU-H   USED  GIB-H  USED  COST       SAVED
2026-03  shop       Deployment/web  paris      100.00  0.50  8.00   -     10.00 EUR  -1.00 EUR
As of 2026-03-02T10:00:00Z.
`},
		"none of a namespace": {usage.Selection{Namespace: "other"}, "No usage is known of namespace other: none of its pods has overflowed. 2 other namespaces have some: -A shows all.\n"},
	} {
		t.Run(name, func(t *testing.T) {
			table := usage.Of(copied, c.selection)
			if diff := cmp.Diff(c.want, table.Text(explain.Style{})); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// TestNone: where nothing is known at all, no other namespace helps.
func TestNone(t *testing.T) {
	for namespace, want := range map[string]string{
		"shop": "No usage is known of namespace shop, nor of any other: no pod has overflowed, or the broker keeps no history.\n",
		"":     "No usage is known: no pod has overflowed, or the broker keeps no history.\n",
	} {
		table := usage.Of(usage.Copy{}, usage.Selection{Namespace: namespace})
		if got := table.Text(explain.Style{}); got != want {
			t.Errorf("of namespace %q it says %q, want %q", namespace, got, want)
		}
	}
}

// TestTruncated: what is not known here is said, also if no row is left.
func TestTruncated(t *testing.T) {
	for _, days := range [][]protocol.UsageItem{nil, {item("2026-03-01", "shop", "Deployment/web", "paris", "1", "1", "1")}} {
		table := usage.Of(usage.Copy{Days: days, Truncated: true}, usage.Selection{})
		if text := table.Text(explain.Style{}); !strings.Contains(text, "the broker has all") {
			t.Errorf("%d days: %s", len(days), text)
		}
	}
}

// TestCSV: each line has all columns, and no text is a formula.
func TestCSV(t *testing.T) {
	hostile := usage.Copy{Days: []protocol.UsageItem{item("=1", "=shop", "Deployment/@web", "paris", "1/0", "1e999999999", "x\n")}}
	hostile.Days[0].PromisedHours["=x"] = "2"
	hostile.Days[0].Currency = "+1"
	table := usage.Of(hostile, usage.Selection{})
	text, err := table.CSV()
	expect.NoError(t, err)
	lines, err := csv.NewReader(strings.NewReader(text)).ReadAll()
	expect.NoError(t, err)
	if got := strings.Join(lines[1], "|"); got != "'=1|'=shop|Deployment/@web|paris|0.00|0.50|8.00||'=x=2.00|0.00|0.00|'+1" {
		t.Error(got)
	}
}

// FuzzDecode: whatever the ConfigMap has is printed as bounded lines, or is an error.
func FuzzDecode(f *testing.F) {
	valid, err := json.Marshal(copied)
	expect.NoError(f, err)
	for _, content := range []string{string(valid), "", "{}", "null", `{"days":[{"period":"\u0007\n","cost":"1e99","promisedHours":{"a":"1/3"}}]}`} {
		f.Add(content)
	}
	f.Fuzz(func(t *testing.T, content string) {
		c, err := usage.Decode(content)
		if err != nil {
			return
		}
		table := usage.Of(c, usage.Selection{})
		text := table.Text(explain.Style{Wide: true})
		if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' || r == 0x7f }) {
			t.Errorf("control characters in %q", text)
		}
		if lines := strings.Count(text, "\n"); len(table.Rows) > 0 && lines > len(table.Rows)+3 {
			t.Errorf("%d lines for %d rows", lines, len(table.Rows))
		}
		if _, err := table.CSV(); err != nil {
			t.Error(err)
		}
	})
}
