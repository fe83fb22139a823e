package program

import (
	"cmp"
	"context"
	"maps"
	"math/big"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/page/view"
)

// past is a history as the page reads it.
type past struct {
	store history.Store
	// reference are the prices that usage is compared with; nil for none.
	reference *broker.Cost
}

// Ended implements page.History.
func (p past) Ended(ctx context.Context, limit int, from string) ([]view.Ended, string, error) {
	page, err := p.store.List(ctx, history.Query{Limit: limit, Continue: from})
	var all []view.Ended
	for _, r := range page.Records {
		ended := view.Ended{Name: r.Name, Consumer: r.Requester, Owner: r.Namespace + "/" + r.Owner, Requested: r.Requested, Reason: r.Reason, Asked: r.Asked, Ended: r.Ended}
		for _, provider := range slices.Sorted(maps.Keys(r.Shares)) {
			share := r.Shares[provider]
			shown := view.Share{
				Provider: provider, Why: share.Why, Most: share.Most.List(), Granted: share.Granted, FirstUsed: share.FirstUsed, Released: share.Released,
				CoreHours: cores(share.Total.Promised), UsedCoreHours: cores(share.Total.Used), Currency: share.Currency,
			}
			if share.PricePerHour != nil {
				shown.Cost = cmp.Or(share.Total.Cost, new(big.Rat))
			}
			ended.Shares = append(ended.Shares, shown)
		}
		all = append(all, ended)
	}
	return all, page.Continue, err
}

// Spent implements page.History.
func (p past) Spent(ctx context.Context, from, to string) ([]view.Spent, error) {
	rows, err := p.store.Usage(ctx, history.UsageQuery{From: from, To: to, Period: history.Daily})
	spent := make([]view.Spent, len(rows))
	for i, row := range rows {
		spent[i] = view.Spent{
			Day: row.Period, Consumer: row.Requester, Provider: row.Provider, CoreHours: cores(row.Promised), UsedCoreHours: cores(row.Used), Cost: row.Cost, Currency: row.Currency,
		}
		if cost, _, known := row.Saving(row.Currency, p.reference); known {
			spent[i].Reference = cost
		}
	}
	return spent, err
}

func cores(amount history.Amount) float64 {
	hours, _ := amount.Hours(corev1.ResourceCPU).Float64()
	return hours
}
