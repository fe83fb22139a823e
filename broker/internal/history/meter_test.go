package history_test

import (
	"encoding/json"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// hub is what a Meter looks at: the ledger of paris and the Reservations.
type hub struct {
	*history.Meter
	ad           broker.ClusterAdvertisement
	reservations map[types.UID]*broker.Reservation
	now          time.Time
	// open is what a store has that was not resumed yet.
	open []history.Record
}

var began = time.Date(2026, 1, 30, 22, 0, 0, 0, time.UTC)

func newHub() *hub {
	h := &hub{Meter: history.NewMeter(), reservations: map[types.UID]*broker.Reservation{}, now: began}
	h.ad.Name, h.ad.Spec.ClusterID = "paris", "paris"
	return h
}

func (h *hub) find(_ string, uid types.UID) *broker.Reservation { return h.reservations[uid] }

func (h *hub) look() {
	h.Observe(&h.ad, h.find, h.now)
	h.resume()
}

func (h *hub) resume() {
	h.Resume(h.open)
	h.open = nil
}

func (h *hub) sweep() { h.Sweep(h.find, func(string) bool { return true }, h.now) }

// ask adds a Reservation of rome for pods of Deployment web, or one made by hand.
func (h *hub) ask(uid types.UID, byHand bool) *broker.Reservation {
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{
		Name: "rome-" + string(uid), UID: uid, CreationTimestamp: metav1.Time{Time: h.now}, Labels: map[string]string{},
		Annotations: map[string]string{broker.LabelSourceNamespace: "shop", broker.LabelSourceName: "web-1"},
	}, Spec: broker.ReservationSpec{RequesterID: "rome"}}
	if byHand {
		r.Labels[broker.LabelByHand] = "true"
	} else {
		r.Annotations[broker.AnnotationSourceOwner] = "Deployment/web"
	}
	r.Status.Decision = &broker.Decision{Scores: []broker.ClusterScore{{Cluster: "paris", Score: "91.20"}, {Cluster: "berlin", Score: "80.00"}}}
	h.reservations[uid] = r
	return r
}

// hold sets what paris holds and has granted of it; "0" ends the hold.
func (h *hub) hold(uid types.UID, cpu, granted string, cost *broker.Cost) {
	h.ad.Status.Holds = slices.DeleteFunc(h.ad.Status.Holds, func(held broker.Hold) bool { return held.ReservationUID == uid })
	if cpu == "0" {
		return
	}
	hold := broker.Hold{ReservationUID: uid, ReservationName: "rome-" + string(uid), Requester: "rome", Promised: held(cpu), Cost: cost}
	if granted != "0" {
		given := held(granted)
		hold.Granted = &given
	}
	h.ad.Status.Holds = append(h.ad.Status.Holds, hold)
}

func held(cpu string) broker.HeldCapacity {
	return broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", cpu))}
}

func (h *hub) use(cpu string) {
	h.ad.Spec.ObservedHolds = []broker.ObservedHold{{Requester: "rome", Used: broker.FromList(expect.Resources("cpu", cpu)), Pods: 1}}
}

func (h *hub) pass(d time.Duration) { h.now = h.now.Add(d) }

// records are those that the store does not have, by UID.
func (h *hub) records() map[types.UID]history.Record {
	all := map[types.UID]history.Record{}
	for _, w := range h.Take() {
		all[w.UID] = w.Record
	}
	return all
}

var eur = &broker.Cost{CPUCost: "0.1", Currency: "EUR"}

func cpuHours(a history.Amount) string { return history.Decimal(a.Hours(corev1.ResourceCPU)) }

// TestMeter follows one Reservation over midnight, by figures computed by hand.
func TestMeter(t *testing.T) {
	h := newHub()
	h.ask("a", false)
	h.hold("a", "2", "0", eur)
	h.look()
	h.pass(30 * time.Second)
	h.hold("a", "2", "2", eur)
	h.look()
	h.pass(30 * time.Second)
	h.use("500m")
	h.look()
	h.pass(time.Hour - time.Minute) // 23:00
	h.hold("a", "4", "4", eur)
	h.use("3")
	h.look()
	h.pass(2 * time.Hour) // 01:00
	h.hold("a", "0", "0", nil)
	h.look()
	h.pass(time.Minute)
	h.End(h.reservations["a"], h.now)

	r := h.records()["a"]
	share := r.Shares["paris"]
	type figures struct{ Namespace, Owner, Why, Reason, Promised, Used, Cost, Most, Price string }
	got := figures{r.Namespace, r.OwnerKind + "/" + r.Owner, share.Why, r.Reason, cpuHours(share.Total.Promised), cpuHours(share.Total.Used),
		history.Decimal(share.Total.Cost), fmt.Sprint(share.Most["cpu"]), history.Decimal(share.PricePerHour) + " " + share.Currency}
	// 2 cores for an hour and 4 for two; half a core for 59 minutes and 3 for two hours.
	want := figures{"shop", "Deployment/web", "paris scored 91.20, berlin scored 80.00", "Released", "10", "6.491667", "1", "4000", "0.4 EUR"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	times := map[string]time.Time{"asked": r.Asked, "granted": share.Granted, "first used": share.FirstUsed, "released": share.Released, "ended": r.Ended}
	for name, after := range map[string]time.Duration{"asked": 0, "granted": 30 * time.Second, "first used": time.Minute, "released": 3 * time.Hour, "ended": 3*time.Hour + time.Minute} {
		if !times[name].Equal(began.Add(after)) {
			t.Errorf("%s at %v, want %v", name, times[name], began.Add(after))
		}
	}
	days := map[string]string{}
	for _, d := range r.Days {
		days[d.Day] = cpuHours(d.Promised) + " " + history.Decimal(d.Cost) + d.Currency
	}
	if diff := cmp.Diff(map[string]string{"2026-01-30": "6 0.6EUR", "2026-01-31": "4 0.4EUR"}, days); diff != "" {
		t.Errorf("days: -want +got\n%s", diff)
	}
}

// TestUsedIsDivided: what guests use counts for those that were requested for pods, and then for those
// made by hand.
func TestUsedIsDivided(t *testing.T) {
	for name, c := range map[string]struct{ used, a, b, byHand string }{
		"nothing":           {"0", "0", "0", "0"},
		"less":              {"1500m", "0.5", "1", "0"},
		"all requested":     {"3", "1", "2", "0"},
		"some made by hand": {"4", "1", "2", "1"},
		"more than granted": {"100", "1", "2", "5"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub()
			h.ask("a", false)
			h.ask("b", false)
			h.ask("hand", true)
			h.hold("hand", "5", "5", nil)
			h.hold("a", "1", "1", nil)
			h.hold("b", "2", "2", nil)
			h.use(c.used)
			h.look()
			h.pass(time.Hour)
			h.look()
			for uid, want := range map[types.UID]string{"a": c.a, "b": c.b, "hand": c.byHand} {
				share := h.records()[uid].Shares["paris"]
				if got := cpuHours(share.Total.Used); got != want {
					t.Errorf("%s uses %s, want %s", uid, got, want)
				}
			}
		})
	}
}

// TestUnknownPrice: hours without a price have no cost and no currency.
func TestUnknownPrice(t *testing.T) {
	h := newHub()
	h.ask("a", false)
	h.hold("a", "2", "2", &broker.Cost{MemoryCost: "1", Currency: "EUR"})
	h.look()
	h.pass(time.Hour)
	h.look()
	r := h.records()["a"]
	if share := r.Shares["paris"]; share.PricePerHour != nil || r.Days[0].Currency != "" || r.Days[0].Cost.Sign() != 0 {
		t.Errorf("share %+v, days %+v", share, r.Days)
	}
}

// restart is a Meter that goes on from what a store has.
func (h *hub) restart(t *testing.T) {
	t.Helper()
	all := h.Take()
	for _, w := range all {
		content, err := json.Marshal(w.Record)
		expect.NoError(t, err)
		var read history.Record
		expect.NoError(t, json.Unmarshal(content, &read))
		h.open = append(h.open, read)
	}
	h.Written(all)
	h.Meter = history.NewMeter()
}

// TestRestart: what is held when no broker runs is counted; what was released then counts up to when it was last
// written.
func TestRestart(t *testing.T) {
	for name, c := range map[string]struct {
		released bool
		want     string
	}{
		"still held": {false, "6"},
		"released":   {true, "2"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub()
			h.ask("a", false)
			h.hold("a", "2", "2", eur)
			h.look()
			h.pass(time.Hour)
			h.look()
			h.restart(t)
			h.pass(2 * time.Hour)
			if c.released {
				h.hold("a", "0", "0", nil)
				delete(h.reservations, "a")
			}
			h.look()
			h.sweep()
			r := h.records()["a"]
			if got := cpuHours(r.Shares["paris"].Total.Promised); got != c.want {
				t.Errorf("counted %s, want %s", got, c.want)
			}
			if gone := r.Reason == history.ReasonGone; gone != c.released || c.released == r.Ended.IsZero() {
				t.Errorf("ended at %v: %q", r.Ended, r.Reason)
			}
		})
	}
}

// TestRestartWithTwoProviders: what one has released when no broker ran is not counted because the other still gives
// its part.
func TestRestartWithTwoProviders(t *testing.T) {
	for _, order := range [][]string{{"paris", "berlin"}, {"berlin", "paris"}} {
		h := newHub()
		h.ask("a", false)
		h.hold("a", "2", "2", eur)
		berlin := h.ad.DeepCopy()
		berlin.Name, berlin.Spec.ClusterID = "berlin", "berlin"
		look := func(clusters ...string) {
			for _, cluster := range clusters {
				h.Observe(map[string]*broker.ClusterAdvertisement{"paris": &h.ad, "berlin": berlin}[cluster], h.find, h.now)
			}
			h.resume()
		}
		look(order...)
		h.pass(time.Hour)
		h.sweep()
		h.restart(t)
		h.pass(2 * time.Hour)
		berlin.Status.Holds = nil
		look(order...)
		h.sweep()
		for provider, want := range map[string]string{"paris": "6", "berlin": "2"} {
			if got := cpuHours(h.records()["a"].Shares[provider].Total.Promised); got != want {
				t.Errorf("%v: counted %s at %s, want %s", order, got, provider, want)
			}
		}
	}
}

// TestLateStore: what was counted before the store answered, and what ended meanwhile, is not lost.
func TestLateStore(t *testing.T) {
	h := newHub()
	for _, uid := range []types.UID{"held", "ended"} {
		h.ask(uid, false)
		h.hold(uid, "2", "2", eur)
	}
	h.look()
	h.pass(time.Hour)
	h.sweep()
	h.restart(t)
	h.pass(time.Hour)
	h.Observe(&h.ad, h.find, h.now)
	h.pass(time.Hour)
	h.End(h.reservations["ended"], h.now)
	h.hold("ended", "0", "0", nil)
	h.pass(23 * time.Hour)
	h.look()
	h.sweep()
	for uid, want := range map[types.UID]string{"held": "52", "ended": "6"} {
		r, days := h.records()[uid], history.Amount{}
		for _, d := range r.Days {
			days = days.Plus(d.Promised)
		}
		if total := cpuHours(r.Shares["paris"].Total.Promised); total != want || cpuHours(days) != want || r.Ended.IsZero() != (uid == "held") {
			t.Errorf("%s: counted %s, days %s, want %s, ended %v", uid, total, cpuHours(days), want, r.Ended)
		}
	}
}

// TestEndByAnotherClock: a clock that is behind ends a record when it was last counted.
func TestEndByAnotherClock(t *testing.T) {
	h := newHub()
	h.ask("a", false)
	h.hold("a", "2", "2", eur)
	h.look()
	h.pass(-time.Minute)
	h.End(h.reservations["a"], h.now)
	if r := h.records()["a"]; !r.Ended.Equal(began) || !r.Until.Equal(began) {
		t.Errorf("ended at %v, counted until %v", r.Ended, r.Until)
	}
}

// TestLooksAreNotWrites: a look that finds nothing new leaves nothing to write, a sweep what was counted.
func TestLooksAreNotWrites(t *testing.T) {
	h := newHub()
	h.ask("a", false)
	h.hold("a", "2", "2", eur)
	h.use("1")
	h.look()
	h.Written(h.Take())
	h.pass(time.Minute)
	h.look()
	if h.Waiting() != 0 {
		t.Error("a look without news is to be written")
	}
	h.sweep()
	if got := cpuHours(h.records()["a"].Shares["paris"].Total.Promised); got != "0.033333" {
		t.Errorf("swept %s", got)
	}
	h.Written(h.Take())
	h.use("2")
	h.look()
	if h.Waiting() != 1 {
		t.Error("another use is not to be written")
	}
}

// TestUnwrittenIsBounded: a store that does not answer costs memory up to a bound.
func TestUnwrittenIsBounded(t *testing.T) {
	h := newHub()
	for i := range history.MaxUnwritten + 5 {
		h.End(h.ask(types.UID(fmt.Sprint(i)), false), h.now)
	}
	if len(h.Take()) != history.MaxUnwritten || h.Lost != 5 {
		t.Errorf("%d records wait, %d are lost", len(h.Take()), h.Lost)
	}
	h.Written(h.Take())
	if h.Waiting() != 0 || len(h.Take()) != 0 || !h.IsWritten("1") {
		t.Error("written records are not forgotten")
	}
}

// TestExact: however often a meter looks, is swept, written and restarted, what it counts is what was held, to the
// last digit, and the days sum up to it.
func TestExact(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := newHub()
		h.ask("a", false)
		want, cost, cpu, price := new(big.Rat), new(big.Rat), int64(0), "0"
		days := map[string]history.Day{}
		var stored []byte
		keep := func() {
			if h.open != nil {
				return // the store has not answered yet
			}
			all := h.Take()
			for _, w := range all {
				var err error
				stored, err = json.Marshal(w.Record)
				expect.NoError(t, err)
				for _, d := range w.Days {
					days[d.Day+d.Currency] = d
				}
			}
			h.Written(all)
		}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0:
				cpu, price = rapid.Int64Range(0, 5000).Draw(rt, "cpu"), rapid.SampledFrom([]string{"0.3", "0.07", "1"}).Draw(rt, "price")
				h.hold("a", fmt.Sprintf("%dm", cpu), "0", &broker.Cost{CPUCost: price, Currency: "EUR"})
				if cpu == 0 {
					h.hold("a", "0", "0", nil)
				}
				h.look()
			case 1:
				d := time.Duration(rapid.Int64Range(1, 90_000_000).Draw(rt, "ms")) * time.Millisecond
				h.pass(d)
				core := new(big.Rat).Mul(big.NewRat(cpu, 1000), big.NewRat(d.Milliseconds(), 3_600_000))
				want.Add(want, core)
				each, _ := new(big.Rat).SetString(price)
				cost.Add(cost, core.Mul(core, each))
			case 2:
				h.sweep()
			case 3:
				keep()
			case 4: // a restart, and a store that answers only at the next look
				if keep(); stored != nil && h.open == nil {
					h.Meter, h.open = history.NewMeter(), make([]history.Record, 1)
					expect.NoError(t, json.Unmarshal(stored, &h.open[0]))
					h.Observe(&h.ad, h.find, h.now)
				}
			}
		}
		h.look()
		h.sweep()
		keep()
		sum, daily := new(big.Rat), new(big.Rat)
		for key, d := range days {
			if sum.Add(sum, d.Promised.Hours(corev1.ResourceCPU)); !strings.HasPrefix(key, d.Day) {
				rt.Fatal(key)
			}
			daily.Add(daily, d.Cost)
		}
		if sum.Cmp(want) != 0 || daily.Cmp(cost) != 0 {
			rt.Fatalf("counted %s at %s, want %s at %s", sum.RatString(), daily.RatString(), want.RatString(), cost.RatString())
		}
	})
}

// TestSaving compares two core-hours for 0.2 EUR with reference prices.
func TestSaving(t *testing.T) {
	h := newHub()
	h.ask("a", false)
	h.hold("a", "2", "2", eur)
	h.look()
	h.pass(time.Hour)
	h.look()
	day := h.records()["a"].Days[0]
	for name, c := range map[string]struct {
		reference *broker.Cost
		want      string
	}{
		"dearer":           {&broker.Cost{CPUCost: "0.25", Currency: "EUR"}, "0.5 0.3"},
		"cheaper":          {&broker.Cost{CPUCost: "0.05", Currency: "EUR"}, "0.1 -0.1"},
		"another currency": {&broker.Cost{CPUCost: "0.25", Currency: "USD"}, "unknown"},
		"no price":         {&broker.Cost{MemoryCost: "0.25", Currency: "EUR"}, "unknown"},
		"no reference":     {nil, "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			got := "unknown"
			if cost, saved, known := day.Saving(day.Currency, c.reference); known {
				got = history.Decimal(cost) + " " + history.Decimal(saved)
			}
			if got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}
