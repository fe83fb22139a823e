package report

import (
	"encoding/csv"
	"maps"
	"slices"
	"strings"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/text"
)

// itemOf is a record as its consumer sees it.
func itemOf(r *history.Record) protocol.HistoryItem {
	item := protocol.HistoryItem{
		ID: r.Name, UID: string(r.UID), Namespace: r.Namespace, OwnerKind: r.OwnerKind, Owner: r.Owner, Requested: r.Requested,
		Asked: r.Asked, Ended: r.Ended, Reason: r.Reason,
	}
	for _, cluster := range slices.Sorted(maps.Keys(r.Shares)) {
		share := r.Shares[cluster]
		provider := protocol.HistoryProvider{
			Cluster: cluster, Why: share.Why, Resources: map[string]string{}, Granted: share.Granted, FirstUsed: share.FirstUsed, Released: share.Released,
			PromisedHours: share.Total.Promised.AllHours(), UsedHours: share.Total.Used.AllHours(),
		}
		for name, amount := range share.Most.List() {
			provider.Resources[string(name)] = amount.String()
		}
		if share.PricePerHour != nil {
			provider.PricePerHour, provider.Currency, provider.Cost = history.Decimal(share.PricePerHour), share.Currency, history.Decimal(share.Total.Cost)
		}
		item.Providers = append(item.Providers, provider)
	}
	return item
}

// usageOf is a row, compared with reference prices.
func usageOf(r *history.UsageRow, reference *broker.Cost) protocol.UsageItem {
	item := protocol.UsageItem{
		Period: r.Period, Namespace: r.Namespace, OwnerKind: r.OwnerKind, Owner: r.Owner, Provider: r.Provider,
		PromisedHours: r.Promised.AllHours(), UsedHours: r.Used.AllHours(), Currency: r.Currency,
	}
	if r.Currency != "" {
		item.Cost = history.Decimal(r.Cost)
	}
	if cost, saved, known := r.Saving(r.Currency, reference); known {
		item.ReferenceCost, item.Saved = history.Decimal(cost), history.Decimal(saved)
	}
	return item
}

// columns are the resources with columns of their own; all others share one.
var columns = []string{"cpu", "memory", string(broker.ResourceGPU), "ephemeral-storage"}

// hours are the cells of hours.
func hours(of map[string]string) (cells []string) {
	for _, name := range columns {
		cells = append(cells, of[name])
	}
	var others []string
	for _, name := range slices.Sorted(maps.Keys(of)) {
		if !slices.Contains(columns, name) {
			others = append(others, name+"="+of[name])
		}
	}
	return append(cells, text.Cell(strings.Join(others, " ")))
}

// hourColumns are the heads of these cells.
func hourColumns(of string) (heads []string) {
	for _, name := range []string{"CPU", "MemoryGiB", "GPU", "StorageGiB", "Other"} {
		heads = append(heads, of+name+"Hours")
	}
	return heads
}

// writeHistory writes a line for each provider of each record.
func writeHistory(out *csv.Writer, items []protocol.HistoryItem) error {
	heads := []string{"id", "uid", "namespace", "ownerKind", "owner", "requested", "asked", "ended", "reason", "provider", "why", "granted", "firstUsed", "released"}
	heads = slices.Concat(heads, hourColumns("promised"), hourColumns("used"), []string{"pricePerHour", "cost", "currency"})
	if err := out.Write(heads); err != nil {
		return err
	}
	for _, item := range items {
		providers := item.Providers
		if len(providers) == 0 {
			providers = []protocol.HistoryProvider{{}}
		}
		for _, p := range providers {
			line := []string{
				text.Cell(item.ID), item.UID, text.Cell(item.Namespace), text.Cell(item.OwnerKind), text.Cell(item.Owner), text.Cell(item.Requested), at(item.Asked), at(item.Ended), text.Cell(item.Reason),
				text.Cell(p.Cluster), text.Cell(p.Why), at(p.Granted), at(p.FirstUsed), at(p.Released),
			}
			if err := out.Write(slices.Concat(line, hours(p.PromisedHours), hours(p.UsedHours), []string{p.PricePerHour, p.Cost, text.Cell(p.Currency)})); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeUsage writes a line for each row.
func writeUsage(out *csv.Writer, items []protocol.UsageItem) error {
	heads := []string{"period", "namespace", "ownerKind", "owner", "provider"}
	heads = slices.Concat(heads, hourColumns("promised"), hourColumns("used"), []string{"cost", "currency", "referenceCost", "saved"})
	if err := out.Write(heads); err != nil {
		return err
	}
	for _, i := range items {
		line := []string{i.Period, text.Cell(i.Namespace), text.Cell(i.OwnerKind), text.Cell(i.Owner), text.Cell(i.Provider)}
		if err := out.Write(slices.Concat(line, hours(i.PromisedHours), hours(i.UsedHours), []string{i.Cost, text.Cell(i.Currency), i.ReferenceCost, i.Saved})); err != nil {
			return err
		}
	}
	return nil
}

// at is a time in a cell; empty for none.
func at(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}
