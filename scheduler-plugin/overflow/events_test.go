package overflow

import (
	"strings"
	"testing"
)

func TestTruncate(t *testing.T) {
	if got := truncate("short"); got != "short" {
		t.Errorf("got %q", got)
	}
	if got := truncate(strings.Repeat("word ", 500)); len(got) > maxMessage || !strings.HasSuffix(got, "word …") {
		t.Errorf("%d bytes, ending %q", len(got), got[len(got)-20:])
	}
}
