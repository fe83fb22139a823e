package reservation

import (
	"hash/fnv"
	"time"
)

// rewriteAfter is the time, by the agent's clock, within which a stored advertisement is
// replaced by an equal one, once in each such period. The new sequence ends the refusals of
// the old one, shows other brokers that the cluster advertises, and the timestamp shows
// users that the cluster is alive.
const rewriteAfter = 5 * time.Minute

// maxRewrites is how many advertisements may be under way to the API server when one more
// is stored that has not changed: otherwise that waits for a later beat. After a failover or
// with a slow API server, thousands at once would fail each other's calls by their deadlines.
const maxRewrites = 4

// rewriteDue reports whether a period of the cluster has begun between the advertisement
// that is stored and the one received. The periods of the clusters begin at different times,
// which depend on nothing but their IDs: all brokers agree on them, and clusters that were
// stored together are not replaced together.
func rewriteDue(cluster string, stored, received time.Time) bool {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(cluster))
	// In whole seconds, as the times that are stored.
	offset := time.Duration(hash.Sum64()%uint64(rewriteAfter/time.Second)) * time.Second
	period := func(t time.Time) time.Time { return t.Add(offset).Truncate(rewriteAfter) }
	return !period(stored).Equal(period(received))
}
