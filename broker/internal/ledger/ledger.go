// Package ledger is the only code that promises and frees capacity. Its functions
// are pure: they change a ClusterAdvertisement's status, which the
// caller has read and writes back by compare-and-swap on its resourceVersion.
//
// The life of a hold, each step tagged with an attempt of its Reservation:
//
//	Place    promises more; the provider accepts or refuses it
//	Confirm  records the provider's answer: if it accepts, all that is promised is
//	         granted; if it refuses, the promise falls back to what was granted
//	Shrink   promises less; what was promised before stays charged (Unconfirmed)
//	Release  promises nothing, likewise
//	Confirm  drops what was unconfirmed, and with it a hold that promises nothing
//	Withdraw lowers what the provider had accepted to what it still holds
//
// Every function is idempotent, and a call with an older attempt than the hold's
// changes nothing.
package ledger

import (
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Growth is capacity to promise to a Reservation.
type Growth struct {
	ReservationUID  types.UID
	ReservationName string
	Requester       string
	// Attempt of the Reservation that commits it.
	Attempt int64
	// Capacity in addition to what is promised already.
	Capacity broker.HeldCapacity
}

// InsufficientError reports that a growth does not fit in the available capacity.
type InsufficientError struct {
	Resource corev1.ResourceName
	// Requested is how much of it the growth adds, Available what is left.
	Requested, Available resource.Quantity
}

func (e *InsufficientError) Error() string {
	return capacity.Insufficient(e.Resource, e.Requested.String(), e.Available.String())
}

// Find is a Reservation's hold, nil if there is none. It points into status.
func Find(status *broker.ClusterAdvertisementStatus, uid types.UID) *broker.Hold {
	i := slices.IndexFunc(status.Holds, func(h broker.Hold) bool { return h.ReservationUID == uid })
	if i < 0 {
		return nil
	}
	return &status.Holds[i]
}

// SameVersion reports whether two versions of a Reservation's hold are the same one: every
// change of this package gives a hold another attempt, or accepts its attempt. It costs
// next to nothing, other than a comparison of all fields.
func SameVersion(a, b *broker.Hold) bool {
	return a.ReservationUID == b.ReservationUID && a.Attempt == b.Attempt && a.AcceptedAttempt == b.AcceptedAttempt &&
		(a.Granted == nil) == (b.Granted == nil) && (a.Unconfirmed == nil) == (b.Unconfirmed == nil)
}

// Draft is a version of an object for a change whose outcome is not written: it shares the rest.
func Draft(ad *broker.ClusterAdvertisement) *broker.ClusterAdvertisement {
	copied := *ad
	copied.Status.Holds = slices.Clone(ad.Status.Holds)
	copied.Status.Conditions = slices.Clone(ad.Status.Conditions)
	return &copied
}

// Place promises a growth, if the charges then still fit in the unallocated
// resources of the cluster and the ledger has room for it; otherwise it returns an
// *InsufficientError or a *FullError and changes nothing.
func Place(spec *broker.ClusterAdvertisementSpec, status *broker.ClusterAdvertisementStatus, growth Growth) (changed bool, err error) {
	held := Find(status, growth.ReservationUID)
	if held != nil && held.Attempt >= growth.Attempt || growth.Capacity.Empty() {
		return false, nil
	}
	hold := broker.Hold{
		ReservationUID:  growth.ReservationUID,
		ReservationName: growth.ReservationName,
		Requester:       growth.Requester,
	}
	if held != nil {
		hold = *held.DeepCopy()
	}
	hold.Cost = lock(hold.Cost, hold.Promised, CostOf(spec, growth.Capacity), growth.Capacity)
	hold.Promised = capacity.Add(hold.Promised, growth.Capacity)
	hold.Attempt = growth.Attempt

	after := broker.ClusterAdvertisementStatus{Holds: slices.Clone(status.Holds)}
	drop(&after, hold.ReservationUID)
	if err := SizeOf(spec, after.Holds).Room(hold.Promised); err != nil {
		return false, err
	}
	put(&after, hold)
	unallocated := unallocated(spec)
	charged := total(charges(spec, &after))
	for name, requested := range growth.Capacity.Totals.List() {
		have, charge := unallocated[name], charged[name]
		if charge.Cmp(have) > 0 {
			_, available := Account(spec, status)
			return false, &InsufficientError{Resource: name, Requested: requested, Available: available.List()[name]}
		}
	}
	put(status, hold)
	return true, nil
}

// Shrink lowers what is promised to its minimum with to. What was promised before
// stays charged until the provider confirms the attempt.
func Shrink(status *broker.ClusterAdvertisementStatus, uid types.UID, attempt int64, to broker.HeldCapacity) (changed bool) {
	hold := Find(status, uid)
	if hold == nil || hold.Attempt >= attempt {
		return false
	}
	to = capacity.Min(hold.Promised, to)
	if capacity.Equal(to, hold.Promised) {
		return false
	}
	before := hold.Promised
	if hold.Unconfirmed != nil {
		before = capacity.Max(*hold.Unconfirmed, before)
	}
	hold.Unconfirmed = before.DeepCopy()
	hold.Promised = to
	hold.Attempt = attempt
	if hold.Granted != nil {
		hold.Granted = orNil(capacity.Min(*hold.Granted, to))
	}
	return true
}

// Fence raises the attempt of a hold without changing it: a Place or Shrink with that
// attempt, or with an earlier one, is void from now on.
func Fence(status *broker.ClusterAdvertisementStatus, uid types.UID, attempt int64) (changed bool) {
	hold := Find(status, uid)
	if hold == nil || hold.Attempt >= attempt {
		return false
	}
	hold.Attempt = attempt
	return true
}

// Confirm records the provider's answer to one attempt. Accepted: what is promised
// is granted, and nothing else of the hold is charged any more. Refused: the
// promise falls back to what was granted before, or to what the provider says that it
// still holds (nil for nothing) if that is more: it may have accepted an attempt whose
// answer was lost. What was unconfirmed stays so. If nothing is pending, the provider
// gives up what it had accepted, except for what it still holds. It cannot refuse a
// release.
func Confirm(status *broker.ClusterAdvertisementStatus, uid types.UID, attempt int64, accepted bool, held *broker.HeldCapacity) (changed bool) {
	hold := Find(status, uid)
	if hold == nil || hold.Attempt != attempt || accepted && hold.AcceptedAttempt == attempt {
		return false
	}
	switch {
	case accepted:
		hold.AcceptedAttempt = attempt
		hold.Unconfirmed = nil
		hold.Granted = orNil(hold.Promised)
	case Pending(*hold).Empty():
		kept := broker.HeldCapacity{}
		if held != nil {
			kept = capacity.Min(hold.Promised, *held)
		}
		if capacity.Equal(kept, hold.Promised) {
			return false
		}
		hold.Promised, hold.Granted = kept, orNil(kept)
	default:
		kept := broker.HeldCapacity{}
		if held != nil {
			kept = capacity.Min(hold.Promised, *held)
		}
		if hold.Granted != nil {
			kept = capacity.Max(kept, *hold.Granted)
		}
		hold.Promised, hold.Granted = kept, orNil(kept)
	}
	if !accepted {
		// What remains needs an answer of its own: a late acceptance of what was
		// refused does not count for it.
		hold.Attempt++
	}
	if hold.Promised.Empty() && hold.Unconfirmed == nil {
		drop(status, uid)
	}
	return true
}

// Withdraw records that the provider gives up what it had accepted, except for what it
// still holds (nil for nothing), and how long pods may use the rest. A hold of which
// nothing remains is kept until the provider confirms its release: until then its guests
// may be there. While the provider has yet to answer, it is a refusal of the attempt.
func Withdraw(status *broker.ClusterAdvertisementStatus, uid types.UID, attempt int64, held *broker.HeldCapacity, leaveWithin time.Duration) (changed bool) {
	hold := Find(status, uid)
	if hold == nil || hold.Attempt != attempt {
		return false
	}
	if hold.Promised.Empty() || !Pending(*hold).Empty() {
		return Confirm(status, uid, attempt, false, held)
	}
	kept := broker.HeldCapacity{}
	if held != nil {
		kept = capacity.Min(hold.Promised, *held)
	}
	if capacity.Equal(kept, hold.Promised) {
		return false
	}
	hold.Promised, hold.Granted = kept, orNil(kept)
	hold.WithdrawnAttempt, hold.LeaveWithin = attempt, &metav1.Duration{Duration: leaveWithin}
	hold.Attempt++
	return true
}

// Sweep releases the holds of Reservations that are deleted or have ended. The
// caller has verified that with a live read.
func Sweep(status *broker.ClusterAdvertisementStatus, candidates ...types.UID) (changed bool) {
	for _, uid := range candidates {
		if hold := Find(status, uid); hold != nil {
			changed = Shrink(status, uid, hold.Attempt+1, broker.HeldCapacity{}) || changed
		}
	}
	return changed
}

// Pending is the part of a hold's promise that the provider has not accepted yet.
func Pending(hold broker.Hold) broker.HeldCapacity {
	if hold.Granted == nil {
		return hold.Promised
	}
	return capacity.Sub(hold.Promised, *hold.Granted)
}

// Charged is what a hold is charged for: what is promised, and what was promised
// before until the provider confirms the smaller hold.
func Charged(hold broker.Hold) broker.HeldCapacity {
	if hold.Unconfirmed == nil {
		return hold.Promised
	}
	return capacity.Max(hold.Promised, *hold.Unconfirmed)
}

// Account sums up a cluster: reserved is the sum, over all consumers, of the larger
// of what their holds are charged for and what their guests are observed to use;
// available is allocatable less allocated less reserved, never below zero.
func Account(spec *broker.ClusterAdvertisementSpec, status *broker.ClusterAdvertisementStatus) (reserved, available broker.ResourceQuantities) {
	sum := total(charges(spec, status))
	return broker.FromList(sum), broker.FromList(capacity.Subtract(unallocated(spec), sum))
}

// Settle writes the account and the score into the status. A common resource that
// the cluster has is written as zero if none of it is reserved or available. The
// score of a cluster without allocatable resources is zero.
func Settle(spec *broker.ClusterAdvertisementSpec, status *broker.ClusterAdvertisementStatus) {
	status.Reserved, status.Available = Account(spec, status)
	for _, q := range []*broker.ResourceQuantities{&status.Reserved, &status.Available} {
		zero := func(has *resource.Quantity, amount **resource.Quantity) {
			if has != nil && *amount == nil {
				*amount = resource.NewQuantity(0, has.Format)
			}
		}
		zero(spec.Resources.Allocatable.CPU, &q.CPU)
		zero(spec.Resources.Allocatable.Memory, &q.Memory)
		zero(spec.Resources.Allocatable.GPU, &q.GPU)
		zero(spec.Resources.Allocatable.Storage, &q.Storage)
	}
	var score capacity.Score
	allocatable := capacity.Floor(spec.Resources.Allocatable.List())
	if kinds := allocatable.Kinds(); len(kinds) > 0 {
		score = capacity.NewScore(100 * capacity.AvailableShare(kinds, capacity.Floor(status.Available.List()), allocatable))
	}
	status.Score = score.String()
}

// unallocated is what a cluster's own pods leave of its allocatable.
func unallocated(spec *broker.ClusterAdvertisementSpec) corev1.ResourceList {
	return capacity.Subtract(spec.Resources.Allocatable.List(), spec.Resources.Allocated.List())
}

// charges are what each consumer is charged for. What the provider holds for a
// Reservation without a hold in the ledger, by UID and name, is charged as well, and so is
// what it holds for one beyond the ledger's hold: the hub has lost them. Guests
// are part of what their consumer holds, and count only where they use more than that.
func charges(spec *broker.ClusterAdvertisementSpec, status *broker.ClusterAdvertisementStatus) map[string]corev1.ResourceList {
	out := map[string]corev1.ResourceList{}
	for _, hold := range status.Holds {
		if out[hold.Requester] == nil {
			out[hold.Requester] = corev1.ResourceList{}
		}
		charged := Charged(hold)
		addTo(out[hold.Requester], &charged.Totals)
	}
	for _, unlisted := range spec.UnlistedHolds {
		if hold := Find(status, unlisted.ReservationUID); hold != nil {
			beyond := capacity.Subtract(unlisted.Held.List(), Charged(*hold).Totals.List())
			out[hold.Requester] = broker.AddTo(out[hold.Requester], beyond)
		} else if !slices.ContainsFunc(status.Holds, func(h broker.Hold) bool {
			return h.Requester == unlisted.Requester && h.ReservationName == unlisted.ReservationName
		}) {
			out[unlisted.Requester] = broker.AddTo(out[unlisted.Requester], unlisted.Held.List())
		}
	}
	used := map[string]corev1.ResourceList{}
	for _, observed := range spec.ObservedHolds {
		used[observed.Requester] = broker.AddTo(used[observed.Requester], observed.Used.List())
	}
	for requester, list := range used {
		if out[requester] == nil {
			out[requester] = corev1.ResourceList{}
		}
		capacity.Larger(out[requester], list)
	}
	return out
}

// addTo adds amounts to a sum in place. A change of a ledger adds up all of its holds:
// nothing is copied.
func addTo(sum corev1.ResourceList, q *broker.ResourceQuantities) {
	q.Each(func(name corev1.ResourceName, amount resource.Quantity) {
		if !amount.IsZero() {
			have := sum[name]
			have.Add(amount)
			sum[name] = have
		}
	})
}

func total(lists map[string]corev1.ResourceList) corev1.ResourceList {
	sum := corev1.ResourceList{}
	for _, requester := range slices.Sorted(maps.Keys(lists)) {
		broker.AddTo(sum, lists[requester])
	}
	return sum
}

func put(status *broker.ClusterAdvertisementStatus, hold broker.Hold) {
	if held := Find(status, hold.ReservationUID); held != nil {
		*held = hold
		return
	}
	status.Holds = append(status.Holds, hold)
}

func drop(status *broker.ClusterAdvertisementStatus, uid types.UID) {
	status.Holds = slices.DeleteFunc(status.Holds, func(h broker.Hold) bool { return h.ReservationUID == uid })
}

func orNil(c broker.HeldCapacity) *broker.HeldCapacity {
	if c.Empty() {
		return nil
	}
	return c.DeepCopy()
}
