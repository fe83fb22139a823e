package main

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// defaultGarbage is the heap, in bytes, that may double between two garbage collections, as
	// by default. A larger one grows by as much, or by minPercent if that is more: doubling it
	// would take hundreds of MiB with thousands of connections, although a beat leaves little
	// garbage.
	defaultGarbage = 64 << 20
	// minPercent bounds the price: a collection costs CPU in proportion to what is in use, about
	// a second for each 700 MiB.
	minPercent, defaultPercent = 50, 100
	// collectEvery is how often the growth is set.
	collectEvery = 10 * time.Second
)

// gcPercent is the growth of the heap, in percent of what is in use, that a collection waits
// for.
func gcPercent(used uint64) int {
	if used <= defaultGarbage {
		return defaultPercent
	}
	return max(minPercent, int(defaultGarbage*100/used))
}

// boundGarbage keeps the garbage collector's percentage at gcPercent until ctx ends, unless
// the environment sets it.
func boundGarbage(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	ticker := time.NewTicker(collectEvery)
	defer ticker.Stop()
	set := defaultPercent
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	for {
		metrics.Read(live)
		if live[0].Value.Kind() == metrics.KindUint64 {
			if percent := gcPercent(live[0].Value.Uint64()); percent != set {
				debug.SetGCPercent(percent)
				set = percent
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
