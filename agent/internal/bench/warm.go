package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// warmRounds is how many times each of the two forms is measured.
const warmRounds = 30

// holdWarm measures what placeholders add to a warm overflow: from the hold of three pods
// being asked for until its guests are bound, with and without, in turn.
func holdWarm(ctx context.Context) (err error) {
	const count = 3
	forms := []bool{true, false}
	providers, took := map[bool]*provider{}, map[bool][]time.Duration{}
	for _, placeholders := range forms {
		p, startErr := startProvider(ctx, placeholders)
		defer func() { err = errors.Join(err, p.stop()) }()
		if startErr != nil {
			return startErr
		}
		for i := range 10 {
			if err := p.addNode(ctx, fmt.Sprintf("node-%d", i), 8000); err != nil {
				return err
			}
		}
		providers[placeholders] = p
	}
	for round := range warmRounds + 1 {
		for _, placeholders := range forms {
			p, name, start := providers[placeholders], fmt.Sprintf("w%d", round), time.Now()
			accepted, err := p.ask(ctx, name, count, heldMilli)
			if err != nil || !accepted {
				return errors.Join(err, notAccepted(accepted))
			}
			for i := range count {
				if _, err := p.createGuest(ctx, fmt.Sprintf("%s-%d", name, i), heldMilli, placeholders); err != nil {
					return err
				}
			}
			err = eventually(ctx, timeout, "guests to be bound", func() (bool, error) {
				bound, err := p.bound(ctx, guestsNamespace)
				return bound == count, err
			})
			if err != nil {
				return err
			}
			if round > 0 {
				took[placeholders] = append(took[placeholders], time.Since(start))
			}
			if err := p.clear(ctx); err != nil {
				return err
			}
		}
	}
	with, without := quantile(took[true], 0.5), quantile(took[false], 0.5)
	fmt.Printf("from the hold to %d bound guests, %d times each: p50 %s with placeholders (p95 %s), %s without (p95 %s): %.2f times as long\n",
		count, warmRounds, with, quantile(took[true], 0.95), without, quantile(took[false], 0.95), with.Seconds()/without.Seconds())
	lines.Time("hold_warm_ms", float64((with - without).Milliseconds()), "ms", "<= 300")
	return nil
}
