package reservation

import (
	"encoding/json"
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// requestedBy is what a spec requests, as the status records it.
func requestedBy(spec *broker.ReservationSpec) *broker.Requested {
	if spec.RequestedResources != nil {
		return &broker.Requested{Resources: *spec.RequestedResources}
	}
	requested := &broker.Requested{Resources: capacity.OfPodSets(spec.PodSets).Totals}
	for _, set := range spec.PodSets {
		requested.PodSets = append(requested.PodSets, broker.RequestedPods{Name: set.Name, Count: set.Count, Shape: shapeOf(set)})
	}
	return requested
}

// shapeOf is a hash of all of a pod set but its name and count.
func shapeOf(set broker.PodSet) string {
	set.Name, set.Count = "", 0
	// The types of the API always encode, with the keys of maps in order.
	encoded, _ := json.Marshal(set)
	hash := fnv.New64a()
	hash.Write(encoded)
	return strconv.FormatUint(hash.Sum64(), 36)
}

// queueTime is the time by which a Reservation is ordered in the queue, nil for that of its
// creation, and what it asked for at that time (asked). It compares no clocks: the times are
// those of the API server.
func (r *Reconciler) queueTime(in *snapshot) (*metav1.MicroTime, *broker.Requested) {
	status, granted := &in.reservation.Status, in.granted()
	requested := requestedBy(&in.reservation.Spec)
	if status.Requested == nil {
		return status.QueueTime, requested
	}
	if kept := asked(status.Requested, &in.reservation.Spec, granted); kept != nil {
		return status.QueueTime, kept
	}
	return &metav1.MicroTime{Time: r.store.afterAll()}, requested
}

// asked is what counts as asked for at the time by which a Reservation is ordered in the queue,
// given what has counted so far. It is nil if the Reservation queues again, behind all that
// there are: because it requests more of a pod set or a resource than it asked for, and either
// all that it asked for has been granted (of a total: that resource), or it is more than twice as
// much. A pod set of another shape is another one.
//
// What a request that waits grows by may thus come with it, and queues again by itself once what
// was asked for first is granted. No request loses its place by its own growth for ever: what it
// requests of a set doubles each time while it waits for another, and without a grant in between
// that of a resource as well. And none keeps overtaking others: at one place it has at most twice
// what it asked for there, because this never rises, and falls with what it requests. So what it
// gives back is granted again at a later place only, unless it waits for another of its sets. This
// does not hold for what providers refuse or withdraw: that keeps its place.
func asked(before *broker.Requested, spec *broker.ReservationSpec, granted broker.HeldCapacity) *broker.Requested {
	kept := requestedBy(spec)
	if spec.RequestedResources != nil {
		amounts, has := before.Resources.List(), granted.Totals.List()
		list := kept.Resources.List()
		for name, amount := range list {
			most, got := amounts[name], has[name]
			if amount.Cmp(most) <= 0 {
				continue
			}
			twice := most.DeepCopy()
			if twice.Add(most); got.Cmp(most) >= 0 || amount.Cmp(twice) > 0 {
				return nil
			}
			list[name] = most
		}
		kept.Resources = broker.FromList(list)
		return kept
	}
	type key struct{ name, shape string }
	counts := map[key]int32{}
	for _, set := range before.PodSets {
		counts[key{set.Name, set.Shape}] = set.Count
	}
	waits, grows := false, false
	for i := range kept.PodSets {
		set := &kept.PodSets[i]
		most := counts[key{set.Name, set.Shape}]
		if capacity.Count(granted, spec.PodSets[i]) < min(set.Count, most) {
			waits = true
		}
		if set.Count <= most {
			continue
		}
		if int64(set.Count) > 2*int64(most) {
			return nil
		}
		set.Count, grows = most, true
	}
	if grows && !waits {
		return nil
	}
	sets := slices.Clone(spec.PodSets)
	for i := range sets {
		sets[i].Count = kept.PodSets[i].Count
	}
	kept.Resources = capacity.OfPodSets(sets).Totals
	return kept
}

// granted is what providers have accepted of what the consumer can count on.
func (in snapshot) granted() (granted broker.HeldCapacity) {
	for _, h := range in.holds() {
		if h.Granted != nil && in.counts(h) {
			granted = capacity.Add(granted, *h.Granted)
		}
	}
	return granted
}

// queueTimeOf is the time by which a Reservation is ordered in the queue.
func queueTimeOf(reservation *broker.Reservation, queueTime *metav1.MicroTime) time.Time {
	if queueTime != nil {
		return queueTime.Time
	}
	return reservation.CreationTimestamp.Time
}
