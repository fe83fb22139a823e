package liqo

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
)

// contracted is a world whose sides can be started anew.
type contracted struct {
	*world
	mu sync.Mutex
}

var _ contract.World = (*contracted)(nil)

func (c *contracted) Consumer() string               { return "rome" }
func (c *contracted) Provider() peering.Peer         { return paris }
func (c *contracted) Driver() peering.Driver         { return c.driver }
func (c *contracted) ProviderSide() peering.Provider { return c.lender }
func (c *contracted) Lossy(lossy bool)               { c.relay.flaky.Store(lossy) }
func (c *contracted) Cut(cut bool)                   { c.relay.cut.Store(cut) }
func (c *contracted) Home() client.Client            { return c.rome }
func (c *contracted) Namespaces() [2]string          { return [2]string{"shop", "tools"} }

func (c *contracted) Restart() {
	c.t.Helper()
	c.relay.wait.Wait()
	driver, err := NewDriver(c.driver.Options)
	if err != nil {
		c.t.Fatal(err)
	}
	lender, err := NewProvider(c.lender.Options)
	if err != nil {
		c.t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.driver, c.lender = driver, lender
	c.relay.driver, c.relay.lender = driver, lender
}

func (c *contracted) NothingIsLeft() {
	c.t.Helper()
	c.nothingIsLeft(c.rome, "rome")
	c.nothingIsLeft(c.paris, "paris")
}

// answering is what the lender's watch does, whichever lender runs.
func (c *contracted) answering() {
	ctx, stop := context.WithCancel(context.Background())
	var answering sync.WaitGroup
	answering.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			c.mu.Lock()
			lender := c.lender
			c.mu.Unlock()
			if _, err := lender.answer(ctx, "rome"); err != nil && ctx.Err() == nil {
				c.t.Logf("answering: %v", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	c.t.Cleanup(func() { stop(); answering.Wait() })
}

// TestContract holds both sides to what every driver promises, and has them meet
// a cluster with another driver.
func TestContract(t *testing.T) {
	t.Parallel()
	w := &contracted{world: newWorld(t)}
	w.answering()
	contract.Test(t, w)

	reply, err := w.lender.Handle(t.Context(), peering.Peer{ClusterID: "rome", Holds: true}, []byte(`{"driver":"direct","kind":"Hello","session":7,"ask":1}`))
	if other, ok := peering.ReadsOnly(reply); err != nil || !ok || other != "liqo" {
		t.Errorf("the provider answers %q, %v", reply, err)
	}
	w.Cut(true)
	if _, err := w.driver.EnsurePeering(t.Context(), paris); err != nil {
		t.Fatal(err)
	}
	w.driver.Receive("paris", peering.Unreadable("direct"))
	progress := w.until("OtherDriver", func() (peering.Progress, error) { return w.driver.EnsurePeering(t.Context(), paris) })
	if !strings.HasPrefix(progress.Message, "paris uses another driver: direct") {
		t.Errorf("the consumer is told %q", progress.Message)
	}
}
