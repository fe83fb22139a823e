package histories

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var (
	operations = flag.Int("operations", 200, "Number of operations of all consumers together.")
	kills      = flag.Int("kills", 3, "Number of times that the leading broker is killed, and as often is stopped for a while.")
)

const (
	consumers = 8
	// room is each provider's, in pods: less than the consumers want.
	room = 10
	// patience is how long anything may take.
	patience = 6 * time.Minute
	// audits is the interval of reading the ledgers.
	audits = 100 * time.Millisecond
	// maxRounds is how often a late write is tried again at most, and how many the negative
	// control makes.
	maxRounds = 10
)

// run is a hub with clusters that work.
type run struct {
	*recorder
	hub       *hub
	providers []*provider
	budget    chan struct{}
	counts    counts
	failed    chan error
	// kills and stops count the leaders that have ended by SIGKILL, and after SIGSTOP.
	kills, stops int
	// late counts writes that were delayed until another broker had changed the ledger,
	// refused those of them that were refused.
	late, refused int
}

// shortcomings are what the run has not tried, or what was not as it must be, besides its
// history.
func (r *run) shortcomings(kills int) (list []string) {
	if r.kills < kills || r.stops < kills {
		list = append(list, fmt.Sprintf("%d leaders were killed and %d stopped, want %d of each", r.kills, r.stops, kills))
	}
	if r.late == 0 && kills > 0 {
		list = append(list, "no write of a former leader arrived after the new leader had changed the ledger: nothing shows that such writes are refused")
	}
	if r.late != r.refused {
		list = append(list, fmt.Sprintf("%d of %d writes of a former leader were not refused", r.late-r.refused, r.late))
	}
	return list
}

// TestShortcomings: a run is not accepted that has not tried what it is for.
func TestShortcomings(t *testing.T) {
	for name, tc := range map[string]struct {
		run  *run
		want string
	}{
		"all was tried":             {&run{kills: 3, stops: 4, late: 2, refused: 2}, ""},
		"no write was late":         {&run{kills: 3, stops: 3}, "no write of a former leader"},
		"a late write was accepted": {&run{kills: 3, stops: 3, late: 2, refused: 1}, "1 of 2 writes"},
		"a leader was not killed":   {&run{kills: 2, stops: 3, late: 1, refused: 1}, "2 leaders were killed"},
		"a leader was not stopped":  {&run{kills: 3, stops: 2, late: 1, refused: 1}, "2 stopped"},
	} {
		list := tc.run.shortcomings(3)
		if tc.want == "" && len(list) > 0 || tc.want != "" && (len(list) != 1 || !strings.Contains(list[0], tc.want)) {
			t.Errorf("%s: got %q, want %q", name, list, tc.want)
		}
	}
}

func newRun(t *testing.T, ctx context.Context, blind bool) *run {
	t.Helper()
	r := &run{recorder: &recorder{began: time.Now()}, hub: newHub(t, blind), budget: make(chan struct{}, 1<<16), failed: make(chan error, consumers)}
	var ids []string
	for _, id := range []string{"paris", "berlin"} {
		p := &provider{id: id, client: r.hub.join(t, id), record: r.recorder, held: map[types.UID]int32{}, attempts: map[types.UID]int64{}}
		go p.run(ctx)
		r.providers, ids = append(r.providers, p), append(ids, id)
	}
	for n := range consumers {
		c := &consumer{id: fmt.Sprint("consumer-", n), record: r.recorder, mine: map[types.UID]bool{}, changed: make(chan struct{})}
		c.views = map[types.UID]protocol.ConsumerView{}
		c.client = r.hub.join(t, c.id)
		go c.watch(ctx)
		go func() {
			r.failed <- c.work(ctx, r.budget, ids, rand.New(rand.NewPCG(uint64(n), 1)), &r.counts)
		}()
	}
	expect.EventuallyWithin(t, patience, "the providers to advertise", func() (bool, string) {
		var list broker.ClusterAdvertisementList
		expect.NoError(t, r.hub.api.List(t.Context(), &list, client.InNamespace(broker.SystemNamespace)))
		return len(list.Items) == len(ids), fmt.Sprint(len(list.Items))
	})
	go func() {
		ticker := time.NewTicker(audits)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				for _, id := range ids {
					// An error is that of the end.
					_ = r.audit(ctx, id)
				}
			}
		}
	}()
	return r
}

// audit records the charges in a ledger, as the API server has them.
func (r *run) audit(ctx context.Context, provider string) error {
	call := r.now()
	var ad broker.ClusterAdvertisement
	if err := r.hub.api.Get(ctx, client.ObjectKey{Namespace: broker.SystemNamespace, Name: provider}, &ad); err != nil {
		return err
	}
	charges := map[types.UID]int32{}
	for i := range ad.Status.Holds {
		hold := &ad.Status.Holds[i]
		charges[hold.ReservationUID] = hold.Promised.Pods()
		if hold.Unconfirmed != nil {
			charges[hold.ReservationUID] = max(hold.Promised.Pods(), hold.Unconfirmed.Pods())
		}
	}
	r.add(call, step{kind: ledger, provider: provider, charges: charges})
	return nil
}

// allow lets the consumers make so many operations more.
func (r *run) allow(n int) {
	for range n {
		r.budget <- struct{}{}
	}
}

// await waits until so many operations have ended.
func (r *run) await(t *testing.T, n int) {
	t.Helper()
	expect.EventuallyWithin(t, patience, fmt.Sprintf("%d operations", n), func() (bool, string) {
		select {
		case err := <-r.failed:
			t.Fatalf("a consumer ended: %v", err)
		default:
		}
		ended := r.counts.ended.Load()
		return ended >= int64(n), fmt.Sprint(ended)
	})
}

// kill kills the leader with SIGKILL.
func (r *run) kill(t *testing.T) {
	t.Helper()
	leader := r.hub.awaitLeader(t, nil)
	before, starts := leader.current()
	leader.signal(t, syscall.SIGKILL)
	<-before.Done()
	// Either broker may get the lease.
	expect.EventuallyWithin(t, patience, "the killed broker to start again", func() (bool, string) {
		_, now := leader.current()
		return now > starts, leader.tail()
	})
	r.kills++
	r.hub.awaitLeader(t, nil)
}

// stop lets the consumers make so many operations more, and stops the leader with SIGSTOP
// while a write of a ledger is on its way. The write arrives when another broker leads and
// has promised capacity that the write does not know of, or once there are no more
// operations; right after it, the ledger is read. Then the old leader goes on, notices
// that it is not, and ends.
func (r *run) stop(t *testing.T, ctx context.Context, operations int) {
	t.Helper()
	leader := r.hub.awaitLeader(t, nil)
	write := leader.gateway.delayNext()
	r.allow(operations)
	expect.EventuallyWithin(t, patience, "the leader to write a ledger", func() (bool, string) {
		select {
		case <-write.arrived:
			return true, ""
		default:
		}
		if now := r.hub.service.leader(); now != nil && now != leader {
			// It has lost the lease by itself.
			leader = now
			write = leader.gateway.delayNext()
		}
		return false, leader.tail()
	})
	_, starts := leader.current()
	leader.signal(t, syscall.SIGSTOP)
	r.hub.awaitLeader(t, leader)
	provider := r.providers[0]
	if provider.id != write.provider {
		provider = r.providers[1]
	}
	changed := func() (bool, string) {
		return provider.holdsBesides(write.holds) || len(r.budget) == 0, fmt.Sprint(len(r.budget))
	}
	expect.EventuallyWithin(t, patience, "the new leader to promise capacity of "+write.provider, changed)
	leader.gateway.ledgers.Lock()
	late := provider.holdsBesides(write.holds)
	close(write.release)
	<-write.done
	err := r.audit(ctx, write.provider)
	leader.gateway.ledgers.Unlock()
	expect.NoError(t, err)
	if late {
		r.late++
		if write.status == http.StatusConflict {
			r.refused++
		}
	}
	leader.signal(t, syscall.SIGCONT)
	expect.EventuallyWithin(t, patience, "the old leader to end and start again", func() (bool, string) {
		_, now := leader.current()
		return now > starts, leader.tail()
	})
	r.stops++
}

// TestHistories kills and stops the leader while eight consumers work.
func TestHistories(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := newRun(t, ctx, false)
	portion := *operations / (2**kills + 1)
	allowed := portion
	r.allow(portion)
	r.await(t, portion)
	for range *kills {
		r.allow(portion)
		r.await(t, allowed+portion/4)
		r.kill(t)
		r.await(t, allowed+portion)
		r.stop(t, ctx, portion)
		allowed += 2 * portion
		r.await(t, allowed)
	}
	for round := 0; *kills > 0 && r.late == 0 && round < maxRounds; round++ {
		// The operations ended before the new leader had promised anything, each time.
		r.stop(t, ctx, portion)
		allowed += portion
		r.await(t, allowed)
	}
	r.allow(*operations - allowed)
	close(r.budget)
	for range consumers {
		select {
		case err := <-r.failed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Fatal("a consumer did not delete its Reservations")
		}
	}
	r.checkEnd(t)
	history := r.operations()
	result, info := porcupine.CheckOperationsVerbose(model(room), history, patience)
	t.Logf("%d operations of %d consumers (%d changed what is granted), %d kills, %d stops, %d late writes (%d refused); a history of %d operations in %s: %s",
		r.counts.ended.Load(), consumers, r.counts.effective.Load(), r.kills, r.stops, r.late, r.refused, len(history), time.Since(r.began).Round(time.Second), result)
	if result != porcupine.Ok {
		t.Errorf("the history is not linearizable:\n%s", explain(history, info))
	}
	for _, shortcoming := range r.shortcomings(*kills) {
		t.Error(shortcoming)
	}
	if n := r.counts.effective.Load(); n < int64(*operations/4) {
		t.Errorf("only %d of %d operations changed what is granted", n, *operations)
	}
}

// checkEnd checks that nothing is held once all Reservations are deleted.
func (r *run) checkEnd(t *testing.T) {
	t.Helper()
	expect.EventuallyWithin(t, patience, "nothing to be held", func() (bool, string) {
		var ads broker.ClusterAdvertisementList
		expect.NoError(t, r.hub.api.List(t.Context(), &ads, client.InNamespace(broker.SystemNamespace)))
		var left []string
		for _, ad := range ads.Items {
			for _, hold := range ad.Status.Holds {
				left = append(left, fmt.Sprintf("%s has a hold: %s", ad.Name, describe(&hold)))
			}
		}
		var list broker.ReservationList
		expect.NoError(t, r.hub.api.List(t.Context(), &list, client.InNamespace(broker.SystemNamespace)))
		for _, reservation := range list.Items {
			left = append(left, "Reservation "+reservation.Name)
		}
		for _, p := range r.providers {
			left = append(left, p.holding()...)
		}
		return len(left) == 0, strings.Join(left, "\n")
	})
}

func describe(hold *broker.Hold) string {
	text := fmt.Sprintf("%s (%s) attempt %d promises %d pods, accepted is attempt %d", hold.ReservationName, hold.ReservationUID, hold.Attempt, hold.Promised.Pods(), hold.AcceptedAttempt)
	if hold.Unconfirmed != nil {
		text += fmt.Sprintf(", unconfirmed are %d pods", hold.Unconfirmed.Pods())
	}
	return text
}

// TestHistoriesWithoutCompareAndSwap is the negative control: a broker whose ledger is
// written without compare-and-swap is found out.
func TestHistoriesWithoutCompareAndSwap(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := newRun(t, ctx, true)
	for round := range maxRounds {
		r.stop(t, ctx, *operations)
		history := r.operations()
		if result, info := porcupine.CheckOperationsVerbose(model(room), history, patience); result == porcupine.Illegal {
			t.Logf("found in round %d, by a history of %d operations after %s:\n%s", round+1, len(history), time.Since(r.began).Round(time.Second), explain(history, info))
			return
		}
		select {
		case err := <-r.failed:
			t.Fatal(errors.Join(errors.New("a consumer ended"), err))
		default:
		}
	}
	t.Errorf("%d late writes without compare-and-swap were not found", r.late)
}

// explain describes, for each provider whose operations fit no order, the one at which the
// longest order ends, and what precedes it.
func explain(history []porcupine.Operation, info porcupine.LinearizationInfo) string {
	name := func(o porcupine.Operation) string {
		return fmt.Sprintf("%9.3f to %9.3f s: %s", time.Duration(o.Call).Seconds(), time.Duration(o.Return).Seconds(), o.Input)
	}
	var lines []string
	for n, orders := range info.PartialLinearizationsOperations() {
		part := byProvider(history)[n]
		if len(orders) == 0 {
			continue
		}
		longest := slices.MaxFunc(orders, func(a, b []porcupine.Operation) int { return cmp.Compare(len(a), len(b)) })
		if len(longest) == len(part) {
			continue
		}
		lines = append(lines, fmt.Sprintf("%d of %d operations fit, and of those the last are:", len(longest), len(part)))
		for _, operation := range longest[max(0, len(longest)-8):] {
			lines = append(lines, "  "+name(operation))
		}
		in := map[string]bool{}
		for _, operation := range longest {
			in[name(operation)] = true
		}
		rest := slices.DeleteFunc(slices.Clone(part), func(o porcupine.Operation) bool { return in[name(o)] })
		first := slices.MinFunc(rest, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
		lines = append(lines, "but not:", "  "+name(first), "and all of that Reservation:")
		for _, operation := range part {
			if operation.Input.(step).uid == first.Input.(step).uid {
				lines = append(lines, "  "+name(operation))
			}
		}
	}
	return strings.Join(lines, "\n")
}
