// Package events keeps what Spillway writes for people within the limits of the
// Kubernetes API. All programs record their events through NewRecorder.
package events

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/spillway-dev/spillway/broker/text"
)

// MaxMessage is the maximum size of an event's note in bytes. The API server rejects
// larger ones.
const MaxMessage = 1024

// Truncate shortens a message to the size of an event's note, see TruncateTo.
func Truncate(message string) string { return TruncateTo(message, MaxMessage) }

// TruncateTo is text.TruncateTo.
func TruncateTo(message string, limit int) string { return text.TruncateTo(message, limit) }

// NewRecorder returns a recorder that truncates the notes of its events.
func NewRecorder(recorder events.EventRecorder) events.EventRecorder {
	return truncating{recorder}
}

type truncating struct{ events.EventRecorder }

func (t truncating) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	t.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", Truncate(fmt.Sprintf(note, args...)))
}
