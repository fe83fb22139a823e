package ledger_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

func cpu(milli int64) broker.ResourceQuantities {
	return broker.ResourceQuantities{CPU: resource.NewMilliQuantity(milli, resource.DecimalSI)}
}

// pods of 100m each.
func pods(n int32) broker.HeldCapacity {
	return capacity.OfPodSets([]broker.PodSet{{Name: "web", Count: n, Requests: cpu(100)}})
}

func paris(allocatable, allocated int64, observed ...broker.ObservedHold) *broker.ClusterAdvertisementSpec {
	return &broker.ClusterAdvertisementSpec{
		ClusterID:     "paris",
		Resources:     broker.AdvertisedResources{Allocatable: cpu(allocatable), Allocated: cpu(allocated)},
		ObservedHolds: observed,
	}
}

func grow(uid string, attempt int64, n int32) ledger.Growth {
	return ledger.Growth{ReservationUID: types.UID(uid), ReservationName: uid, Requester: "rome", Attempt: attempt, Capacity: pods(n)}
}

// figures of a hold: promised, unconfirmed (-1 for none) and granted pods.
type figures struct{ Promised, Unconfirmed, Granted int32 }

func figuresOf(status *broker.ClusterAdvertisementStatus, uid types.UID) *figures {
	hold := ledger.Find(status, uid)
	if hold == nil {
		return nil
	}
	f := &figures{Promised: hold.Promised.Pods(), Unconfirmed: -1}
	if hold.Unconfirmed != nil {
		f.Unconfirmed = hold.Unconfirmed.Pods()
	}
	if hold.Granted != nil {
		f.Granted = hold.Granted.Pods()
	}
	return f
}

func TestHoldLife(t *testing.T) {
	spec := paris(1000, 200) // room for 8 pods
	type status = broker.ClusterAdvertisementStatus
	place := func(attempt int64, n int32) func(*status) bool {
		return func(s *status) bool {
			changed, err := ledger.Place(spec, s, grow("a", attempt, n))
			return changed && err == nil
		}
	}
	shrink := func(attempt int64, n int32) func(*status) bool {
		return func(s *status) bool { return ledger.Shrink(s, "a", attempt, pods(n)) }
	}
	answer := func(attempt int64, yes bool) func(*status) bool {
		return func(s *status) bool { return ledger.Confirm(s, "a", attempt, yes) }
	}
	cases := map[string]struct {
		reason    string
		steps     []func(*status) bool
		want      *figures
		available string
	}{
		"placed": {
			reason: "what is promised is charged at once",
			steps:  []func(*status) bool{place(1, 5)},
			want:   &figures{5, -1, 0}, available: "300m",
		},
		"accepted": {
			reason: "a yes makes the promise granted",
			steps:  []func(*status) bool{place(1, 5), answer(1, true)},
			want:   &figures{5, -1, 5}, available: "300m",
		},
		"refused": {
			reason: "a refused first attempt leaves nothing",
			steps:  []func(*status) bool{place(1, 5), answer(1, false)},
			want:   nil, available: "800m",
		},
		"growth refused": {
			reason: "a refused growth does not lose what was granted before",
			steps:  []func(*status) bool{place(1, 3), answer(1, true), place(2, 5), answer(2, false)},
			want:   &figures{3, -1, 3}, available: "500m",
		},
		"growth pending": {
			reason: "what was granted stays granted while a growth waits",
			steps:  []func(*status) bool{place(1, 3), answer(1, true), place(2, 5)},
			want:   &figures{8, -1, 3}, available: "0",
		},
		"shrunk": {
			reason: "what is given back stays charged",
			steps:  []func(*status) bool{place(1, 5), answer(1, true), shrink(2, 2)},
			want:   &figures{2, 5, 2}, available: "300m",
		},
		"shrink confirmed": {
			reason: "the provider's word frees it",
			steps:  []func(*status) bool{place(1, 5), answer(1, true), shrink(2, 2), answer(2, true)},
			want:   &figures{2, -1, 2}, available: "600m",
		},
		"released": {
			reason: "a hold that promises nothing stays until the provider confirms",
			steps:  []func(*status) bool{place(1, 5), shrink(2, 0)},
			want:   &figures{0, 5, 0}, available: "300m",
		},
		"release confirmed": {
			reason: "then it is gone",
			steps:  []func(*status) bool{place(1, 5), shrink(2, 0), answer(2, true)},
			want:   nil, available: "800m",
		},
		"grown before the shrink was confirmed": {
			reason: "the growth is taken from what is charged anyway; a no takes back only the growth",
			steps:  []func(*status) bool{place(1, 5), answer(1, true), shrink(2, 2), place(3, 2), answer(3, false)},
			want:   &figures{2, 5, 2}, available: "300m",
		},
		"two growths, the second answered": {
			reason: "a yes is about all that is promised",
			steps:  []func(*status) bool{place(1, 2), place(2, 3), answer(2, true)},
			want:   &figures{5, -1, 5}, available: "300m",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var s status
			for i, step := range tc.steps {
				if !step(&s) {
					t.Fatalf("step %d changed nothing", i)
				}
				before := s.DeepCopy()
				if step(&s) || !apiequality.Semantic.DeepEqual(*before, s) {
					t.Fatalf("step %d is not idempotent:\n%s", i, cmp.Diff(*before, s))
				}
			}
			if diff := cmp.Diff(tc.want, figuresOf(&s, "a")); diff != "" {
				t.Errorf("%s: (-want +got)\n%s", tc.reason, diff)
			}
			_, available := ledger.Account(spec, &s)
			if got := available.List()[corev1.ResourceCPU]; got.Cmp(resource.MustParse(tc.available)) != 0 {
				t.Errorf("%s: available cpu is %s, want %s", tc.reason, got.String(), tc.available)
			}
		})
	}
}

func TestStaleAnswersChangeNothing(t *testing.T) {
	spec := paris(1000, 0)
	var s broker.ClusterAdvertisementStatus
	must(t, spec, &s, grow("a", 1, 5))
	ledger.Confirm(&s, "a", 1, true)
	ledger.Release(&s, "a", 2)
	for _, stale := range []func() bool{
		func() bool { return ledger.Confirm(&s, "a", 1, true) },
		func() bool { return ledger.Confirm(&s, "a", 1, false) },
		func() bool { return ledger.Confirm(&s, "a", 3, true) },
		func() bool { return ledger.Confirm(&s, "a", 2, false) },
		func() bool { return ledger.Shrink(&s, "a", 1, pods(1)) },
		func() bool { changed, _ := ledger.Place(spec, &s, grow("a", 2, 1)); return changed },
	} {
		if stale() {
			t.Fatalf("a stale call changed the hold to %+v", figuresOf(&s, "a"))
		}
	}
}

func TestLateYesToARefusedGrowth(t *testing.T) {
	spec := paris(1000, 0)
	var s broker.ClusterAdvertisementStatus
	must(t, spec, &s, grow("a", 1, 3))
	ledger.Confirm(&s, "a", 1, true)
	must(t, spec, &s, grow("a", 2, 2))
	ledger.Confirm(&s, "a", 2, false)
	if ledger.Confirm(&s, "a", 2, true) {
		t.Error("a yes to what was refused before changed the hold")
	}
	if !ledger.Confirm(&s, "a", 3, true) || ledger.Find(&s, "a").AcceptedAttempt != 3 {
		t.Error("what is left is not answered by its own number")
	}
}

func TestAccount(t *testing.T) {
	guests := func(requester string, milli int64) broker.ObservedHold {
		return broker.ObservedHold{Requester: requester, Used: cpu(milli), Pods: 1}
	}
	cases := map[string]struct {
		reason              string
		spec                *broker.ClusterAdvertisementSpec
		holds               int32
		reserved, available string
	}{
		"guests within their hold":   {"guests are part of what their consumer holds", paris(2000, 500, guests("rome", 300)), 5, "500m", "1"},
		"guests beyond their hold":   {"what is seen in use is charged even if less is promised", paris(2000, 500, guests("rome", 800)), 5, "800m", "700m"},
		"guests without a hold":      {"guests nobody holds anything for still take room", paris(2000, 500, guests("berlin", 300)), 5, "800m", "700m"},
		"more used than allocatable": {"available never goes below zero", paris(2000, 1900, guests("rome", 800)), 0, "800m", "0"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var s broker.ClusterAdvertisementStatus
			if tc.holds > 0 {
				must(t, paris(100000, 0), &s, grow("a", 1, tc.holds))
			}
			ledger.Settle(tc.spec, &s)
			if s.Reserved.CPU.Cmp(resource.MustParse(tc.reserved)) != 0 || s.Available.CPU.Cmp(resource.MustParse(tc.available)) != 0 {
				t.Errorf("%s: reserved %s, available %s; want %s, %s", tc.reason, s.Reserved.CPU, s.Available.CPU, tc.reserved, tc.available)
			}
		})
	}
}

func TestPlaceWithoutRoom(t *testing.T) {
	spec := paris(1000, 200)
	var s broker.ClusterAdvertisementStatus
	must(t, spec, &s, grow("a", 1, 5))
	before := s.DeepCopy()
	_, err := ledger.Place(spec, &s, grow("b", 1, 4))
	var full *ledger.NoRoomError
	if !errors.As(err, &full) || full.Needed.String() != "400m" || full.Available.String() != "300m" {
		t.Fatalf("want 400m needed and 300m available, got %v", err)
	}
	if !apiequality.Semantic.DeepEqual(*before, s) {
		t.Error("a growth that did not fit changed the ledger")
	}
}

func TestSweep(t *testing.T) {
	var s broker.ClusterAdvertisementStatus
	must(t, paris(1000, 0), &s, grow("a", 3, 5))
	must(t, paris(1000, 0), &s, grow("b", 1, 1))
	if !ledger.Sweep(&s, "a", "gone") || ledger.Sweep(&s, "a") {
		t.Fatal("a sweep must change the ledger once")
	}
	if diff := cmp.Diff(&figures{0, 5, 0}, figuresOf(&s, "a")); diff != "" {
		t.Errorf("what was swept stays charged until confirmed: %s", diff)
	}
	if !ledger.Confirm(&s, "a", 4, true) || ledger.Find(&s, "a") != nil || ledger.Find(&s, "b") == nil {
		t.Error("the confirmed sweep must leave the other hold only")
	}
}

func TestDivisibleTotal(t *testing.T) {
	spec := paris(1000, 0)
	total := func(milli int64) broker.HeldCapacity { return broker.HeldCapacity{Totals: cpu(milli)} }
	var s broker.ClusterAdvertisementStatus
	must(t, spec, &s, ledger.Growth{ReservationUID: "a", Requester: "rome", Attempt: 1, Capacity: total(700)})
	ledger.Confirm(&s, "a", 1, true)
	ledger.Shrink(&s, "a", 2, total(300))
	if got := ledger.Find(&s, "a"); got.Promised.Totals.CPU.String() != "300m" || got.Unconfirmed.Totals.CPU.String() != "700m" {
		t.Errorf("want 300m promised and 700m unconfirmed, got %s and %s", got.Promised.Totals, got.Unconfirmed.Totals)
	}
}

func must(t *testing.T, spec *broker.ClusterAdvertisementSpec, s *broker.ClusterAdvertisementStatus, g ledger.Growth) {
	t.Helper()
	if changed, err := ledger.Place(spec, s, g); err != nil || !changed {
		t.Fatalf("placing failed: %v, %v", changed, err)
	}
}

// TestLedgerProperties runs random operations, with repetitions and stale
// attempts among them, while what the provider advertises changes.
func TestLedgerProperties(t *testing.T) {
	milli := func(q broker.ResourceQuantities) int64 {
		amount := q.List()[corev1.ResourceCPU]
		return amount.MilliValue()
	}
	rapid.Check(t, func(t *rapid.T) {
		advertise := func() *broker.ClusterAdvertisementSpec {
			return paris(rapid.Int64Range(0, 3000).Draw(t, "allocatable"), rapid.Int64Range(0, 1000).Draw(t, "allocated"),
				broker.ObservedHold{Requester: "rome", Used: cpu(rapid.Int64Range(0, 900).Draw(t, "used"))})
		}
		spec := advertise()
		requesters := map[types.UID]string{"a": "rome", "b": "rome", "c": "berlin"}
		var s broker.ClusterAdvertisementStatus
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			uid := rapid.SampledFrom([]types.UID{"a", "b", "c"}).Draw(t, "uid")
			attempt := rapid.Int64Range(-1, 1).Draw(t, "ahead")
			if hold := ledger.Find(&s, uid); hold != nil {
				attempt += hold.Attempt
			}
			n := rapid.Int32Range(0, 8).Draw(t, "pods")
			yes := rapid.Bool().Draw(t, "yes")
			kind := rapid.SampledFrom([]string{"place", "shrink", "release", "confirm", "sweep", "advertise"}).Draw(t, "kind")
			op := map[string]func(*broker.ClusterAdvertisementStatus) bool{
				"place": func(s *broker.ClusterAdvertisementStatus) bool {
					changed, err := ledger.Place(spec, s, ledger.Growth{
						ReservationUID: uid, ReservationName: string(uid), Requester: requesters[uid], Attempt: attempt, Capacity: pods(n),
					})
					return changed && err == nil
				},
				"shrink":    func(s *broker.ClusterAdvertisementStatus) bool { return ledger.Shrink(s, uid, attempt, pods(n)) },
				"release":   func(s *broker.ClusterAdvertisementStatus) bool { return ledger.Release(s, uid, attempt) },
				"confirm":   func(s *broker.ClusterAdvertisementStatus) bool { return ledger.Confirm(s, uid, attempt, yes) },
				"sweep":     func(s *broker.ClusterAdvertisementStatus) bool { return ledger.Sweep(s, uid) },
				"advertise": func(*broker.ClusterAdvertisementStatus) bool { spec = advertise(); return false },
			}[kind]

			before := *s.DeepCopy()
			changed := op(&s)
			if same := apiequality.Semantic.DeepEqual(before, s); changed == same {
				t.Fatalf("%s says changed=%t:\n%s", kind, changed, cmp.Diff(before, s))
			}
			if kind != "advertise" {
				once := *s.DeepCopy()
				if op(&s) || !apiequality.Semantic.DeepEqual(once, s) {
					t.Fatalf("%s is not idempotent:\n%s", kind, cmp.Diff(once, s))
				}
			}

			seen := map[types.UID]bool{}
			var promised int64
			for _, hold := range s.Holds {
				if seen[hold.ReservationUID] {
					t.Fatalf("two holds of %s", hold.ReservationUID)
				}
				seen[hold.ReservationUID] = true
				promised += milli(hold.Promised.Totals)
				if hold.Granted != nil && hold.Granted.Pods() > hold.Promised.Pods() {
					t.Fatalf("granted more than promised: %+v", hold)
				}
				if hold.Promised.Empty() && hold.Unconfirmed == nil {
					t.Fatalf("an empty hold stayed: %+v", hold)
				}
			}
			if lendable := milli(spec.Resources.Allocatable) - milli(spec.Resources.Allocated); kind == "place" && changed && promised > lendable {
				t.Fatalf("%dm promised of %dm", promised, lendable)
			}
			for _, hold := range before.Holds {
				after := ledger.Find(&s, hold.ReservationUID)
				if kind != "confirm" && (after == nil || milli(ledger.Charged(*after).Totals) < milli(ledger.Charged(hold).Totals)) {
					t.Fatalf("%s freed capacity without the provider's word", kind)
				}
				if kind == "confirm" && !yes && hold.Granted != nil && (after == nil || after.Granted == nil || !capacity.Equal(*after.Granted, *hold.Granted)) {
					t.Fatal("a refusal lost what was granted before")
				}
			}
			if reserved, available := ledger.Account(spec, &s); available.CPU != nil && available.CPU.Sign() < 0 || reserved.CPU != nil && reserved.CPU.Sign() < 0 {
				t.Fatalf("the account is negative: reserved %s, available %s", reserved, available)
			}
		}
	})
}
