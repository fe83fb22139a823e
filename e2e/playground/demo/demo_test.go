package demo_test

import (
	"io"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/e2e/playground/demo"
)

func TestUnknownBreak(t *testing.T) {
	if err := demo.Run(t.Context(), demo.Options{Out: io.Discard, Break: "everything"}); err == nil || !strings.Contains(err.Error(), "broker, provider or scheduler") {
		t.Errorf("have %v", err)
	}
}
