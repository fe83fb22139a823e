// Package events keeps what Spillway writes for people within the limits of the
// Kubernetes API. All programs record their events through NewRecorder.
package events

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
)

// MaxMessage is the maximum size of an event's note in bytes. The API server rejects
// larger ones.
const MaxMessage = 1024

// Truncate shortens a message to the size of an event's note, see TruncateTo.
func Truncate(message string) string { return TruncateTo(message, MaxMessage) }

// TruncateTo returns the message as valid UTF-8 of at most limit bytes. A shortened
// message ends with "…". limit must be 3 or more, the size of "…".
func TruncateTo(message string, limit int) string {
	message = strings.ToValidUTF8(message, "�")
	if len(message) <= limit {
		return message
	}
	const ellipsis = "…"
	// The cut may be within a character: its first bytes go, too.
	return strings.ToValidUTF8(message[:limit-len(ellipsis)], "") + ellipsis
}

// NewRecorder returns a recorder that truncates the notes of its events.
func NewRecorder(recorder events.EventRecorder) events.EventRecorder {
	return truncating{recorder}
}

type truncating struct{ events.EventRecorder }

func (t truncating) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	t.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", Truncate(fmt.Sprintf(note, args...)))
}
