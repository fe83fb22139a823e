package plan

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/lease"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/internal/settings"
)

// Input is all that the plan for one Reservation and its status depend on.
type Input struct {
	Reservation *broker.Reservation
	// Advertisements sorted by cluster ID. They are shared: read-only.
	Advertisements []*broker.ClusterAdvertisement
	// Holders are the clusters with a hold of the Reservation, or of an earlier one of
	// the same name.
	Holders  []string
	Settings settings.Settings
	Now      time.Time
	// Active are the holders whose last advertisement is not stale.
	Active map[string]bool
	// Unreachable is since when the consumer has reported each provider as unreachable; none if
	// it is silent itself.
	Unreachable map[string]time.Time
	// Unusable is up to which attempt the consumer cannot use what each holder has granted.
	Unusable map[string]int64
	// Progress is how far the holders have come with what they were asked.
	Progress map[string]answers.Progress
	// Times are since when this process has seen the Reservation's state.
	Times lease.Times
	// Heard is when the consumer last advertised, or when this process became the leader.
	Heard time.Time
	// First is the request for which capacity is kept free before the Reservation in the
	// queue, where it would have that position; nil for none. RefuseFirst are the clusters that
	// must not be chosen for the first one at present.
	First       *decide.Request
	RefuseFirst map[string]capacity.Rejection
	Position    int32
	// QueueTime is the time by which it is ordered there; nil for that of its creation.
	QueueTime *metav1.MicroTime

	// Choice is what a placement is decided on; empty if there is nothing to place.
	Choice Choice
}

// Choice is what there is to choose from for a capacity.
type Choice struct {
	Clusters decide.Snapshot
	// Full are the clusters whose ledgers have no room for a hold of the capacity, Refused those
	// that must not be chosen for it because of their answers so far.
	Full, Refused map[string]capacity.Rejection
	// Records are how the clusters have kept their promises; nil if that has no weight.
	Records map[string]answers.Record
}

// with is the input with another status.
func (in Input) with(status broker.ReservationStatus) Input {
	reservation := *in.Reservation
	reservation.Status = status
	in.Reservation = &reservation
	return in
}

// Advertisement is that of a cluster; nil if there is none.
func (in Input) Advertisement(cluster string) *broker.ClusterAdvertisement {
	at, found := in.find(cluster)
	if !found {
		return nil
	}
	return in.Advertisements[at]
}

func (in Input) find(cluster string) (at int, found bool) {
	return slices.BinarySearchFunc(in.Advertisements, cluster, func(ad *broker.ClusterAdvertisement, cluster string) int {
		return cmp.Compare(ad.Spec.ClusterID, cluster)
	})
}

// Hold is the Reservation's hold at one cluster.
type Hold struct {
	broker.Hold
	Cluster string
}

// Holds lists the Reservation's holds, in the order of its allocations, newest last.
func (in Input) Holds() []Hold {
	r := in.Reservation
	var holds []Hold
	for _, cluster := range in.Holders {
		if ad := in.Advertisement(cluster); ad != nil {
			if hold := ledger.Find(&ad.Status, r.UID); hold != nil {
				holds = append(holds, Hold{*hold, cluster})
			}
		}
	}
	order := func(h Hold) int {
		i := slices.IndexFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.Cluster == h.Cluster })
		if i < 0 {
			return len(r.Status.Allocations)
		}
		return i
	}
	slices.SortFunc(holds, func(a, b Hold) int {
		return cmp.Or(cmp.Compare(order(a), order(b)), cmp.Compare(a.Cluster, b.Cluster))
	})
	return holds
}

// reliable is the part of a hold that the requester can count on: what an active cluster
// that it can connect to has granted, and the rest of the promise while its answer is
// expected.
func (in Input) reliable(h Hold) broker.HeldCapacity {
	switch {
	case !in.counts(h):
		return broker.HeldCapacity{}
	case in.Overdue(h):
		return capacity.Sub(h.Promised, ledger.Pending(h.Hold))
	default:
		return h.Promised
	}
}

// ended reports whether the Reservation has been deleted, released, or its lease has
// ended.
func (in Input) ended() bool {
	r := in.Reservation
	return in.Deleted() || r.Status.Phase == broker.ReservationReleased || in.leaseEnded()
}

// Requested is the capacity that the Reservation requests now: none once it has ended.
func (in Input) Requested() broker.HeldCapacity {
	switch spec := &in.Reservation.Spec; {
	case in.ended(), invalidReason(spec) != "":
		return broker.HeldCapacity{}
	default:
		return capacity.Requested(spec)
	}
}

// invalidReason explains why no provider can satisfy the spec; "" if one could.
func invalidReason(spec *broker.ReservationSpec) string {
	switch {
	case spec.RequesterID == "":
		return "requesterID is empty: set it to the consumer's cluster ID."
	case spec.TargetClusterID == spec.RequesterID:
		return "targetClusterID is the requester itself: set another cluster ID, or remove it."
	case spec.TargetClusterID != "" && spec.Placement != nil && slices.Contains(spec.Placement.ExcludeClusters, spec.TargetClusterID):
		return fmt.Sprintf("targetClusterID is %s, which placement.excludeClusters excludes: change one of them.", spec.TargetClusterID)
	case spec.Duration != nil && spec.Duration.Duration <= 0:
		return "duration must be positive."
	case spec.RequestedResources != nil && len(spec.RequestedResources.List()) == 0:
		return "requestedResources is zero: set a positive amount."
	}
	return ""
}
