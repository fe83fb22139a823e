package overflow

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Reasons of the events that tell a pod's story.
const (
	// eventNotPossible: the pod cannot go, and why.
	eventNotPossible = "OverflowNotPossible"
	// eventRequested: room was asked for.
	eventRequested = "OverflowRequested"
	// eventCapped: the namespace's policy allows no more.
	eventCapped = "OverflowCapped"
	// eventQueued: no cluster has room now, each with its reason.
	eventQueued = "OverflowQueued"
	// eventGranted: room was granted and can be used.
	eventGranted = "OverflowGranted"
	// eventFailed: it cannot be asked for, or can never be met.
	eventFailed = "OverflowFailed"
)

// eventAction is what the plugin was doing in all of them.
const eventAction = "Overflowing"

// narrate tells a waiting pod what has become of its key's Reservations.
func (a *asker) narrate(key demand.Key, uid types.UID) {
	if !a.acting() {
		return
	}
	all, err := a.reservations.of(key)
	if err != nil {
		a.log.Error(err, "Telling pods of their Reservations failed")
		return
	}
	for _, r := range all {
		for _, c := range chapters(r) {
			a.tell(uid, c.reason, c.gist, r, "%s", c.text)
		}
	}
}

// chapter is one thing to tell about a Reservation.
type chapter struct {
	reason string
	// gist is what makes it new: a figure that changes is no news.
	gist string
	text string
}

// chapters is what a Reservation's status has to tell its pods.
func chapters(r *broker.Reservation) []chapter {
	var all []chapter
	if places := entryOf(r).places; len(places) > 0 {
		clusters := slices.Sorted(maps.Keys(places))
		var in []string
		for _, cluster := range clusters {
			in = append(in, fmt.Sprintf("%d in %s", places[cluster], cluster))
		}
		all = append(all, chapter{eventGranted, strings.Join(clusters, ","), fmt.Sprintf("Room was granted for pods of this owner: %s (Reservation %s).", strings.Join(in, ", "), r.Name)})
	}
	if queued := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionQueued); queued != nil && queued.Status == "True" {
		gist, text := rejections(r)
		if text == "" {
			text = queued.Message
		}
		all = append(all, chapter{eventQueued, gist, fmt.Sprintf("No cluster has room now, it is tried again when capacity appears (Reservation %s): %s", r.Name, text)})
	}
	if r.Status.Phase == broker.ReservationFailed {
		text := "it cannot be met as it is written"
		if ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady); ready != nil && ready.Message != "" {
			text = ready.Message
		}
		all = append(all, chapter{eventFailed, text, fmt.Sprintf("Reservation %s failed: %s", r.Name, text)})
	}
	return all
}

// rejections lists each provider and why not.
func rejections(r *broker.Reservation) (gist, text string) {
	if r.Status.Decision == nil {
		return "", ""
	}
	var reasons, sentences []string
	for _, no := range r.Status.Decision.Rejections {
		reasons = append(reasons, no.Cluster+"="+no.Reason)
		sentences = append(sentences, fmt.Sprintf("%s: %s", no.Cluster, strings.TrimSuffix(no.Message, ".")))
	}
	if len(sentences) == 0 {
		return "", ""
	}
	return strings.Join(reasons, ","), strings.Join(sentences, "; ") + "."
}

// tellAll tells the waiting pods of an ask.
func (a *asker) tellAll(ask demand.Ask, reason, gist string, about *broker.Reservation, note string, args ...any) {
	for _, uid := range ask.Waiting {
		a.tell(uid, reason, gist, about, note, args...)
	}
}

// tell writes an event on a pod, unless it was the last thing told for that
// reason.
func (a *asker) tell(uid types.UID, reason, gist string, about *broker.Reservation, note string, args ...any) {
	s := a.stories[uid]
	if s == nil || !a.acting() {
		return
	}
	if before, told := s.told[reason]; told && before == gist {
		return
	}
	pod, err := a.pods.Pods(s.pod.Namespace).Get(s.pod.Name)
	if err != nil || pod.UID != uid {
		return
	}
	s.told[reason] = gist
	kind := corev1.EventTypeNormal
	switch reason {
	case eventNotPossible, eventCapped, eventQueued, eventFailed:
		kind = corev1.EventTypeWarning
	}
	text := shorten(fmt.Sprintf(note, args...))
	if about == nil {
		a.recorder.Eventf(pod, nil, kind, reason, eventAction, "%s", text)
		return
	}
	// The version in the reference keeps events with different texts from being
	// counted as one.
	a.recorder.Eventf(pod, &corev1.ObjectReference{
		APIVersion:      broker.GroupVersion.String(),
		Kind:            "Reservation",
		Namespace:       about.Namespace,
		Name:            about.Name,
		UID:             about.UID,
		ResourceVersion: about.ResourceVersion,
	}, kind, reason, eventAction, "%s", text)
}
