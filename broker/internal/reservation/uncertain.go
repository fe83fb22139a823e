package reservation

import (
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// uncertainFor is how long a line waits for its change to show.
const uncertainFor = 5 * time.Minute

// uncertain are the lines of the audit log about changes of ledgers that may or may not be
// committed: each is logged once, when the write succeeds or when the watch shows the
// change, whatever became of the answer to the write.
type uncertain struct {
	clock clock.PassiveClock

	mu sync.Mutex
	// lines by the cluster of the ledger.
	lines map[string][]*auditLine
}

// auditLine is to be logged once a Reservation's hold has an attempt; 0 if it has no hold.
type auditLine struct {
	cluster string
	uid     types.UID
	attempt int64
	log     func()
	since   time.Time
	// tried is whether the answer to an earlier try of the change was lost: then only the
	// watch shows that it was not made.
	tried bool
}

func newUncertain(clock clock.PassiveClock) *uncertain {
	return &uncertain{clock: clock, lines: map[string][]*auditLine{}}
}

// auditLines are those of one change. A committer may still compute it when its caller has
// given up: only uncertain reads and writes them.
type auditLines struct{ lines []*auditLine }

// expect adds a line to those of a change before that is written.
func (u *uncertain) expect(of *auditLines, cluster string, uid types.UID, attempt int64, log func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, former := range u.lines[cluster] {
		if former.uid == uid && former.attempt == attempt {
			// An earlier try of the same, which may have been written.
			former.log, former.since, former.tried = log, u.clock.Now(), true
			of.lines = append(of.lines, former)
			return
		}
	}
	line := &auditLine{cluster: cluster, uid: uid, attempt: attempt, log: log, since: u.clock.Now()}
	u.lines[cluster] = append(u.lines[cluster], line)
	of.lines = append(of.lines, line)
}

// settle takes the outcome of the write of a change: it logs the lines, unless the watch
// was first, or drops them if nothing was written, by this try or an earlier one. Otherwise,
// it leaves them to the watch.
func (u *uncertain) settle(of *auditLines, err error) {
	if err != nil && !isConflict(err) {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, line := range of.lines {
		if err == nil {
			if u.drop(line) {
				line.log()
			}
		} else if !line.tried {
			u.drop(line)
		}
	}
}

// forget drops the lines of a change that is computed again, unless an earlier try of it may
// have been written.
func (u *uncertain) forget(of *auditLines) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, line := range of.lines {
		if !line.tried {
			u.drop(line)
		}
	}
	of.lines = nil
}

// drop reports whether the line was there.
func (u *uncertain) drop(line *auditLine) bool {
	at := slices.Index(u.lines[line.cluster], line)
	if at < 0 {
		return false
	}
	u.lines[line.cluster] = slices.Delete(u.lines[line.cluster], at, at+1)
	if len(u.lines[line.cluster]) == 0 {
		delete(u.lines, line.cluster)
	}
	return true
}

// forgetCluster drops the lines about a ledger that was deleted: nothing will show whether
// their changes were committed.
func (u *uncertain) forgetCluster(cluster string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.lines, cluster)
}

// observe logs the lines whose change a ledger shows, of which this is the newest version;
// nil if it does not exist any more.
func (u *uncertain) observe(ad *broker.ClusterAdvertisement) {
	if ad == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, line := range slices.Clone(u.lines[ad.Name]) {
		var attempt int64
		if hold := ledger.Find(&ad.Status, line.uid); hold != nil {
			attempt = hold.Attempt
		}
		switch {
		case attempt == line.attempt:
			u.drop(line)
			line.log()
		case attempt > line.attempt && line.attempt > 0 || u.clock.Since(line.since) > uncertainFor:
			u.drop(line)
		}
	}
}
