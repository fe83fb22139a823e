// Package events keeps what Spillway writes for people within the limits of the
// Kubernetes API. All programs record their events through NewRecorder.
package events

import (
	"fmt"
	"strings"
	"unicode"

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

// Line returns what another cluster has written as one line, see TruncateTo: what cannot be
// seen, or changes how other text is shown, is a space.
func Line(text string, limit int) string {
	visible := func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}
	return TruncateTo(strings.TrimSpace(strings.Map(visible, text)), limit)
}

// Quote returns what another cluster has written in quotation marks, for a message of one's
// own. Those within it are single ones: nothing in the text ends the quotation.
func Quote(text string) string {
	return `"` + strings.TrimRight(strings.ReplaceAll(text, `"`, "'"), ". ") + `"`
}

// NewRecorder returns a recorder that truncates the notes of its events.
func NewRecorder(recorder events.EventRecorder) events.EventRecorder {
	return truncating{recorder}
}

type truncating struct{ events.EventRecorder }

func (t truncating) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	t.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", Truncate(fmt.Sprintf(note, args...)))
}
