package controller

import (
	"strings"
	"testing"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
)

func TestTruncatingRecorder(t *testing.T) {
	for name, c := range map[string]struct {
		reason     string
		note, want string
	}{
		"short":     {"a note within the limit is kept", "100% of é", "100% of é"},
		"limit":     {"a note of the maximum length is kept", strings.Repeat("a", maxNote), strings.Repeat("a", maxNote)},
		"long":      {"a longer note ends with an ellipsis", strings.Repeat("a", maxNote+1), strings.Repeat("a", maxNote-3) + "…"},
		"multibyte": {"characters are not split", strings.Repeat("é", maxNote), strings.Repeat("é", (maxNote-3)/2) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			fake := events.NewFakeRecorder(1)
			truncatingRecorder{fake}.Eventf(&corev1.Pod{}, nil, corev1.EventTypeWarning, "Reason", "Action", "%s", c.note)
			_, got, _ := strings.Cut(<-fake.Events, "Reason ")
			if got != c.want || len(got) > maxNote || !utf8.ValidString(got) {
				t.Errorf("%s: got %d bytes %q", c.reason, len(got), got)
			}
		})
	}
}
