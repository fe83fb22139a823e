package controller

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
)

// Reasons of Events.
const (
	// reasonFailed is on the Secret of a virtual node that cannot run.
	reasonFailed = "VirtualNodeFailed"
	// reasonTerminating is on the pods that a terminating virtual node deletes.
	reasonTerminating = "VirtualNodeTerminating"
)

// maxNote is the API's limit of an Event's note, in bytes.
const maxNote = 1024

// truncatingRecorder shortens notes to what the API accepts.
type truncatingRecorder struct{ events.EventRecorder }

func (r truncatingRecorder) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	const ellipsis = "…"
	note = fmt.Sprintf(note, args...)
	if len(note) > maxNote {
		note = strings.ToValidUTF8(note[:maxNote-len(ellipsis)], "") + ellipsis
	}
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", note)
}
