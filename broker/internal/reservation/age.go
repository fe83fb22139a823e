package reservation

import (
	"encoding/json"
	"hash/fnv"
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

// hasGrown reports whether more is requested than before, of any pod set or resource. A pod
// set of another shape is another one.
func hasGrown(before, now *broker.Requested) bool {
	type key struct{ name, shape string }
	counts := map[key]int32{}
	for _, set := range before.PodSets {
		counts[key{set.Name, set.Shape}] = set.Count
	}
	for _, set := range now.PodSets {
		if set.Count > counts[key{set.Name, set.Shape}] {
			return true
		}
	}
	amounts := before.Resources.List()
	for name, amount := range now.Resources.List() {
		if have := amounts[name]; amount.Cmp(have) > 0 {
			return true
		}
	}
	return false
}

// queueTime is the time by which a Reservation is ordered in the queue, nil for that of its
// creation: a request that grows queues again, behind all that there are. Otherwise an old
// Reservation could grow again and again before those that wait. It compares no clocks: the
// times are those of the API server.
func (r *Reconciler) queueTime(reservation *broker.Reservation) *metav1.MicroTime {
	status := &reservation.Status
	if status.Requested == nil || !hasGrown(status.Requested, requestedBy(&reservation.Spec)) {
		return status.QueueTime
	}
	return &metav1.MicroTime{Time: r.store.afterAll()}
}

// queueTimeOf is the time by which a Reservation is ordered in the queue.
func queueTimeOf(reservation *broker.Reservation, queueTime *metav1.MicroTime) time.Time {
	if queueTime != nil {
		return queueTime.Time
	}
	return reservation.CreationTimestamp.Time
}
