package scenarios_test

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/demo"
)

// recorder keeps the output.
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

// TestDemoFailsWithoutBroker kills the broker before pods overflow: the demo must fail. It
// stops the playground and leaves nothing, and stands in the last file, so that no test after
// it starts another one.
func TestDemoFailsWithoutBroker(t *testing.T) {
	all := nodes{}
	for _, m := range demo.Members() {
		all[m.Name] = m.Nodes
	}
	s := begin(t, all)
	running := processes()
	shared = nil
	var output recorder
	// Long enough for two more pods to run at home, and all of it passes.
	err := demo.Run(t.Context(), demo.Options{Out: &output, Break: "broker", Deadline: time.Minute, Playground: s.p})
	if err == nil {
		t.Fatalf("the demo succeeded:\n%s", &output)
	}
	for _, want := range []string{`chapter 3, "Pods overflow", failed`, "8 of 14 pods run", "DEMO_BREAK=broker: the broker was killed"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, err)
		}
	}
	for _, want := range []string{"✓ 2 Home fills", "✗ 3 Pods overflow"} {
		if !strings.Contains(output.String(), want) {
			t.Errorf("the output lacks %q:\n%s", want, &output)
		}
	}
	expect.NoError(t, nothingRemains(running))
}
