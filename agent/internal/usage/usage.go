package usage

import (
	"cmp"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/text"
)

// Name of the ConfigMap in the agent's namespace, and Key of its content.
const (
	Name = "spillway-usage"
	Key  = "usage.json"
)

// MaxItems is how many items a Copy has of days and of months: the newest.
const MaxItems = 1000

// Copy is the content of the ConfigMap.
type Copy struct {
	// AsOf is when it was read from the broker.
	AsOf time.Time `json:"asOf"`
	// Days are those of the last 31 days, Months those of the last 13 months.
	Days   []protocol.UsageItem `json:"days"`
	Months []protocol.UsageItem `json:"months"`
	// Truncated is whether the broker has more: more items than MaxItems, or than a ConfigMap holds, or
	// days or months that could not be read.
	Truncated bool `json:"truncated,omitempty"`
}

// Decode decodes the content of the ConfigMap.
func Decode(content string) (c Copy, err error) {
	if err := json.Unmarshal([]byte(content), &c); err != nil {
		return c, fmt.Errorf("decoding the usage: %w", err)
	}
	return c, nil
}

// Row is what pods of one owner were given in a period, by all providers, at prices in one currency.
type Row struct {
	Period    string `json:"period"`
	Namespace string `json:"namespace,omitempty"`
	Owner     string `json:"owner,omitempty"`
	Providers string `json:"providers"`
	// Promised and used hours by resource, as decimal numbers: core-hours, GiB-hours, hours of others.
	Promised map[string]string `json:"promisedHours,omitempty"`
	Used     map[string]string `json:"usedHours,omitempty"`
	// Cost and Saved are empty where they are not known.
	Cost     string `json:"cost,omitempty"`
	Saved    string `json:"saved,omitempty"`
	Currency string `json:"currency,omitempty"`
}

// Table is the usage of a cluster.
type Table struct {
	AsOf      time.Time `json:"asOf"`
	Rows      []Row     `json:"rows"`
	Truncated bool      `json:"truncated,omitempty"`
	// namespace that was selected, and how many others have rows.
	namespace string
	others    int
}

// Selection is what of a Copy a Table has: days or months, and one namespace or all.
type Selection struct {
	Monthly   bool
	Namespace string
}

// row is a Row as it is summed up.
type row struct {
	providers      map[string]bool
	promised, used map[string]*big.Rat
	cost, saved    *big.Rat
	unsaved        bool
}

// Of sums up a Copy.
func Of(c Copy, s Selection) Table {
	type key struct{ period, namespace, owner, currency string }
	items := c.Days
	if s.Monthly {
		items = c.Months
	}
	rows, others := map[key]*row{}, map[string]bool{}
	for _, item := range items {
		if s.Namespace != "" && item.Namespace != s.Namespace {
			others[item.Namespace] = true
			continue
		}
		owner := strings.TrimPrefix(item.OwnerKind+"/"+item.Owner, "/")
		k := key{text.Line(item.Period, 16), text.Line(item.Namespace, 63), text.Line(owner, 320), text.Line(item.Currency, 3)}
		r := rows[k]
		if r == nil {
			r = &row{providers: map[string]bool{}, promised: map[string]*big.Rat{}, used: map[string]*big.Rat{}, cost: new(big.Rat), saved: new(big.Rat)}
			rows[k] = r
		}
		r.providers[text.Line(item.Provider, 63)] = true
		addAll(r.promised, item.PromisedHours)
		addAll(r.used, item.UsedHours)
		r.cost.Add(r.cost, number(item.Cost))
		r.saved.Add(r.saved, number(item.Saved))
		r.unsaved = r.unsaved || item.Saved == ""
	}
	table := Table{AsOf: c.AsOf, Rows: []Row{}, Truncated: c.Truncated, namespace: s.Namespace, others: len(others)}
	for _, k := range slices.SortedFunc(maps.Keys(rows), func(a, b key) int {
		return cmp.Or(cmp.Compare(b.period, a.period), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.owner, b.owner), cmp.Compare(a.currency, b.currency))
	}) {
		r := rows[k]
		out := Row{
			Period: k.period, Namespace: k.namespace, Owner: k.owner, Currency: k.currency, Providers: strings.Join(slices.Sorted(maps.Keys(r.providers)), ","),
			Promised: decimals(r.promised), Used: decimals(r.used),
		}
		if k.currency != "" {
			out.Cost = r.cost.FloatString(2)
			if !r.unsaved {
				out.Saved = r.saved.FloatString(2)
			}
		}
		table.Rows = append(table.Rows, out)
	}
	return table
}

// number is a decimal number of the broker; 0 if it is none.
func number(figure string) *big.Rat {
	n, ok := new(big.Rat).SetString(figure)
	if !ok || len(figure) > 64 || strings.ContainsAny(figure, "eEpP/") {
		return new(big.Rat)
	}
	return n
}

func addAll(sums map[string]*big.Rat, hours map[string]string) {
	for name, figure := range hours {
		name = text.Line(name, 253)
		if sums[name] == nil {
			sums[name] = new(big.Rat)
		}
		sums[name].Add(sums[name], number(figure))
	}
}

func decimals(sums map[string]*big.Rat) map[string]string {
	out := map[string]string{}
	for name, sum := range sums {
		out[name] = sum.FloatString(2)
	}
	return out
}

// Text returns the table for people, with all resources if it is wide.
func (t *Table) Text(style explain.Style) string {
	truncated := ""
	if t.Truncated {
		truncated = fmt.Sprintf("Only the newest %d rows at most are known here; the broker has all.\n", MaxItems)
	}
	if len(t.Rows) == 0 {
		return truncated + t.none()
	}
	rows := [][]string{{"PERIOD", "NAMESPACE", "OWNER", "PROVIDERS", "CPU-H", "USED", "GIB-H", "USED", "COST", "SAVED"}}
	if style.Wide {
		rows[0] = append(rows[0], "OTHER-H")
	}
	for _, r := range t.Rows {
		line := []string{r.Period, or(r.Namespace), or(r.Owner), r.Providers, or(r.Promised["cpu"]), or(r.Used["cpu"]), or(r.Promised["memory"]), or(r.Used["memory"]), money(r.Cost, r.Currency), money(r.Saved, r.Currency)}
		if style.Wide {
			line = append(line, others(r.Promised))
		}
		rows = append(rows, line)
	}
	return explain.Columns(rows) + "As of " + t.AsOf.UTC().Format(time.RFC3339) + ".\n" + truncated
}

// none says why there is no row, and where there are some.
func (t *Table) none() string {
	const reason = ": no pod has overflowed, or the broker keeps no history.\n"
	switch {
	case t.namespace == "":
		return "No usage is known" + reason
	case t.others == 0:
		return "No usage is known of namespace " + t.namespace + ", nor of any other" + reason
	case t.others == 1:
		return "No usage is known of namespace " + t.namespace + ": none of its pods has overflowed. 1 other namespace has some: -A shows it.\n"
	}
	return fmt.Sprintf("No usage is known of namespace %s: none of its pods has overflowed. %d other namespaces have some: -A shows all.\n", t.namespace, t.others)
}

func or(text string) string { return cmp.Or(text, "-") }

func money(figure, currency string) string {
	if figure == "" {
		return "-"
	}
	return figure + " " + currency
}

// others are the hours of resources without a column.
func others(hours map[string]string) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(hours)) {
		if name != "cpu" && name != "memory" {
			parts = append(parts, name+"="+hours[name])
		}
	}
	return or(strings.Join(parts, ","))
}

// CSV returns the table for spreadsheets, which take no text in it for a formula.
func (t *Table) CSV() (string, error) {
	var out strings.Builder
	w := csv.NewWriter(&out)
	lines := [][]string{{"period", "namespace", "owner", "providers", "promisedCPUHours", "usedCPUHours", "promisedMemoryGiBHours", "usedMemoryGiBHours", "promisedOtherHours", "cost", "saved", "currency"}}
	for _, r := range t.Rows {
		lines = append(lines, []string{text.Cell(r.Period), text.Cell(r.Namespace), text.Cell(r.Owner), text.Cell(r.Providers), r.Promised["cpu"], r.Used["cpu"], r.Promised["memory"], r.Used["memory"],
			text.Cell(strings.TrimPrefix(others(r.Promised), "-")), r.Cost, r.Saved, text.Cell(r.Currency)})
	}
	if err := w.WriteAll(lines); err != nil {
		return "", err
	}
	return out.String(), nil
}
