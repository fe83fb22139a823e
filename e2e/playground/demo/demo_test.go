package demo_test

import (
	"bytes"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/e2e/playground/demo"
)

// recorder keeps what is told.
type recorder struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *recorder) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// TestItNotices kills the broker before pods are to overflow: the story must not
// claim that they did.
func TestItNotices(t *testing.T) {
	var told recorder
	dir := t.TempDir()
	err := demo.Tell(t.Context(), demo.Options{Out: &told, Break: "broker", Deadline: 30 * time.Second, Dir: dir})
	if err == nil {
		t.Fatalf("it was told to its end:\n%s", &told)
	}
	for _, want := range []string{`chapter 3, "Pods overflow", did not come true`, "8 of 14 pods run", "DEMO_BREAK=broker: the broker was killed"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, err)
		}
	}
	for _, want := range []string{"✓ 2 Home fills", "✗ 3 Pods overflow"} {
		if !strings.Contains(told.String(), want) {
			t.Errorf("it was not told that %q:\n%s", want, &told)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the directory: %v %v", left, err)
	}
}

func TestAnUnknownBreak(t *testing.T) {
	if err := demo.Tell(t.Context(), demo.Options{Out: &recorder{}, Break: "everything"}); err == nil || !strings.Contains(err.Error(), "broker, provider or scheduler") {
		t.Errorf("have %v", err)
	}
}
