package virtualnode

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// reasonNotReady is the reason of the event on a Reservation whose virtual node is
// not ready after Options.ReadyTimeout.
const reasonNotReady = "VirtualNodeNotReady"

// reportNotReady records on each Reservation that its virtual node is late.
func (r *Reconciler) reportNotReady(s *Snapshot, p progress) {
	for _, g := range s.Grants {
		if !g.Releasing() {
			r.recorder.Eventf(g.Reservation, nil, corev1.EventTypeWarning, reasonNotReady, "Peer",
				"Virtual node for provider %s is not ready after %s, retrying: %s", s.Provider, p.waited.Round(time.Second), p.blocking().Message)
		}
	}
}
