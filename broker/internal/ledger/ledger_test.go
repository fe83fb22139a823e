package ledger_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/e2e/expect"
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
	spec := paris(1000, 200) // 8 pods fit
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
		return func(s *status) bool { return ledger.Confirm(s, "a", attempt, yes, nil) }
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
			reason: "an acceptance grants what is promised",
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
			reason: "what is released stays charged until confirmed",
			steps:  []func(*status) bool{place(1, 5), answer(1, true), shrink(2, 2)},
			want:   &figures{2, 5, 2}, available: "300m",
		},
		"shrink confirmed": {
			reason: "the confirmation of the provider frees it",
			steps:  []func(*status) bool{place(1, 5), answer(1, true), shrink(2, 2), answer(2, true)},
			want:   &figures{2, -1, 2}, available: "600m",
		},
		"released": {
			reason: "a hold that promises nothing stays until the provider confirms",
			steps:  []func(*status) bool{place(1, 5), shrink(2, 0)},
			want:   &figures{0, 5, 0}, available: "300m",
		},
		"fenced": {
			reason: "a shrink with the attempt that is fenced changes nothing any more",
			steps: []func(*status) bool{place(1, 5), answer(1, true), func(s *status) bool {
				fenced := ledger.Fence(s, "a", 2)
				return fenced && !ledger.Shrink(s, "a", 2, pods(2))
			}},
			want: &figures{5, -1, 5}, available: "300m",
		},
		"release confirmed": {
			reason: "the confirmed hold is removed",
			steps:  []func(*status) bool{place(1, 5), shrink(2, 0), answer(2, true)},
			want:   nil, available: "800m",
		},
		"grown before the shrink was confirmed": {
			reason: "the growth is taken from what is charged already; a refusal takes back only the growth",
			steps:  []func(*status) bool{place(1, 5), answer(1, true), shrink(2, 2), place(3, 2), answer(3, false)},
			want:   &figures{2, 5, 2}, available: "300m",
		},
		"two growths, the second answered": {
			reason: "an acceptance is about all that is promised",
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
	place(t, spec, &s, grow("a", 1, 5))
	ledger.Confirm(&s, "a", 1, true, nil)
	ledger.Shrink(&s, "a", 2, broker.HeldCapacity{})
	for _, stale := range []func() bool{
		func() bool { return ledger.Confirm(&s, "a", 1, true, nil) },
		func() bool { return ledger.Confirm(&s, "a", 1, false, nil) },
		func() bool { return ledger.Confirm(&s, "a", 3, true, nil) },
		func() bool { return ledger.Confirm(&s, "a", 2, false, nil) },
		func() bool { return ledger.Shrink(&s, "a", 1, pods(1)) },
		func() bool { changed, _ := ledger.Place(spec, &s, grow("a", 2, 1)); return changed },
	} {
		if stale() {
			t.Fatalf("a stale call changed the hold to %+v", figuresOf(&s, "a"))
		}
	}
}

// TestRefusalSaysWhatIsHeld: the answer that accepted 2 pods is lost, and a growth is
// refused. The provider holds the 2 pods, so they stay granted.
func TestRefusalSaysWhatIsHeld(t *testing.T) {
	spec := paris(1000, 0)
	for name, tc := range map[string]struct {
		held *broker.HeldCapacity
		want *figures
	}{
		"what it accepted before":       {ptr.To(pods(2)), &figures{2, -1, 2}},
		"less than that":                {ptr.To(pods(1)), &figures{1, -1, 1}},
		"more than was ever promised":   {ptr.To(pods(9)), &figures{3, -1, 3}},
		"nothing":                       {ptr.To(pods(0)), nil},
		"it does not say what it holds": {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var s broker.ClusterAdvertisementStatus
			place(t, spec, &s, grow("a", 1, 2))
			place(t, spec, &s, grow("a", 2, 1))
			if !ledger.Confirm(&s, "a", 2, false, tc.held) {
				t.Fatal("the refusal changed nothing")
			}
			if diff := cmp.Diff(tc.want, figuresOf(&s, "a")); diff != "" {
				t.Errorf("the hold (-want +got)\n%s", diff)
			}
		})
	}
}

// TestWithdraw: the provider of 5 granted pods says what remains, and how long pods may use
// the rest.
func TestWithdraw(t *testing.T) {
	spec := paris(1000, 0)
	for name, tc := range map[string]struct {
		reason  string
		held    *broker.HeldCapacity
		growth  int32
		attempt int64
		want    *figures
		within  time.Duration
	}{
		"a part":         {"the rest is promised and granted", ptr.To(pods(3)), 0, 1, &figures{3, -1, 3}, time.Minute},
		"all":            {"the hold stays until the provider confirms that its guests are gone", nil, 0, 1, &figures{0, -1, 0}, time.Minute},
		"nothing":        {"it still holds everything", ptr.To(pods(5)), 0, 1, &figures{5, -1, 5}, 0},
		"more":           {"it holds no more than is promised", ptr.To(pods(9)), 0, 1, &figures{5, -1, 5}, 0},
		"a growth":       {"an open question is refused, and what was granted stays until that is withdrawn", ptr.To(pods(3)), 2, 2, &figures{5, -1, 5}, 0},
		"former attempt": {"it answers another amount", ptr.To(pods(3)), 2, 1, &figures{7, -1, 5}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var s broker.ClusterAdvertisementStatus
			place(t, spec, &s, grow("a", 1, 5))
			ledger.Confirm(&s, "a", 1, true, nil)
			if tc.growth > 0 {
				place(t, spec, &s, grow("a", 2, tc.growth))
			}
			ledger.Withdraw(&s, "a", tc.attempt, tc.held, time.Minute)
			if diff := cmp.Diff(tc.want, figuresOf(&s, "a")); diff != "" {
				t.Errorf("%s: the hold (-want +got)\n%s", tc.reason, diff)
			}
			hold := ledger.Find(&s, "a")
			if within := ptr.Deref(hold.LeaveWithin, metav1.Duration{}).Duration; within != tc.within || (hold.WithdrawnAttempt > 0) != (tc.within > 0) {
				t.Errorf("%s: %+v", tc.reason, hold)
			}
		})
	}
}

// TestWithdrawnHoldEnds: a hold of which everything was withdrawn ends with the provider's
// confirmation, and may grow again before.
func TestWithdrawnHoldEnds(t *testing.T) {
	spec := paris(1000, 0)
	withdrawn := func() *broker.ClusterAdvertisementStatus {
		s := &broker.ClusterAdvertisementStatus{}
		place(t, spec, s, grow("a", 1, 5))
		ledger.Confirm(s, "a", 1, true, nil)
		ledger.Withdraw(s, "a", 1, nil, time.Minute)
		return s
	}
	s := withdrawn()
	if ledger.Withdraw(s, "a", 1, nil, time.Minute) || ledger.Withdraw(s, "a", 2, nil, time.Hour) {
		t.Error("a repeated message changed the hold")
	}
	if !ledger.Confirm(s, "a", 2, true, nil) || ledger.Find(s, "a") != nil {
		t.Errorf("the hold did not end: %+v", ledger.Find(s, "a"))
	}
	s = withdrawn()
	place(t, spec, s, grow("a", 3, 2))
	ledger.Confirm(s, "a", 3, true, nil)
	if diff := cmp.Diff(&figures{2, -1, 2}, figuresOf(s, "a")); diff != "" {
		t.Errorf("the hold that grew again (-want +got)\n%s", diff)
	}
}

func TestLateAcceptanceOfARefusedGrowth(t *testing.T) {
	spec := paris(1000, 0)
	var s broker.ClusterAdvertisementStatus
	place(t, spec, &s, grow("a", 1, 3))
	ledger.Confirm(&s, "a", 1, true, nil)
	place(t, spec, &s, grow("a", 2, 2))
	ledger.Confirm(&s, "a", 2, false, nil)
	if ledger.Confirm(&s, "a", 2, true, nil) {
		t.Error("an acceptance of what was refused before changed the hold")
	}
	if !ledger.Confirm(&s, "a", 3, true, nil) || ledger.Find(&s, "a").AcceptedAttempt != 3 {
		t.Error("what remains is not answered by its own attempt")
	}
}

// TestProviderGivesUp: the provider lowers what it has accepted. The rest is free, and a
// repeated answer changes nothing.
func TestProviderGivesUp(t *testing.T) {
	spec := paris(1000, 0)
	for name, held := range map[string]*broker.HeldCapacity{"a part": ptr.To(pods(2)), "everything": nil, "more than promised": ptr.To(pods(9))} {
		t.Run(name, func(t *testing.T) {
			var s broker.ClusterAdvertisementStatus
			place(t, spec, &s, grow("a", 1, 5))
			ledger.Confirm(&s, "a", 1, true, nil)
			want := broker.HeldCapacity{}
			if held != nil {
				want = capacity.Min(pods(5), *held)
			}
			if changed := ledger.Confirm(&s, "a", 1, false, held); changed == (name == "more than promised") {
				t.Errorf("changed is %t", changed)
			}
			ledger.Confirm(&s, "a", 1, true, nil)
			ledger.Confirm(&s, "a", 1, false, nil)
			hold := ledger.Find(&s, "a")
			switch name {
			case "a part":
				if hold == nil || !capacity.Equal(hold.Promised, want) || !capacity.Equal(*hold.Granted, want) || hold.Attempt != 2 || hold.Unconfirmed != nil {
					t.Errorf("the hold is %+v", hold)
				}
			case "everything":
				if hold != nil {
					t.Errorf("the hold is %+v", hold)
				}
			}
		})
	}
}

// TestUnlistedHolds: what a provider holds for a Reservation that the ledger has lost is
// charged, until the Reservation is posted again under the same name.
func TestUnlistedHolds(t *testing.T) {
	spec := paris(1000, 0)
	spec.UnlistedHolds = []broker.UnlistedHold{{ReservationUID: "lost", ReservationName: "a", Requester: "rome", Held: pods(8).Totals}}
	var s broker.ClusterAdvertisementStatus
	other := grow("b", 1, 5)
	if _, err := ledger.Place(spec, &s, other); err == nil {
		t.Fatal("what the provider holds is promised again")
	}
	again := grow("a", 1, 8)
	again.ReservationName, again.Requester = "a", "rome"
	place(t, spec, &s, again)
	if reserved, _ := ledger.Account(spec, &s); reserved.String() != pods(8).Totals.String() {
		t.Errorf("reserved is %s, want %s", reserved, pods(8).Totals)
	}
	// The ledger has the hold, but not that it has grown.
	s = broker.ClusterAdvertisementStatus{}
	smaller := grow("lost", 1, 3)
	place(t, spec, &s, smaller)
	if reserved, _ := ledger.Account(spec, &s); reserved.String() != pods(8).Totals.String() {
		t.Errorf("reserved is %s, and the provider holds %s", reserved, pods(8).Totals)
	}
	if _, err := ledger.Place(spec, &s, other); err == nil {
		t.Error("what the provider holds beyond the ledger's hold is promised again")
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
		"guests beyond their hold":   {"what is observed in use is charged even if less is promised", paris(2000, 500, guests("rome", 800)), 5, "800m", "700m"},
		"guests without a hold":      {"guests without a hold still use capacity", paris(2000, 500, guests("berlin", 300)), 5, "800m", "700m"},
		"more used than allocatable": {"available never goes below zero", paris(2000, 1900, guests("rome", 800)), 0, "800m", "0"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var s broker.ClusterAdvertisementStatus
			if tc.holds > 0 {
				place(t, paris(100000, 0), &s, grow("a", 1, tc.holds))
			}
			ledger.Settle(tc.spec, &s)
			if s.Reserved.CPU.Cmp(resource.MustParse(tc.reserved)) != 0 || s.Available.CPU.Cmp(resource.MustParse(tc.available)) != 0 {
				t.Errorf("%s: reserved %s, available %s; want %s, %s", tc.reason, s.Reserved.CPU, s.Available.CPU, tc.reserved, tc.available)
			}
		})
	}
}

// TestScore: status.score is the share that is available, over all resources that
// the cluster has.
func TestScore(t *testing.T) {
	amounts := func(pairs ...string) broker.ResourceQuantities { return broker.FromList(expect.Resources(pairs...)) }
	cases := map[string]struct {
		reason                 string
		allocatable, allocated broker.ResourceQuantities
		pods                   int32
		want                   string
	}{
		"empty cluster":     {"without allocatable resources nothing is available", amounts(), amounts(), 0, "0.00"},
		"all available":     {"nothing is allocated or reserved", amounts("cpu", "4", "memory", "8Gi"), amounts(), 0, "100.00"},
		"mean of all kinds": {"cpu 50 %, memory 25 %, storage 100 %, GPU 0 %", amounts("cpu", "4", "memory", "8Gi", "ephemeral-storage", "10Gi", "nvidia.com/gpu", "2"), amounts("cpu", "2", "memory", "6Gi", "nvidia.com/gpu", "2"), 0, "43.75"},
		"extended resource": {"it counts like any other", amounts("cpu", "3", "example.com/fpga", "3"), amounts("example.com/fpga", "2"), 0, "66.67"},
		"holds":             {"reserved is not available", amounts("cpu", "1"), amounts(), 5, "50.00"},
		"overcommitted":     {"available is never below zero", amounts("cpu", "1"), amounts("cpu", "2"), 0, "0.00"},
		"unknown allocated": {"what is not allocatable is not counted", amounts("cpu", "1"), amounts("memory", "1Gi"), 0, "100.00"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			spec := &broker.ClusterAdvertisementSpec{Resources: broker.AdvertisedResources{Allocatable: tc.allocatable, Allocated: tc.allocated}}
			var s broker.ClusterAdvertisementStatus
			if tc.pods > 0 {
				place(t, spec, &s, grow("a", 1, tc.pods))
			}
			ledger.Settle(spec, &s)
			if s.Score != tc.want {
				t.Errorf("%s: score is %s, want %s", tc.reason, s.Score, tc.want)
			}
		})
	}
}

func TestPlaceInsufficient(t *testing.T) {
	spec := paris(1000, 200)
	var s broker.ClusterAdvertisementStatus
	place(t, spec, &s, grow("a", 1, 5))
	before := s.DeepCopy()
	_, err := ledger.Place(spec, &s, grow("b", 1, 4))
	var insufficient *ledger.InsufficientError
	if !errors.As(err, &insufficient) || err.Error() != "Insufficient cpu: requested 400m, available 300m" {
		t.Fatalf("want 400m requested and 300m available, got %v", err)
	}
	if !apiequality.Semantic.DeepEqual(*before, s) {
		t.Error("a growth that did not fit changed the ledger")
	}
}

func TestSweep(t *testing.T) {
	var s broker.ClusterAdvertisementStatus
	place(t, paris(1000, 0), &s, grow("a", 3, 5))
	place(t, paris(1000, 0), &s, grow("b", 1, 1))
	if !ledger.Sweep(&s, "a", "gone") || ledger.Sweep(&s, "a") {
		t.Fatal("a sweep must change the ledger once")
	}
	if diff := cmp.Diff(&figures{0, 5, 0}, figuresOf(&s, "a")); diff != "" {
		t.Errorf("what was swept stays charged until confirmed: %s", diff)
	}
	if !ledger.Confirm(&s, "a", 4, true, nil) || ledger.Find(&s, "a") != nil || ledger.Find(&s, "b") == nil {
		t.Error("the confirmed sweep must leave the other hold only")
	}
}

func TestDivisibleTotal(t *testing.T) {
	spec := paris(1000, 0)
	total := func(milli int64) broker.HeldCapacity { return broker.HeldCapacity{Totals: cpu(milli)} }
	var s broker.ClusterAdvertisementStatus
	place(t, spec, &s, ledger.Growth{ReservationUID: "a", Requester: "rome", Attempt: 1, Capacity: total(700)})
	ledger.Confirm(&s, "a", 1, true, nil)
	ledger.Shrink(&s, "a", 2, total(300))
	if got := ledger.Find(&s, "a"); got.Promised.Totals.CPU.String() != "300m" || got.Unconfirmed.Totals.CPU.String() != "700m" {
		t.Errorf("want 300m promised and 700m unconfirmed, got %s and %s", got.Promised.Totals, got.Unconfirmed.Totals)
	}
}

func place(t *testing.T, spec *broker.ClusterAdvertisementSpec, s *broker.ClusterAdvertisementStatus, g ledger.Growth) {
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
			kind := rapid.SampledFrom([]string{"place", "shrink", "release", "fence", "confirm", "withdraw", "sweep", "advertise"}).Draw(t, "kind")
			op := map[string]func(*broker.ClusterAdvertisementStatus) bool{
				"place": func(s *broker.ClusterAdvertisementStatus) bool {
					changed, err := ledger.Place(spec, s, ledger.Growth{
						ReservationUID: uid, ReservationName: string(uid), Requester: requesters[uid], Attempt: attempt, Capacity: pods(n),
					})
					return changed && err == nil
				},
				"shrink": func(s *broker.ClusterAdvertisementStatus) bool { return ledger.Shrink(s, uid, attempt, pods(n)) },
				"fence":  func(s *broker.ClusterAdvertisementStatus) bool { return ledger.Fence(s, uid, attempt) },
				"release": func(s *broker.ClusterAdvertisementStatus) bool {
					return ledger.Shrink(s, uid, attempt, broker.HeldCapacity{})
				},
				"confirm": func(s *broker.ClusterAdvertisementStatus) bool { return ledger.Confirm(s, uid, attempt, yes, nil) },
				"withdraw": func(s *broker.ClusterAdvertisementStatus) bool {
					return ledger.Withdraw(s, uid, attempt, ptr.To(pods(n)), time.Minute)
				},
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
				if hold.Promised.Empty() && hold.Unconfirmed == nil && hold.LeaveWithin == nil {
					t.Fatalf("an empty hold stayed: %+v", hold)
				}
			}
			if unallocated := milli(spec.Resources.Allocatable) - milli(spec.Resources.Allocated); kind == "place" && changed && promised > unallocated {
				t.Fatalf("%dm promised of %dm", promised, unallocated)
			}
			for _, hold := range before.Holds {
				after := ledger.Find(&s, hold.ReservationUID)
				if after != nil && ledger.SameVersion(&hold, after) != apiequality.Semantic.DeepEqual(&hold, after) {
					t.Fatalf("%s changed a hold, and its version is the same:\n%s", kind, cmp.Diff(&hold, after))
				}
				if kind != "confirm" && kind != "withdraw" && (after == nil || milli(ledger.Charged(*after).Totals) < milli(ledger.Charged(hold).Totals)) {
					t.Fatalf("%s freed capacity without a confirmation of the provider", kind)
				}
				if kind == "confirm" && !yes && hold.Granted != nil && !ledger.Pending(hold).Empty() && (after == nil || after.Granted == nil || !capacity.Equal(*after.Granted, *hold.Granted)) {
					t.Fatal("a refusal lost what was granted before")
				}
			}
			if reserved, available := ledger.Account(spec, &s); available.CPU != nil && available.CPU.Sign() < 0 || reserved.CPU != nil && reserved.CPU.Sign() < 0 {
				t.Fatalf("the account is negative: reserved %s, available %s", reserved, available)
			}
		}
	})
}
